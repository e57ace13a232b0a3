"""A locked file that grows at its end, or not at all.

Invariant: after `append` returned the bytes are in the file at the old `end`; after it raised, the
next append starts at the same place with nothing behind it. What the bytes mean is not known here.
"""

import os
from contextlib import suppress
from pathlib import Path

from streamkv.errors import JournalError
from streamkv.journal_frames import pread_exactly
from streamkv.tiers.faults import fault_point

_COPY_BYTES = 1 << 20


class AppendFile:
    """The writing side of a journal's file; owns `fd` until `close`.

    Attributes:
        path: the file, for messages.
        fd: open for reading and writing, and locked.
        end: where the next append goes; what lies behind it is cut off first.
    """

    __slots__ = ("_has_debris", "_sync_failed", "_synced_end", "end", "fd", "path")

    def __init__(self, path: Path, fd: int, end: int) -> None:
        self.path = path
        self.fd = fd
        self.end = end
        # A torn tail may lie behind `end`; the first append cuts it off.
        self._has_debris = True
        self._sync_failed = False
        self._synced_end = 0

    def append(self, data: bytes) -> None:
        """Write `data` at the end: one system call unless the disk is full.

        Raises:
            JournalError: the file cannot be written; nothing of `data` will be read back.
        """
        try:
            self._cut_debris()
            # Until `end` counts them, the bytes written here are debris, whatever interrupts.
            self._has_debris = True
            fault_point("journal.write")
            self._write_at(data, self.end)
        except OSError as error:
            with suppress(OSError):
                self._cut_debris()
            raise JournalError(
                f"{self.path}: cannot be written ({error.strerror}). Nothing of this step was "
                "accepted and nothing earlier is lost: free space on the disk, then go on. (The "
                "directory blocks of a store is only a cache: without an engine it may be deleted.)"
            ) from error
        self.end += len(data)
        self._has_debris = False

    def sync(self) -> None:
        """Wait until all that was appended is on disk.

        Raises:
            JournalError: it cannot be said that it is; a later `sync` tries anew.
        """
        try:
            fault_point("journal.fsync")
            if self._sync_failed:
                self._rewrite_unsynced()
            os.fsync(self.fd)
            is_deleted = os.fstat(self.fd).st_nlink == 0
        except OSError as error:
            self._sync_failed = True
            raise JournalError(
                f"{self.path}: cannot be made durable ({error.strerror}). What was accepted would "
                "survive a crash of the process but not of the machine: check the disk and its "
                "free space, then go on."
            ) from error
        if is_deleted:
            raise JournalError(
                f"{self.path}: was deleted while it was open. The session goes on until it is "
                "closed; nothing of it will be there afterwards. Read on in another session."
            )
        self._sync_failed = False
        self._synced_end = self.end

    def close(self) -> None:
        """Close the file, which releases its lock."""
        os.close(self.fd)

    def _cut_debris(self) -> None:
        if self._has_debris:
            os.ftruncate(self.fd, self.end)
            self._has_debris = False

    def _rewrite_unsynced(self) -> None:
        # After a failed fsync the system takes the pages for clean and would never write them.
        for offset in range(self._synced_end, self.end, _COPY_BYTES):
            part = pread_exactly(self.fd, min(_COPY_BYTES, self.end - offset), offset)
            self._write_at(part, offset)

    def _write_at(self, data: bytes, offset: int) -> None:
        written = 0
        while written < len(data):
            written += os.pwrite(self.fd, data[written:], offset + written)
