"""Opening, sharing, compacting, forking and closing a real store."""

import contextlib
import errno
import logging
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from streamkv.errors import (
    ConfigError,
    InputError,
    StoreError,
    StoreFormatError,
    StoreFullError,
    StoreLockedError,
)
from streamkv.tiers.codec import Bytes
from streamkv.tiers.faults import inject
from streamkv.tiers.spec import BlockKey, KVSpec
from streamkv.tiers.ssd import SsdTier, StoreIdentity

SPEC = KVSpec(num_layers=3, num_kv_heads=2, head_dim=32, dtype="bfloat16")
WEIGHTS = StoreIdentity("tiny", b"w" * 16)
MIB = 1 << 20


def key(number: int) -> BlockKey:
    return BlockKey(number.to_bytes(16, "big"))


def block(number: int) -> Bytes:
    return np.random.default_rng(number).integers(0, 256, SPEC.block_bytes, dtype=np.uint8)


def open_tier(
    path: Path,
    spec: KVSpec = SPEC,
    identity: StoreIdentity = WEIGHTS,
    limit_bytes: int = 4 * MIB,
    codec: str = "raw",
) -> SsdTier:
    return SsdTier(path, spec, identity, limit_bytes=limit_bytes, codec=codec)


def write(tier: SsdTier, *numbers: int) -> int:
    return tier.write([(key(n), block(n)) for n in numbers])


def read(tier: SsdTier, number: int) -> bool:
    out = np.full(SPEC.block_bytes, 0xEE, dtype=np.uint8)
    found = tier.read(key(number), out)
    assert not found or np.array_equal(out, block(number))
    return found


def raising(error: Exception) -> Callable[[], None]:
    def action() -> None:
        raise error

    return action


@pytest.fixture
def tier(tmp_path: Path) -> Iterator[SsdTier]:
    with open_tier(tmp_path / "store") as tier:
        yield tier


def test_counters_are_all_there_from_the_start(tier: SsdTier) -> None:
    assert tier.counters == {
        "hits": 0,
        "misses": 0,
        "corrupt": 0,
        "read_errors": 0,
        "bytes_read": 0,
        "writes": 0,
        "duplicates": 0,
        "evictions": 0,
        "deletes": 0,
        "full_retries": 0,
        "bytes_written": 0,
    }


def test_a_closed_store_comes_back_whole(tmp_path: Path) -> None:
    with open_tier(tmp_path) as tier:
        write(tier, 1, 2)
        tier.set_manifest("diary", [key(2)])
        tier.sync()
    with open_tier(tmp_path) as tier:
        assert [read(tier, n) for n in (1, 2)] == [True, True]
        assert tier.manifest("diary") == [key(2)]
        assert tier.usage().num_blocks == 2
        tier.check_integrity()


def test_files_are_for_their_owner_only(tier: SsdTier) -> None:
    modes = {path.name: path.stat().st_mode & 0o777 for path in tier.path.iterdir()}
    assert modes == {
        "data.mdb": 0o600,
        "lock.mdb": 0o600,
        "owner.lock": 0o600,
        "reserve": 0o600,
    }
    assert tier.path.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"identity": StoreIdentity("tiny", b"x" * 16)}, "this engine has tiny"),
        ({"spec": KVSpec(3, 2, 32, "float16")}, "this engine has KVSpec"),
        ({"spec": KVSpec(3, 2, 32, "bfloat16", block_size=32)}, "this engine has KVSpec"),
    ],
)
def test_another_engine_is_refused_and_the_store_stays_usable(
    tmp_path: Path, changed: dict[str, object], message: str
) -> None:
    with open_tier(tmp_path) as tier:
        write(tier, 1)
    with pytest.raises(StoreFormatError, match=message):
        open_tier(tmp_path, **changed)  # type: ignore[arg-type]
    with open_tier(tmp_path) as tier:
        assert read(tier, 1)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"codec": "gzip"}, "codec='gzip'"),
        ({"limit_bytes": 1000}, "ssd_bytes=1000: no room for 8 blocks"),
        ({"limit_bytes": 0}, "ssd_bytes=0: no room for 8 blocks"),
    ],
)
def test_bad_options_are_refused_before_anything_is_made(
    tmp_path: Path, changed: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        open_tier(tmp_path / "store", **changed)  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []


def test_a_store_is_open_once(tier: SsdTier) -> None:
    remedy = r"Talk to that process \(streamkv serve\), close it, or use another --store\."
    with pytest.raises(StoreLockedError, match=f"process {os.getpid()} on .* {remedy}"):
        open_tier(tier.path)
    write(tier, 1)
    assert read(tier, 1)


def test_a_directory_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "store").touch()
    with pytest.raises(StoreError, match="Use another --store"):
        open_tier(tmp_path / "store")


