"""Chosen blocks come back into the gpu pool, and others are given back.

Invariant: what a sequence's table names as recalled is owned once for it, at every moment, whatever
goes wrong. A block that no tier has is absent: counted, never an answer.
"""

from streamkv.recall_schedule import Choosing
from streamkv.recall_stream import RecallStream
from streamkv.sequence import Sequence
from streamkv.tiers.manager import TierManager
from streamkv.tiers.spec import BlockKey


class Installer:
    """Installs choices for all sequences of an engine.

    Args:
        tiers: where blocks are.

    Attributes:
        num_absent: chosen blocks that no tier had.
    """

    def __init__(self, tiers: TierManager) -> None:
        self.num_absent = 0
        self._tiers = tiers

    def install(self, sequence: Sequence, stream: RecallStream, choosing: Choosing) -> None:
        """Have exactly the chosen blocks recalled, as far as they are to be had.

        Raises:
            PoolFullError: the gpu pool has no room; what is not chosen has been given back.
        """
        recalled, blocks = sequence.table.recalled, choosing.blocks()
        wanted = set(blocks)
        kept = {index: recalled[index] for index in recalled if index in wanted}
        for index in list(recalled):
            if index not in wanted:
                self._tiers.drop(recalled[index])
        # What is given back must not be read, whatever goes wrong from here on.
        recalled.set(kept)
        away = dict[int, BlockKey]()
        for index in blocks:
            key = _key(stream, index)
            if index in kept or key is None:
                # Without a key: chosen before a restart that has lost its digest.
                continue
            if _is_live(sequence, index, key):
                kept[index] = sequence.table[index].block_id
                self._tiers.share(kept[index])
            else:
                away[index] = key
        recalled.set(kept)
        found = self._tiers.fetch(list(away.values()))
        kept.update({at: block for at, block in zip(away, found, strict=True) if block is not None})
        recalled.set(kept)
        self.num_absent += len(blocks) - len(kept)
        weights = dict(zip(blocks, choosing.weights(), strict=False))
        for index in kept:
            known = [stream.attended.get(index), weights.get(index)]
            stream.attended[index] = max((each for each in known if each is not None), default=None)

    def stage(self, sequence: Sequence, stream: RecallStream, blocks: tuple[int, ...]) -> None:
        """These blocks are chosen and not due yet: have the tiers bring them nearer meanwhile."""
        recalled = sequence.table.recalled
        keys = ((index, _key(stream, index)) for index in blocks if index not in recalled)
        self._tiers.prefetch(
            [key for index, key in keys if key is not None and not _is_live(sequence, index, key)]
        )


def _key(stream: RecallStream, block_index: int) -> BlockKey | None:
    """The name that a block can be recalled by."""
    return stream.index.key(block_index) if block_index < len(stream.index) else None


def _is_live(sequence: Sequence, block_index: int, key: BlockKey) -> bool:
    """Whether the sequence has the block in its window, by that name."""
    return block_index in sequence.table and sequence.table[block_index].key == key
