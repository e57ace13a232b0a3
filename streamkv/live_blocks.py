"""Blocks come from the tiers to a sequence, and go back to them."""

from collections.abc import Iterable, Sequence

from streamkv.block_table import LiveBlock
from streamkv.tiers.manager import TierManager
from streamkv.tiers.spec import BlockKey


def give_back(tiers: TierManager, blocks: Iterable[LiveBlock]) -> None:
    """Have the tiers keep the blocks that have a name, and free the others."""
    for block in blocks:
        if block.key is None:
            tiers.free(block.block_id)
        else:
            tiers.drop(block.block_id)


def read_block(tiers: TierManager, key: BlockKey) -> int | None:
    """A block of the gpu pool that holds what the tiers have under a name; `None` if none has it.

    Raises:
        PoolFullError: the gpu pool has no room.
    """
    return read_blocks(tiers, [key])[0]


def read_blocks(tiers: TierManager, keys: Sequence[BlockKey]) -> list[int | None]:
    """Blocks of the gpu pool that hold what the tiers have under these names, in order.

    All are read together, those on ssd by several threads. Each belongs to the caller; `None` where
    no tier has it, or the disk did not answer in time.

    Raises:
        PoolFullError: the gpu pool has no room for all of them; nothing is kept of the others.
    """
    return tiers.fetch(keys)
