"""The tier manager over real pools and a real store: what is kept where, and what comes back."""

import threading
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_page_lock import FakePageLock

from streamkv.errors import EngineClosedError, PoolFullError, StoreError
from streamkv.tiers.faults import inject
from streamkv.tiers.usage import TierUsage

MakeRig = Callable[..., Any]

TIERS = [
    pytest.param({"cpu": 4, "ssd": True}, id="cpu-ssd"),
    pytest.param({"cpu": 4, "ssd": False}, id="cpu"),
    pytest.param({"cpu": None, "ssd": True}, id="ssd"),
    pytest.param({"cpu": 0, "ssd": True}, id="cpu0-ssd"),
    pytest.param({"cpu": None, "ssd": False}, id="neither"),
]


@pytest.mark.parametrize("tiers", TIERS)
@pytest.mark.parametrize("retain", ["all", "window", "none"])
@pytest.mark.parametrize("on_pressure", ["wait", "drop"])
def test_what_comes_back_is_bit_for_bit_what_was_sealed(
    make_rig: MakeRig, tiers: dict[str, Any], retain: str, on_pressure: str
) -> None:
    rig = make_rig(retain=retain, on_pressure=on_pressure, **tiers)
    for number in range(20):
        rig.pass_through(number)
        rig.check()
    rig.settle()
    held = rig.held(*range(20))  # compares the bytes of each that is found
    assert rig.count("misses") == held.count(False)
    if retain != "all" or tiers == {"cpu": None, "ssd": False}:
        assert not any(held)
    elif not tiers["ssd"] and on_pressure == "wait":
        assert held == [False] * 16 + [True] * 4
    elif on_pressure == "wait":
        assert all(held)
    else:
        assert held.count(False) == rig.count("dropped") + (not tiers["ssd"]) * rig.count(
            "evictions"
        )
    rig.settle()


def test_blocks_reach_the_ssd_once_the_cpu_pool_passes_its_watermark(make_rig: MakeRig) -> None:
    rig = make_rig(cpu=4, watermark=0.5)
    rig.pass_through(0, 1)
    rig.settle()
    assert (rig.count("demotions"), rig.count("writes")) == (2, 0)
    rig.pass_through(2)
    rig.settle()
    assert rig.count("writes") == 1
    assert [rig.ssd.contains(rig.key_of(number)) for number in range(3)] == [True, False, False]


def test_none_stores_nothing_at_all(make_rig: MakeRig) -> None:
    rig = make_rig(retain="none")
    block_id = rig.seal(0)
    ticket = rig.manager.checkpoint("diary", [(rig.key_of(0), block_id)])
    assert ticket.wait() is False and ticket.missing == 1
    assert rig.manager.write_partial(rig.partial_key_of(1), block_id).wait() is False
    rig.manager.drop(block_id)
    rig.settle()
    assert list(rig.ssd.keys()) == [] and rig.ssd.manifest("diary") == []
    assert rig.manager.usage()["cpu"].num_blocks == 0
    assert rig.held(0) == [False]


def test_window_deletes_a_block_that_left_unless_a_manifest_names_it(make_rig: MakeRig) -> None:
    rig = make_rig(retain="window", gpu=8)
    blocks = {number: rig.seal(number) for number in range(4)}
    named = [(rig.key_of(number), blocks[number]) for number in (0, 1)]
    assert rig.manager.checkpoint("diary", named).wait() is True
    for block_id in blocks.values():
        rig.manager.drop(block_id)
    rig.settle()
    assert rig.held(0, 1, 2, 3) == [True, True, False, False]
    assert rig.manager.usage()["ssd"].num_blocks == 2


def test_window_deletes_what_a_superseded_manifest_named_one_checkpoint_later(
    make_rig: MakeRig,
) -> None:
    rig = make_rig(retain="window", cpu=None, gpu=8)
    stored = []
    for number in range(4):
        block_id = rig.seal(number)
        assert rig.manager.checkpoint("diary", [(rig.key_of(number), block_id)]).wait()
        rig.manager.drop(block_id)
        rig.settle()
        stored.append([rig.ssd.contains(rig.key_of(earlier)) for earlier in range(number + 1)])
    assert stored == [[True], [True, True], [False, True, True], [False, False, True, True]]


def test_a_superseded_partial_record_goes_even_if_all_is_retained(make_rig: MakeRig) -> None:
    rig = make_rig(retain="all", gpu=8)
    block_id = rig.fill(7)
    for number in range(3):
        key = rig.partial_key_of(number)
        assert rig.manager.checkpoint("diary", [(key, block_id)]).wait()
    rig.settle()
    held = [rig.ssd.contains(rig.partial_key_of(number)) for number in range(3)]
    assert held == [False, True, True]
    assert rig.restored(7, key=rig.partial_key_of(2))
    rig.manager.free(block_id)


