"""Reading from a real store whose file was damaged."""

import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from streamkv.errors import InputError, StoreFormatError
from streamkv.tiers.codec import Bytes, Codecs
from streamkv.tiers.faults import inject
from streamkv.tiers.spec import BlockKey, KVSpec
from streamkv.tiers.ssd import SsdTier, StoreIdentity

SPEC = KVSpec(num_layers=3, num_kv_heads=2, head_dim=32, dtype="bfloat16")
CODECS = ["raw", "zstd"]

CUT_SHORT = """
import importlib.util
from pathlib import Path
from streamkv.errors import StoreError
spec = importlib.util.spec_from_file_location("blocks", {test_file!r})
blocks = importlib.util.module_from_spec(spec)
spec.loader.exec_module(blocks)
from streamkv.tiers.ssd import SsdReader
try:
    if {reader_first}:
        with SsdReader(Path({path!r})) as reader:
            reader.verify()
    with blocks.open_tier(Path({path!r})) as tier:
        found = [blocks.read(tier, number) for number in range(8)]
        tier.verify()
        print("misses" if not all(found) else "all read")
except StoreError:
    print("refused")
"""


def key(number: int) -> BlockKey:
    return BlockKey(number.to_bytes(16, "big"))


def block(number: int) -> Bytes:
    """Values like KV, so that zstd makes them smaller."""
    values = np.random.default_rng(number).standard_normal(SPEC.block_bytes // 2)
    return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)


def open_tier(path: Path, codec: str = "raw") -> SsdTier:
    identity = StoreIdentity("tiny", b"w" * 16)
    return SsdTier(path, SPEC, identity, limit_bytes=4 << 20, codec=codec)


def fill(path: Path, codec: str, *numbers: int) -> None:
    with open_tier(path, codec) as tier:
        tier.write([(key(n), block(n)) for n in numbers])


def flip(path: Path, number: int, layer: int, codec: str) -> None:
    """Flip one bit of a stored frame in the file itself."""
    frame = block(number).reshape(3, -1)[layer]
    needle = Codecs(2).named(codec).encode(frame)[300:340]
    data = bytearray((path / "data.mdb").read_bytes())
    position = data.index(needle)
    while position >= 0:  # unused parts of other pages may hold a copy
        data[position] ^= 0x10
        position = data.find(needle, position + 1)
    (path / "data.mdb").write_bytes(data)


def read(tier: SsdTier, number: int) -> bool:
    out = np.full(SPEC.block_bytes, 0xEE, dtype=np.uint8)
    found = tier.read(key(number), out)
    assert not found or np.array_equal(out, block(number))
    return found


def read_frame(tier: SsdTier, number: int, layer: int) -> bool:
    out = np.full(SPEC.frame_bytes, 0xEE, dtype=np.uint8)
    found = tier.read_frame(key(number), layer, out)
    assert not found or np.array_equal(out, block(number).reshape(3, -1)[layer])
    return found


@pytest.fixture
def tier(tmp_path: Path) -> Iterator[SsdTier]:
    with open_tier(tmp_path) as tier:
        yield tier


@pytest.mark.parametrize("codec", CODECS)
def test_a_block_and_each_of_its_frames_come_back(tmp_path: Path, codec: str) -> None:
    with open_tier(tmp_path, codec) as tier:
        tier.write([(key(1), block(1)), (key(2), block(2))])
        assert [read(tier, n) for n in (1, 2, 3)] == [True, True, False]
        assert [read_frame(tier, 2, layer) for layer in range(3)] == [True, True, True]
        assert not read_frame(tier, 3, 0)
        assert (tier.counters["hits"], tier.counters["misses"]) == (5, 2)
        assert tier.counters["bytes_read"] > 0


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("layer", [0, 1, 2])
def test_a_flipped_bit_in_the_file_is_a_miss_of_that_layer(
    tmp_path: Path, codec: str, layer: int, caplog: pytest.LogCaptureFixture
) -> None:
    fill(tmp_path, codec, 1, 2)
    flip(tmp_path, 1, layer, codec)
    with open_tier(tmp_path, codec) as tier, caplog.at_level(logging.WARNING):
        assert [read_frame(tier, 1, other) for other in range(3)] == [n != layer for n in range(3)]
        assert not read(tier, 1)
        assert read(tier, 2)
        assert (tier.counters["corrupt"], tier.counters["misses"]) == (2, 2)
    assert f"checksum of layer {layer}" in caplog.text


