"""Bytes that sessions take on disk: blocks in the store's file, journals, files of digests.

Pure arithmetic over the formats of `tiers.record`, `tiers.store_tables`, `journal_records` and
`digest_file`; nothing is opened. What a codec saves is not known before there are blocks, so all of
it is for `raw`: with `zstd` it is less.

    block     p pages of payload, and what the tables' trees take for its rows
    journal   13 a token that is a record of its own, as an answer's are, and 33 + 24 b a checkpoint
              of b blocks; 25 + 4 k a choice of k old blocks. Fed text takes 4 a token and itself
    digests   24 + n (24 + d) for n sealed blocks
"""

import mmap

from streamkv.config import EngineConfig
from streamkv.digest_file import HEADER_BYTES, ROW_OVERHEAD
from streamkv.errors import ConfigError
from streamkv.journal_frames import FRAME_OVERHEAD
from streamkv.journal_records import Checkpoint, Chosen, Generated, encode_record
from streamkv.sizing import digest_bytes
from streamkv.tiers.record import PieceLayout, RecordHeader
from streamkv.tiers.spec import BlockKey, KVSpec
from streamkv.tiers.store_room import StoreRoom
from streamkv.window_blocks import WindowBlocks

PAGE_BYTES = min(mmap.PAGESIZE, 1 << 15)
"""Page of the store's file on this machine: the system's, of which LMDB takes at most 32 KiB."""

_NODE_BYTES = 10  # of a row in a leaf besides its key and value: a header and its place
_ORDER_BYTES = 8 + 16 + 4  # sequence, key and number of pieces
_PIECE_BYTES = 12 + 8  # sequence and index, and where the piece lies
_KEY = BlockKey(bytes(16))


def payload_bytes(spec: KVSpec, page_bytes: int = PAGE_BYTES) -> int:
    """Bytes of the pages that a stored block fills."""
    return PieceLayout.of(spec, page_bytes).num_pages(spec.block_bytes) * page_bytes


def block_bytes(spec: KVSpec, page_bytes: int = PAGE_BYTES) -> int:
    """Bytes of a stored block with its rows, at most: leaves of the trees are half full."""
    pieces = PieceLayout.of(spec, page_bytes).num_pieces(spec.block_bytes)
    unset = (0,) * spec.num_layers
    header = len(RecordHeader(0, 0, bytes(8), unset, unset).pack(_KEY))
    # The key a second time in the manifest of a session.
    rows = 2 * len(_KEY) + header + _ORDER_BYTES + pieces * _PIECE_BYTES
    return payload_bytes(spec, page_bytes) + 2 * (rows + (2 + pieces) * _NODE_BYTES)


def room_for_blocks(limit_bytes: int, spec: KVSpec, page_bytes: int = PAGE_BYTES) -> int:
    """Blocks that a store with that limit has room for, at least; 0: it cannot be opened."""
    try:
        room = StoreRoom.of(limit_bytes, spec, page_bytes)
    except ConfigError:
        return 0
    return room.budget() * page_bytes // block_bytes(spec, page_bytes)


def journal_bytes(config: EngineConfig, spec: KVSpec, num_tokens: int, num_blocks: int) -> int:
    """Bytes of the journal of so many tokens, each a record of its own, rounded up.

    Args:
        num_blocks: named by a checkpoint. Those are as frequent as can be: unless told otherwise
            one comes with every full block, if that takes half a second.
    """
    window = WindowBlocks(0, _KEY, tuple((index, _KEY) for index in range(num_blocks)))
    checkpoint = FRAME_OVERHEAD + len(encode_record(Checkpoint(0, window.encode()))[1])
    every = config.checkpoint_tokens or spec.block_size
    num_bytes = num_tokens * (FRAME_OVERHEAD + len(encode_record(Generated((0,)))[1]))
    num_bytes += -(-num_tokens * checkpoint // every)
    if config.recall_blocks > 0:
        blocks = tuple(range(config.recall_blocks))
        choice = FRAME_OVERHEAD + len(encode_record(Chosen(0, 0, blocks))[1])
        num_bytes += -(-num_tokens * choice // config.stride)
    return num_bytes


def digest_row_bytes(config: EngineConfig, spec: KVSpec) -> int:
    """Bytes that a sealed block adds to the file of digests, at most; 0 without recall."""
    return ROW_OVERHEAD + digest_bytes(spec) if config.recall_blocks > 0 else 0


def digest_file_bytes(config: EngineConfig, spec: KVSpec, num_tokens: int) -> int:
    """Bytes of the file of digests of a stream of so many tokens, at most; 0 without recall."""
    if config.recall_blocks == 0:
        return 0
    return HEADER_BYTES + num_tokens // spec.block_size * digest_row_bytes(config, spec)
