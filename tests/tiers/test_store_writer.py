"""Limits, eviction and full disks, on a real store."""

import errno
import os
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

import numpy as np
import pytest

from streamkv.errors import StoreFullError
from streamkv.tiers import store_writer
from streamkv.tiers.codec import Bytes
from streamkv.tiers.faults import inject
from streamkv.tiers.spec import BlockKey, KVSpec
from streamkv.tiers.ssd import LmdbFile, SsdTier, StoreIdentity

SMALL = KVSpec(num_layers=3, num_kv_heads=2, head_dim=32, dtype="bfloat16")  # 48 KiB, 1-page pieces
LARGE = KVSpec(num_layers=2, num_kv_heads=4, head_dim=64, dtype="float32")  # 256 KiB, 8-page pieces
MIB = 1 << 20


def key(number: int) -> BlockKey:
    return BlockKey(number.to_bytes(16, "big"))


def block(spec: KVSpec, number: int) -> Bytes:
    """Values like KV, every fourth block incompressible, so that records differ in size."""
    random = np.random.default_rng(number)
    if number % 4 == 0:
        return random.integers(0, 256, spec.block_bytes, dtype=np.uint8)
    values = random.standard_normal(spec.block_bytes // 4).astype(np.float32)
    bits = values.view(np.uint32)
    return (bits if number % 4 == 1 else bits & 0xFFFF0000).view(np.uint8)


def open_tier(
    path: Path, spec: KVSpec = SMALL, limit_bytes: int = 3 * MIB, codec: str = "raw"
) -> SsdTier:
    identity = StoreIdentity("tiny", b"w" * 16)
    return SsdTier(path, spec, identity, limit_bytes=limit_bytes, codec=codec)


def write(tier: SsdTier, *numbers: int) -> int:
    return tier.write([(key(n), block(tier.spec, n)) for n in numbers])


def read(tier: SsdTier, number: int) -> bool:
    out = np.full(tier.spec.block_bytes, 0xEE, dtype=np.uint8)
    found = tier.read(key(number), out)
    assert not found or np.array_equal(out, block(tier.spec, number))
    return found


def raising(number: int, times: int = 1 << 30) -> Callable[[], None]:
    """An action that raises `OSError(number)` the first `times` it is called."""
    left = [times]

    def action() -> None:
        if left[0] > 0:
            left[0] -= 1
            raise OSError(number, os.strerror(number))

    return action


@pytest.fixture
def tier(tmp_path: Path) -> Iterator[SsdTier]:
    with open_tier(tmp_path) as tier:
        yield tier


@pytest.mark.parametrize(("spec", "limit"), [(SMALL, 2 * MIB), (LARGE, 6 * MIB)])
def test_the_file_stays_within_its_limit_over_restarts_and_codecs(
    tmp_path: Path, spec: KVSpec, limit: int
) -> None:
    number, written, restarts = 0, 0, 0
    while written < 20 * limit:
        codec = ("raw", "zstd")[restarts % 2]
        with open_tier(tmp_path, spec, limit, codec) as tier:
            for _ in range(6):
                assert write(tier, number, number + 1) == 2
                number, written = number + 2, written + 2 * spec.block_bytes
                assert tier.file_bytes() <= limit
            assert read(tier, number - 1)
            assert read(tier, number - 2)
            tier.check_integrity()
            assert tier.counters["full_retries"] == 0
        restarts += 1
    with open_tier(tmp_path, spec, limit) as tier:
        report = tier.verify()
        assert report.num_ok == report.num_records
        assert tier.usage().num_bytes > 0.5 * limit
        assert {entry.codec for entry in tier.entries()} == {"raw", "zstd"}


def test_the_oldest_blocks_go_first(tier: SsdTier) -> None:
    for number in range(200):
        write(tier, number)
    kept = list(tier.keys())
    assert kept == [key(n) for n in range(200 - len(kept), 200)]
    assert tier.counters["evictions"] == 200 - len(kept)
    assert tier.counters["writes"] == 200


def test_the_first_writer_wins(tier: SsdTier) -> None:
    write(tier, 1)
    other = block(SMALL, 2)
    assert tier.write([(key(1), other), (key(3), block(SMALL, 3)), (key(3), other)]) == 3
    assert read(tier, 1)
    assert read(tier, 3)
    assert tier.counters["duplicates"] == 2
    assert tier.counters["writes"] == 2


def test_keys_of_manifests_survive_eviction_and_restarts(tmp_path: Path) -> None:
    with open_tier(tmp_path) as tier:
        write(tier, *range(10))
        tier.set_manifest("diary", [key(2), key(3)])
        tier.set_manifest("work", [key(3), key(7)])
    with open_tier(tmp_path) as tier:
        assert tier.manifest("diary") == [key(2), key(3)]
        for number in range(100, 300):
            write(tier, number)
        assert [read(tier, n) for n in (2, 3, 7)] == [True, True, True]
        assert list(tier.keys())[:3] == [key(2), key(3), key(7)]
        tier.set_manifest("diary", [])
        for number in range(300, 450):
            write(tier, number)
        assert [read(tier, n) for n in (2, 3, 7)] == [False, True, True]
        assert tier.manifest("diary") == []
        assert tier.manifest("work") == [key(3), key(7)]


def test_a_key_may_be_locked_before_it_is_written(tier: SsdTier) -> None:
    tier.set_manifest("diary", [key(50)])
    for number in range(200):
        write(tier, number)
    assert read(tier, 50)


def test_blocks_of_a_write_are_not_evicted_for_it(tier: SsdTier) -> None:
    write(tier, 0)
    for number in range(1, 60):
        write(tier, number)
    oldest = int.from_bytes(next(tier.keys()), "big")
    assert write(tier, oldest, *range(1000, 1020)) == 21
    assert all(read(tier, n) for n in (oldest, *range(1000, 1020)))


def test_a_store_full_of_locked_blocks_refuses_with_a_remedy_and_recovers(tier: SsdTier) -> None:
    locked: list[int] = []
    with pytest.raises(StoreFullError, match=r"Raise ssd_bytes, or delete sessions\."):
        for number in range(1000):
            locked.append(number)
            tier.set_manifest("hoard", [key(n) for n in locked])
            write(tier, number)
    stored = locked[:-1]
    assert all(read(tier, n) for n in stored)
    tier.check_integrity()
    tier.set_manifest("hoard", [key(n) for n in stored[:5]])
    assert write(tier, 2000) == 1
    assert read(tier, 2000)
    assert all(read(tier, n) for n in stored[:5])


def test_a_write_larger_than_a_transaction_is_cut(tier: SsdTier) -> None:
    assert write(tier, *range(25)) == 25
    assert all(read(tier, n) for n in range(25))


def test_of_a_write_larger_than_the_store_the_last_blocks_stay(tier: SsdTier) -> None:
    write(tier, 1000)
    stored = write(tier, *range(100))
    assert 30 < stored < 100
    assert list(tier.keys()) == [key(n) for n in range(100 - stored, 100)]
    tier.check_integrity()


def test_deleting_spares_what_a_manifest_names(tier: SsdTier) -> None:
    write(tier, *range(5))
    tier.set_manifest("diary", [key(1)])
    tier.delete([key(0), key(1), key(9)])
    assert [read(tier, n) for n in range(5)] == [False, True, True, True, True]
    assert tier.counters["deletes"] == 1


def test_many_blocks_are_deleted_at_once(tmp_path: Path) -> None:
    with open_tier(tmp_path, limit_bytes=24 * MIB) as tier:
        write(tier, *range(300))
        tier.delete(key(n) for n in range(1, 300))
        assert list(tier.keys()) == [key(0)]
        assert tier.counters["deletes"] == 299
        tier.check_integrity()


def test_deleting_a_session_spares_what_another_needs(tier: SsdTier) -> None:
    write(tier, *range(6))
    tier.set_manifest("diary", [key(0), key(1)])
    tier.set_manifest("work", [key(1), key(2)])
    tier.delete_session("diary", [key(3), key(2)])
    assert [read(tier, n) for n in range(6)] == [False, True, True, False, True, True]
    assert tier.manifests() == {"work": (key(1), key(2))}
    tier.delete_session("unknown")


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_one_refusal_of_the_disk_costs_old_blocks_and_nothing_else(
    tier: SsdTier, number: int
) -> None:
    write(tier, *range(20))
    with inject("ssd.commit", raising(number, times=1)):
        assert write(tier, 100) == 1
    assert read(tier, 100)
    assert tier.counters["full_retries"] == 1
    assert tier.counters["evictions"] > 0
    tier.check_integrity()


def test_a_disk_that_stays_full_is_an_error_and_the_store_goes_on(tier: SsdTier) -> None:
    write(tier, *range(20))
    with inject("ssd.commit", raising(errno.ENOSPC)):
        with pytest.raises(StoreFullError, match="takes no more"):
            write(tier, 100)
        with pytest.raises(StoreFullError):
            tier.set_manifest("diary", [key(1)])
        with pytest.raises(StoreFullError):
            tier.delete([key(1)])
        assert read(tier, 1)
    assert not tier.contains(key(100))
    assert tier.manifest("diary") == []
    assert write(tier, 100) == 1
    assert read(tier, 100)


FILL = """
import importlib.util, sys
from pathlib import Path
spec = importlib.util.spec_from_file_location("writer_tests", sys.argv[1])
tests = importlib.util.module_from_spec(spec)
spec.loader.exec_module(tests)
tests.fill_a_full_disk(Path(sys.argv[2]), int(sys.argv[3]))
print("done")
"""


def fill_a_full_disk(path: Path, file_bytes: int) -> None:
    """Write far more than the disk takes, or than a file may have (if `file_bytes`)."""
    with open_tier(path, limit_bytes=64 * MIB) as tier:
        if file_bytes:
            resource.setrlimit(resource.RLIMIT_FSIZE, (file_bytes, file_bytes))
        write(tier, 0, 1)
        tier.set_manifest("diary", [key(1)])
        for number in range(2, 400):
            assert write(tier, number) == 1
            assert read(tier, number)
        assert read(tier, 1)
        assert not read(tier, 0)
        assert tier.counters["full_retries"] > 0
        kept = tier.usage().num_blocks
        assert kept > 20, kept
        tier.delete([key(399)])
        tier.sync()
        tier.check_integrity()
        assert tier.verify().num_ok == kept - 1
    with open_tier(path, limit_bytes=64 * MIB) as tier:
        assert read(tier, 398)
        assert write(tier, 1000) == 1


def run_fill(path: Path, file_bytes: int) -> None:
    command = [sys.executable, "-c", FILL, __file__, str(path), str(file_bytes)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.stdout == "done\n", done.stderr


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 8 MiB."""
    if os.geteuid() != 0:
        pytest.skip("mounting a small disk needs root")
    path = tmp_path / "disk"
    path.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=8m", "none", str(path)]
    mounted = subprocess.run(command, capture_output=True, text=True)
    if mounted.returncode != 0:
        pytest.skip(f"cannot mount a small disk here: {mounted.stderr.strip()}")
    yield path
    subprocess.run(["umount", str(path)], check=True)


def test_a_full_disk_is_lived_with(small_disk: Path) -> None:
    run_fill(small_disk / "store", 0)


def test_a_limit_on_file_sizes_is_lived_with(tmp_path: Path) -> None:
    run_fill(tmp_path / "store", 6 * MIB)


def test_a_disk_filled_by_others_is_lived_with(small_disk: Path) -> None:
    with open_tier(small_disk / "store", limit_bytes=64 * MIB) as tier:
        write(tier, *range(40))
        with (small_disk / "other").open("wb", buffering=0) as other, pytest.raises(OSError):
            while True:
                other.write(bytes(65536))
        for number in range(100, 200):
            assert write(tier, number) == 1
            assert read(tier, number)
        (small_disk / "other").unlink()
        kept = tier.usage().num_blocks
        for number in range(200, 300):
            write(tier, number)
        assert tier.usage().num_blocks > kept
        assert tier.verify().num_ok == tier.usage().num_blocks


def test_a_store_can_be_opened_and_emptied_on_a_full_disk(small_disk: Path) -> None:
    with open_tier(small_disk / "store", limit_bytes=64 * MIB) as tier:
        write(tier, *range(40))
        tier.set_manifest("diary", [key(1)])
    with (small_disk / "other").open("wb", buffering=0) as other, pytest.raises(OSError):
        while True:
            other.write(bytes(4096))
    with open_tier(small_disk / "store", limit_bytes=64 * MIB) as tier:
        assert read(tier, 1)
        tier.delete_session("diary")
        assert not read(tier, 1)
        assert write(tier, 100) == 1
        assert read(tier, 100)
        tier.check_integrity()


OPEN = """
import importlib.util, sys
from pathlib import Path
from streamkv.errors import StoreError
spec = importlib.util.spec_from_file_location("writer_tests", sys.argv[1])
tests = importlib.util.module_from_spec(spec)
spec.loader.exec_module(tests)
try:
    tests.open_tier(Path(sys.argv[2]))
except StoreError as error:
    print(error)
"""


@pytest.mark.parametrize("free_bytes", [0, 64 << 10, 200 << 10])
def test_opening_a_new_store_on_a_full_disk_is_refused(small_disk: Path, free_bytes: int) -> None:
    (small_disk / "store").mkdir()
    (small_disk / "store" / "owner.lock").write_bytes(b"{}")
    (small_disk / "reserved").write_bytes(bytes(free_bytes))
    with (small_disk / "other").open("wb", buffering=0) as other, pytest.raises(OSError):
        while True:
            other.write(bytes(4096))
    (small_disk / "reserved").unlink()
    # In a process of its own: a write through a map would kill it.
    command = [sys.executable, "-c", OPEN, __file__, str(small_disk / "store")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    if free_bytes < 128 << 10:
        assert "Free some space" in done.stdout
    (small_disk / "other").unlink()
    with open_tier(small_disk / "store") as tier:
        assert write(tier, 1) == 1
        assert read(tier, 1)


STALE = """
import sys
from pathlib import Path
from streamkv.tiers.ssd import LmdbFile
file = LmdbFile(Path(sys.argv[1]), None)
with file.read():
    print("reading", flush=True)
    sys.stdin.read()
"""


def test_pages_held_by_a_killed_reader_are_reused(tmp_path: Path) -> None:
    with open_tier(tmp_path) as tier:
        write(tier, *range(10))
        command = [sys.executable, "-c", STALE, str(tmp_path)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        with subprocess.Popen(command, **pipes) as reader:  # type: ignore[call-overload]
            assert reader.stdout.readline() == b"reading\n"
            reader.kill()
        for number in range(100, 400):
            assert write(tier, number) == 1
            assert tier.file_bytes() <= 3 * MIB
        assert read(tier, 399)


def test_pages_held_by_a_reader_that_stays_end_in_an_error_until_it_leaves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_writer, "READER_PATIENCE_S", 0.1)
    with open_tier(tmp_path) as tier:
        write(tier, *range(10))
        command = [sys.executable, "-c", STALE, str(tmp_path)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        with subprocess.Popen(command, **pipes) as reader:  # type: ignore[call-overload]
            assert reader.stdout.readline() == b"reading\n"
            with pytest.raises(StoreFullError):
                for number in range(100, 400):
                    write(tier, number)
            assert tier.file_bytes() <= 3 * MIB
            reader.kill()
        assert write(tier, 1000) == 1
        assert read(tier, 1000)
        tier.check_integrity()


def test_a_write_waits_for_a_reader_that_leaves(tmp_path: Path) -> None:
    with open_tier(tmp_path) as tier:
        write(tier, *range(10))
        command = [sys.executable, "-c", STALE, str(tmp_path)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        with subprocess.Popen(command, **pipes) as reader:  # type: ignore[call-overload]
            assert reader.stdout.readline() == b"reading\n"
            with ThreadPoolExecutor(1) as threads:
                writing = threads.submit(lambda: [write(tier, n) for n in range(100, 400)])
                while tier.counters["full_retries"] == 0:
                    assert not writing.done()
                    wait([writing], timeout=0.01)
                reader.stdin.close()
                assert writing.result() == [1] * 300
        tier.check_integrity()


def test_memory_does_not_grow_with_records(tmp_path: Path) -> None:
    import tracemalloc

    tiny = KVSpec(num_layers=2, num_kv_heads=1, head_dim=2, dtype="bfloat16", block_size=4)
    one = np.zeros(tiny.block_bytes, dtype=np.uint8)
    with open_tier(tmp_path, tiny, 32 * MIB) as tier:
        for start in range(0, 4000, 1000):
            tier.write([(key(n), one) for n in range(start, start + 1000)])
    tracemalloc.start()
    try:
        with open_tier(tmp_path, tiny, 32 * MIB) as tier:
            assert tier.usage().num_blocks == 4000
            assert len(list(tier.keys())) == 4000
            _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 400_000


def test_a_file_of_pages_of_many_readers_opens_many_transactions(tmp_path: Path) -> None:
    from contextlib import ExitStack

    open_tier(tmp_path).close()
    file = LmdbFile(tmp_path, None)
    with ExitStack() as readers:
        for _ in range(500):
            readers.enter_context(file.read())
    file.close()
