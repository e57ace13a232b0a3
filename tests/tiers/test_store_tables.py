"""The tables over a real LMDB file."""

from collections.abc import Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from streamkv.errors import InputError
from streamkv.tiers.codec import Bytes, Codecs
from streamkv.tiers.piece_runs import runs
from streamkv.tiers.record import BadRecordError, EncodedRecord, encode_record
from streamkv.tiers.spec import BlockKey, KVSpec
from streamkv.tiers.ssd import LmdbFile
from streamkv.tiers.store_format import StoreFormat, StoreIdentity
from streamkv.tiers.store_tables import Tables, Transaction

SPEC = KVSpec(num_layers=3, num_kv_heads=2, head_dim=32, dtype="bfloat16")
FORMAT = StoreFormat(SPEC, StoreIdentity("tiny", b"w" * 16), 1 << 24, "raw")


def key(number: int) -> BlockKey:
    return BlockKey(number.to_bytes(16, "big"))


def block(number: int) -> Bytes:
    return np.random.default_rng(number).integers(0, 256, SPEC.block_bytes, dtype=np.uint8)


@pytest.fixture
def file(tmp_path: Path) -> Iterator[LmdbFile]:
    file = LmdbFile(tmp_path, 1 << 24)
    yield file
    file.close()


@pytest.fixture
def tables(file: LmdbFile) -> Tables:
    return file.tables(FORMAT)[1]


def record(tables: Tables, number: int) -> EncodedRecord:
    codec = Codecs(2).named("raw")
    return encode_record(key(number), block(number), SPEC, tables.layout, codec)


def put(file: LmdbFile, tables: Tables, *numbers: int) -> None:
    def change(txn: Transaction) -> None:
        for number in numbers:
            tables.put(txn, record(tables, number))

    file.commit(change)


def ages(file: LmdbFile, tables: Tables, from_sequence: int = 0) -> list[BlockKey]:
    with file.read() as txn:
        return [row.key for row in tables.rows(txn, from_sequence)]


def test_records_are_listed_in_the_order_of_writing(file: LmdbFile, tables: Tables) -> None:
    put(file, tables, 5, 3, 9)
    assert ages(file, tables) == [key(5), key(3), key(9)]
    with file.read() as txn:
        second = next(islice(tables.rows(txn), 1, None))
    assert second.num_pieces == 13
    assert ages(file, tables, second.sequence) == [key(3), key(9)]


@pytest.mark.parametrize(
    ("start", "size"),
    [(0, 49152), (0, 1), (4079, 2), (4080, 4080), (16384, 16384), (49151, 1), (100, 20000)],
)
def test_any_part_of_a_payload_can_be_read(
    file: LmdbFile, tables: Tables, start: int, size: int
) -> None:
    put(file, tables, 1, 2)
    out = np.full(size, 0xEE, dtype=np.uint8)
    with file.read() as txn:
        header = tables.header(txn, key(2))
        assert header is not None
        tables.read_payload(txn, header, start, out)
    assert np.array_equal(out, block(2)[start : start + size])


def test_a_removed_record_leaves_nothing(file: LmdbFile, tables: Tables) -> None:
    put(file, tables, 1, 2)
    assert file.commit(lambda txn: tables.remove(txn, key(1)))
    assert not file.commit(lambda txn: tables.remove(txn, key(1)))
    assert ages(file, tables) == [key(2)]
    with file.read() as txn:
        assert tables.header(txn, key(1)) is None
        assert (tables.num_records(txn), tables.num_headers(txn), tables.num_pieces(txn)) == (
            1,
            1,
            13,
        )


def test_writing_a_key_again_makes_it_the_newest(file: LmdbFile, tables: Tables) -> None:
    put(file, tables, 1, 2, 1)
    assert ages(file, tables) == [key(2), key(1)]
    with file.read() as txn:
        assert tables.num_pieces(txn) == 26


def test_a_sequence_number_is_not_used_twice(file: LmdbFile, tables: Tables) -> None:
    put(file, tables, 1, 2)
    file.commit(lambda txn: tables.remove(txn, key(2)))
    put(file, tables, 3)
    with file.read() as txn:
        assert [row.sequence for row in tables.rows(txn)] == [1, 3]


