"""The ssd tier: blocks in an LMDB file.

Invariant: LMDB's errors leave this module as `StoreError`s, a full map and a full disk as
`NoRoomError`, and a file that was cut short cannot kill the process. This is the only module that
imports lmdb; it does not know records, limits or eviction.
"""

import contextlib
import errno
import logging
import mmap
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self, TypeVar

import lmdb

from streamkv.errors import StoreDamagedError, StoreError, StoreLockedError
from streamkv.tiers.faults import fault_point
from streamkv.tiers.record import PieceLayout
from streamkv.tiers.store_file import NoRoomError, StoreReadError
from streamkv.tiers.store_files import (
    DATA_FILE,
    OWNER_FILE,
    READERS_FILE,
    allocate_lock_file,
    sync_path,
)
from streamkv.tiers.store_format import StoreFormat, StoreIdentity
from streamkv.tiers.store_lock import FileLock
from streamkv.tiers.store_rebuild import copy_rows_of
from streamkv.tiers.store_tables import FORMAT_KEY, TABLE_NAMES, Tables, Transaction
from streamkv.tiers.store_tier import StoreTier
from streamkv.tiers.store_view import Snapshot, StoreView
from streamkv.tiers.usage import TierUsage

__all__ = ["LmdbFile", "SsdReader", "SsdTier", "StoreIdentity", "open_existing"]

_MAX_READERS = 1024
_SLACK_BYTES = 1 << 20
# LMDB says EIO when a write was cut short, which is how a disk that is filling up begins to refuse.
_FULL_ERRNOS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO}
_UNREADABLE = (
    lmdb.InvalidError,
    lmdb.VersionMismatchError,
    lmdb.CorruptedError,
    lmdb.PageNotFoundError,
)
_REMEDY = "Delete that directory (it is a cache; sessions compute anew what they need)."

logger = logging.getLogger(__name__)

T = TypeVar("T")


class LmdbFile:
    """An open LMDB environment whose errors are `StoreError`s.

    Args:
        path: directory of the store.
        limit_bytes: size of the map, so of the file; None opens for reading only.

    Raises:
        StoreFormatError: not an LMDB file that this version reads.
        StoreError: it cannot be opened.
    """

    def __init__(self, path: Path, limit_bytes: int | None) -> None:
        self.path = path
        self.readonly = limit_bytes is None
        # A reader's map is as large as the writer's (0), so that it need not follow its growth.
        map_bytes = 0 if limit_bytes is None else _map_bytes(path / DATA_FILE, limit_bytes)
        with self._errors():
            if not self.readonly:
                allocate_lock_file(path)
            self._env = lmdb.open(
                str(path),
                map_size=map_bytes,
                readonly=self.readonly,
                create=not self.readonly,
                readahead=False,  # see page_advice
                metasync=False,  # commits stay atomic and ordered; sync() makes them durable
                mode=0o600,
                max_readers=_MAX_READERS,
                max_dbs=len(TABLE_NAMES),
            )
        try:
            self.page_bytes = int(self._env.stat()["psize"])
            with self._errors():
                self._env.reader_check()
                self._mend_truncation()
        except BaseException:
            self._env.close()
            raise

    def tables(self, opened: StoreFormat | None) -> tuple[StoreFormat, Tables]:
        """The header and the tables.

        Args:
            opened: written if the store is new, else compared; None takes the store as it is.

        Raises:
            StoreFormatError: no streamkv store, or another one than `opened`.
        """
        with self._errors():
            stored, databases = self._own_tables() if opened is None else self._tables_of(opened)
        layout = PieceLayout.of(stored.spec, self.page_bytes)
        return stored, Tables(databases, stored.spec, layout)

    @contextmanager
    def read(self) -> Iterator[Transaction]:
        """A read transaction; what it hands out is valid only inside."""
        try:
            with self._env.begin(buffers=True) as txn:
                yield txn
        except lmdb.Error as error:
            raise StoreReadError(f"{self.path}: {str(error).rstrip('.')}. {_REMEDY}") from error

    def commit(self, change: Callable[[Transaction], T]) -> T:
        """Run `change` in one write transaction; any error undoes it."""
        with self._errors(), self._env.begin(write=True, buffers=True) as txn:
            result = change(txn)
            fault_point("ssd.commit")
            return result

    def sync(self) -> None:
        """Make everything committed durable."""
        with self._errors():
            fault_point("ssd.fsync")
            self._env.sync(True)

    def copy_compacted(self, directory: Path) -> None:
        """Write the rows alone into an empty `directory`, durably."""
        with self._errors():
            with self._empty_copy(directory) as target:
                copy_rows_of(self._env, self._databases(None), target)
                target.sync(True)
            fault_point("ssd.fsync")
            sync_path(directory / DATA_FILE)

    @contextmanager
    def _empty_copy(self, directory: Path) -> Iterator[Any]:
        env = lmdb.open(
            str(directory),
            map_size=self._env.info()["map_size"],
            sync=False,  # one sync at the end: until then nobody looks at it
            lock=False,
            mode=0o600,
            max_dbs=len(TABLE_NAMES),
        )
        try:
            yield env
        finally:
            env.close()

    def num_pages(self) -> int:
        """Pages of the file."""
        return (self.path / DATA_FILE).stat().st_size // self.page_bytes

    def forget_dead_readers(self) -> None:
        """Let pages be reused that readers held which are no more."""
        with self._errors():
            self._env.reader_check()

    def close(self) -> None:
        """Close the environment; no transaction may be open."""
        self._env.close()

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except lmdb.MapFullError as error:
            raise NoRoomError(
                f"{self.path} has no room within its limit. "
                "Raise ssd_bytes, or let those who read it finish.",
                on_disk=False,
            ) from error
        except _UNREADABLE as error:
            raise StoreDamagedError(
                f"{self.path / DATA_FILE} is not a file that this version reads. {_REMEDY}"
            ) from error
        except (lmdb.Error, OSError) as error:
            if isinstance(error, lmdb.DiskError) or _is_full(error):
                raise NoRoomError(
                    f"The disk of {self.path} takes no more ({error}). Free some space.",
                    on_disk=True,
                ) from error
            remedy = f"If it stays so: {_REMEDY[0].lower()}{_REMEDY[1:]}"
            raise StoreError(f"{self.path}: {str(error).rstrip('.')}. {remedy}") from error

    def _tables_of(self, opened: StoreFormat) -> tuple[StoreFormat, dict[str, Any]]:
        with self._env.begin(write=True, buffers=True) as txn:
            is_new = not self._names(txn)
            databases = self._databases(txn)
            stored = opened if is_new else self._stored_format(txn, databases)
            stored.check(opened, self.path)
            if is_new or stored != opened:  # a full disk may have no page for the same again
                txn.put(FORMAT_KEY, opened.pack(), db=databases["format"])
            fault_point("ssd.commit")
            return stored, databases

    def _own_tables(self) -> tuple[StoreFormat, dict[str, Any]]:
        with self._env.begin() as txn:
            names = self._names(txn)
        if not names.issuperset(TABLE_NAMES):
            StoreFormat.unpack(None, self.path)  # refuses
        databases = self._databases(None)
        with self._env.begin() as txn:
            return self._stored_format(txn, databases), databases

    def _names(self, txn: Any) -> set[str]:
        with txn.cursor() as cursor:
            return {bytes(name).decode(errors="replace") for name, _ in cursor}

    def _databases(self, txn: Any) -> dict[str, Any]:
        create = txn is not None
        return {n: self._env.open_db(n.encode(), txn=txn, create=create) for n in TABLE_NAMES}

    def _stored_format(self, txn: Any, databases: dict[str, Any]) -> StoreFormat:
        packed = txn.get(FORMAT_KEY, db=databases["format"])
        return StoreFormat.unpack(None if packed is None else bytes(packed), self.path)

    def _mend_truncation(self) -> None:
        """See that every used page lies inside the file: reading beyond its end kills."""
        wanted = (int(self._env.info()["last_pgno"]) + 1) * self.page_bytes
        size = (self.path / DATA_FILE).stat().st_size
        if size >= wanted:
            return
        with contextlib.ExitStack() as owned:
            if self.readonly:
                try:
                    owner = FileLock(self.path / OWNER_FILE, named=False, remedy="")
                except StoreLockedError:
                    return  # a writer has seen to it, and what it never wrote it does not use
                owned.callback(owner.close)
            logger.warning("%s was cut from %d to %d bytes", self.path / DATA_FILE, wanted, size)
            os.truncate(self.path / DATA_FILE, wanted)  # what is gone reads as zeros: misses


