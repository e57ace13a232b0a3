"""What a store asks of the file below its tables. LMDB is the one implementation, in `ssd.py`.

Invariant asked of it: a change happens as a whole or not at all, and survives the death of the
process once `commit` has returned. This module implements nothing.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol, TypeVar

from streamkv.errors import StoreError, StoreFullError
from streamkv.tiers.store_format import StoreFormat
from streamkv.tiers.store_tables import Tables, Transaction

T = TypeVar("T")


class StoreReadError(StoreError):
    """The file failed while it was read."""


class NoRoomError(StoreFullError):
    """A transaction was undone because its pages found no room.

    Attributes:
        on_disk: the disk is full, not the map.
    """

    def __init__(self, message: str, *, on_disk: bool) -> None:
        super().__init__(message)
        self.on_disk = on_disk


class StoreFile(Protocol):
    """An open file of tables.

    Attributes:
        path: directory of the store.
        page_bytes: size of a page.
    """

    path: Path
    page_bytes: int

    def tables(self, opened: StoreFormat | None) -> tuple[StoreFormat, Tables]:
        """The header and the tables; `opened` is compared with the header, or becomes it."""
        ...

    def read(self) -> AbstractContextManager[Transaction]:
        """A read transaction; raises `StoreReadError`."""
        ...

    def commit(self, change: Callable[[Transaction], T]) -> T:
        """Run `change` in one write transaction; any error undoes it.

        Raises:
            NoRoomError: no room in the map, or on the disk.
            StoreError: the file failed.
        """
        ...

    def sync(self) -> None:
        """Make everything committed durable."""
        ...

    def copy_compacted(self, directory: Path) -> None:
        """Write the rows, and nothing that was deleted, into an empty `directory`, durably."""
        ...

    def num_pages(self) -> int:
        """Pages of the file."""
        ...

    def forget_dead_readers(self) -> None:
        """Let pages be reused that readers held which are no more."""
        ...

    def close(self) -> None:
        """Close the file; no transaction may be open."""
        ...
