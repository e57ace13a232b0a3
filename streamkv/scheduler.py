"""Whose turn it is: sequences that have work take turns, one step each. Pure, no clock.

A *work item* is a run of pending tokens to compute, and what is wanted from it. A long feed is cut
into prefill chunks and goes to the back of the queue after each, so that it never stalls a decode
for longer than one chunk.
"""

from collections import deque
from dataclasses import dataclass

from streamkv.batch import Batch, SequenceStep, Wanted
from streamkv.sequence import Sequence


@dataclass(slots=True, eq=False)
class Work:
    """Tokens of one sequence to compute.

    Attributes:
        sequence: whose pending tokens.
        num_tokens: how many of them; counts down.
        wanted: for SCORES from each step; for LOGITS only from the last.
    """

    sequence: Sequence
    num_tokens: int
    wanted: Wanted = Wanted.NOTHING


class Scheduler:
    """Round robin over work items.

    Args:
        prefill_chunk: tokens of one sequence in one step, at most.
    """

    def __init__(self, prefill_chunk: int) -> None:
        self.prefill_chunk = prefill_chunk
        self._queue: deque[Work] = deque()

    def __len__(self) -> int:
        return len(self._queue)

    def add(self, work: Work) -> None:
        """Queue a work item. One sequence has at most one."""
        assert all(other.sequence is not work.sequence for other in self._queue)
        self._queue.append(work)

    def schedule(self) -> tuple[Work, Batch] | None:
        """The next step and its work item, or `None` when there is nothing to do."""
        if not self._queue:
            return None
        work = self._queue[0]
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
        return work, Batch((SequenceStep(work.sequence, query_len, wanted),))

    def postprocess(self, work: Work, batch: Batch) -> bool:
        """Count a finished step. Returns whether its work item is finished."""
        assert self._queue[0] is work
        self._queue.popleft()
        work.num_tokens -= batch.steps[0].query_len
        if work.num_tokens > 0:
            self._queue.append(work)
            return False
        return True

    def remove(self, work: Work) -> None:
        """Take back a work item whose step failed or whose caller gave up."""
        if work in self._queue:
            self._queue.remove(work)

    def drain(self) -> list[Work]:
        """Remove and return everything that is queued."""
        works = list(self._queue)
        self._queue.clear()
        return works
