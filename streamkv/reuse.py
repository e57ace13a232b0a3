"""Taking stored blocks for tokens to come, instead of computing them.

Invariant: afterwards the sequence stands where computing would have brought it, with blocks that
are bit for bit those of the stream that computed them; or nothing has changed. Whoever looks does
so on its own thread; blocks change hands on the engine's thread only, a bounded number at a time,
so that the steps of other sessions go on in between. No torch, no journal.
"""

import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from types import TracebackType
from typing import Self

from streamkv.errors import PoolFullError
from streamkv.executor import Executor
from streamkv.prefix import blocks_seen, keys_ahead, longest_run
from streamkv.sequence import Sequence as Stream
from streamkv.sharing import Sharing
from streamkv.tiers.manager import TierManager
from streamkv.tiers.policy import Place
from streamkv.tiers.spec import BlockKey

READ_AT_ONCE = 32
"""Blocks read between two steps of other sessions."""


class Run:
    """Blocks to come of a sequence as they were found.

    Attributes:
        first: index of the first block to come.
        end: index of the block after those that are reused.
        wanted: index of each block to be read.
    """

    def __init__(self, stream: Stream, keys: Sequence[BlockKey], room: int) -> None:
        self._stream = stream
        self._keys = keys
        self._room = room
        self._places: list[Place | None] = [None] * len(keys)
        self.first = self.end = stream.num_computed // stream.block_size
        self.wanted: list[int] = []

    @property
    def num_tokens(self) -> int:
        """Tokens that need not be computed."""
        return self.end * self._stream.block_size - self._stream.num_computed

    def key(self, index: int) -> BlockKey:
        """Key of a block to come."""
        return self._keys[index - self.first]

    def place(self, index: int) -> Place:
        """Where a wanted block was found."""
        place = self._places[index - self.first]
        assert place is not None
        return place

    def locate(self, where: Callable[[BlockKey], Place | None]) -> None:
        """Look where the blocks are, and choose the longest run."""
        self._places = [where(key) for key in self._keys]
        self._choose()

    def lose(self, index: int) -> None:
        """A block could not be read: choose a run that does not need it."""
        self._places[index - self.first] = None
        self._choose()

    def _choose(self) -> None:
        stream, size = self._stream, self._stream.block_size
        stored = [place is not None for place in self._places]
        live = _exact_blocks(stream)
        self.end = longest_run(stream.window, size, self.first, stored, live, self._room)
        seen = blocks_seen(stream.window, size, self.end * size) if self.end > self.first else []
        self.wanted = [index for index in seen if index >= self.first]
        # Less than a block is soon computed.
        if self.num_tokens < size:
            self.end, self.wanted = self.first, []


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
        self.num_tokens = 0

    def find(self) -> Run | None:
        """A run of blocks that is stored, and sooner read than computed. Moves nothing."""
        keys = keys_ahead(self._sequence)
        if not keys:
            return None
        run = Run(self._sequence, keys, self._num_blocks - len(self._sequence.table))
        run.locate(self._tiers.where)
        if not run.wanted:
            return None
        num_bytes: Counter[Place] = Counter()
        for index in run.wanted:
            num_bytes[run.place(index)] += self._block_bytes
        return run if self._gate.chooses_reading(run.num_tokens, num_bytes) else None

    def taking(self, run: Run, after_step: Callable[[], None]) -> "Taking":
        """The way to take a run.

        Args:
            run: found just now.
            after_step: called once the tokens count as computed.
        """
        return Taking(self, run, after_step)

    def read(self, run: Run, indices: Collection[int], held: dict[int, int]) -> None:
        """Read blocks into `held`, block index to block id; those that cannot be are lost to `run`.

        Raises:
            PoolFullError: no room in the gpu pool.
            StoreError, EngineClosedError: the tiers' worker stopped or was closed.
        """
        for place in sorted({run.place(index) for index in indices}):
            group = [index for index in indices if run.place(index) == place]
            self._read_group(run, place, group, held)

    def _read_group(self, run: Run, place: Place, indices: list[int], held: dict[int, int]) -> None:
        block_ids: list[int] = []
        try:
            for _ in indices:
                block_ids.append(self._tiers.allocate())
        except BaseException:
            for block_id in block_ids:
                self._tiers.free(block_id)
            raise
        pairs = [(run.key(index), at) for index, at in zip(indices, block_ids, strict=True)]
        begun_s = time.monotonic()
        found = self._tiers.restore_many(pairs)
        num_bytes = sum(found) * self._block_bytes
        self._gate.note_read(place, num_bytes, time.monotonic() - begun_s)
        for index, block_id, is_there in zip(indices, block_ids, found, strict=True):
            if is_there:
                held[index] = block_id
            else:
                self._tiers.free(block_id)
        for index, is_there in zip(indices, found, strict=True):
            if not is_there:
                run.lose(index)

    def give_back(self, held: dict[int, int]) -> None:
        """Give blocks back that were read and are not used."""
        while held:
            self._tiers.drop(held.popitem()[1])

    def adopt(self, run: Run, held: dict[int, int]) -> int:
        """Make the blocks of a run live and count its tokens as computed; returns how many."""
        sequence, num_tokens = self._sequence, run.num_tokens
        self._remove_from(run.first)
        for index in run.wanted:
            sequence.table.add(index, held.pop(index), run.key(index))
        sequence.advance(num_tokens)
        sequence.mark_exact(run.end * sequence.block_size)
        self._executor.drop_expired(sequence)
        self.num_tokens += num_tokens
        self._counted.add("reused_tokens", num_tokens)
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

    def step(self) -> int | None:
        """Read some blocks, on the engine's thread.

        Returns:
            `None` while there are more to read; then the tokens that count as computed, 0 if the
            run could not be had.
        """
        run = self._run
        self._forget_unwanted()
        absent = [index for index in run.wanted if index not in self._held]
        try:
            self._reuse.read(run, absent[:READ_AT_ONCE], self._held)
        except PoolFullError:
            return 0
        if not run.wanted:
            return 0
        if any(index not in self._held for index in run.wanted):
            return None
        self._forget_unwanted()
        num_tokens = self._reuse.adopt(run, self._held)
        self._after_step()
        return num_tokens

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._reuse.give_back(self._held)

    def _forget_unwanted(self) -> None:
        """Give back what a shorter run does not need."""
        unwanted = {index: at for index, at in self._held.items() if index not in self._run.wanted}
        for index in unwanted:
            del self._held[index]
        self._reuse.give_back(unwanted)


def _exact_blocks(stream: Stream) -> set[int]:
    # A copy first: the engine's thread may make a block live for a step that nobody asked for yet.
    return {block.block_index for block in list(stream.table) if block.key is not None}