def test_a_failed_open_leaves_the_store_unlocked(tmp_path: Path) -> None:
    open_tier(tmp_path).close()
    with inject("ssd.commit", raising(OSError(errno.EACCES, "denied"))), pytest.raises(StoreError):
        open_tier(tmp_path)
    open_tier(tmp_path).close()


@pytest.mark.parametrize("array", [np.zeros(10, np.uint8), np.zeros(SPEC.block_bytes, np.int8)])
def test_blocks_of_another_shape_are_refused_before_any_is_written(
    tier: SsdTier, array: Bytes
) -> None:
    with pytest.raises(InputError, match="not the bytes of a block"):
        tier.write([(key(1), block(1)), (key(2), array)])
    assert list(tier.keys()) == []


@pytest.mark.parametrize("wrong", [b"", b"short", b"k" * 17])
def test_keys_of_another_size_are_refused(tier: SsdTier, wrong: bytes) -> None:
    with pytest.raises(InputError, match=r"not the key of a block. Use 16 bytes"):
        tier.write([(key(1), block(1)), (BlockKey(wrong), block(2))])
    with pytest.raises(InputError):
        tier.set_manifest("diary", [key(1), BlockKey(wrong)])
    assert list(tier.keys()) == []
    assert tier.manifest("diary") == []


@pytest.mark.parametrize("point", ["ssd.put", "ssd.commit"])
@pytest.mark.parametrize("error", [OSError(errno.EIO, "i/o"), KeyError("our bug")])
def test_a_failed_write_shows_no_key_and_leaves_the_store_usable(
    tier: SsdTier, point: str, error: Exception
) -> None:
    write(tier, 1, 2)
    with inject(point, raising(error)), pytest.raises((StoreError, KeyError)):
        write(tier, 3, 4)
    assert not tier.contains(key(3))
    assert not read(tier, 3)
    assert all(read(tier, int.from_bytes(k, "big")) for k in list(tier.keys()))
    assert write(tier, 3, 4) == 2
    assert [read(tier, n) for n in (3, 4)] == [True, True]
    tier.check_integrity()


@pytest.mark.parametrize("point", ["ssd.put", "ssd.commit", "ssd.get", "ssd.fsync"])
def test_after_a_failure_at_any_point_every_key_shown_can_be_read(
    tmp_path: Path, point: str
) -> None:
    with open_tier(tmp_path) as tier:
        write(tier, 1, 2)
        with inject(point, raising(OSError(errno.EIO, "i/o"))):
            for step in (
                lambda: write(tier, 3),
                lambda: tier.set_manifest("diary", [key(1)]),
                lambda: read(tier, 1),
                lambda: tier.delete([key(2)]),
                tier.sync,
            ):
                with contextlib.suppress(StoreError):
                    step()
        shown = [int.from_bytes(k, "big") for k in list(tier.keys())]
        assert all(read(tier, n) for n in shown)
        assert all(tier.contains(key(n)) for n in shown)
        tier.check_integrity()
    with open_tier(tmp_path) as tier:
        assert tier.verify().bad == ()


def test_a_failed_sync_is_an_error(tier: SsdTier) -> None:
    write(tier, 1)
    with inject("ssd.fsync", raising(OSError(errno.ENOSPC, "full"))), pytest.raises(StoreFullError):
        tier.sync()
    tier.sync()
    assert read(tier, 1)