def test_removing_an_old_row_spares_a_newer_record_of_its_key(
    file: LmdbFile, tables: Tables
) -> None:
    put(file, tables, 1)
    with file.read() as txn:
        old = next(tables.rows(txn))
    put(file, tables, 1)
    file.commit(lambda txn: tables.remove_row(txn, old))
    assert ages(file, tables) == [key(1)]
    with file.read() as txn:
        assert tables.header(txn, key(1)) is not None


def test_a_missing_piece_is_a_bad_record(file: LmdbFile, tables: Tables) -> None:
    put(file, tables, 1)
    with file.read() as txn:
        header = tables.header(txn, key(1))
    assert header is not None
    file.commit(lambda txn: tables.remove(txn, key(1)))
    with file.read() as txn, pytest.raises(BadRecordError, match="piece 0 is missing"):
        tables.read_payload(txn, header, 0, np.empty(10, dtype=np.uint8))


def test_live_pages_follow_what_is_stored(file: LmdbFile, tables: Tables) -> None:
    def live() -> int:
        with file.read() as txn:
            return tables.live_pages(txn)

    empty = live()
    put(file, tables, *range(10))
    assert 130 <= live() - empty <= 140
    for number in range(10):
        file.commit(lambda txn, number=number: tables.remove(txn, key(number)))
    assert live() <= empty + 1


@pytest.mark.parametrize("num_keys", [1, 64, 65, 1000])
def test_a_manifest_of_any_length_comes_back(file: LmdbFile, tables: Tables, num_keys: int) -> None:
    keys = [key(n) for n in range(num_keys)]
    file.commit(lambda txn: tables.put_manifest(txn, "diary", keys))
    file.commit(lambda txn: tables.put_manifest(txn, "diary-2", keys[:1]))
    assert file.commit(tables.manifests) == {"diary": tuple(keys), "diary-2": (key(0),)}


def test_a_shorter_manifest_replaces_a_longer_one(file: LmdbFile, tables: Tables) -> None:
    keys = [key(n) for n in range(200)]
    file.commit(lambda txn: tables.put_manifest(txn, "diary", keys))
    file.commit(lambda txn: tables.put_manifest(txn, "diary", keys[:2]))
    assert file.commit(tables.manifests) == {"diary": (key(0), key(1))}
    file.commit(lambda txn: tables.put_manifest(txn, "diary", []))
    assert file.commit(tables.manifests) == {}


def test_names_of_sessions_are_checked(file: LmdbFile, tables: Tables) -> None:
    for name in ("", "a\0b", "x" * 501):
        with pytest.raises(InputError, match="session="):
            file.commit(lambda txn, name=name: tables.put_manifest(txn, name, [key(1)]))
    file.commit(lambda txn: tables.put_manifest(txn, "日記" * 80, [key(1)]))
    assert file.commit(tables.manifests) == {"日記" * 80: (key(1),)}


def test_payloads_are_read_whole_and_in_part_wherever_their_pieces_lie(
    file: LmdbFile, tables: Tables, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Records come and go until free pages are scattered, and new pieces with them."""
    rng = np.random.default_rng(4)
    held: list[int] = []
    most = 0

    def counted(*args: Any, **kwargs: Any) -> dict[range, int]:
        nonlocal most
        found = runs(*args, **kwargs)
        most = max(most, len(found))
        return found

    monkeypatch.setattr("streamkv.tiers.store_tables.runs", counted)
    for number in range(60):
        put(file, tables, number)
        held.append(number)
        if len(held) > 12:
            doomed = key(held.pop(int(rng.integers(len(held)))))
            file.commit(partial(tables.remove, key=doomed))
    with file.read() as txn:
        for number in held:
            header = tables.header(txn, key(number))
            assert header is not None
            payload = block(number)
            for _ in range(8):
                start, end = sorted(rng.integers(0, payload.size + 1, 2).tolist())
                out = np.full(end - start, 0xEE, dtype=np.uint8)
                if out.size:
                    tables.read_payload(txn, header, start, out, by_ends=bool(rng.integers(2)))
                assert np.array_equal(out, payload[start:end])
            whole = np.empty_like(payload)
            tables.read_payload(txn, header, 0, whole, by_ends=True)
            assert np.array_equal(whole, payload)
    assert most > 1, "no payload lay in several places, so this test shows nothing"
