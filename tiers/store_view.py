"""What can be read from a store: listing, verification, sessions and sizes.

Invariant: every method reads in transactions of a bounded number of records, so that a writer
beside it can soon reuse the pages it frees. Listings may be iterated while the store changes: a
record that goes in between is left out. This module does not know who opened the store, or how.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple, TypeVar

import numpy as np

from streamkv.errors import StoreError
from streamkv.tiers.record import BadRecordError, RecordHeader, decode_frames
from streamkv.tiers.spec import BlockKey
from streamkv.tiers.store_tables import OrderRow, Tables, Transaction
from streamkv.tiers.usage import TierUsage

LIST_BATCH = 256
VERIFY_BATCH = 16
"""Records of one read transaction: a listing reads headers, a verification whole payloads."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class StoreEntry:
    """One record, for a listing.

    Attributes:
        key: its name.
        sequence: order of writing; smaller is older.
        num_bytes: bytes it takes in the file.
        coded_bytes: bytes of its coded frames; 0 if its header is damaged.
        codec: name of its codec; `damaged` if its header is.
        sessions: sessions whose resume needs it; it is locked while there are any.
    """

    key: BlockKey
    sequence: int
    num_bytes: int
    coded_bytes: int
    codec: str
    sessions: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """Outcome of reading every record.

    Attributes:
        num_records: records read.
        num_ok: records of which every frame was right.
        num_bytes: coded bytes read.
        bad: key and fault of each other record.
    """

    num_records: int
    num_ok: int
    num_bytes: int
    bad: tuple[tuple[BlockKey, str], ...]


class Snapshot(NamedTuple):
    """One read transaction and the tables to read with it."""

    txn: Transaction
    tables: Tables


class StoreView(ABC):
    """The reading side of a store."""

    @abstractmethod
    def _snapshot(self) -> AbstractContextManager[Snapshot]:
        """A read transaction."""

    @abstractmethod
    def _page_bytes(self) -> int:
        """Bytes of a page of the store."""

    def entries(self) -> Iterator[StoreEntry]:
        """Every record, oldest first."""
        locked_by = self._locked_by()
        return self._scan(lambda view, row: self._entry(view, row, locked_by), LIST_BATCH)

    def keys(self) -> Iterator[BlockKey]:
        """The key of every record with a sound header, oldest first."""
        for entry in self.entries():
            if entry.codec != "damaged":
                yield entry.key

    def verify(self, on_record: Callable[[int], None] | None = None) -> VerifyReport:
        """Read every frame of every record, decode it and compare its checksum.

        Args:
            on_record: called with the number of records read so far.
        """
        num_records = num_bytes = 0
        bad: list[tuple[BlockKey, str]] = []
        for row, outcome in self._scan(_verify, VERIFY_BATCH):
            num_records += 1
            if isinstance(outcome, str):
                bad.append((row.key, outcome))
            else:
                num_bytes += outcome
            if on_record is not None:
                on_record(num_records)
        return VerifyReport(num_records, num_records - len(bad), num_bytes, tuple(bad))

    def manifests(self) -> dict[str, tuple[BlockKey, ...]]:
        """The keys that each session's resume needs."""
        with self._snapshot() as view:
            return view.tables.manifests(view.txn)

    def check_integrity(self) -> None:
        """Compare the tables with one another.

        Raises:
            StoreError: they disagree; names the numbers. Wants no writer at work meanwhile.
        """
        num_rows = num_pieces = 0
        for row in self._scan(_check_row, LIST_BATCH):
            num_rows += 1
            num_pieces += row.num_pieces
        with self._snapshot() as view:
            stored_pieces = view.tables.num_pieces(view.txn)
            stored_records = view.tables.num_headers(view.txn)
        if (num_rows, num_pieces) != (stored_records, stored_pieces):
            raise StoreError(
                f"{num_rows} records by age and {stored_records} by key; "
                f"{num_pieces} pieces expected and {stored_pieces} stored."
            )

    def _usage(self, limit_bytes: int) -> TierUsage:
        with self._snapshot() as view:
            num_bytes = view.tables.live_pages(view.txn) * self._page_bytes()
            return TierUsage(view.tables.num_records(view.txn), num_bytes, limit_bytes)

    def _locked_by(self) -> dict[BlockKey, tuple[str, ...]]:
        locked_by: dict[BlockKey, tuple[str, ...]] = {}
        for session, keys in sorted(self.manifests().items()):
            for key in set(keys):
                locked_by[key] = (*locked_by.get(key, ()), session)
        return locked_by

    def _scan(self, handle: Callable[[Snapshot, OrderRow], T], batch: int) -> Iterator[T]:
        next_sequence = 0
        while True:
            with self._snapshot() as view:
                rows = list(islice(view.tables.rows(view.txn, next_sequence), batch))
                results = [handle(view, row) for row in rows]
            yield from results
            if len(rows) < batch:
                return
            next_sequence = rows[-1].sequence + 1

    def _entry(
        self, view: Snapshot, row: OrderRow, locked_by: dict[BlockKey, tuple[str, ...]]
    ) -> StoreEntry:
        num_bytes = row.num_pieces * view.tables.layout.piece_pages * self._page_bytes()
        sessions = locked_by.get(row.key, ())
        try:
            header = _header_of(view, row)
            codec = view.tables.codecs.coded(header.codec).name
        except StoreError:
            return StoreEntry(row.key, row.sequence, num_bytes, 0, "damaged", sessions)
        return StoreEntry(row.key, row.sequence, num_bytes, header.num_bytes, codec, sessions)


def _header_of(view: Snapshot, row: OrderRow) -> RecordHeader:
    header = view.tables.header(view.txn, row.key)
    if header is None or header.sequence != row.sequence:
        raise BadRecordError("its header is missing")
    return header


def _verify(view: Snapshot, row: OrderRow) -> tuple[OrderRow, int | str]:
    spec = view.tables.spec
    try:
        header = _header_of(view, row)
        coded = np.empty(header.num_bytes, dtype=np.uint8)
        view.tables.read_payload(view.txn, header, 0, coded)
        out = np.empty((spec.num_layers, spec.frame_bytes), dtype=np.uint8)
        decode_frames(row.key, header, range(spec.num_layers), coded, out, view.tables.codecs)
    except BadRecordError as error:
        return row, str(error)
    return row, header.num_bytes


def _check_row(view: Snapshot, row: OrderRow) -> OrderRow:
    header = _header_of(view, row)
    expected = view.tables.layout.num_pieces(header.num_bytes)
    if expected != row.num_pieces:
        raise StoreError(f"{row.key.hex()}: {row.num_pieces} pieces, its header says {expected}.")
    return row