def test_compacting_gives_free_pages_back_and_keeps_everything(tier: SsdTier) -> None:
    write(tier, *range(40))
    tier.set_manifest("diary", [key(5)])
    tier.delete([key(n) for n in range(40) if n % 4])
    before = tier.file_bytes()
    gained = tier.compact()
    assert gained > 20 * SPEC.block_bytes
    assert tier.file_bytes() == before - gained
    assert [read(tier, n) for n in range(0, 40, 4)] == [True] * 10
    assert read(tier, 5)
    assert tier.manifest("diary") == [key(5)]
    assert tier.path.joinpath("data.mdb").stat().st_mode & 0o777 == 0o600
    assert write(tier, 100) == 1
    tier.check_integrity()
    assert not (tier.path / "compact.tmp").exists()


def test_a_compaction_that_fails_leaves_the_store_as_it_was(tier: SsdTier) -> None:
    write(tier, *range(10))
    with inject("ssd.fsync", raising(OSError(errno.ENOSPC, "full"))), pytest.raises(StoreFullError):
        tier.compact()
    assert not (tier.path / "compact.tmp").exists()
    assert all(read(tier, n) for n in range(10))
    assert tier.compact() >= 0


def test_what_a_killed_compaction_left_is_removed(tmp_path: Path) -> None:
    open_tier(tmp_path).close()
    (tmp_path / "compact.tmp").mkdir()
    (tmp_path / "compact.tmp" / "data.mdb").write_bytes(b"half a copy")
    open_tier(tmp_path).close()
    assert not (tmp_path / "compact.tmp").exists()


def test_reads_go_on_while_the_store_is_compacted(tier: SsdTier) -> None:
    write(tier, *range(20))
    stop = threading.Event()

    def reader() -> int:
        num_reads = 0
        while not stop.is_set():
            assert read(tier, num_reads % 20)
            num_reads += 1
        return num_reads

    with ThreadPoolExecutor(3) as threads:
        readers = [threads.submit(reader) for _ in range(3)]
        try:
            for _ in range(5):
                tier.compact()
        finally:
            stop.set()
        assert all(future.result() > 0 for future in readers)
    assert tier.counters["misses"] == 0


def test_a_lower_limit_is_enforced_at_the_next_open(tmp_path: Path) -> None:
    with open_tier(tmp_path, limit_bytes=8 * MIB) as tier:
        write(tier, *range(120))
        assert tier.file_bytes() > 5 * MIB
    with open_tier(tmp_path, limit_bytes=2 * MIB) as tier:
        assert tier.file_bytes() <= 2 * MIB
        assert read(tier, 119)
        for number in range(200, 260):
            write(tier, number)
            assert tier.file_bytes() <= 2 * MIB
        tier.check_integrity()