def test_a_partial_record_can_be_written_before_the_checkpoint_that_names_it(
    make_rig: MakeRig,
) -> None:
    rig = make_rig()
    block_id = rig.fill(3)
    key = rig.partial_key_of(3)
    rig.manager.write_partial(key, block_id)
    ticket = rig.manager.checkpoint("diary", [(key, None)])
    rig.manager.free(block_id)
    assert ticket.wait() is True and ticket.missing == 0
    assert rig.restored(3, key=key)


def test_a_checkpoint_survives_a_restart(make_rig: MakeRig) -> None:
    first = make_rig(gpu=8)
    blocks = [(first.key_of(number), first.seal(number)) for number in range(5)]
    assert first.manager.checkpoint("diary", blocks).wait() is True
    first.manager.close(drain=False)
    first.ssd.close()
    second = make_rig(gpu=8)
    assert second.ssd.manifest("diary") == [first.key_of(number) for number in range(5)]
    targets = [second.manager.allocate() for _ in range(5)]
    wanted = [(second.key_of(number), target) for number, target in enumerate(targets)]
    assert second.manager.restore_many(wanted) == [True] * 5
    for number, target in enumerate(targets):
        assert np.array_equal(second.gpu_pool.block_bytes(target), second.bytes_of(number))
    # What the earlier process stored is superseded and, two checkpoints on, unlocked.
    for _ in range(2):
        second.manager.checkpoint("diary", [wanted[4]]).wait()
    assert second.ssd.manifest("diary") == [second.key_of(4)]


def test_restore_many_tells_hits_from_misses_in_order(make_rig: MakeRig) -> None:
    rig = make_rig(gpu=8, cpu=2)
    rig.pass_through(0, 1, 2, 3)
    rig.settle()
    targets = [rig.manager.allocate() for _ in range(6)]
    numbers = [9, 0, 3, 8, 1, 2]
    wanted = [(rig.key_of(n), target) for n, target in zip(numbers, targets, strict=True)]
    assert rig.manager.restore_many(wanted) == [False, True, True, False, True, True]
    assert rig.manager.restore_many([]) == []
    assert (rig.count("promotions"), rig.count("misses")) == (4, 2)


def test_draining_writes_all_that_is_retained(make_rig: MakeRig) -> None:
    rig = make_rig(cpu=8, watermark=1.0)
    rig.pass_through(0, 1, 2)
    rig.manager.close()
    rig.manager.close()
    rig.check()
    assert [rig.ssd.contains(rig.key_of(number)) for number in range(3)] == [True] * 3
    assert rig.count("writes") == 3


def test_two_sessions_that_seal_the_same_key_store_one_copy(make_rig: MakeRig) -> None:
    rig = make_rig(retain="window", gpu=8)
    first, second = rig.seal(0), rig.seal(0)
    rig.settle()
    assert (rig.count("demotions"), rig.manager.usage()["cpu"].num_blocks) == (1, 1)
    for session, block_id in (("diary", first), ("log", second)):
        rig.manager.checkpoint(session, [(rig.key_of(0), block_id)]).wait()
    assert (rig.count("writes"), rig.manager.usage()["ssd"].num_blocks) == (1, 1)
    rig.manager.drop(first)
    rig.settle()
    assert rig.held(0) == [True]
    rig.manager.drop(second)
    rig.manager.forget("diary").wait()
    assert rig.held(0) == [True]
    rig.manager.forget("log").wait()
    rig.settle()
    assert rig.held(0) == [False]
    assert rig.manager.usage()["ssd"].num_blocks == 0


def test_a_block_that_another_session_has_in_the_gpu_pool_is_copied_from_there(
    make_rig: MakeRig,
) -> None:
    rig = make_rig(cpu=None, ssd=False)
    block_id = rig.seal(5)
    assert rig.held(5) == [True]
    assert (rig.count("shared"), rig.count("promotions")) == (1, 0)
    rig.manager.drop(block_id)
    assert rig.held(5) == [False]


def test_a_block_that_two_sessions_own_stays_until_both_dropped_it(make_rig: MakeRig) -> None:
    rig = make_rig(retain="window", gpu=3)
    block_id = rig.seal(0)
    rig.manager.share(block_id)
    rig.manager.drop(block_id)
    rig.manager.forget("diary", [rig.key_of(0)]).wait()
    rig.settle()
    assert rig.held(0) == [True]
    assert rig.manager.usage()["gpu"].num_blocks == 1
    rig.manager.drop(block_id)
    rig.settle()
    assert rig.held(0) == [False]
    assert rig.manager.usage()["gpu"].num_blocks == 0