@pytest.mark.parametrize("codec", CODECS)
def test_a_damaged_key_is_hidden_until_it_is_written_again(tmp_path: Path, codec: str) -> None:
    fill(tmp_path, codec, 1, 2)
    flip(tmp_path, 1, 1, codec)
    with open_tier(tmp_path, codec) as tier:
        assert tier.contains(key(1))
        assert not read(tier, 1)
        assert not tier.contains(key(1))
        assert list(tier.keys()) == [key(2)]
        assert tier.write([(key(1), block(1))]) == 1
        assert tier.contains(key(1))
        assert read(tier, 1)
        assert list(tier.keys()) == [key(2), key(1)]
        tier.check_integrity()


def test_a_damaged_header_is_a_miss_and_can_be_replaced(tmp_path: Path) -> None:
    fill(tmp_path, "raw", 1, 2)
    data = bytearray((tmp_path / "data.mdb").read_bytes())
    position = data.index(b"SKVR")
    while position >= 0:  # stale copies of the page included
        data[position + 20] ^= 1
        position = data.find(b"SKVR", position + 1)
    (tmp_path / "data.mdb").write_bytes(data)
    with open_tier(tmp_path) as tier:
        assert not tier.contains(key(1))
        assert not read(tier, 1)
        assert list(tier.keys()) == []
        assert [entry.codec for entry in tier.entries()] == ["damaged", "damaged"]
        assert tier.verify().num_ok == 0
        tier.write([(key(1), block(1))])
        assert read(tier, 1)
        assert list(tier.keys()) == [key(1)]


@pytest.mark.parametrize("reader_first", [False, True])
@pytest.mark.parametrize("num_pages", [2, 20, 80])
def test_a_file_that_was_cut_short_is_refused_or_read_with_misses(
    tmp_path: Path, num_pages: int, reader_first: bool
) -> None:
    fill(tmp_path, "raw", *range(8))
    size = (tmp_path / "data.mdb").stat().st_size
    os.truncate(tmp_path / "data.mdb", size - num_pages * 4096)
    # In a process of its own: reading a map beyond the end of its file would kill it.
    script = CUT_SHORT.format(path=str(tmp_path), test_file=__file__, reader_first=reader_first)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() in ("refused", "misses")


def test_a_file_cut_to_nothing_is_a_new_store(tmp_path: Path) -> None:
    fill(tmp_path, "raw", 1)
    os.truncate(tmp_path / "data.mdb", 0)
    with open_tier(tmp_path) as tier:
        assert not read(tier, 1)
        tier.write([(key(1), block(1))])
        assert read(tier, 1)


def test_a_file_that_is_no_lmdb_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "data.mdb").write_bytes(bytes(range(256)) * 64)
    with pytest.raises(StoreFormatError, match="is not a file that this version reads"):
        open_tier(tmp_path)


def test_reading_fails_softly_when_the_disk_does(tier: SsdTier) -> None:
    tier.write([(key(1), block(1))])

    def fail() -> None:
        raise OSError("bad sector")

    with inject("ssd.get", fail):
        assert not read(tier, 1)
    assert tier.counters["read_errors"] == 1
    assert tier.counters["misses"] == 1
    assert tier.write([(key(1), block(1))]) == 1
    assert read(tier, 1)


@pytest.mark.parametrize(
    "out",
    [
        np.empty(10, dtype=np.uint8),
        np.empty(SPEC.block_bytes, dtype=np.int8),
        np.empty(2 * SPEC.block_bytes, dtype=np.uint8)[::2],
    ],
    ids=["size", "dtype", "stride"],
)
def test_an_output_of_another_shape_is_refused(tier: SsdTier, out: Bytes) -> None:
    with pytest.raises(InputError, match=r"not the bytes of a block. Use uint8 \[49152\]"):
        tier.read(key(1), out)


@pytest.mark.parametrize("codec", CODECS)
def test_many_threads_read_while_one_writes_and_evicts(tmp_path: Path, codec: str) -> None:
    with open_tier(tmp_path, codec) as tier:

        def reader(seed: int) -> int:
            picks = np.random.default_rng(seed).integers(0, 200, 150)
            return sum(read(tier, int(n)) for n in picks)

        with ThreadPoolExecutor(4) as threads:
            hits = [threads.submit(reader, seed) for seed in range(4)]
            for n in range(200):
                tier.write([(key(n), block(n))])
            assert all(future.result() >= 0 for future in hits)
        assert tier.counters["corrupt"] == 0
        assert tier.counters["read_errors"] == 0
        assert tier.counters["evictions"] > 0
        tier.check_integrity()
