"""The file below a journal: created whole, locked while open, removed for good.

Invariant: a file under its final name always starts with what it was created with, and only the
holder of its lock writes to it. What is in it is not known here.
"""

import fcntl
import os
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from streamkv.errors import JournalError, SessionError

UNFINISHED = ".new-journal-"
"""How the name of a file begins that is being made; its lock is held by whoever makes it."""


def create_locked(path: Path, content: bytes | Iterable[bytes]) -> int:
    """Create the file with `content`, mode 0600, on disk with its name; returns the locked fd.

    Args:
        path: its name.
        content: what is in it, whole or in pieces; what making a piece raises ends it.

    Raises:
        JournalError: it exists, or the directory cannot be written.
    """
    try:
        fd, temporary = tempfile.mkstemp(prefix=UNFINISHED, dir=path.parent)
    except OSError as error:
        raise _cannot_create(path, error) from error
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        for part in (content,) if isinstance(content, bytes) else content:
            _write_all(fd, part)
        os.fsync(fd)
        # link, unlike rename, never replaces a file; a crash leaves no half-written journal.
        os.link(temporary, path)
        sync_directory(path.parent)
    except BaseException as error:
        os.close(fd)
        if isinstance(error, OSError):
            raise _cannot_create(path, error) from error
        raise
    finally:
        with suppress(OSError):
            os.unlink(temporary)
    return fd


def open_locked(path: Path) -> int:
    """Open the file for reading and writing; returns the locked fd.

    Raises:
        JournalError: it does not exist or may not be opened.
        SessionError: it is open already; names the process.
    """
    fd = _open(path, os.O_RDWR)
    try:
        _lock(fd, path)
    except BaseException:
        os.close(fd)
        raise
    return fd


def open_unlocked(path: Path) -> int:
    """Open the file for reading beside whoever writes it; returns the fd.

    Raises:
        JournalError: it does not exist or may not be opened.
    """
    return _open(path, os.O_RDONLY)


def remove(path: Path) -> None:
    """Delete the file, whose lock the caller holds, from its directory and from the disk.

    Raises:
        JournalError: the directory cannot be written.
    """
    try:
        path.unlink(missing_ok=True)
        sync_directory(path.parent)
    except OSError as error:
        raise JournalError(
            f"{path}: cannot be deleted ({error.strerror}). Make its directory writable."
        ) from error


def sync_directory(directory: Path) -> None:
    """Make the names in a directory durable. Raises OSError."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def lock_owner(fd: int) -> int | None:
    """Id of the process that holds the lock on the file of `fd`, where the system tells (Linux)."""
    inode = os.fstat(fd).st_ino
    try:
        lines = Path("/proc/locks").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        # 1: FLOCK  ADVISORY  WRITE 4711 fe:01:1234 0 EOF
        fields = line.split()
        if fields[1] == "FLOCK" and fields[5].rpartition(":")[2] == str(inode):
            return int(fields[4])
    return None


def _open(path: Path, flags: int) -> int:
    try:
        return os.open(path, flags | os.O_CLOEXEC)
    except FileNotFoundError as error:
        raise JournalError(f"{path}: no such journal. Create the session first.") from error
    except OSError as error:
        raise JournalError(
            f"{path}: cannot be opened ({error.strerror}). It must be a file that this user may "
            "read and write."
        ) from error


def _lock(fd: int, path: Path) -> None:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise SessionError(
            f"{path}: the session is open already, in {_describe(lock_owner(fd))}. Close it there "
            "first, or use another session name."
        ) from error
    # Between open and lock another process may have deleted the file.
    if os.fstat(fd).st_nlink == 0:
        raise JournalError(f"{path}: no such journal. It was deleted just now.")


def _describe(owner: int | None) -> str:
    if owner == os.getpid():
        return f"this process ({owner})"
    return "another process" if owner is None else f"process {owner}"


def _write_all(fd: int, content: bytes) -> None:
    written = 0
    while written < len(content):
        written += os.write(fd, content[written:])


def _cannot_create(path: Path, error: OSError) -> JournalError:
    if isinstance(error, FileExistsError):
        return JournalError(f"{path}: exists already. Open it, or delete the session first.")
    return JournalError(
        f"{path}: cannot be created ({error.strerror}). Its directory must exist, be writable and "
        "have room."
    )
