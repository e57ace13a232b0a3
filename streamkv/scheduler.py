"""What the next step computes: fair shares of sequences that have work. Pure, no clock.

A *work item* is a run of pending tokens to compute, and what is wanted from it. A step takes items
whose next part is one token, and one longer part, a chunk of a feed. A long feed is cut into chunks
and waits for its turn again after each; while others are decoding its chunks are shorter, so that
none of them waits for longer than a short one.

Where not all have room in a step, those come first that have been served least, counted in tokens
over `2 ** priority`: of two sequences that both have work all the time one with priority 1 gets
twice the tokens of one with 0, and none gets none. Who had nothing to do has nothing saved up.
"""

from collections import deque
from dataclasses import dataclass

from streamkv.batch import SequenceStep, Wanted
from streamkv.sampling_params import SamplingParams
from streamkv.sequence import Sequence

STEPS_REMEMBERED = 3
"""For so many steps after its last one a sequence still counts as decoding: its caller may be about
to ask for the next token."""


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
    """Shares steps among work items.

    Args:
        prefill_chunk: tokens of one sequence in one step, at most.
        mixed_chunk: the same while other sequences are decoding; by default no fewer.
        mixes: a step may have tokens of sequences that decode and a chunk. Else the two take turns,
            and chunks are the same whoever decodes.
    """

    def __init__(
        self, prefill_chunk: int, mixed_chunk: int | None = None, *, mixes: bool = True
    ) -> None:
        self.prefill_chunk = prefill_chunk
        self.mixed_chunk = min(prefill_chunk, mixed_chunk or prefill_chunk)
        self.mixes = mixes
        if not mixes:
            self.mixed_chunk = prefill_chunk
        self._chunk_is_next = True
        self._queue: deque[Work] = deque()
        self._queued: set[Sequence] = set()
        self._steps_since_decode = STEPS_REMEMBERED
        self._served = 0.0

    def __len__(self) -> int:
        return len(self._queue)

    def add(self, work: Work) -> None:
        """Queue a work item. One sequence has at most one."""
        assert work.sequence not in self._queued
        work.sequence.served = max(work.sequence.served, self._served)
        self._queued.add(work.sequence)
        self._queue.append(work)

    def schedule(
        self, max_sequences: int = 1, *, others_decode: bool = False
    ) -> list[tuple[Work, SequenceStep]]:
        """Take the next step's work items out of the queue, at most so many.

        Args:
            max_sequences: of the step.
            others_decode: sequences that are not queued have a token in this step.
        """
        decoding = [work for work in self._queue if self._is_single(work)]
        self._steps_since_decode += 1
        if decoding or others_decode:
            self._steps_since_decode = 0
        chunk = self.prefill_chunk
        if self._steps_since_decode < STEPS_REMEMBERED:
            chunk = self.mixed_chunk
        taken = self._choose(max_sequences, decoding)
        if not taken:
            return []
        if len(taken) == len(self._queue):
            self._queue.clear()
        else:
            gone = {id(work) for work in taken}
            self._queue = deque(work for work in self._queue if id(work) not in gone)
        self._served = min(work.sequence.served for work in taken)
        found = []
        for work in taken:
            self._queued.discard(work.sequence)
            step = self._next_step(work, chunk)
            work.sequence.served += step.query_len / 2.0**work.sequence.priority
            found.append((work, step))
        return found

    def _choose(self, max_sequences: int, decoding: list[Work]) -> list[Work]:
        """Who takes part, in the order of the queue."""
        first = None
        if len(decoding) < len(self._queue):
            longer = [work for work in self._queue if not self._is_single(work)]
            first = min(longer, key=_served_so_far, default=None)
        if not self.mixes and first is not None:
            takes_chunk = self._chunk_is_next or not decoding
            self._chunk_is_next = not takes_chunk
            if takes_chunk:
                return [first]
            first = None
        rivals = {id(work) for work in decoding}
        if first is not None:
            rivals.add(id(first))
        if len(rivals) < len(self._queue):
            found = [work for work in self._queue if id(work) in rivals]
        else:
            found = list(self._queue)
        if len(found) <= max_sequences:
            return found
        # A chunk competes like everyone else, so that neither it nor a decode is left out for ever.
        chosen = {id(work) for work in sorted(found, key=_served_so_far)[:max_sequences]}
        return [work for work in found if id(work) in chosen]

    def _is_single(self, work: Work) -> bool:
        if work.num_tokens == 1:
            return True
        # A boundary may leave one token of a longer part.
        return self._next_step(work, self.mixed_chunk).query_len == 1

    def _next_step(self, work: Work, chunk: int) -> SequenceStep:
        if work.num_tokens == 1:
            params = work.params if work.wanted is Wanted.LOGITS else None
            return SequenceStep(work.sequence, 1, work.wanted, params)
        # Cut at absolute multiples: a feed and its replay after a crash compute the same chunks.
        room = chunk - work.sequence.num_computed % chunk
        # Fed by whole chunks, a stream is always one token behind: no step for that one alone.
        if room < min(work.num_tokens, work.sequence.block_size):
            room = chunk
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

    def take_back(self, sequence: Sequence) -> Work | None:
        """Take the work item of a sequence out of the queue, if there is one."""
        if sequence not in self._queued:
            return None
        work = next(work for work in self._queue if work.sequence is sequence)
        self.remove(work)
        return work

    def drain(self) -> list[Work]:
        """Remove and return everything that is queued."""
        works = list(self._queue)
        self._queue.clear()
        self._queued.clear()
        return works


def _served_so_far(work: Work) -> float:
    return work.sequence.served
