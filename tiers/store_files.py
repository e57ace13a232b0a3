"""The directory of a store, and the ballast that lets a store on a full disk delete.

    data.mdb      the store; the limit counts this file
    lock.mdb      LMDB's table of readers
    owner.lock    held by the one writer
    readers.lock  shared by readers of other processes, so that a compaction knows of them
    reserve       the ballast

Invariant: directories have mode 0700 and files 0600. This module does not know LMDB.
"""

import contextlib
import errno
import os
from pathlib import Path

from streamkv.errors import StoreError

DATA_FILE = "data.mdb"
OWNER_FILE = "owner.lock"
READERS_FILE = "readers.lock"
BALLAST_FILE = "reserve"
COMPACT_DIRECTORY = "compact.tmp"

_LOCK_FILE = "lock.mdb"
_LOCK_BYTES = 128 << 10  # room for 2,000 readers

BALLAST_BYTES = 1 << 20
"""Deleting from a copy-on-write tree takes new pages first: up to some dozens per transaction."""


def prepare_directory(path: Path) -> None:
    """Make the directory of a store, with mode 0700, and see that it can be written.

    Raises:
        StoreError: it cannot be made or written.
    """
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not os.access(path, os.W_OK | os.X_OK):
            raise PermissionError(0, "not writable")
    except OSError as error:
        remedy = "Use another --store, or make it writable."
        raise StoreError(f"store={str(path)!r}: {error.strerror}. {remedy}") from error


def sync_path(path: Path) -> None:
    """Make a file's bytes, or the renames inside a directory, durable."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def allocate_lock_file(directory: Path) -> None:
    """Give LMDB's table of readers its disk space before LMDB maps it.

    LMDB writes to that file through a map, and a write to a page for which a full disk has no space
    kills the process.

    Raises:
        OSError: the disk is full.
    """
    path = directory / _LOCK_FILE
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        size = os.fstat(fd).st_size
        _allocate(fd, size, size or _LOCK_BYTES)
    except OSError:
        if not size:
            path.unlink()
        raise
    finally:
        os.close(fd)


def _allocate(fd: int, size: int, wanted: int) -> None:
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(fd, 0, wanted)
    elif not size and os.write(fd, bytes(wanted)) < wanted:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class Ballast:
    """Disk space held back, to be given up when the disk is full.

    Args:
        directory: where its file lies.
    """

    def __init__(self, directory: Path) -> None:
        self._path = directory / BALLAST_FILE

    def hold(self) -> None:
        """Take the space; without effect if the disk has none, or if it is held already."""
        with contextlib.suppress(OSError):
            if self._path.exists():
                return
            fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            try:
                written = os.write(fd, bytes(BALLAST_BYTES))
            except OSError:
                written = 0
            finally:
                os.close(fd)
            if written < BALLAST_BYTES:
                self.release()

    def release(self) -> None:
        """Give the space back to the file system."""
        with contextlib.suppress(OSError):
            self._path.unlink(missing_ok=True)
