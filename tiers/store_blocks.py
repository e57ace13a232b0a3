"""Reading blocks from a store by key, all layers or one.

Invariant: a read fills the whole output with bytes whose checksums are right and returns True, or
it is a miss: absent, torn, damaged, foreign, or unreadable. Misses of a stored record are counted
and logged, and the key is shown no more until it is written again. This module does not know
LMDB; it is handed snapshots.
"""

import logging
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from threading import Lock

import numpy as np

from streamkv.errors import InputError
from streamkv.tiers.codec import Bytes, RawCodec
from streamkv.tiers.faults import fault_point
from streamkv.tiers.record import BadRecordError, RecordHeader, decode_frames
from streamkv.tiers.spec import BlockKey, KVSpec
from streamkv.tiers.store_file import StoreReadError
from streamkv.tiers.store_tables import KEY_BYTES
from streamkv.tiers.store_view import Snapshot
from streamkv.tiers.usage import Counters

READ_COUNTERS = ("hits", "misses", "corrupt", "read_errors", "bytes_read")

_MAX_SUSPECTS = 4096

logger = logging.getLogger(__name__)


def require_key(key: BlockKey) -> None:
    """Raise `InputError` unless `key` has the size of a key."""
    if len(key) != KEY_BYTES:
        raise InputError("key", key, "not the key of a block", f"Use {KEY_BYTES} bytes.")


def require_bytes(name: str, array: Bytes, num_bytes: int) -> None:
    """Raise `InputError` unless `array` is contiguous uint8 `[num_bytes]`."""
    right = array.dtype == np.uint8 and array.size == num_bytes and array.flags.c_contiguous
    if not right:
        found = f"{array.dtype} {list(array.shape)}"
        raise InputError(name, found, "not the bytes of a block", f"Use uint8 [{num_bytes}].")


class BlockReader:
    """Reads blocks; safe for any number of threads.

    Args:
        spec: layout of the blocks.
        snapshot: opens a read transaction.
        counters: has `READ_COUNTERS`.
    """

    def __init__(
        self,
        spec: KVSpec,
        snapshot: Callable[[], AbstractContextManager[Snapshot]],
        counters: Counters,
    ) -> None:
        self._spec = spec
        self._snapshot = snapshot
        self._counters = counters
        self._suspects: set[BlockKey] = set()
        self._suspects_lock = Lock()

    def contains(self, key: BlockKey) -> bool:
        """Whether `key` is stored with a sound header, and no read of it has failed."""
        if self.is_suspect(key):
            return False
        try:
            with self._snapshot() as view:
                return view.tables.header(view.txn, key) is not None
        except (BadRecordError, StoreReadError, OSError):
            return False

    def read(self, key: BlockKey, layers: range, out: Bytes) -> bool:
        """Fill `out` with the frames of consecutive `layers`; False is a miss.

        Args:
            out: uint8, contiguous, `len(layers) * frame_bytes`; undefined after a miss.
        """
        require_bytes("out", out, len(layers) * self._spec.frame_bytes)
        frames = out.reshape(len(layers), self._spec.frame_bytes)
        try:
            fault_point("ssd.get")
            num_bytes = self._fetch(key, layers, frames)
        except BadRecordError as error:
            return self._failed("corrupt", key, error)
        except (StoreReadError, OSError) as error:
            return self._failed("read_errors", key, error)
        self._counters.add("misses" if num_bytes is None else "hits")
        self._counters.add("bytes_read", num_bytes or 0)
        return num_bytes is not None

    def is_suspect(self, key: BlockKey) -> bool:
        """Whether a read of `key` has failed."""
        return key in self._suspects

    def trust(self, keys: Collection[BlockKey]) -> None:
        """Show `keys` again: they were written anew."""
        with self._suspects_lock:
            self._suspects.difference_update(keys)

    def _fetch(self, key: BlockKey, layers: range, frames: Bytes) -> int | None:
        try:
            return self._fetch_once(key, layers, frames, by_ends=True)
        except BadRecordError:
            # Perhaps not all pieces lie where they were taken to be.
            return self._fetch_once(key, layers, frames, by_ends=False)

    def _fetch_once(
        self, key: BlockKey, layers: range, frames: Bytes, *, by_ends: bool
    ) -> int | None:
        with self._snapshot() as view:
            header = view.tables.header(view.txn, key)
            if header is None:
                return None
            offsets = header.offsets
            start, num_bytes = offsets[layers.start], offsets[layers.stop] - offsets[layers.start]
            coded = self._buffer(header, num_bytes, frames)
            view.tables.read_payload(view.txn, header, start, coded, by_ends=by_ends)
            codecs = view.tables.codecs
        # Outside the transaction: decoding takes time, and a reader keeps freed pages from reuse.
        decode_frames(key, header, layers, coded, frames, codecs)
        return num_bytes

    def _buffer(self, header: RecordHeader, num_bytes: int, frames: Bytes) -> Bytes:
        if header.codec == RawCodec.code and num_bytes == frames.size:
            return frames.reshape(-1)  # raw frames are checked where they are wanted
        return np.empty(num_bytes, dtype=np.uint8)

    def _failed(self, counter: str, key: BlockKey, error: Exception) -> bool:
        logger.warning("ssd record %s is a miss: %s", key.hex(), error)
        self._counters.add(counter)
        self._counters.add("misses")
        with self._suspects_lock:
            if len(self._suspects) >= _MAX_SUSPECTS:
                self._suspects.pop()
            self._suspects.add(key)
        return False