def test_a_block_is_copied_within_the_gpu_pool(make_rig: MakeRig) -> None:
    rig = make_rig()
    source, copied = rig.fill(0), rig.manager.allocate()
    rig.manager.copy(source, copied)
    rig.manager.free(source)
    rig.manager.seal(copied, rig.key_of(0))
    assert rig.held(0) == [True]
    rig.manager.drop(copied)
    rig.settle()


def test_forget_deletes_named_blocks_that_nobody_else_needs(make_rig: MakeRig) -> None:
    rig = make_rig(gpu=8, cpu=2)
    rig.pass_through(0, 1, 2, 3)
    shared = rig.seal(3)
    rig.settle()
    keys = [rig.key_of(number) for number in range(4)]
    rig.manager.forget("diary", keys).wait()
    assert rig.held(0, 1, 2, 3) == [False, False, False, True]
    rig.manager.drop(shared)
    rig.settle()


def test_a_sleeping_session_stays_in_the_cpu_pool_if_there_is_no_ssd(make_rig: MakeRig) -> None:
    rig = make_rig(ssd=False, cpu=3, gpu=8)
    blocks = [rig.seal(number) for number in range(2)]
    named = [(rig.key_of(number), block_id) for number, block_id in enumerate(blocks)]
    ticket = rig.manager.checkpoint("diary", named)
    assert ticket.wait() is False and ticket.missing == 0
    for block_id in blocks:
        rig.manager.drop(block_id)
    rig.pass_through(*range(10, 20))
    rig.settle()
    assert rig.held(0, 1, 18, 19) == [True, True, False, True]
    rig.manager.forget("diary").wait()
    rig.pass_through(*range(20, 23))
    rig.settle()
    assert rig.held(0, 1) == [False, False]


def test_a_full_ssd_evicts_old_blocks_and_keeps_what_a_session_needs(make_rig: MakeRig) -> None:
    rig = make_rig(cpu=None, gpu=8, limit_bytes=700_000)
    needed = [(rig.key_of(number), rig.seal(number)) for number in range(3)]
    assert rig.manager.checkpoint("diary", needed).wait()
    for _, block_id in needed:
        rig.manager.drop(block_id)
    rig.pass_through(*range(100, 300))
    rig.settle()
    assert rig.held(0, 1, 2, 100, 299) == [True, True, True, False, True]
    assert (rig.count("ssd_disabled"), rig.count("dropped")) == (0, 0)
    assert rig.ssd.file_bytes() <= 700_000


def test_a_pool_whose_blocks_are_all_owned_says_so(make_rig: MakeRig) -> None:
    rig = make_rig(gpu=2)
    blocks = [rig.manager.allocate(), rig.manager.allocate()]
    with pytest.raises(PoolFullError, match="all 2 gpu blocks are in use"):
        rig.manager.allocate()
    rig.manager.free(blocks[0])
    assert rig.manager.allocate() == blocks[0]


@pytest.fixture
def python_bytes() -> Iterator[Callable[[], int]]:
    """Counts the bytes of the Python objects made during the test that are still alive."""
    tracemalloc.start()
    yield lambda: tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()


def test_bookkeeping_stays_within_its_stated_budget(
    make_rig: MakeRig, python_bytes: Callable[[], int]
) -> None:
    rig = make_rig(gpu=600, cpu=500, ssd=False)
    rig.pass_through(0)
    rig.manager.flush()
    before = python_bytes()
    blocks = [rig.seal(number) for number in range(500)]
    rig.manager.flush()
    assert len(blocks) == rig.manager.usage()["cpu"].num_blocks == 500
    assert python_bytes() - before <= 500 * (512 + 400)


def test_blocks_that_were_evicted_or_are_on_ssd_cost_no_memory(
    make_rig: MakeRig, python_bytes: Callable[[], int]
) -> None:
    rig = make_rig(cpu=4)
    used = []
    for first in (0, 500, 1000):
        rig.pass_through(*range(first, first + 500))
        rig.manager.flush()
        used.append(python_bytes())
    assert rig.manager.usage()["ssd"].num_blocks > 800
    assert used[2] - used[1] < 2500  # 5 bytes for each of 500 more blocks


