"""A store that is open for writing: who may do what, when, and how it is replaced and closed.

Invariants: a key that is shown can be read; what is read is what was written, or it is a miss;
the file never grows past the limit; a key named by a manifest is never evicted; killed at any
moment, the store opens as it was after some committed write. Reads may come from many threads at
once, changes wait for one another. This module does not know LMDB, sessions, models or torch.
"""

import logging
import mmap
import os
import shutil
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Lock
from typing import Self

from streamkv.errors import StoreError
from streamkv.tiers.codec import Bytes, Codecs
from streamkv.tiers.gate import Gate
from streamkv.tiers.record import EncodedRecord, encode_record
from streamkv.tiers.spec import DTYPE_BYTES, BlockKey, KVSpec
from streamkv.tiers.store_blocks import READ_COUNTERS, BlockReader, require_bytes, require_key
from streamkv.tiers.store_file import StoreFile
from streamkv.tiers.store_files import (
    COMPACT_DIRECTORY,
    DATA_FILE,
    OWNER_FILE,
    READERS_FILE,
    prepare_directory,
    sync_path,
)
from streamkv.tiers.store_format import StoreFormat, StoreIdentity
from streamkv.tiers.store_lock import FileLock
from streamkv.tiers.store_room import StoreRoom
from streamkv.tiers.store_view import Snapshot, StoreView
from streamkv.tiers.store_writer import WRITE_COUNTERS, StoreWriter
from streamkv.tiers.usage import Counters, TierUsage

logger = logging.getLogger(__name__)

COUNTERS = (*READ_COUNTERS, *WRITE_COUNTERS)

LOCKED_REMEDY = "Talk to that process (streamkv serve), close it, or use another --store."


def require_free(path: Path) -> None:
    """Raise if another process has the tier at `path` open now; makes and keeps nothing.

    For who is about to load a model for it: opening asks again.

    Raises:
        StoreLockedError: held elsewhere; names process, host and start time.
    """
    if (path / OWNER_FILE).is_file():
        FileLock(path / OWNER_FILE, named=False, remedy=LOCKED_REMEDY).close()


