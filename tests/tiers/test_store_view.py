"""Listing and verifying a real store."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from streamkv.errors import StoreError
from streamkv.tiers.codec import Bytes
from streamkv.tiers.record import EncodedRecord
from streamkv.tiers.spec import BlockKey, KVSpec
from streamkv.tiers.ssd import LmdbFile, SsdTier, StoreIdentity
from streamkv.tiers.store_tables import Tables, Transaction
from streamkv.tiers.usage import TierUsage

SPEC = KVSpec(num_layers=2, num_kv_heads=1, head_dim=32, dtype="bfloat16")  # blocks of 16 KiB
LIMIT = 16 << 20


def key(number: int) -> BlockKey:
    return BlockKey(number.to_bytes(16, "big"))


def block(number: int) -> Bytes:
    values = np.random.default_rng(number).standard_normal(SPEC.block_bytes // 2)
    return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)


def open_tier(path: Path, codec: str = "raw") -> SsdTier:
    return SsdTier(path, SPEC, StoreIdentity("tiny", b"w" * 16), limit_bytes=LIMIT, codec=codec)


@pytest.fixture
def tier(tmp_path: Path) -> Iterator[SsdTier]:
    with open_tier(tmp_path) as tier:
        yield tier


def write(tier: SsdTier, *numbers: int) -> None:
    tier.write([(key(n), block(n)) for n in numbers])


def change(path: Path, sequence: int, index: int, piece: bytes | None) -> None:
    """Replace or remove one stored piece, behind the store's back."""
    import lmdb

    with lmdb.open(str(path), max_dbs=5, map_size=LIMIT) as env:
        pieces = env.open_db(b"pieces")
        name = sequence.to_bytes(8, "big") + index.to_bytes(4, "big")
        with env.begin(write=True) as txn:
            assert txn.get(name, db=pieces) is not None
            if piece is None:
                txn.delete(name, db=pieces)
            else:
                txn.put(name, piece, db=pieces)


def test_entries_tell_age_size_codec_and_sessions(tmp_path: Path) -> None:
    with open_tier(tmp_path, "raw") as tier:
        write(tier, 3, 1)
    with open_tier(tmp_path, "zstd") as tier:
        write(tier, 2)
        tier.set_manifest("work", [key(1), key(1)])
        tier.set_manifest("diary", [key(1), key(9)])
        entries = list(tier.entries())
    assert [entry.key for entry in entries] == [key(3), key(1), key(2)]
    assert [entry.codec for entry in entries] == ["raw", "raw", "zstd"]
    assert [entry.sessions for entry in entries] == [(), ("diary", "work"), ()]
    assert [entry.sequence for entry in entries] == [1, 2, 3]
    assert entries[0].coded_bytes == SPEC.block_bytes
    assert entries[0].num_bytes == 5 * 4096
    assert entries[2].coded_bytes < 0.8 * SPEC.block_bytes
    assert entries[2].num_bytes == 3 * 4096


def test_listings_of_more_than_one_transaction_are_whole(tier: SsdTier) -> None:
    numbers = list(range(600))
    write(tier, *numbers)
    assert list(tier.keys()) == [key(n) for n in numbers]
    assert tier.verify().num_ok == 600


def test_a_listing_goes_on_while_the_store_changes(tier: SsdTier) -> None:
    write(tier, *range(300))
    listing = tier.keys()
    assert next(listing) == key(0)
    tier.delete([key(n) for n in range(250, 300)])
    write(tier, 1000)
    assert list(listing) == [key(n) for n in range(1, 256)] + [key(1000)]


def test_an_empty_store_lists_and_verifies(tier: SsdTier) -> None:
    assert list(tier.entries()) == []
    report = tier.verify()
    assert (report.num_records, report.num_ok, report.num_bytes, report.bad) == (0, 0, 0, ())
    tier.check_integrity()
    usage = tier.usage()
    assert isinstance(usage, TierUsage)
    assert (usage.num_blocks, usage.limit_bytes) == (0, LIMIT)


