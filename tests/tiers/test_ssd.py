"""The LMDB file: killed writers, other processes, other files."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import lmdb
import numpy as np
import pytest

from streamkv.errors import StoreError, StoreFormatError, StoreLockedError
from streamkv.tiers.codec import Bytes
from streamkv.tiers.spec import BlockKey, KVSpec
from streamkv.tiers.ssd import LmdbFile, SsdReader, SsdTier, StoreIdentity, open_existing
from streamkv.tiers.store_file import NoRoomError

SPEC = KVSpec(num_layers=3, num_kv_heads=2, head_dim=32, dtype="bfloat16")
MIB = 1 << 20


def key(number: int) -> BlockKey:
    return BlockKey(number.to_bytes(16, "big"))


def block(number: int) -> Bytes:
    return np.random.default_rng(number).integers(0, 256, SPEC.block_bytes, dtype=np.uint8)


def open_tier(path: Path, codec: str = "zstd") -> SsdTier:
    identity = StoreIdentity("tiny", b"w" * 16)
    return SsdTier(path, SPEC, identity, limit_bytes=4 * MIB, codec=codec)


def write(tier: SsdTier, *numbers: int) -> int:
    return tier.write([(key(n), block(n)) for n in numbers])


def read(tier: SsdTier, number: int) -> bool:
    out = np.full(SPEC.block_bytes, 0xEE, dtype=np.uint8)
    found = tier.read(key(number), out)
    assert not found or np.array_equal(out, block(number))
    return found


PRELUDE = """
import importlib.util, os, signal, sys
from pathlib import Path
from streamkv.errors import StoreError
from streamkv.tiers.faults import inject
from streamkv.tiers.ssd import SsdReader
spec = importlib.util.spec_from_file_location("ssd_tests", sys.argv[1])
tests = importlib.util.module_from_spec(spec)
spec.loader.exec_module(tests)
path = Path(sys.argv[2])
"""


def script(body: str, path: Path, *arguments: str) -> "subprocess.Popen[str]":
    """Run `body` in another process, with the helpers of this file as `tests`."""
    return subprocess.Popen(
        [sys.executable, "-c", PRELUDE + body, __file__, str(path), *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


KILLED = """
def die():
    os.kill(os.getpid(), signal.SIGKILL)

tier = tests.open_tier(path)
tests.write(tier, 1, 2, 3)
tier.set_manifest("diary", [tests.key(2)])
tier.sync()
point = sys.argv[3]
with inject(point, die):
    if point == "ssd.fsync":
        tests.write(tier, 4)
        tier.sync()
    tests.write(tier, 4, 5, 6)
"""


@pytest.mark.parametrize("point", ["ssd.put", "ssd.commit", "ssd.fsync"])
def test_a_writer_killed_at_any_point_leaves_what_was_committed(tmp_path: Path, point: str) -> None:
    with script(KILLED, tmp_path, point) as process:
        assert process.wait(60) == -signal.SIGKILL
    with open_tier(tmp_path) as tier:
        tier.check_integrity()
        assert tier.verify().bad == ()
        assert [read(tier, n) for n in (1, 2, 3)] == [True, True, True]
        assert read(tier, 4) == (point == "ssd.fsync")
        assert tier.manifest("diary") == [key(2)]
        assert write(tier, 4, 5, 6) == 3
        assert [read(tier, n) for n in (4, 5, 6)] == [True, True, True]


BUSY = """
tier = tests.open_tier(path)
print("open", flush=True)
for number in range(100000):
    tests.write(tier, number)
    if number == int(sys.argv[3]):
        print("writing", flush=True)
"""


@pytest.mark.parametrize("after", [3, 50, 120])
def test_a_writer_killed_anywhere_leaves_a_sound_store(tmp_path: Path, after: int) -> None:
    with script(BUSY, tmp_path, str(after)) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "open\n"
        assert process.stdout.readline() == "writing\n"
        process.kill()
    with open_tier(tmp_path) as tier:
        tier.check_integrity()
        report = tier.verify()
        assert (report.num_ok, report.bad) == (report.num_records, ())
        assert read(tier, after)
        assert tier.file_bytes() <= 4 * MIB


def test_another_process_is_refused_with_the_owner_named(tmp_path: Path) -> None:
    body = """
try:
    tests.open_tier(path)
except StoreError as error:
    print(type(error).__name__, error)
"""
    with open_tier(tmp_path), script(body, tmp_path) as process:
        output, _ = process.communicate(timeout=60)
    assert output.startswith(f"StoreLockedError {tmp_path} is open in process {os.getpid()} on ")
    assert "streamkv serve" in output
    assert "--store" in output


READ_BESIDE = """
with SsdReader(path) as reader:
    print(reader.verify().num_ok, flush=True)
    for line in sys.stdin:
        report = reader.verify()
        entries = list(reader.entries())
        print(len(report.bad), report.num_ok, len(entries), flush=True)