def _map_bytes(path: Path, limit_bytes: int) -> int:
    size = path.stat().st_size if path.exists() else 0
    if size > limit_bytes:  # written under a higher limit: deleting takes room first
        limit_bytes = size + _SLACK_BYTES
    return limit_bytes // mmap.PAGESIZE * mmap.PAGESIZE


def _is_full(error: Exception) -> bool:
    if isinstance(error, OSError):
        return error.errno in _FULL_ERRNOS
    # Only since py-lmdb 3 does an error carry its number.
    return any(os.strerror(number) in str(error) for number in _FULL_ERRNOS)


class SsdTier(StoreTier):
    """A store in an LMDB file, open for writing; see `StoreTier`."""

    def _open_file(self) -> LmdbFile:
        return LmdbFile(self.path, self.limit_bytes)


class SsdReader(StoreView):
    """A store, open for reading beside its writer, which may be another process.

    Args:
        path: directory of the store.

    Attributes:
        format: layout, model, weights, limit.

    Raises:
        StoreFormatError: no streamkv store, or one of another format version.
        StoreLockedError: the store is being compacted.
        StoreError: there is none, or it is open in this process already.
    """

    def __init__(self, path: Path) -> None:
        if not (path / DATA_FILE).is_file():
            raise StoreError(f"{path} holds no store.")
        self.path = path
        self._lock = FileLock(path / READERS_FILE, shared=True, remedy="Try again in a moment.")
        try:
            self._file = LmdbFile(path, None)
            self.format, self._tables = self._file.tables(None)
        except BaseException:
            self.close()
            raise

    def usage(self) -> TierUsage:
        """Blocks, bytes of live pages, and the limit set by the last writer."""
        return self._usage(self.format.limit_bytes)

    def file_bytes(self) -> int:
        """Size of the file."""
        return (self.path / DATA_FILE).stat().st_size

    def close(self) -> None:
        """Close the store; a second call does nothing."""
        file: LmdbFile | None = getattr(self, "_file", None)
        if file is not None:
            file.close()
        self._lock.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextmanager
    def _snapshot(self) -> Iterator[Snapshot]:
        with self._file.read() as txn:
            yield Snapshot(txn, self._tables)

    def _page_bytes(self) -> int:
        return self._file.page_bytes


def open_existing(path: Path) -> SsdTier:
    """Open the store at `path` for writing as it was opened last, whatever model it belongs to.

    Raises:
        As `SsdReader` and `SsdTier`.
    """
    with SsdReader(path) as reader:
        stored = reader.format
    return SsdTier(
        path, stored.spec, stored.identity, limit_bytes=stored.limit_bytes, codec=stored.codec
    )