def test_usage_counts_blocks_and_live_bytes(tier: SsdTier) -> None:
    write(tier, *range(10))
    usage = tier.usage()
    assert usage.num_blocks == 10
    assert 10 * 5 * 4096 <= usage.num_bytes <= 10 * 5 * 4096 + 12 * 4096


@pytest.mark.parametrize(
    ("index", "piece", "fault"),
    [
        (0, None, "piece 0 is missing or torn"),
        (4, None, "piece 4 is missing or torn"),
        (2, b"short", "piece 2 is missing or torn"),
        (1, bytes(4080), "checksum of layer 0"),
        (3, bytes(4080), "checksum of layer 1"),
    ],
)
def test_verify_names_each_bad_record_and_its_fault(
    tmp_path: Path, index: int, piece: bytes | None, fault: str
) -> None:
    with open_tier(tmp_path) as tier:
        write(tier, 1, 2, 3)
    change(tmp_path, 2, index, piece)
    with open_tier(tmp_path) as tier:
        report = tier.verify()
        assert (report.num_records, report.num_ok) == (3, 2)
        assert report.num_bytes == 2 * SPEC.block_bytes
        assert report.bad == ((key(2), fault),)
        out = np.full(SPEC.block_bytes, 0xEE, dtype=np.uint8)
        assert tier.read(key(1), out)
        assert tier.read(key(3), out)
        # The bytes that were written may still lie where the piece lay, and are right then.
        found = tier.read(key(2), out)
        assert not found or np.array_equal(out, block(2))
        assert not found or index in range(1, 4), "a piece at an end is looked up"


def test_a_piece_that_lies_elsewhere_than_it_is_taken_to_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_tier(tmp_path) as tier:
        write(tier, 1, 2, 3)
        size = tier._tables.layout.piece_bytes
    piece = block(2)[2 * size : 3 * size].tobytes()
    change(tmp_path, 2, 2, piece)  # is put on another page
    for _ in range(4):  # and its old page is used for something else
        change(tmp_path, 3, 0, block(3)[:size].tobytes())
        change(tmp_path, 1, 0, block(1)[:size].tobytes())
    tries: list[bool] = []
    real = Tables.read_payload

    def read_payload(*args: Any, by_ends: bool) -> None:
        tries.append(by_ends)
        real(*args, by_ends=by_ends)

    with open_tier(tmp_path) as tier:
        monkeypatch.setattr(Tables, "read_payload", read_payload)
        out = np.full(SPEC.block_bytes, 0xEE, dtype=np.uint8)
        assert tier.read(key(2), out)
        assert np.array_equal(out, block(2))
        assert tries == [True, False], "the guess was right, so this test shows nothing"
        assert tier.counters["corrupt"] == 0


def test_check_integrity_names_the_numbers_that_differ(tmp_path: Path) -> None:
    with open_tier(tmp_path) as tier:
        write(tier, 1, 2)
    change(tmp_path, 1, 3, None)
    with open_tier(tmp_path) as tier, pytest.raises(StoreError, match="10 pieces expected and 9"):
        tier.check_integrity()


def test_a_record_of_another_layout_is_a_miss(tmp_path: Path) -> None:
    with open_tier(tmp_path) as tier:
        write(tier, 1)
        stored = next(iter(tier.entries())).key
    file = LmdbFile(tmp_path, LIMIT)
    _, tables = file.tables(None)
    foreign = KVSpec(num_layers=2, num_kv_heads=1, head_dim=32, dtype="float16")
    record = EncodedRecord(stored, 0, (8192, 8192), (1, 2), bytes(5 * 4080))

    def replace(txn: Transaction) -> None:
        tables.put(txn, record)
        row = list(tables.rows(txn))[-1]
        packed = record.header(row.sequence, foreign).pack(stored)
        txn.put(stored, packed, db=tables._records)  # no other way in

    file.commit(replace)
    file.close()
    with open_tier(tmp_path) as tier:
        assert not tier.contains(stored)
        assert not tier.read(stored, np.empty(SPEC.block_bytes, dtype=np.uint8))
        assert tier.counters["corrupt"] == 1
        assert tier.verify().bad == ((stored, "written for another layout"),)
