"""All old blocks of a sequence in the gpu pool, owned once more each while they are attended.

Invariant: what a sequence's table names as recalled is owned once for it, and room in the pool was
reserved for it before it moved; an error leaves both as they were. No torch, no modes.
"""

from collections.abc import Iterable

from streamkv.config import format_size
from streamkv.errors import AbsentBlockError, PoolFullError
from streamkv.pool_room import PoolRoom
from streamkv.sequence import Sequence
from streamkv.tiers.manager import TierManager
from streamkv.tiers.spec import BlockKey, KVSpec


class OldBlocks:
    """Takes and gives back old blocks of all sequences of an engine.

    Args:
        tiers: where blocks are.
        room: of the gpu pool, shared with everyone.
        spec: layout of a block.
    """

    def __init__(self, tiers: TierManager, room: PoolRoom, spec: KVSpec) -> None:
        self._tiers = tiers
        self._room = room
        self._spec = spec

    @property
    def num_blocks(self) -> int:
        """Of the gpu pool."""
        return self._room.num_blocks

    def take(self, sequence: Sequence, indices: Iterable[int], num_held: int) -> dict[int, int]:
        """Blocks in the gpu pool with one more owner each, by block index; all of them or none.

        Args:
            sequence: whose; `keys` names them.
            indices: which; those that hold nothing but sink tokens are left out, as they are live
                for ever.
            num_held: old blocks that it holds besides.

        Raises:
            PoolFullError: the gpu pool has no room for them.
            AbsentBlockError: no tier has one of them.
        """
        wanted = [index for index in indices if _has_others(sequence, index)]
        before = self._room.promised(sequence)
        self.reserve(sequence, num_held + len(wanted))
        try:
            return self._taken(sequence, wanted)
        except BaseException:
            self._room.reserve(sequence, before)
            raise

    def share(self, sequence: Sequence, forked: Sequence) -> dict[int, int]:
        """What a sequence holds, for a fork of it.

        Raises:
            PoolFullError: no room, should they go different ways.
        """
        recalled = sequence.table.recalled
        self.reserve(forked, len(recalled))
        held = {index: recalled[index] for index in recalled}
        for block_id in held.values():
            self._tiers.share(block_id)
        return held

    def give_back(self, sequence: Sequence, first_block: int = 0) -> None:
        """Give back what is recalled of the blocks from `first_block` on."""
        recalled = sequence.table.recalled
        gone = [recalled[index] for index in recalled if index >= first_block]
        # What is given back must not be read.
        recalled.set({index: recalled[index] for index in recalled if index < first_block})
        for block_id in gone:
            self._tiers.drop(block_id)

    def drop(self, held: dict[int, int]) -> None:
        """Give back what `take` or `share` returned."""
        for block_id in held.values():
            self._tiers.drop(block_id)

    def release(self, sequence: Sequence) -> None:
        """The sequence needs no room for old blocks any more."""
        self._room.release(sequence)

    def reserve(self, sequence: Sequence, num_blocks: int) -> None:
        """Promise a sequence room for so many old blocks, in place of what it was promised.

        Raises:
            PoolFullError: there is not as much; says how much would be enough.
        """
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
        held: dict[int, int] = {}
        try:
            for index in indices:
                block_id = _at_hand(sequence, index)
                if block_id is not None:
                    self._tiers.share(block_id)
                    held[index] = block_id
            away = {at: _key(sequence, at) for at in indices if at not in held}
            read = self._tiers.fetch(list(away.values()))
            held |= {at: block for at, block in zip(away, read, strict=True) if block is not None}
            for index in away:
                if index not in held:
                    raise _absent(sequence, index, "no tier has it any more, or it is damaged")
        except BaseException:
            self.drop(held)
            raise
        return held


def _key(sequence: Sequence, index: int) -> BlockKey:
    """The name by which the tiers have a block."""
    key = sequence.keys.get(index) if sequence.keys is not None else None
    if key is None:
        raise _absent(sequence, index, "it was not computed with its whole past")
    return key


def _has_others(sequence: Sequence, index: int) -> bool:
    """Whether a block holds more than sink tokens."""
    size = sequence.block_size
    return bool(sequence.window.others_in(index * size, (index + 1) * size))


def _at_hand(sequence: Sequence, index: int) -> int | None:
    """Where a block lies in the gpu pool, if the sequence has it there by its name."""
    table = sequence.table
    if index in table.recalled:
        return table.recalled[index]
    if index in table and table[index].key is not None:
        return table[index].block_id
    return None


def _absent(sequence: Sequence, index: int, reason: str) -> AbsentBlockError:
    start = index * sequence.block_size
    return AbsentBlockError(start, start + sequence.block_size, reason)
