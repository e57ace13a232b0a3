"""The tables of a store, and what one transaction does to them.

    format      b"format" -> header of the store
    records     BlockKey -> record header
    order       sequence -> BlockKey, number of pieces: oldest first
    pieces      sequence, index -> one piece of a payload
    manifests   session, 0, index -> keys that the session's resume needs

Invariant: a record is in `records`, `order` and `pieces`, or in none of them; every method here
keeps that within the caller's transaction. The tables are the index: nothing is kept in memory
per record. This module is handed transactions and does not know where they come from, how large a
store may be, or threads.
"""

import struct
from collections.abc import Generator
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.lib.stride_tricks import as_strided

from streamkv.errors import InputError
from streamkv.tiers.codec import Bytes, Codecs
from streamkv.tiers.page_advice import will_need
from streamkv.tiers.piece_runs import copy_rows, runs
from streamkv.tiers.record import BadRecordError, EncodedRecord, PieceLayout, RecordHeader
from streamkv.tiers.spec import DTYPE_BYTES, BlockKey, KVSpec

TABLE_NAMES = ("format", "records", "order", "pieces", "manifests")
FORMAT_KEY = b"format"
KEY_BYTES = 16

_SEQUENCE = struct.Struct(">Q")
_PIECE = struct.Struct(">QI")
_NUM_PIECES = struct.Struct(">I")
_INDEX = struct.Struct(">H")
_TICK_KEY = b"tick"
_KEYS_PER_ROW = 64  # 1 KiB: stays inside a page of the tree, so rows never take pages of their own
_MAX_SESSION_BYTES = 500  # LMDB keys end at 511


class Transaction(Protocol):
    """The part of an LMDB transaction that is used here; values are views valid inside it."""

    def get(self, key: bytes, default: None = None, db: Any = None) -> Any: ...

    def put(
        self,
        key: bytes,
        value: bytes | memoryview,
        dupdata: bool = True,
        overwrite: bool = True,
        append: bool = False,
        db: Any = None,
    ) -> bool: ...

    def delete(self, key: bytes, value: bytes = b"", db: Any = None) -> bool: ...

    def cursor(self, db: Any = None) -> Any: ...

    def stat(self, db: Any = None) -> Any: ...


class OrderRow(NamedTuple):
    """One record by age.

    Attributes:
        sequence: grows with every write.
        key: its name.
        num_pieces: pieces of its payload.
    """

    sequence: int
    key: BlockKey
    num_pieces: int


