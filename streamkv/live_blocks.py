"""Blocks go back from a sequence to the tiers."""

from collections.abc import Iterable

from streamkv.block_table import LiveBlock
from streamkv.tiers.manager import TierManager


def give_back(tiers: TierManager, blocks: Iterable[LiveBlock]) -> None:
    """Have the tiers keep the blocks that have a name, and free the others."""
    for block in blocks:
        if block.key is None:
            tiers.free(block.block_id)
        else:
            tiers.drop(block.block_id)
