"""Taking stored blocks for tokens to come, instead of computing them.

Invariant: afterwards the sequence stands where computing would have brought it, with blocks that
are bit for bit those of the stream that computed them; or nothing has changed. Whoever looks does
so on its own thread; blocks change hands on the engine's thread only, a bounded number at a time,
so that the steps of other sessions go on in between. Meanwhile the next blocks are under way, or
the device's copies would stand still between two steps. No torch, no journal.
"""

import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from streamkv.errors import PoolFullError
from streamkv.executor import Executor
from streamkv.prefix import keys_ahead
from streamkv.read_pace import ReadPace
from streamkv.reply import Reply
from streamkv.sequence import Sequence as Stream
from streamkv.sharing import REUSED, Sharing
from streamkv.stored_run import Run
from streamkv.tiers.manager import TierManager
from streamkv.tiers.policy import Place
from streamkv.tiers.restoring import Restore
from streamkv.tiers.spec import BlockKey
from streamkv.under_way import Claim

READ_AT_ONCE = 32
"""Blocks read between two steps of other sessions."""

NUM_AHEAD = 1
"""As many times more blocks are under way while those are waited for."""


@dataclass(frozen=True, slots=True, eq=False)
class _Batch:
    """Blocks of one tier that are being read.

    Attributes:
        place: the tier.
        block_ids: gpu block of each block index.
        restore: what fills them.
    """

    place: Place
    block_ids: dict[int, int]
    restore: Restore


class PrefixReuse:
    """Finds and takes what the tiers hold of one session's tokens to come.

    Args:
        sequence: the session's stream.
        tiers: owner of the blocks.
        executor: drops what leaves the window.
        sharing: the engine's cost gate and counts.
        num_blocks: gpu blocks that the session may hold.
        block_bytes: bytes of a block.

    Attributes:
        num_tokens: tokens reused so far.
    """

    def __init__(
        self,
        sequence: Stream,
        tiers: TierManager,
        executor: Executor,
        sharing: Sharing,
        num_blocks: int,
        block_bytes: int,
    ) -> None:
        self._sequence = sequence
        self._tiers = tiers
        self._executor = executor
        self._gate = sharing.gate
        self._counted = sharing.counted
        self._num_blocks = num_blocks
        self._block_bytes = block_bytes
        self._under_way = sharing.under_way
        self._ahead: list[BlockKey] = []
        self._waits_in_vain = False
        self.num_tokens = 0

    def hold(self) -> None:
        """Blocks are read for the sequence that are not live yet: it must not sleep."""
        self._sequence.holds += 1

    def release(self) -> None:
        """They are live, or given back."""
        self._sequence.holds -= 1

    def find(self, accept_more: Callable[[], bool] = lambda: False) -> Run | None:
        """A run of blocks that is stored, and sooner read than computed. Moves nothing.

        Args:
            accept_more: called while all that is pending was found: has more pending, or tells
                that there is no more.
        """
        run = Run(self._sequence, self._num_blocks - len(self._sequence.table))
        while keys := keys_ahead(self._sequence, run.keys):
            begun_s = time.monotonic()
            run.extend(keys, self._tiers.where)
            run.looked_s += time.monotonic() - begun_s
            if not run.reaches_end or not accept_more():
                break
        self._ahead = run.keys
        if not run.wanted:
            return None
        num_bytes: Counter[Place] = Counter()
        for index in run.wanted:
            num_bytes[run.place(index)] += self._block_bytes
        return run if self._gate.chooses_reading(run.num_tokens, num_bytes) else None

    def others_compute(self) -> Reply[None] | None:
        """Whether another session computes what comes next, which `find` has not found.

        Returns:
            Done when that is over, and it is time to `find` again; `None`: there is nothing to wait
            for, or waiting has brought nothing before.
        """
        if not self._ahead or self._waits_in_vain:
            return None
        reply = self._under_way.wait_for(self._ahead[0])
        self._waits_in_vain = reply is not None
        return reply

    def claim(self, num_tokens: int) -> Claim | Reply[None]:
        """Say that so many tokens are about to be computed, after `find` has found none of them.

        Returns:
            The claim; or what `others_compute` returns, if another session has come first.
        """
        sequence = self._sequence
        size = sequence.block_size
        num_blocks = (sequence.num_computed + num_tokens) // size - sequence.num_computed // size
        keys = self._ahead[:num_blocks]
        claim = self._under_way.claim(keys)
        if isinstance(claim, Reply):
            if self._waits_in_vain:
                return self._under_way.claim(())
            self._waits_in_vain = True
        return claim

    def taking(self, run: Run, after_step: Callable[[], None]) -> "Taking":
        """The way to take a run.

        Args:
            run: found just now.
            after_step: called once the tokens count as computed.
        """
        return Taking(self, run, after_step)

    def begin(self, run: Run, place: Place, indices: list[int]) -> _Batch:
        """Begin to read blocks of one tier.

        Raises:
            PoolFullError: no room in the gpu pool.
            StoreError, EngineClosedError: the tiers' worker stopped or was closed.
        """
        block_ids: dict[int, int] = {}
        try:
            for index in indices:
                block_ids[index] = self._tiers.allocate()
            pairs = [(run.key(index), at) for index, at in block_ids.items()]
            return _Batch(place, block_ids, self._tiers.begin_restore(pairs))
        except BaseException:
            for block_id in block_ids.values():
                self._tiers.free(block_id)
            raise

    def end(self, batch: _Batch) -> list[int]:
        """Wait until blocks are there; returns the indices of those that could not be read.

        Their gpu blocks are given back. After an error the batch is still to be abandoned.
        """
        lost = []
        found = self._tiers.end_restore(batch.restore)
        for index, is_there in zip(list(batch.block_ids), found, strict=True):
            if not is_there:
                self._tiers.free(batch.block_ids.pop(index))
                lost.append(index)
        return lost

    def abandon(self, batch: _Batch) -> None:
        """Give back blocks that are being read."""
        batch.restore.abandon()
        for block_id in batch.block_ids.values():
            self._tiers.free(block_id)

    def note_read(self, place: Place, num_blocks: int, seconds: float) -> None:
        """Tell the gate how long blocks took."""
        self._gate.note_read(place, num_blocks * self._block_bytes, seconds)

    def give_back(self, held: dict[int, int]) -> None:
        """Give blocks back that were read and are not used."""
        while held:
            self._tiers.drop(held.popitem()[1])

    def adopt(self, run: Run, held: dict[int, int]) -> int:
        """Make the blocks of a run live and count its tokens as computed; returns how many."""
        sequence, num_tokens = self._sequence, run.num_tokens
        reused = _by_place(run, sequence)
        self._remove_from(run.first)
        for index in run.wanted:
            sequence.table.add(index, held.pop(index), run.key(index))
        sequence.advance_blocks(run.keys[: run.end - run.first])
        sequence.mark_exact(run.end * sequence.block_size)
        self._executor.drop_expired(sequence)
        self.num_tokens += num_tokens
        self._waits_in_vain = False
        self._counted.add_all(reused)
        return num_tokens

    def _remove_from(self, first: int) -> None:
        """Give the open block back, and what was made live for tokens after it."""
        table = self._sequence.table
        for block in table.take_all():
            if block.block_index < first:
                table.add(block.block_index, block.block_id, block.key)
            else:
                self._tiers.free(block.block_id)


