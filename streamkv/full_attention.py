"""Mode `full`: a session attends to every block of its stream, whatever tier it lay in.

    the mode begins            blocks that left the window are brought back into the gpu pool
    tokens leave the window    their block gets one more owner before the window lets go of it
    the mode ends              what the window does not need is given back

So every old block is a recalled entry of the table, at its true distance, and nothing is chosen.
Room in the pool is reserved before anything moves. A block that cannot be had is an error and never
a gap: `full` is for checking, and for short histories. No torch.

A step ends at multiples of the largest whole number of blocks that the window holds: then all that
leaves the window of one of its queries lies in blocks that were full before it began.
"""

import secrets
from collections.abc import Callable, Iterable, Iterator

from streamkv.block_keys import BlockKeys
from streamkv.config import format_size
from streamkv.errors import AbsentBlockError, ConfigError, PoolFullError
from streamkv.live_blocks import give_back, read_blocks
from streamkv.pool_room import PoolRoom
from streamkv.recall_schedule import question_start
from streamkv.sequence import Sequence
from streamkv.tiers.manager import TierManager
from streamkv.tiers.spec import BlockKey, KVSpec


class FullAttention:
    """Sequences of an engine that attend to all of their blocks.

    Args:
        tiers: where blocks are.
        room: of the gpu pool, shared with everyone.
        spec: layout of a block.
        trained_length: nothing seems farther away than this, less one.
        problem: why sessions of this engine cannot attend so; empty if they can.
    """

    def __init__(
        self,
        tiers: TierManager,
        room: PoolRoom,
        spec: KVSpec,
        trained_length: int,
        problem: str = "",
    ) -> None:
        self._tiers = tiers
        self._room = room
        self._spec = spec
        self._trained_length = trained_length
        self._problem = problem
        # First blocks of each stream that were brought in.
        self._reached: dict[Sequence, int] = {}
        self._since: dict[Sequence, int] = {}

    def open(self, sequence: Sequence) -> None:
        """Note the names of a new sequence's blocks from the first one on."""
        if not self._problem:
            sequence.keys = BlockKeys(self._room.num_blocks)

    def is_on(self, sequence: Sequence) -> bool:
        """Whether the sequence attends to all of its blocks."""
        return sequence in self._reached

    def turn_on(self, sequence: Sequence, let_go: Callable[[], None]) -> None:
        """Attend to everything from the next token on; nothing of it may be under way.

        Args:
            sequence: in another mode, in which it stays if this raises.
            let_go: ends the other mode; what that has recalled is had by then.

        Raises:
            ConfigError: sessions of this engine cannot.
            PoolFullError: the gpu pool has no room for the whole stream.
            AbsentBlockError: no tier has one of its blocks.
        """
        if self._problem:
            remedy = "Use mode 'window', or 'recall' of an engine with recall_blocks."
            raise ConfigError("mode", "full", self._problem, remedy)
        end_block = self._end_block(sequence, sequence.num_computed + 1)
        wanted = list(self._with_others(sequence, range(end_block)))
        self._reserve(sequence, len(wanted))
        try:
            held = self._taken(sequence, wanted)
        except BaseException:
            self._room.release(sequence)
            raise
        let_go()
        self._begin(sequence, held, end_block)

    def turn_off(self, sequence: Sequence) -> None:
        """Attend by another mode from the next token on, and give back what only this one needs."""
        if sequence in self._reached:
            self.give_back(sequence)
            self.forget(sequence)
            sequence.attends_to_all = False
            sequence.table.recalled.set_policy("far")
            sequence.recall_boundary = None
            _name_apart(sequence)

    def ask_again(self, sequence: Sequence) -> None:
        """An answer begins: compute the question again if it was read in another mode."""
        token_index = question_start(sequence.num_computed, sequence.block_size)
        read_before = token_index < self._since.get(sequence, 0) <= sequence.num_computed
        if read_before and sequence.can_go_back(token_index):
            give_back(self._tiers, sequence.go_back(token_index))
            self._since[sequence] = token_index
            _name_apart(sequence)
            self.after_step(sequence)

    def before_step(self, sequence: Sequence, end: int) -> None:
        """Bring in what leaves the window of a query before `end`.

        Raises:
            PoolFullError: the gpu pool has no room for it.
            AbsentBlockError: no tier has it.
        """
        reached = self._reached.get(sequence)
        if reached is None or (end_block := self._end_block(sequence, end)) <= reached:
            return
        recalled = sequence.table.recalled
        wanted = list(self._with_others(sequence, range(reached, end_block)))
        self._reserve(sequence, len(recalled) + len(wanted))
        held = self._taken(sequence, wanted)
        recalled.set({index: recalled[index] for index in recalled} | held)
        self._reached[sequence] = end_block

    def after_step(self, sequence: Sequence) -> None:
        """Say where the next step has to end."""
        if sequence in self._reached:
            size = sequence.block_size
            stride = sequence.window.window_size // size * size
            sequence.recall_boundary = (sequence.num_computed // stride + 1) * stride

    def fork(self, sequence: Sequence, forked: Sequence) -> None:
        """A sequence with the same past begins: blocks belong to both.

        Raises:
            PoolFullError: no room, should they go different ways.
        """
        if sequence not in self._reached:
            return
        recalled = sequence.table.recalled
        self._reserve(forked, len(recalled))
        held = {index: recalled[index] for index in recalled}
        for block_id in held.values():
            self._tiers.share(block_id)
        self._begin(forked, held, self._reached[sequence])

    def rewound(self, sequence: Sequence) -> None:
        """The stream ended earlier, and blocks that are not its own any more were given back."""
        if sequence in self._reached:
            num_full = sequence.num_computed // sequence.block_size
            self._reached[sequence] = min(self._reached[sequence], num_full)
            self._room.reserve(sequence, len(sequence.table.recalled))
            _name_apart(sequence)
            self.after_step(sequence)

    def give_back(self, sequence: Sequence) -> None:
        """Give back what left the window; the next step brings it in again."""
        if sequence in self._reached:
            recalled = sequence.table.recalled
            held = [recalled[index] for index in recalled]
            recalled.set({})
            for block_id in held:
                self._tiers.drop(block_id)
            self._reached[sequence] = 0
            self._room.release(sequence)

    def forget(self, sequence: Sequence) -> None:
        """The sequence has ended, or its mode; it holds nothing any more."""
        self._reached.pop(sequence, None)
        self._since.pop(sequence, None)
        self._room.release(sequence)

    def _begin(self, sequence: Sequence, held: dict[int, int], reached: int) -> None:
        recalled = sequence.table.recalled
        recalled.trained_length = self._trained_length
        recalled.set_policy("absolute")
        recalled.set(held)
        sequence.attends_to_all = True
        self._reached[sequence] = reached
        self._since[sequence] = sequence.num_computed
        _name_apart(sequence)
        self.after_step(sequence)

    def _end_block(self, sequence: Sequence, end: int) -> int:
        """Blocks [0, n) have a token that left the window of a query before `end`."""
        return -(-max(0, end - sequence.window.window_size) // sequence.block_size)

    def _with_others(self, sequence: Sequence, indices: Iterable[int]) -> Iterator[int]:
        """Those of the blocks that hold more than sink tokens, which are live for ever."""
        size = sequence.block_size
        for index in indices:
            if sequence.window.others_in(index * size, (index + 1) * size):
                yield index

    def _reserve(self, sequence: Sequence, num_blocks: int) -> None:
        room, size = self._room, self._spec.block_bytes
        if not room.reserve(sequence, num_blocks):
            has, left = room.promised(sequence), room.num_free
            more = num_blocks - has - left
            # Rounded up, so that it is enough.
            total = f"{-(-(room.num_blocks + more) * size // 2**20)}MiB"
            raise PoolFullError(
                f"mode 'full' needs room for {num_blocks} old blocks "
                f"({format_size(num_blocks * size)}) in the gpu pool besides the window; there is "
                f"room for {has + left} ({format_size((has + left) * size)}) of "
                f"{room.num_blocks}. Open the engine with gpu_bytes of at least {total}, close "
                "other sessions, or go on in mode 'window' or 'recall'."
            )

    def _taken(self, sequence: Sequence, indices: list[int]) -> dict[int, int]:
        """Blocks in the gpu pool with one more owner each, by block index; all of them or none."""
        held: dict[int, int] = {}
        try:
            for index in indices:
                block_id = _at_hand(sequence, index)
                if block_id is not None:
                    self._tiers.share(block_id)
                    held[index] = block_id
            absent = [(index, self._key(sequence, index)) for index in indices if index not in held]
            read = read_blocks(self._tiers, [key for _, key in absent])
            held |= {at: b for (at, _), b in zip(absent, read, strict=True) if b is not None}
            for index, _ in absent:
                if index not in held:
                    raise _absent(sequence, index, "no tier has it any more, or it is damaged")
        except BaseException:
            for block_id in held.values():
                self._tiers.drop(block_id)
            raise
        return held

    def _key(self, sequence: Sequence, index: int) -> BlockKey:
        key = sequence.keys.get(index) if sequence.keys is not None else None
        if key is None:
            raise _absent(sequence, index, "it was not computed with its whole past")
        return key


def _at_hand(sequence: Sequence, index: int) -> int | None:
    """Where a block lies in the gpu pool, if the sequence has it there by its name."""
    table = sequence.table
    if index in table.recalled:
        return table.recalled[index]
    if index in table and table[index].key is not None:
        return table[index].block_id
    return None


def _name_apart(sequence: Sequence) -> None:
    """What is computed from now on may differ from what others compute from the same tokens."""
    sequence.recall_salt = secrets.token_bytes(16)


def _absent(sequence: Sequence, index: int, reason: str) -> AbsentBlockError:
    start = index * sequence.block_size
    return AbsentBlockError(start, start + sequence.block_size, reason)
