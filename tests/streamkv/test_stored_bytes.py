"""Bytes on disk: figures by hand, and those of a store, a journal and a file that are written."""

from pathlib import Path

import numpy as np
import pytest

from streamkv import Engine, EngineConfig, SamplingParams
from streamkv.digest_file import DigestFile
from streamkv.journal_records import SessionHeader
from streamkv.sizing import digest_bytes
from streamkv.store import journal_path
from streamkv.stored_bytes import (
    PAGE_BYTES,
    block_bytes,
    digest_file_bytes,
    digest_row_bytes,
    journal_bytes,
    payload_bytes,
    room_for_blocks,
)
from streamkv.tiers.spec import BlockKey, KVSpec
from streamkv.tiers.ssd import SsdTier, StoreIdentity

MIB = 1 << 20
SMOL = KVSpec(30, 3, 64, "bfloat16")
SMALL = KVSpec(3, 1, 16, "bfloat16")  # 12 KiB a block
RECALL = {"recall_blocks": 16, "store": "."}


def open_store(path: Path, spec: KVSpec, limit_bytes: int) -> SsdTier:
    identity = StoreIdentity("random", bytes(16))
    return SsdTier(path, spec, identity, limit_bytes=limit_bytes, codec="raw")


def write_blocks(store: SsdTier, count: int, first: int = 0) -> None:
    chosen = np.random.default_rng(first)
    for number in range(first, first + count):
        block = chosen.integers(0, 256, store.spec.block_bytes, dtype=np.uint8)
        key = BlockKey(chosen.bytes(12) + number.to_bytes(4, "big"))
        assert store.write([(key, block)]) == 1


def test_a_block_of_the_demo_model_is_counted_by_hand() -> None:
    """30 frames of 49,152 bytes in pieces of three pages, less LMDB's header of 16 bytes."""
    pieces = 121  # 30 * 49,152 / 12,272, rounded up
    assert payload_bytes(SMOL, 4096) == pieces * 3 * 4096
    rows = (16 + 28 + 30 * 8 + 4) + (8 + 16 + 4) + pieces * (12 + 8) + 16
    assert block_bytes(SMOL, 4096) == pieces * 3 * 4096 + 2 * (rows + 10 * (2 + pieces))


@pytest.mark.parametrize(
    ("spec", "count"), [(SMALL, 400), (KVSpec(2, 2, 32, "float32"), 100), (SMOL, 12)]
)
def test_a_stored_block_takes_what_was_said(tmp_path: Path, spec: KVSpec, count: int) -> None:
    with open_store(tmp_path / "blocks", spec, 64 * MIB) as store:
        before = store.usage().num_bytes
        write_blocks(store, count)
        grown = store.usage().num_bytes - before
    assert count * payload_bytes(spec) < grown <= count * block_bytes(spec) + 4 * PAGE_BYTES
    assert grown <= 1.07 * count * payload_bytes(spec) + 4 * PAGE_BYTES


@pytest.mark.parametrize(("spec", "limit"), [(SMALL, 4 * MIB), (SMOL, 40 * MIB)])
def test_a_full_store_holds_what_there_was_said_to_be_room_for(
    tmp_path: Path, spec: KVSpec, limit: int
) -> None:
    room = room_for_blocks(limit, spec)
    with open_store(tmp_path / "blocks", spec, limit) as store:
        write_blocks(store, room)
        assert store.usage().num_blocks == room, "nothing is evicted yet"
        write_blocks(store, room, first=room)
        kept = store.usage().num_blocks
    assert room <= kept <= 1.05 * room + 1


def test_a_limit_too_small_for_a_store_has_room_for_nothing() -> None:
    assert room_for_blocks(0, SMOL, 4096) == room_for_blocks(1_000_000, SMOL, 4096) == 0


def test_a_journal_is_counted_by_hand() -> None:
    """13 a token; a checkpoint of 5 blocks every 64; a choice of 16 blocks every 256."""
    assert journal_bytes(EngineConfig(), SMOL, 640, 5) == 640 * 13 + 10 * (33 + 5 * 24)
    rare = EngineConfig(checkpoint_tokens=640)
    assert journal_bytes(rare, SMOL, 640, 5) == 640 * 13 + (33 + 5 * 24)
    recall = EngineConfig(**RECALL, checkpoint_tokens=640)
    assert journal_bytes(recall, SMOL, 1280, 5) == 1280 * 13 + 2 * 153 + 5 * (25 + 4 * 16)


def test_the_journal_of_an_answer_takes_what_was_said(tiny_model_dir: Path, tmp_path: Path) -> None:
    config = EngineConfig(window_size=128, store=str(tmp_path), checkpoint_tokens=64)
    with Engine(str(tiny_model_dir), config) as engine, engine.session("diary") as session:
        session.feed([[5]]).run()
        before = journal_path(tmp_path, "diary").stat().st_size
        session.generate(SamplingParams(max_tokens=300, ignore_eos=True)).run()
        assert session.num_tokens == 301
        grown = journal_path(tmp_path, "diary").stat().st_size - before
        spec = engine.model.spec
    turn = 200  # a record of the answer's end
    assert 300 * 13 < grown <= journal_bytes(config, spec, 300, 3) + turn
    assert journal_bytes(config, spec, 300, 3) < 1.2 * grown


def test_a_file_of_digests_takes_what_was_said(tmp_path: Path) -> None:
    header = SessionHeader("tiny", "00", 300, 128, 4, "recall", "far", "ab", 17.25)
    config, num_bytes = EngineConfig(**RECALL), digest_bytes(SMALL)
    file = DigestFile.open(tmp_path / "digests", num_bytes, "keys", header)
    for number in range(5):
        file.write(number, 0, BlockKey(bytes([number + 1] * 16)), np.zeros(num_bytes // 2, "u2"))
    file.close()
    size = (tmp_path / "digests").stat().st_size
    assert size == digest_file_bytes(config, SMALL, 5 * 64 + 63)
    assert digest_row_bytes(config, SMALL) == num_bytes + 24
    assert digest_file_bytes(EngineConfig(), SMALL, 1000) == 0
    assert digest_row_bytes(EngineConfig(), SMALL) == 0