class Taking:
    """A run that is being taken; as a context manager it gives back what was read for nothing."""

    def __init__(self, reuse: PrefixReuse, run: Run, after_step: Callable[[], None]) -> None:
        self._reuse = reuse
        self._run = run
        self._after_step = after_step
        self._held: dict[int, int] = {}
        self._under_way: deque[_Batch] = deque()
        self._pace = ReadPace()
        self._came: _Batch | None = None
        self._num_read: Counter[Place] = Counter()
        self._seconds: defaultdict[Place, float] = defaultdict(float)
        if run.wanted:
            self._seconds[run.place(run.wanted[0])] = run.looked_s
        # A caller who is interrupted again and again leaves while a step is still being taken.
        self._lock = threading.Lock()
        self._is_left = False

    def step(self) -> int | None:
        """Read some blocks, on the engine's thread.

        Returns:
            `None` while there are more to read; then the tokens that count as computed, 0 if the
            run could not be had.
        """
        with self._lock, self._pace:
            if self._is_left:
                return 0
            taken = self._step()
            self._time(is_over=taken is not None)
            return taken

    def _step(self) -> int | None:
        run = self._run
        try:
            num_left = self._begin_next()
        except PoolFullError:
            return 0
        if self._under_way and (num_left == 0 or len(self._under_way) > NUM_AHEAD):
            self._end_oldest()
        if not run.wanted:
            return 0
        if self._under_way or any(index not in self._held for index in run.wanted):
            return None
        self._give_back_unwanted()
        num_tokens = self._reuse.adopt(run, self._held)
        self._after_step()
        return num_tokens

    def _begin_next(self) -> int:
        """Begin to read the next blocks, of one tier at a time; returns how many are left."""
        run = self._run
        begun = {index for batch in self._under_way for index in batch.block_ids}
        absent = [index for index in run.wanted if index not in self._held and index not in begun]
        if not absent:
            return 0
        place = run.place(absent[0])
        indices = [index for index in absent if run.place(index) == place][:READ_AT_ONCE]
        self._under_way.append(self._reuse.begin(run, place, indices))
        return len(absent) - len(indices)

    def _end_oldest(self) -> None:
        batch = self._under_way[0]
        lost = self._reuse.end(batch)
        self._under_way.popleft()
        self._held |= batch.block_ids
        self._came = batch
        for index in lost:
            self._run.lose(index)
        if lost:
            self._give_back_unwanted()

    def _time(self, *, is_over: bool) -> None:
        """Note how long the blocks took that came in this step; at last, tell it.

        All of them together took what the caller waited, from looking until they were adopted.
        """
        if (batch := self._came) is not None:
            self._num_read[batch.place] += len(batch.block_ids)
            self._seconds[batch.place] += self._pace.lap_s()
            self._came = None
        if is_over and self._pace.is_known():
            for place, num_blocks in self._num_read.items():
                self._reuse.note_read(place, num_blocks, self._seconds[place])

    def _give_back_unwanted(self) -> None:
        """Give back what a shorter run does not need."""
        wanted = set(self._run.wanted)
        unwanted = {index: at for index, at in self._held.items() if index not in wanted}
        for index in unwanted:
            del self._held[index]
        self._reuse.give_back(unwanted)

    def __enter__(self) -> Self:
        self._reuse.hold()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with self._lock:
            self._is_left = True
            while self._under_way:
                self._reuse.abandon(self._under_way.popleft())
            self._reuse.give_back(self._held)
        self._reuse.release()


def _by_place(run: Run, sequence: Stream) -> dict[str, int]:
    """Tokens of a run that is about to be adopted: counters and what to add to them."""
    size, read = sequence.block_size, set(run.wanted)
    counted = Counter({"reused_tokens": run.num_tokens})
    for index in range(run.first, run.end):
        # Of the first block some may be computed already.
        num_tokens = (index + 1) * size - max(index * size, sequence.num_computed)
        counted[REUSED[run.place(index) if index in read else None]] += num_tokens
    return dict(counted)