"""


@pytest.fixture
def reader(tmp_path: Path) -> Iterator["subprocess.Popen[str]"]:
    with open_tier(tmp_path) as tier:
        write(tier, *range(10))
    with script(READ_BESIDE, tmp_path) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "10\n"
        yield process
        process.kill()


def test_a_reader_beside_the_writer_sees_sound_records(
    tmp_path: Path, reader: "subprocess.Popen[str]"
) -> None:
    assert reader.stdin is not None
    assert reader.stdout is not None
    with open_tier(tmp_path) as tier:
        for start in range(100, 400, 100):
            reader.stdin.write("look\n")
            reader.stdin.flush()
            for number in range(start, start + 100):
                write(tier, number)
            bad, ok, entries = map(int, reader.stdout.readline().split())
            assert bad == 0
            assert ok > 0
            assert entries > 0


def test_a_compaction_waits_until_no_process_reads(
    tmp_path: Path, reader: "subprocess.Popen[str]"
) -> None:
    with open_tier(tmp_path) as tier:
        with pytest.raises(StoreLockedError, match="Let it finish reading, then try again"):
            tier.compact()
        assert read(tier, 1)
        reader.kill()
        reader.wait()
        assert tier.compact() >= 0
        assert read(tier, 1)


def test_a_reader_tells_whose_store_it_is(tmp_path: Path) -> None:
    with open_tier(tmp_path) as tier:
        write(tier, 1, 2)
        tier.set_manifest("diary", [key(2)])
    with SsdReader(tmp_path) as reader:
        assert reader.format.spec == SPEC
        assert reader.format.identity == StoreIdentity("tiny", b"w" * 16)
        assert (reader.format.codec, reader.format.limit_bytes) == ("zstd", 4 * MIB)
        assert reader.usage().num_blocks == 2
        assert reader.file_bytes() > 2 * SPEC.block_bytes
        assert reader.manifests() == {"diary": (key(2),)}
        assert [entry.sessions for entry in reader.entries()] == [(), ("diary",)]
        reader.check_integrity()
        reader.close()


def test_a_reader_needs_a_store(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="holds no store"):
        SsdReader(tmp_path)
    assert list(tmp_path.iterdir()) == []
    with lmdb.open(str(tmp_path), max_dbs=1) as env:
        env.open_db(b"something else")
    with pytest.raises(StoreFormatError, match="is not a streamkv store"):
        SsdReader(tmp_path)


def test_somebody_elses_lmdb_file_is_left_alone(tmp_path: Path) -> None:
    with lmdb.open(str(tmp_path), max_dbs=1) as env:
        other = env.open_db(b"something else")
        with env.begin(write=True) as txn:
            txn.put(b"a", b"b", db=other)
    with pytest.raises(StoreFormatError, match="is not a streamkv store"):
        open_tier(tmp_path)
    with lmdb.open(str(tmp_path), max_dbs=8) as env, env.begin() as txn:
        assert [bytes(name) for name, _ in txn.cursor()] == [b"something else"]


def test_a_store_can_be_opened_without_its_model(tmp_path: Path) -> None:
    with open_tier(tmp_path) as tier:
        write(tier, 1)
    with open_existing(tmp_path) as tier:
        assert (tier.spec, tier.limit_bytes) == (SPEC, 4 * MIB)
        assert read(tier, 1)
        tier.delete([key(1)])
    with open_tier(tmp_path) as tier:
        assert not tier.contains(key(1))


def test_a_change_is_made_whole_or_not_at_all(tmp_path: Path) -> None:
    file = LmdbFile(tmp_path, MIB)

    def half(txn: "lmdb.Transaction[memoryview]") -> None:
        txn.put(b"a", b"1")
        raise KeyError("our bug")

    with pytest.raises(KeyError):
        file.commit(half)  # type: ignore[arg-type]  # the real transaction has more methods
    with file.read() as txn:
        assert txn.get(b"a") is None
    file.close()


def test_a_full_map_is_no_room_and_leaves_the_file_usable(tmp_path: Path) -> None:
    file = LmdbFile(tmp_path, MIB)
    with pytest.raises(NoRoomError, match="Raise ssd_bytes") as caught:
        file.commit(lambda txn: [txn.put(b"%d" % n, bytes(100000)) for n in range(20)])
    assert not caught.value.on_disk
    file.commit(lambda txn: txn.put(b"a", bytes(100000)))
    file.close()
    file = LmdbFile(tmp_path, MIB)
    with file.read() as txn:
        assert len(txn.get(b"a")) == 100000
        assert txn.get(b"1") is None
    assert file.num_pages() * file.page_bytes <= MIB
    file.close()
