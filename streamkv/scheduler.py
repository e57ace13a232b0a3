"""Whose turn it is: sequences that have work take turns, one step each. Pure, no clock.

A *work item* is a run of pending tokens to compute, and what is wanted from it. A step takes, in
the order of the queue, items whose next part is one token, and one longer part. A long feed is cut
into prefill chunks and goes to the back of the queue after each, so that it never stalls a decode
for longer than one chunk.
"""

from collections import deque
from dataclasses import dataclass

from streamkv.batch import SequenceStep, Wanted
from streamkv.sampling_params import SamplingParams
from streamkv.sequence import Sequence


@dataclass(slots=True, eq=False)
class Work:
    """Tokens of one sequence to compute.

    Attributes:
        sequence: whose pending tokens.
        num_tokens: how many of them; counts down.
        wanted: for SCORES from each step; for LOGITS only from the last.
        params: how the device may choose the token after the last.
    """

    sequence: Sequence
    num_tokens: int
    wanted: Wanted = Wanted.NOTHING
    params: SamplingParams | None = None


class Scheduler:
    """Round robin over work items.

    Args:
        prefill_chunk: tokens of one sequence in one step, at most.
    """

    def __init__(self, prefill_chunk: int) -> None:
        self.prefill_chunk = prefill_chunk
        self._queue: deque[Work] = deque()
        self._queued: set[Sequence] = set()

    def __len__(self) -> int:
        return len(self._queue)

    def add(self, work: Work) -> None:
        """Queue a work item. One sequence has at most one."""
        assert work.sequence not in self._queued
        self._queued.add(work.sequence)
        self._queue.append(work)

    def schedule(self, max_sequences: int = 1) -> list[tuple[Work, SequenceStep]]:
        """Take the next step's work items out of the queue, at most so many."""
        taken: list[tuple[Work, SequenceStep]] = []
        left: deque[Work] = deque()
        has_chunk = False
        for work in self._queue:
            if len(taken) == max_sequences:
                left.append(work)
                continue
            step = self._next_step(work)
            if step.query_len > 1 and has_chunk:
                left.append(work)
                continue
            has_chunk = has_chunk or step.query_len > 1
            taken.append((work, step))
            self._queued.discard(work.sequence)
        self._queue = left
        return taken

    def _next_step(self, work: Work) -> SequenceStep:
        # Cut at absolute multiples: a feed and its replay after a crash compute the same chunks.
        room = self.prefill_chunk - work.sequence.num_computed % self.prefill_chunk
        # Fed by whole chunks, a stream is always one token behind: no step for that one alone.
        if room < min(work.num_tokens, work.sequence.block_size):
            room = self.prefill_chunk
        if (boundary := work.sequence.next_boundary) is not None:
            room = min(room, boundary - work.sequence.num_computed)
        query_len = min(work.num_tokens, room)
        last = query_len == work.num_tokens
        wanted = work.wanted if last or work.wanted is Wanted.SCORES else Wanted.NOTHING
        params = work.params if wanted is Wanted.LOGITS else None
        return SequenceStep(work.sequence, query_len, wanted, params)

    def postprocess(self, work: Work, query_len: int) -> bool:
        """Count a step of a work item that was taken out. Returns whether it is finished."""
        work.num_tokens -= query_len
        if work.num_tokens > 0:
            self.add(work)
            return False
        return True

    def remove(self, work: Work) -> None:
        """Take back a work item whose caller gave up."""
        if work in self._queue:
            self._queue.remove(work)
            self._queued.discard(work.sequence)

    def drain(self) -> list[Work]:
        """Remove and return everything that is queued."""
        works = list(self._queue)
        self._queue.clear()
        self._queued.clear()
        return works
