"""Blocks come from the tiers to a sequence, and go back to them."""

from collections.abc import Iterable

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
        StoreError: the store cannot be read.
    """
    block_id = tiers.allocate()
    try:
        if tiers.restore(key, block_id):
            return block_id
    except BaseException:
        tiers.free(block_id)
        raise
    tiers.free(block_id)
    return None
