"""Locks between processes that use one store, and who holds them.

Invariant: the kernel drops a lock when its process ends, however it ends, so none is ever stale;
the text in the file is only for the message. This module does not know what is being protected.
"""

import contextlib
import fcntl
import json
import os
import socket
from datetime import datetime
from pathlib import Path

from streamkv.errors import StoreError, StoreLockedError


class FileLock:
    """A lock on `path`, held from construction until `close()`.

    Args:
        path: the lock file; made with mode 0600, and left in place.
        shared: many shared holders, or one exclusive holder.
        named: whether an exclusive holder writes into the file who it is. Not for a file that has
            shared holders too: the name would be taken for theirs.
        remedy: what a person can do when another process holds the lock.

    Raises:
        StoreLockedError: held elsewhere; names process, host and start time of a named holder.
        StoreError: the file cannot be made, or the file system has no locks.
    """

    def __init__(
        self, path: Path, *, shared: bool = False, named: bool = True, remedy: str
    ) -> None:
        self._fd = -1
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError as error:
            owner = _describe_owner(self._fd)
            self.close()
            raise StoreLockedError(f"{path.parent} is open in {owner}. {remedy}") from error
        except OSError as error:
            self.close()
            raise StoreError(f"cannot lock {path}: {error.strerror}.") from error
        if named and not shared:
            self._name_owner()

    def close(self) -> None:
        """Give the lock up; a second call does nothing."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _name_owner(self) -> None:
        owner = {
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "started": datetime.now().astimezone().isoformat(timespec="seconds"),
        }
        with contextlib.suppress(OSError):  # on a full disk the lock holds all the same
            os.ftruncate(self._fd, 0)
            os.pwrite(self._fd, json.dumps(owner).encode(), 0)


def _describe_owner(fd: int) -> str:
    try:
        owner = json.loads(os.pread(fd, 4096, 0))
        return f"process {owner['pid']} on {owner['host']} (since {owner['started']})"
    except (OSError, ValueError, KeyError, TypeError):
        return "another process"