def test_usage_and_counters_are_complete_from_the_start(make_rig: MakeRig) -> None:
    rig = make_rig(gpu=2, cpu=3)
    block_bytes = rig.spec.block_bytes
    assert rig.manager.usage() == {
        "gpu": TierUsage(0, 0, 2 * block_bytes),
        "cpu": TierUsage(0, 0, 3 * block_bytes),
        "ssd": TierUsage(0, rig.ssd.usage().num_bytes, 4 << 20),
    }
    assert set(rig.manager.counters().values()) == {0}
    assert set(rig.manager.counters()) >= {
        *("promotions", "demotions", "evictions", "misses", "dropped", "writes"),
        *("ssd_disabled", "waits", "wait_ms"),
    }


def test_where_tells_the_fastest_tier_that_has_a_block(make_rig: MakeRig) -> None:
    rig = make_rig(cpu=2)
    rig.pass_through(0, 1, 2)
    live = rig.seal(3)
    rig.manager.flush()
    assert [rig.manager.where(rig.key_of(n)) for n in range(5)] == [
        "ssd",
        "ssd",
        "cpu",
        "gpu",
        None,
    ]
    rig.manager.drop(live)
    assert rig.manager.where(rig.key_of(3)) == "cpu"
    assert rig.count("misses") == 0


def test_tiers_that_are_not_there_hold_nothing(make_rig: MakeRig) -> None:
    rig = make_rig(cpu=None, ssd=False)
    assert rig.manager.usage()["cpu"] == rig.manager.usage()["ssd"] == TierUsage(0, 0, 0)


def test_dropping_and_freeing_are_not_mixed_up(make_rig: MakeRig) -> None:
    rig = make_rig()
    sealed, open_block = rig.seal(0), rig.fill(1)
    with pytest.raises(AssertionError, match="use drop"):
        rig.manager.free(sealed)
    with pytest.raises(AssertionError, match="use free"):
        rig.manager.drop(open_block)
    rig.manager.drop(sealed)
    rig.manager.free(open_block)
    rig.settle()


def test_a_closed_manager_refuses_work_but_takes_blocks_back(make_rig: MakeRig) -> None:
    rig = make_rig()
    sealed, other = rig.seal(0), rig.fill(1)
    rig.manager.close()
    with pytest.raises(EngineClosedError):
        rig.manager.seal(other, rig.key_of(1))
    with pytest.raises(EngineClosedError):
        rig.manager.checkpoint("diary", [])
    with pytest.raises(EngineClosedError):
        rig.manager.forget("diary")
    with pytest.raises(EngineClosedError):
        rig.manager.flush()
    rig.manager.drop(sealed)
    rig.manager.free(other)
    rig.check()
    assert rig.manager.usage()["gpu"].num_blocks == 0


def test_no_thread_outlives_close(make_rig: MakeRig) -> None:
    before = set(threading.enumerate())
    rig = make_rig(gpu=8)
    rig.pass_through(0, 1, 2)
    assert set(threading.enumerate()) - before
    targets = [rig.manager.allocate() for _ in range(3)]
    rig.manager.restore_many([(rig.key_of(n), target) for n, target in enumerate(targets)])
    with rig.manager:
        pass
    assert set(threading.enumerate()) == before


def test_a_damaged_record_is_a_miss(make_rig: MakeRig, tmp_path: Path) -> None:
    rig = make_rig(cpu=None)
    rig.pass_through(0)
    rig.settle()
    pattern = rig.bytes_of(0).tobytes()[:16]
    rig.manager.close()
    rig.ssd.close()
    data = next(path for path in (tmp_path / "store").rglob("data.mdb"))
    content = bytearray(data.read_bytes())
    at = content.index(pattern)
    content[at] ^= 1
    data.write_bytes(content)
    again = make_rig(cpu=None)
    assert again.held(0) == [False]
    assert again.count("misses") == 1