class Tables:
    """Reads and changes of the tables within a caller's transaction.

    Args:
        databases: LMDB's handle of each of `TABLE_NAMES`.
        spec: layout of the blocks.
        layout: how payloads are cut.
    """

    def __init__(self, databases: dict[str, Any], spec: KVSpec, layout: PieceLayout) -> None:
        self._databases = databases
        self._records = databases["records"]
        self._order = databases["order"]
        self._pieces = databases["pieces"]
        self._manifests = databases["manifests"]
        self.spec = spec
        self.layout = layout
        self.codecs = Codecs(DTYPE_BYTES[spec.dtype])
        self._last_sequence = (
            0  # a number is not used twice in a process, even if its record is gone
        )

    def tick(self, txn: Transaction) -> None:
        """Change something of no account, so that the transaction counts as one."""
        count = int(txn.get(_TICK_KEY, db=self._databases["format"]) is not None)
        txn.put(_TICK_KEY, bytes([count]), db=self._databases["format"])

    def num_records(self, txn: Transaction) -> int:
        """Records in the store."""
        return int(txn.stat(self._order)["entries"])

    def num_headers(self, txn: Transaction) -> int:
        """Record headers in the store."""
        return int(txn.stat(self._records)["entries"])

    def num_pieces(self, txn: Transaction) -> int:
        """Pieces in the store."""
        return int(txn.stat(self._pieces)["entries"])

    def live_pages(self, txn: Transaction) -> int:
        """Pages that hold something; read from LMDB's own counts, so true after every restart."""
        pages = 0
        for database in self._databases.values():
            stat = txn.stat(database)
            pages += stat["branch_pages"] + stat["leaf_pages"] + stat["overflow_pages"]
        return pages

    def header(self, txn: Transaction, key: BlockKey) -> RecordHeader | None:
        """The header of `key`, or None.

        Raises:
            BadRecordError: there is one, and it is damaged.
        """
        packed = txn.get(key, db=self._records)
        return None if packed is None else RecordHeader.unpack(key, bytes(packed), self.spec)

    def read_payload(
        self,
        txn: Transaction,
        header: RecordHeader,
        start: int,
        out: Bytes,
        *,
        by_ends: bool = False,
    ) -> None:
        """Copy payload bytes `[start, start + out.size)` into `out` (uint8, contiguous).

        Args:
            by_ends: look few pieces up and guess where those between them lie: what is copied may
                be something else.

        Raises:
            BadRecordError: a piece that was looked up is missing or short.
        """
        piece_bytes = self.layout.piece_bytes
        end = start + out.size
        wanted = range(start // piece_bytes, self.layout.num_pieces(end))
        pieces: dict[int, Bytes] = {}

        def address_of(index: int) -> int:
            piece = txn.get(_PIECE.pack(header.sequence, index), db=self._pieces)
            if piece is None or len(piece) != piece_bytes:
                raise BadRecordError(f"piece {index} is missing or torn")
            pieces[index] = row = np.frombuffer(piece, dtype=np.uint8)
            address: int = row.__array_interface__["data"][0]
            return address

        stride = self.layout.piece_stride
        found = runs(wanted, address_of, stride, by_ends=by_ends)
        for run, address in found.items():
            # Both its ends were looked up, whereby LMDB touched every page of them.
            will_need(address + stride, (len(run) - 2) * stride)
        at = 0
        for run in found:
            # A whole run at once: by single pieces, threads would wait for the interpreter, not
            # for memory.
            shape, strides = (len(run), piece_bytes), (stride, 1)
            rows = as_strided(pieces[run.start], shape, strides, writeable=False)
            at += copy_rows(rows, start + at - run.start * piece_bytes, out[at:])

    def put(self, txn: Transaction, record: EncodedRecord) -> None:
        """Add a record as the newest; an older one of the same key is removed."""
        self.remove(txn, record.key)
        sequence = self._next_sequence(txn)
        payload, size = memoryview(record.payload), self.layout.piece_bytes
        num_pieces = len(payload) // size
        for index in range(num_pieces):
            piece = payload[index * size : (index + 1) * size]
            txn.put(_PIECE.pack(sequence, index), piece, append=True, db=self._pieces)
        row = record.key + _NUM_PIECES.pack(num_pieces)
        txn.put(_SEQUENCE.pack(sequence), row, append=True, db=self._order)
        header = record.header(sequence, self.spec).pack(record.key)
        txn.put(record.key, header, db=self._records)

    def remove(self, txn: Transaction, key: BlockKey) -> bool:
        """Remove the record of `key`; False if there is none.

        If its header is damaged, all that was ever written under its key is looked for by age.
        """
        try:
            header = self.header(txn, key)
            doomed = [header.sequence] if header is not None else []
        except BadRecordError:
            doomed = [row.sequence for row in self.rows(txn) if row.key == key]
        for sequence in doomed:
            self._remove_payload(txn, sequence)
        return txn.delete(key, db=self._records)

    def remove_row(self, txn: Transaction, row: OrderRow) -> None:
        """Remove the record that was written as `row`, and not a later one of the same key."""
        self._remove_payload(txn, row.sequence)
        try:
            header = self.header(txn, row.key)
        except BadRecordError:
            header = None
        if header is None or header.sequence == row.sequence:
            txn.delete(row.key, db=self._records)

    def rows(self, txn: Transaction, from_sequence: int = 0) -> Generator[OrderRow, None, None]:
        """Records by age, oldest first, beginning at a sequence number."""
        with txn.cursor(self._order) as cursor:
            found = cursor.set_range(_SEQUENCE.pack(from_sequence))
            while found:
                (sequence,) = _SEQUENCE.unpack(cursor.key())
                row = bytes(cursor.value())
                key = BlockKey(row[:KEY_BYTES])
                yield OrderRow(sequence, key, *_NUM_PIECES.unpack(row[KEY_BYTES:]))
                found = cursor.next()

    def put_manifest(self, txn: Transaction, session: str, keys: list[BlockKey]) -> None:
        """Replace the manifest of `session`; no keys forgets it.

        Raises:
            InputError: the session's name is too long.
        """
        prefix = _manifest_prefix(session)
        _delete_prefix(txn, self._manifests, prefix)
        for index, start in enumerate(range(0, len(keys), _KEYS_PER_ROW)):
            row = b"".join(keys[start : start + _KEYS_PER_ROW])
            txn.put(prefix + _INDEX.pack(index), row, db=self._manifests)

    def manifests(self, txn: Transaction) -> dict[str, tuple[BlockKey, ...]]:
        """The manifest of every session."""
        rows: dict[str, list[BlockKey]] = {}
        with txn.cursor(self._manifests) as cursor:
            for name, row in cursor:
                session = bytes(name)[: -_INDEX.size - 1].decode(errors="replace")
                rows.setdefault(session, []).extend(_split_keys(bytes(row)))
        return {session: tuple(keys) for session, keys in rows.items()}

    def _next_sequence(self, txn: Transaction) -> int:
        with txn.cursor(self._order) as cursor:
            stored = _SEQUENCE.unpack(cursor.key())[0] if cursor.last() else 0
        self._last_sequence = max(stored, self._last_sequence) + 1
        return self._last_sequence

    def _remove_payload(self, txn: Transaction, sequence: int) -> None:
        prefix = _SEQUENCE.pack(sequence)
        _delete_prefix(txn, self._pieces, prefix)
        txn.delete(prefix, db=self._order)


def _split_keys(row: bytes) -> list[BlockKey]:
    return [BlockKey(row[i : i + KEY_BYTES]) for i in range(0, len(row), KEY_BYTES)]


def _manifest_prefix(session: str) -> bytes:
    name = session.encode()
    if not 0 < len(name) <= _MAX_SESSION_BYTES or 0 in name:
        problem = f"not 1 to {_MAX_SESSION_BYTES} bytes of UTF-8 without NUL"
        raise InputError("session", session, problem, "Use a shorter name.")
    return name + b"\0"


def _delete_prefix(txn: Transaction, database: Any, prefix: bytes) -> None:
    with txn.cursor(database) as cursor:
        found = cursor.set_range(prefix)
        while found and bytes(cursor.key()[: len(prefix)]) == prefix:
            cursor.delete()  # moves on to the next row
            found = bool(cursor.key())
