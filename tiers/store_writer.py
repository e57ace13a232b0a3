"""Changing a store that has a limit: chunks, eviction, and one more try when there was no room.

Invariant: after every committed change the live pages are within the budget, and what is
remembered here agrees with the tables: nothing is remembered before its transaction is committed.
Locked records are never evicted, and those of a write not for the same write, unless it is larger
than the store. One thread at a time; the owner sees to that. This module does not know LMDB.
"""

import logging
import os
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from streamkv.errors import StoreFullError
from streamkv.tiers.eviction import Eviction, Victims
from streamkv.tiers.faults import fault_point
from streamkv.tiers.record import BadRecordError, EncodedRecord
from streamkv.tiers.spec import BlockKey
from streamkv.tiers.store_file import NoRoomError, StoreFile
from streamkv.tiers.store_files import BALLAST_BYTES, Ballast
from streamkv.tiers.store_room import StoreRoom
from streamkv.tiers.store_tables import Tables, Transaction
from streamkv.tiers.usage import Counters

WRITE_COUNTERS = ("writes", "duplicates", "evictions", "deletes", "full_retries", "bytes_written")

READER_PATIENCE_S = 5.0
"""How long a change waits for readers in other processes, whose transactions hold freed pages."""

_READER_POLL_S = 0.02
_DELETE_BATCH = 128

logger = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Chunk:
    """Records of one write transaction, and the keys of the whole write."""

    records: tuple[EncodedRecord, ...]
    protected: frozenset[BlockKey]
    num_pages: int


