"""What a resume needs of the window, as a CHECKPOINT record of the journal holds it.

Pure bookkeeping: keys and block indices to bytes and back.
"""

import struct
from dataclasses import dataclass
from typing import Self

from streamkv.errors import JournalError
from streamkv.tiers.keys import KEY_BYTES
from streamkv.tiers.spec import BlockKey


@dataclass(frozen=True, slots=True)
class WindowBlocks:
    """What a resume at a block boundary needs.

    Attributes:
        token_index: tokens before it; a multiple of the block size.
        chain_key: key of the block that ends there.
        blocks: (block_index, key) of the sink and window blocks.
    """

    token_index: int
    chain_key: BlockKey
    blocks: tuple[tuple[int, BlockKey], ...]

    def encode(self) -> bytes:
        """What the CHECKPOINT record carries besides the token index."""
        packed = (struct.pack("<Q", index) + key for index, key in self.blocks)
        return self.chain_key + b"".join(packed)

    @classmethod
    def decode(cls, token_index: int, data: bytes) -> Self:
        """The inverse of `encode`.

        Raises:
            JournalError: not the content of a CHECKPOINT record.
        """
        entry = 8 + KEY_BYTES
        if len(data) < KEY_BYTES or (len(data) - KEY_BYTES) % entry:
            raise JournalError(f"a CHECKPOINT record of {len(data)} bytes cannot be read")
        blocks = tuple(
            (struct.unpack_from("<Q", data, at)[0], BlockKey(data[at + 8 : at + entry]))
            for at in range(KEY_BYTES, len(data), entry)
        )
        return cls(token_index, BlockKey(data[:KEY_BYTES]), blocks)