@pytest.mark.parametrize("point", ["ssd.put", "ssd.commit"])
def test_a_failing_write_gives_the_ssd_up_and_the_cpu_pool_carries_on(
    make_rig: MakeRig, point: str, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> None:
        raise OSError(5, "Input/output error")

    rig = make_rig(cpu=4, watermark=0.5)
    rig.pass_through(0, 1, 2)
    rig.settle()
    with inject(point, fail):
        rig.pass_through(*range(3, 10))
        rig.settle()
    rig.pass_through(*range(10, 20))
    rig.settle()
    assert rig.count("ssd_disabled") == 1
    loud = [record for record in caplog.records if "no longer written to" in record.message]
    assert len(loud) == 1
    assert rig.held(5, 16, 17, 18, 19) == [False, True, True, True, True]


def test_a_failing_sync_reaches_whoever_waits_for_the_checkpoint(make_rig: MakeRig) -> None:
    def fail() -> None:
        raise OSError(5, "Input/output error")

    rig = make_rig(gpu=8, cpu=2)
    rig.pass_through(5, 6, 7, 8)
    block_id = rig.seal(0)
    named = [(rig.key_of(0), block_id)]
    with inject("ssd.fsync", fail):
        ticket = rig.manager.checkpoint("diary", named)
        with pytest.raises((StoreError, OSError), match="Input/output error"):
            ticket.wait()
    assert rig.count("ssd_disabled") == 1
    # From here on the session is kept in memory only, and its caller is told.
    assert rig.manager.checkpoint("diary", named).wait() is False
    rig.manager.drop(block_id)
    rig.pass_through(*range(10, 20))
    rig.settle()
    assert rig.held(0) == [True]
    # What the ssd held before can still be read.
    assert rig.held(5, 6) == [True, True]


def test_without_a_cpu_pool_a_failing_ssd_drops_blocks_and_counts_them(make_rig: MakeRig) -> None:
    def fail() -> None:
        raise OSError(28, "No space left on device")

    rig = make_rig(cpu=None)
    with inject("ssd.put", fail):
        rig.pass_through(0)
        rig.settle()
    rig.pass_through(1, 2)
    rig.settle()
    assert rig.held(0, 1, 2) == [False, False, False]
    assert (rig.count("ssd_disabled"), rig.count("dropped")) == (1, 1)


def test_a_full_ssd_is_tried_again_when_a_session_is_forgotten(make_rig: MakeRig) -> None:
    rig = make_rig(cpu=None, gpu=200, limit_bytes=700_000)
    blocks = [(rig.key_of(number), rig.seal(number)) for number in range(150)]
    rig.settle()
    ticket = rig.manager.checkpoint("huge", blocks)
    with pytest.raises(StoreError, match="ssd_bytes"):
        ticket.wait()
    assert rig.manager.checkpoint("small", blocks[:2]).wait() is False
    rig.manager.forget("huge").wait()
    assert rig.manager.checkpoint("small", blocks[:2]).wait() is True
    rig.settle()


@pytest.mark.parametrize("ssd", [True, False])
@pytest.mark.parametrize("refuse_at", [None, 0, 1, 2])
def test_a_pool_that_is_still_being_pinned_loses_nothing_that_has_room(
    make_rig: MakeRig, refuse_at: int | None, ssd: bool
) -> None:
    """Pieces of two blocks, six in all; a step pins one while the worker needs others."""
    lock = FakePageLock(refuse_at)
    rig = make_rig(cpu=6, ssd=ssd, page_lock=lock)
    for number in range(12):
        rig.pass_through(number)
        rig.manager.between_steps()
    rig.settle()
    room = 6 if refuse_at is None else 2 * refuse_at
    assert rig.held(*range(12)) == ([True] * 12 if ssd else [False] * (12 - room) + [True] * room)
    if ssd or room:
        assert rig.count("dropped") == 0
    assert rig.manager.usage()["cpu"].limit_bytes == sum(lock.pieces.values())
    rig.settle()


def test_a_checkpoint_waits_for_nothing_but_room_in_what_can_be_pinned(make_rig: MakeRig) -> None:
    rig = make_rig(cpu=6, ssd=False, retain="window", page_lock=FakePageLock(refuse_at=1), gpu=8)
    wanted = [(rig.key_of(number), rig.fill(number)) for number in range(3)]
    ticket = rig.manager.checkpoint("diary", wanted)
    assert (ticket.wait(), ticket.missing) == (False, 1)
    for _, block_id in wanted:
        rig.manager.free(block_id)
    rig.settle()
    assert rig.held(0, 1, 2) == [True, True, False]


def test_an_idle_engine_pins_all_and_a_busy_one_only_what_is_near(make_rig: MakeRig) -> None:
    lock = FakePageLock()
    rig = make_rig(cpu=6, page_lock=lock)
    assert [rig.manager.between_steps() for _ in range(3)] == [True, False, False]
    assert [rig.manager.between_steps(idle=True) for _ in range(3)] == [True, True, False]
    assert len(lock.pieces) == 3


@pytest.mark.parametrize("cpu", [None, 0, 4])
def test_without_a_gpu_nothing_is_done_between_steps(make_rig: MakeRig, cpu: int | None) -> None:
    rig = make_rig(cpu=cpu)
    assert not rig.manager.between_steps() and not rig.manager.between_steps(idle=True)