class StoreTier(StoreView, ABC):
    """A store, open for writing.

    Memory holds nothing per record; a dict entry (about 100 bytes) per key of a manifest.

    Args:
        path: directory of the store; made if missing.
        spec: layout of the blocks.
        identity: model and weights the KV belongs to.
        limit_bytes: limit of the file.
        codec: `raw` or `zstd`, for new records.

    Raises:
        ConfigError: unknown codec, or a limit below some blocks.
        StoreFormatError: the store belongs to another format version, model, weights or layout.
        StoreLockedError: open in another process, or in this one.
        StoreFullError: the disk is full.
        StoreError: the directory cannot be used.
    """

    def __init__(
        self, path: Path, spec: KVSpec, identity: StoreIdentity, *, limit_bytes: int, codec: str
    ) -> None:
        StoreRoom.of(limit_bytes, spec, mmap.PAGESIZE)
        self._codec = Codecs(DTYPE_BYTES[spec.dtype]).named(codec)
        self._format = StoreFormat(spec, identity, limit_bytes, codec)
        self.path, self.spec, self.limit_bytes = path, spec, limit_bytes
        self._process_id = os.getpid()
        self._write_lock = Lock()
        self._gate = Gate(f"The store {path}")
        self._counters = Counters(COUNTERS)
        self._reader = BlockReader(spec, self._snapshot, self._counters)
        prepare_directory(path)
        self._owner = FileLock(path / OWNER_FILE, remedy=LOCKED_REMEDY)
        try:
            self._open()
            self._fit_limit()
        except BaseException:
            self._owner.close()
            raise

    @property
    def stored_format(self) -> StoreFormat:
        """What the store says of itself, as it was opened."""
        return self._format

    @property
    def counters(self) -> dict[str, int]:
        """What happened since opening, by name; every name is there from the start."""
        return self._counters.snapshot()

    def write(self, items: Sequence[tuple[BlockKey, Bytes]]) -> int:
        """Store blocks, the first as the oldest; a key that is there already is left as it is.

        Committed in transactions of about 32 MiB; durable after `sync()`. The oldest blocks that no
        manifest names make room.

        Args:
            items: keys and their blocks, uint8 `[block_bytes]`, contiguous.

        Returns:
            How many of `items` are stored now: all, unless they are more than the store can hold.

        Raises:
            InputError: a key or a block of another size; nothing is stored.
            StoreFullError: no room; some of the first may be stored.
            StoreError: the store failed; likewise.
        """
        for key, block in items:
            require_key(key)
            require_bytes("block", block, self.spec.block_bytes)
        keys = frozenset(key for key, _ in items)
        with self._writing() as writer:
            writer.write(self._new_records(items), keys)
            self._reader.trust(keys)
        return sum(self.contains(key) for key, _ in items)

    def sync(self) -> None:
        """Make everything written durable.

        Raises:
            StoreError: the disk failed: what was written since the last sync may not last.
        """
        with self._inside():
            self._file.sync()

    def contains(self, key: BlockKey) -> bool:
        """Whether `key` can be read, as far as is known without reading it."""
        return self._reader.contains(key)

    def read(self, key: BlockKey, out: Bytes) -> bool:
        """Fill `out` (uint8 `[block_bytes]`, contiguous). False: a miss, `out` is undefined."""
        return self._reader.read(key, range(self.spec.num_layers), out)

    def read_frame(self, key: BlockKey, layer: int, out: Bytes) -> bool:
        """Fill `out` (uint8 `[frame_bytes]`, contiguous) with one layer; False is a miss."""
        return self._reader.read(key, range(layer, layer + 1), out)

    def keys(self) -> Iterator[BlockKey]:
        """Every key that can be read, as far as is known without reading it, oldest first."""
        stored = super().keys()
        return (key for key in stored if not self._reader.is_suspect(key))

    def delete(self, keys: Iterable[BlockKey]) -> None:
        """Remove blocks. Those that a manifest names stay."""
        with self._writing() as writer:
            writer.delete(keys)

    def set_manifest(self, session: str, keys: Sequence[BlockKey]) -> None:
        """Lock the keys that a resume needs, in place of those before; none forgets the session.

        A locked key need not be there yet.

        Raises:
            InputError: a key, or the session's name, cannot be stored.
        """
        for key in keys:
            require_key(key)
        with self._writing() as writer:
            writer.set_manifest(session, keys)

    def manifest(self, session: str) -> list[BlockKey]:
        """Keys that the resume of `session` needs, as set; empty if it is unknown."""
        with self._inside():
            return self._writer.manifest(session)

    def delete_session(self, session: str, keys: Iterable[BlockKey] = ()) -> None:
        """Forget `session` and remove its blocks: those of its manifest, and `keys`.

        What the manifest of another session names stays.
        """
        with self._writing() as writer:
            doomed = {*writer.manifest(session), *keys}
            writer.set_manifest(session, [])
            writer.delete(doomed)

    def usage(self) -> TierUsage:
        """Blocks, bytes of live pages, and the limit."""
        return self._usage(self.limit_bytes)

    def file_bytes(self) -> int:
        """Size of the file."""
        return (self.path / DATA_FILE).stat().st_size

    def check_integrity(self) -> None:
        """Compare the tables with one another; a `StoreError` names the numbers that differ."""
        with self._writing():
            super().check_integrity()

    def compact(self) -> int:
        """Rewrite the file without free pages, and put it in place of the old one in one step.

        Reads go on meanwhile; writes wait.

        Returns:
            Bytes gained.

        Raises:
            StoreLockedError: another process is reading the store.
            StoreFullError: no room for the copy.
        """
        with self._writing():
            before = self.file_bytes()
            remedy = "Let it finish reading, then try again."
            readers = FileLock(self.path / READERS_FILE, named=False, remedy=remedy)
            try:
                self._replace_by_copy()
            finally:
                readers.close()
            return before - self.file_bytes()

    def close(self) -> None:
        """Close the store and let others open it; a second call does nothing. Waits for reads."""
        if os.getpid() != self._process_id:
            return
        with self._write_lock:
            if self._gate.closed:
                return
            self._gate.close()
            with self._gate.exclusive():
                try:
                    self._file.sync()
                except StoreError as error:
                    logger.warning("the last writes may not last: %s", error)
                self._file.close()
            self._owner.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @abstractmethod
    def _open_file(self) -> StoreFile:
        """Open the file, which is there or is made, for writing."""

    def _open(self) -> None:
        file = self._open_file()
        try:
            _, self._tables = file.tables(self._format)
            room = StoreRoom.of(self.limit_bytes, self.spec, file.page_bytes)
            self._writer = StoreWriter(file, self._tables, room, self._counters)
        except BaseException:
            file.close()
            raise
        self._file = file

    def _fit_limit(self) -> None:
        """Shrink a store that was written under a higher limit."""
        shutil.rmtree(self.path / COMPACT_DIRECTORY, ignore_errors=True)
        if self.file_bytes() > self.limit_bytes:
            try:
                self._writer.shrink()
                self.compact()
            except StoreError as error:
                self._gate.check_open()
                logger.warning("%s stays larger than its limit: %s", self.path, error)

    def _replace_by_copy(self) -> None:
        directory = self.path / COMPACT_DIRECTORY
        try:
            directory.mkdir(mode=0o700)
            self._file.copy_compacted(directory)
            with self._gate.exclusive():
                self._file.close()
                try:
                    os.replace(directory / DATA_FILE, self.path / DATA_FILE)
                    sync_path(self.path)
                finally:
                    self._reopen()
        finally:
            shutil.rmtree(directory, ignore_errors=True)

    def _reopen(self) -> None:
        try:
            self._open()
        except BaseException:
            self._gate.close()
            self._owner.close()
            raise

    def _new_records(self, items: Sequence[tuple[BlockKey, Bytes]]) -> Iterator[EncodedRecord]:
        seen: set[BlockKey] = set()
        for key, block in items:
            if key in seen or self.contains(key):
                self._counters.add("duplicates")
                continue
            seen.add(key)
            yield encode_record(key, block, self.spec, self._tables.layout, self._codec)

    @contextmanager
    def _writing(self) -> Iterator[StoreWriter]:
        self._check_process()
        with self._write_lock:
            self._gate.check_open()
            yield self._writer

    @contextmanager
    def _inside(self) -> Iterator[None]:
        self._check_process()
        with self._gate.enter():
            yield

    @contextmanager
    def _snapshot(self) -> Iterator[Snapshot]:
        with self._inside(), self._file.read() as txn:
            yield Snapshot(txn, self._tables)

    def _page_bytes(self) -> int:
        return self._file.page_bytes

    def _check_process(self) -> None:
        if os.getpid() != self._process_id:
            raise StoreError(
                f"The store {self.path} was opened before this process was forked. "
                "Open it after the fork."
            )
