"""Names of a stream's first blocks, so that all of them can be found again. Pure.

16 bytes for each, up to a limit: what has more blocks than the gpu pool cannot be attended whole.
"""

from streamkv.tiers.keys import KEY_BYTES
from streamkv.tiers.spec import BlockKey

_NONE = bytes(KEY_BYTES)


class BlockKeys:
    """Block keys by block index.

    Args:
        limit: blocks from this one on are not noted.
    """

    def __init__(self, limit: int) -> None:
        assert limit >= 0
        self._limit = limit
        self._packed = bytearray()

    def put(self, block_index: int, key: BlockKey | None) -> None:
        """A block was sealed; `None` for one that is not what its tokens name."""
        if block_index >= self._limit:
            return
        start, end = block_index * KEY_BYTES, (block_index + 1) * KEY_BYTES
        if len(self._packed) < end:
            self._packed.extend(bytes(end - len(self._packed)))
        self._packed[start:end] = _NONE if key is None else key

    def get(self, block_index: int) -> BlockKey | None:
        """The block's key; `None` if it is not known, or has none."""
        start = block_index * KEY_BYTES
        key = bytes(self._packed[start : start + KEY_BYTES])
        return None if key in (b"", _NONE) else BlockKey(key)

    def truncate(self, num_blocks: int) -> None:
        """Forget the blocks from `num_blocks` on: the stream ends earlier now."""
        del self._packed[num_blocks * KEY_BYTES :]

    def copy(self) -> "BlockKeys":
        """The same for a fork."""
        other = BlockKeys(self._limit)
        other._packed = bytearray(self._packed)
        return other