def test_a_lower_limit_than_the_locked_blocks_need_is_said_and_lived_with(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with open_tier(tmp_path, limit_bytes=8 * MIB) as tier:
        write(tier, *range(100))
        tier.set_manifest("diary", [key(n) for n in range(100)])
    with open_tier(tmp_path, limit_bytes=2 * MIB) as tier, caplog.at_level(logging.WARNING):
        assert all(read(tier, n) for n in range(100))
        with pytest.raises(StoreFullError, match="Raise ssd_bytes, or delete sessions"):
            write(tier, 200)
        tier.set_manifest("diary", [key(n) for n in range(10)])
        assert write(tier, 200) == 1
    with open_tier(tmp_path, limit_bytes=2 * MIB) as tier:
        assert tier.file_bytes() <= 2 * MIB
        assert all(read(tier, n) for n in (*range(10), 200))


def test_a_higher_limit_gives_more_room(tmp_path: Path) -> None:
    with open_tier(tmp_path, limit_bytes=2 * MIB) as tier:
        write(tier, *range(60))
        kept = tier.usage().num_blocks
    with open_tier(tmp_path, limit_bytes=8 * MIB) as tier:
        write(tier, *range(100, 160))
        assert tier.usage().num_blocks == kept + 60
        assert tier.usage().limit_bytes == 8 * MIB


def test_a_forked_process_is_refused(tier: SsdTier) -> None:
    write(tier, 1)
    child = os.fork()
    if child == 0:
        refused = 0
        steps: list[Callable[[], object]] = [
            lambda: read(tier, 1),
            lambda: tier.contains(key(1)),
            lambda: write(tier, 2),
            lambda: list(tier.keys()),
            tier.sync,
        ]
        for step in steps:
            try:
                step()
            except StoreError as error:
                refused += "Open it after the fork" in str(error)
        tier.close()
        os._exit(0 if refused == 5 else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert read(tier, 1)
    assert write(tier, 2) == 1
    with pytest.raises(StoreLockedError):
        open_tier(tier.path)


def test_a_closed_store_says_so(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    write(tier, 1)
    tier.close()
    tier.close()
    steps: list[Callable[[], object]] = [
        lambda: read(tier, 1),
        lambda: write(tier, 2),
        lambda: tier.contains(key(1)),
        tier.sync,
        tier.compact,
        tier.usage,
        tier.verify,
        lambda: tier.manifest("diary"),
    ]
    for step in steps:
        with pytest.raises(StoreError, match="is closed"):
            step()


def test_closing_waits_for_reads(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    write(tier, 1)
    listing = tier.entries()
    with ThreadPoolExecutor(8) as threads:
        reads = [threads.submit(read, tier, 1) for _ in range(64)]
        tier.close()
        for future in reads:
            try:
                assert future.result()
            except StoreError as error:
                assert "is closed" in str(error)
    with pytest.raises(StoreError):
        list(listing)


def test_a_close_that_cannot_sync_still_closes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tier = open_tier(tmp_path)
    with inject("ssd.fsync", raising(OSError(errno.EIO, "i/o"))):
        tier.close()
    assert "the last writes may not last" in caplog.text
    open_tier(tmp_path).close()


def test_a_compacted_store_has_no_key_of_what_was_deleted(tmp_path: Path) -> None:
    """Not even in the pages by which rows are found: LMDB's own compacting copy leaves them."""
    chosen = np.random.default_rng(5)
    keys = [BlockKey(chosen.bytes(16)) for _ in range(1200)]
    spec = KVSpec(num_layers=1, num_kv_heads=1, head_dim=2, dtype="bfloat16", block_size=1)
    with open_tier(tmp_path, spec, limit_bytes=16 * MIB) as tier:
        tier.write([(each, np.zeros(8, dtype=np.uint8)) for each in keys])
        tier.set_manifest("diary", keys[::2])
        for name in ("log", "never again", "victim"):
            tier.set_manifest(name, keys[1::2])
        for name in ("never again", "victim", "log"):
            tier.set_manifest(name, [])
        tier.delete(keys)
        assert tier.usage().num_blocks == 600
        tier.compact()
        tier.check_integrity()
        assert all(tier.contains(each) for each in keys[::2])
    data = (tmp_path / "data.mdb").read_bytes()
    assert all(each in data for each in keys[::2])
    assert not any(each in data for each in keys[1::2])
    assert not any(name in data for name in (b"never again", b"victim"))


def test_a_damaged_record_that_is_deleted_takes_its_bytes_along(tmp_path: Path) -> None:
    """One whose header is damaged, and one whose payload is: neither is shown any more."""
    with open_tier(tmp_path) as tier:
        write(tier, 1, 2, 3)
    path = tmp_path / "data.mdb"
    data = bytearray(path.read_bytes())
    samples = [block(number).tobytes()[4096:4128] for number in (1, 2, 3)]
    place = data.find(key(1) + b"SKVR")
    while place >= 0:
        data[place + 26] ^= 0xFF
        place = data.find(key(1) + b"SKVR", place + 1)
    data[data.find(samples[1]) - 100] ^= 0xFF
    path.write_bytes(data)
    with open_tier(tmp_path) as tier:
        assert [read(tier, number) for number in (1, 2, 3)] == [False, False, True]
        tier.delete([key(1), key(2)])
        tier.compact()
        tier.check_integrity()
        assert read(tier, 3)
    data = bytearray(path.read_bytes())
    assert [sample in data for sample in samples] == [False, False, True]