class StoreWriter:
    """Writes, deletes and locks records.

    Args:
        file: runs the transactions.
        tables: tables of `file`.
        room: how much may be stored.
        counters: has `WRITE_COUNTERS`.
    """

    def __init__(
        self, file: StoreFile, tables: Tables, room: StoreRoom, counters: Counters
    ) -> None:
        self._file = file
        self._tables = tables
        self._room = room
        self._counters = counters
        with file.read() as txn:
            self._eviction = Eviction(tables.manifests(txn))
        self._ceiling_pages: int | None = None
        self._ballast = Ballast(file.path)
        self._ballast.hold()

    def write(self, records: Iterable[EncodedRecord], protected: frozenset[BlockKey]) -> None:
        """Store `records`, in order, a chunk per transaction.

        Args:
            protected: keys not to be evicted for it.

        Raises:
            StoreFullError: no room, and no more to evict; chunks before stay stored.
        """
        for chunk in self._chunks(records, protected):
            try:
                self._write(chunk)
            except NoRoomError:
                if len(chunk.records) == 1:
                    raise
                for record in chunk.records:
                    self._write(self._chunk([record], protected))

    def delete(self, keys: Iterable[BlockKey]) -> None:
        """Remove records; those that a manifest names stay."""
        doomed = [key for key in keys if not self._eviction.is_locked(key)]
        for start in range(0, len(doomed), _DELETE_BATCH):
            batch = doomed[start : start + _DELETE_BATCH]
            self._counters.add("deletes", self._change(partial(self._remove, batch)))

    def manifest(self, session: str) -> list[BlockKey]:
        """Keys that the resume of `session` needs, as set."""
        return list(self._eviction.manifests.get(session, ()))

    def set_manifest(self, session: str, keys: Sequence[BlockKey]) -> None:
        """Lock `keys` for `session` in place of those before."""
        if list(keys) == self.manifest(session):
            return
        released = self._eviction.released_by(session, keys)

        def change(txn: Transaction) -> int | None:
            self._tables.put_manifest(txn, session, list(keys))
            return self._oldest(released, txn)

        self._eviction.replace(session, keys, self._change(change))

    def shrink(self) -> None:
        """Evict until the live pages are within the budget, as far as locks allow."""
        while True:
            victims = self._change(self._evict_excess)
            self._evicted(victims)
            if not victims.rows:
                return

    def _chunks(
        self, records: Iterable[EncodedRecord], protected: frozenset[BlockKey]
    ) -> Iterator[Chunk]:
        batch: list[EncodedRecord] = []
        num_pages = 0
        for record in records:
            pages = self._tables.layout.num_pages(record.num_bytes)
            if batch and num_pages + pages > self._chunk_pages():
                yield self._chunk(batch, protected)
                batch, num_pages = [], 0
            batch.append(record)
            num_pages += pages
        if batch:
            yield self._chunk(batch, protected)

    def _chunk(self, records: Sequence[EncodedRecord], protected: frozenset[BlockKey]) -> Chunk:
        num_pages = sum(self._tables.layout.num_pages(record.num_bytes) for record in records)
        return Chunk(tuple(records), protected, num_pages)

    def _chunk_pages(self) -> int:
        on_full_disk = self._ceiling_pages is not None
        return self._room.block_pages if on_full_disk else self._room.chunk_pages

    def _write(self, chunk: Chunk) -> None:
        self._evicted(self._change(partial(self._store, chunk), chunk))
        self._counters.add("writes", len(chunk.records))
        self._counters.add("bytes_written", sum(record.num_bytes for record in chunk.records))

    def _store(self, chunk: Chunk, txn: Transaction) -> Victims:
        excess = self._tables.live_pages(txn) + chunk.num_pages - self._budget()
        victims = self._choose(excess, txn, chunk.protected)
        if victims.num_pages < excess:  # more is being written than the store can hold
            victims = self._choose(excess, txn, {record.key for record in chunk.records})
        if victims.num_pages < excess:
            raise self._all_locked()
        self._remove_rows(victims, txn)
        for record in chunk.records:
            fault_point("ssd.put")
            self._tables.put(txn, record)
        return victims

    def _all_locked(self) -> StoreFullError:
        problem = f"{self._file.path} is full of blocks that sessions need to resume"
        if self._ceiling_pages is None:
            return StoreFullError(f"{problem}. Raise ssd_bytes, or delete sessions.")
        return StoreFullError(f"{problem}, and its disk is full. Free some space.")

    def _choose(self, num_pages: int, txn: Transaction, protected: Collection[BlockKey]) -> Victims:
        piece_pages = self._tables.layout.piece_pages
        with closing(self._tables.rows(txn, self._eviction.scan_from)) as rows:
            return self._eviction.choose(rows, num_pages, piece_pages, protected)

    def _remove_rows(self, victims: Victims, txn: Transaction) -> None:
        for row in victims.rows:
            self._tables.remove_row(txn, row)

    def _evict_excess(self, txn: Transaction) -> Victims:
        excess = self._tables.live_pages(txn) - self._budget()
        victims = self._choose(min(excess, self._room.chunk_pages), txn, ())
        self._remove_rows(victims, txn)
        return victims

    def _evicted(self, victims: Victims) -> None:
        self._eviction.removed(victims)
        self._counters.add("evictions", len(victims.rows))

    def _remove(self, keys: list[BlockKey], txn: Transaction) -> int:
        return sum(self._tables.remove(txn, key) for key in keys)

    def _oldest(self, keys: list[BlockKey], txn: Transaction) -> int | None:
        sequences: list[int] = []
        for key in keys:
            try:
                header = self._tables.header(txn, key)
            except BadRecordError:
                return 0  # its place is unknown: look from the start
            if header is not None:
                sequences.append(header.sequence)
        return min(sequences, default=None)

    def _change(self, change: Callable[[Transaction], T], chunk: Chunk | None = None) -> T:
        try:
            return self._file.commit(change)
        except NoRoomError as error:
            logger.warning("ssd store: %s Evicting, then once more.", error)
            self._counters.add("full_retries")
            self._make_room(error, chunk)
            return self._commit_patiently(change)

    def _commit_patiently(self, change: Callable[[Transaction], T]) -> T:
        deadline = time.monotonic() + READER_PATIENCE_S
        while True:
            try:
                return self._file.commit(change)
            except NoRoomError as error:
                if error.on_disk or time.monotonic() >= deadline:
                    raise
                time.sleep(_READER_POLL_S)

    def _make_room(self, error: NoRoomError, chunk: Chunk | None) -> None:
        if error.on_disk:
            self._ceiling_pages = self._file.num_pages()
        self._file.forget_dead_readers()
        self._ballast.release()
        try:
            self._evicted(self._commit_patiently(partial(self._evict_for, chunk)))
            # Pages freed by one transaction can be taken by the second one after it.
            self._commit_patiently(self._tables.tick)
        finally:
            self._ballast.hold()

    def _evict_for(self, chunk: Chunk | None, txn: Transaction) -> Victims:
        wanted = max(chunk.num_pages if chunk else 0, self._tables.layout.piece_pages)
        excess = self._tables.live_pages(txn) + wanted - self._budget()
        protected = chunk.protected if chunk else frozenset()
        victims = self._choose(max(excess, 2 * wanted), txn, protected)
        self._remove_rows(victims, txn)
        return victims

    def _budget(self) -> int:
        if self._ceiling_pages is not None and self._disk_has_room():
            self._ceiling_pages = None
        return self._room.budget(self._ceiling_pages)

    def _disk_has_room(self) -> bool:
        disk = os.statvfs(self._file.path)
        wanted = 2 * BALLAST_BYTES + 8 * self._room.block_pages * self._room.page_bytes
        return disk.f_bavail * disk.f_frsize > wanted
