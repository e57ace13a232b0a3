"""Chosen blocks come back into the gpu pool, and others are given back.

Invariant: what a sequence's table names as recalled is owned once for it, at every moment, whatever
goes wrong. A block that no tier has is absent: counted, never an answer.
"""

from streamkv.live_blocks import read_block
from streamkv.recall_stream import RecallStream
from streamkv.sequence import Sequence
from streamkv.tiers.manager import TierManager


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

    def install(self, sequence: Sequence, stream: RecallStream, blocks: tuple[int, ...]) -> None:
        """Have exactly these blocks recalled, as far as they are to be had.

        Raises:
            PoolFullError: the gpu pool has no room; what is not chosen has been given back.
        """
        recalled = sequence.table.recalled
        wanted = set(blocks)
        kept = {index: recalled[index] for index in recalled if index in wanted}
        for index in list(recalled):
            if index not in wanted:
                self._tiers.drop(recalled[index])
        # What is given back must not be read, whatever goes wrong from here on.
        recalled.set(kept)
        for index in blocks:
            if index not in kept:
                block_id = self._restored(sequence, stream, index)
                if block_id is not None:
                    kept[index] = block_id
                    recalled.set(kept)
        stream.attended.update(kept)

    def _restored(self, sequence: Sequence, stream: RecallStream, block_index: int) -> int | None:
        """The block in the gpu pool, with one more owner; `None` if it is absent."""
        key = stream.index.key(block_index) if block_index < len(stream.index) else None
        if key is None:
            # Chosen before a restart that has lost its digest.
            self.num_absent += 1
            return None
        if block_index in sequence.table and sequence.table[block_index].key == key:
            block_id = sequence.table[block_index].block_id
            self._tiers.share(block_id)
            return block_id
        read = read_block(self._tiers, key)
        self.num_absent += read is None
        return read
