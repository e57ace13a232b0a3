"""Two sequences of one past: full blocks belong to both, the open block is copied.

    source   [sealed] [sealed] [sealed] [open]
                 \\        \\        \\       | copied
    target   [   one more owner each   ] [open]

Invariant: a block that a sequence may still write to has one owner. Blocks that are full but have
no key, because they were computed on the way to an exact window, are copied too: nothing that is
not sealed can be shared. This module knows neither journals nor text.
"""

from streamkv.block_table import LiveBlock
from streamkv.sequence import Sequence
from streamkv.tiers.manager import TierManager


def share_blocks(source: Sequence, target: Sequence, tiers: TierManager) -> None:
    """Give `target`, a copy of `source` without blocks, what `source` has live.

    Raises:
        PoolFullError: no room for the open block; what `target` has by then is its own to release.
    """
    for block in source.table:
        if block.key is not None:
            tiers.share(block.block_id)
            target.table.add(block.block_index, block.block_id, block.key)
        elif _is_written(source, block):
            target.table.add(block.block_index, _copied(block, tiers))


def _is_written(source: Sequence, block: LiveBlock) -> bool:
    """Whether a block holds computed tokens, and not only room for those to come."""
    return block.block_index * source.block_size < source.num_computed


def _copied(block: LiveBlock, tiers: TierManager) -> int:
    block_id = tiers.allocate()
    try:
        tiers.copy(block.block_id, block_id)
    except BaseException:
        tiers.free(block_id)
        raise
    return block_id
