"""Reading ahead: what is prefetched is what was sealed, and nothing that was deleted comes back."""

import os
import shutil
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from slow_reads import held_reads

from streamkv.tiers.faults import inject
from streamkv.tiers.gpu_pool import GpuPool
from streamkv.tiers.host_memory import Bytes
from streamkv.tiers.prefetch import MAX_PENDING
from streamkv.tiers.transfer import Completion, Transfer

MakeRig = Callable[..., Any]


def rig_of(make_rig: MakeRig, num_stored: int = 6, **options: Any) -> Any:
    """A rig whose first blocks are on ssd only; its cpu pool has room for four, all evictable."""
    rig = make_rig(**{"gpu": 8, "watermark": 0.0, **options})
    rig.pass_through(*range(num_stored))
    rig.pass_through(*range(100, 104))
    rig.settle()
    return rig


def test_a_prefetched_block_is_restored_from_memory(make_rig: MakeRig) -> None:
    rig = rig_of(make_rig)
    assert rig.where(0, 1, 2, 3) == ["ssd"] * 4
    rig.prefetch(0, 2)
    rig.prefetch_ends()
    assert rig.where(0, 1, 2, 3) == ["cpu", "ssd", "cpu", "ssd"]
    assert rig.held(0, 2) == [True, True]
    assert (rig.count("prefetched"), rig.count("cpu_reads"), rig.count("ssd_reads")) == (2, 2, 0)
    assert (rig.count("prefetch_skipped"), rig.count("prefetch_waits")) == (0, 0)
    rig.settle()


def test_what_is_in_memory_is_not_read_again(make_rig: MakeRig) -> None:
    rig = rig_of(make_rig)
    live = rig.seal(5)
    rig.prefetch(5, 103)
    rig.prefetch_ends()
    assert rig.ssd.counters["hits"] == 0
    assert (rig.count("prefetched"), rig.count("prefetch_skipped")) == (0, 0)
    rig.manager.drop(live)


def test_an_absent_block_is_no_error_and_nothing_is_listed(make_rig: MakeRig) -> None:
    rig = rig_of(make_rig)
    rig.prefetch(77)
    rig.prefetch_ends()
    assert rig.where(77) == [None] and rig.held(77) == [False]
    assert rig.count("prefetched") == 0
    rig.settle()


@pytest.mark.parametrize("options", [{"cpu": None}, {"cpu": 0}], ids=["none", "no room"])
def test_without_a_cpu_pool_a_prefetch_is_skipped_and_counted(
    make_rig: MakeRig, options: dict[str, Any]
) -> None:
    rig = rig_of(make_rig, **options)
    rig.prefetch(0, 1)
    assert rig.count("prefetch_skipped") == 2
    assert rig.held(0, 1) == [True, True]


def test_without_an_ssd_a_prefetch_is_skipped_and_counted(make_rig: MakeRig) -> None:
    rig = make_rig(ssd=False)
    rig.prefetch(0)
    assert rig.count("prefetch_skipped") == 1


def test_a_prefetch_takes_no_room_from_blocks_that_are_locked(make_rig: MakeRig) -> None:
    rig = rig_of(make_rig)
    locked = [rig.cpu_pool.lock(rig.key_of(number)) for number in range(100, 104)]
    rig.prefetch(0)
    rig.until("prefetch_skipped", 1)
    rig.prefetch_ends()
    assert rig.where(0) == ["ssd"] and rig.held(0) == [True]
    for block in locked:
        rig.cpu_pool.unlock(block)
    rig.prefetch(0)
    rig.prefetch_ends()
    assert rig.where(0) == ["cpu"]
    rig.settle()


def test_a_slow_disk_holds_up_nobody_who_prefetches_and_no_more_than_so_many_wait(
    make_rig: MakeRig,
) -> None:
    rig = rig_of(make_rig)
    with held_reads(rig, 4) as held:
        rig.prefetch(*range(200, 200 + MAX_PENDING + 44))
        held.arrive(4)
        assert rig.count("prefetch_skipped") == 44
        held.go()
        rig.prefetch_ends()
    rig.settle()


def test_a_block_that_two_ask_for_is_read_once(make_rig: MakeRig) -> None:
    rig = rig_of(make_rig)
    with held_reads(rig) as held:
        rig.prefetch(0)
        held.arrive()
        rig.prefetch(0, 0)
        held.go()
        rig.prefetch_ends()
    assert (rig.ssd.counters["hits"], rig.count("prefetched")) == (1, 1)


@pytest.mark.parametrize("how", ["held", "fetched"])
def test_a_restore_waits_for_a_prefetch_that_has_begun(make_rig: MakeRig, how: str) -> None:
    rig = rig_of(make_rig)
    outcome: list[Any] = []
    with held_reads(rig) as held:
        rig.prefetch(0)
        held.arrive()
        restoring = threading.Thread(target=lambda: outcome.append(getattr(rig, how)(0)))
        restoring.start()
        rig.until("prefetch_waits", 1)
        assert outcome == []
        held.go()
        restoring.join()
    assert outcome == [[True]]
    assert (rig.ssd.counters["hits"], rig.count("prefetched"), rig.count("cpu_reads")) == (1, 1, 1)
    assert rig.count("prefetch_waits") == 1


@pytest.mark.parametrize("how", ["held", "fetched"])
def test_a_restore_waits_for_no_prefetch_that_has_not_begun(make_rig: MakeRig, how: str) -> None:
    rig = rig_of(make_rig)
    with held_reads(rig, 4) as held:
        rig.prefetch(0, 1, 2, 3, 4)
        held.arrive(4)
        assert getattr(rig, how)(4) == [True]  # while four others are under way
        assert (rig.count("prefetch_waits"), rig.count("prefetch_skipped")) == (0, 1)
        held.go()
    rig.prefetch_ends()
    assert rig.ssd.counters["hits"] == 5
    rig.settle()


def test_a_block_that_is_evicted_again_before_it_is_due_is_read_again(make_rig: MakeRig) -> None:
    rig = rig_of(make_rig)
    rig.prefetch(0)
    rig.prefetch_ends()
    rig.pass_through(*range(110, 114))
    rig.settle()
    assert rig.where(0) == ["ssd"] and rig.held(0) == [True]


def test_the_worker_may_bring_down_what_is_being_read(make_rig: MakeRig) -> None:
    rig = rig_of(make_rig)
    with held_reads(rig) as held:
        rig.prefetch(0)
        held.arrive()
        rig.pass_through(0)  # computed anew meanwhile
        rig.manager.flush()
        assert rig.where(0) == ["cpu"]
        held.go()
        rig.prefetch_ends()
    assert rig.count("prefetched") == 0
    rig.settle()
    assert rig.held(0) == [True]
    # Two had room, one of them gave it back.
    assert rig.manager.usage()["cpu"].num_blocks == 3


class HeldDemotion(Transfer):
    """A copy down that takes until the test says so."""

    def __init__(self, gpu_pool: GpuPool) -> None:
        super().__init__(gpu_pool)
        self.begun, self.go = threading.Event(), threading.Event()
        self.go.set()

    def demote(self, block_id: int, out: Bytes) -> Completion:
        self.begun.set()
        self.go.wait()
        return super().demote(block_id, out)


def test_a_block_may_be_read_while_the_worker_brings_it_down(make_rig: MakeRig) -> None:
    rig = rig_of(make_rig, transfer_type=HeldDemotion)
    transfer, demotions = rig.manager._transfer, rig.count("demotions")
    with held_reads(rig) as held:
        rig.prefetch(0)
        held.arrive()
        transfer.begun.clear()
        transfer.go.clear()
        rig.pass_through(0)
        transfer.begun.wait()
        held.go()
        rig.prefetch_ends()
    assert rig.count("prefetched") == 1
    transfer.go.set()
    rig.settle()
    assert rig.count("demotions") == demotions
    assert rig.held(0) == [True]
    # Two had room, one of them gave it back.
    assert rig.manager.usage()["cpu"].num_blocks == 3


def test_a_block_that_is_forgotten_while_it_is_read_does_not_come_back(make_rig: MakeRig) -> None:
    rig = rig_of(make_rig)
    with held_reads(rig) as held:
        rig.prefetch(0)
        held.arrive()
        rig.manager.forget("diary", [rig.key_of(0)]).wait()
        held.go()
        rig.prefetch_ends()
    assert rig.where(0) == [None] and rig.held(0) == [False]
    assert rig.count("prefetched") == 0
    rig.settle()


def test_a_block_that_is_being_deleted_cannot_be_prefetched(make_rig: MakeRig) -> None:
    rig = rig_of(make_rig)

    def prefetch() -> None:  # gone from memory, and still to be read from ssd
        rig.prefetch(0)
        rig.prefetch_ends()

    with inject("ssd.commit", prefetch):
        rig.manager.forget("diary", [rig.key_of(0)]).wait()
    assert rig.where(0) == [None] and rig.held(0) == [False]
    assert rig.count("prefetch_skipped") == 1
    rig.pass_through(0)
    assert rig.held(0) == [True]  # and may be sealed anew


def test_a_block_that_loses_its_last_claim_while_it_is_read_does_not_come_back(
    make_rig: MakeRig,
) -> None:
    rig = make_rig(retain="window", gpu=8)
    block_id = rig.seal(0)
    assert rig.manager.checkpoint("diary", [(rig.key_of(0), block_id)]).wait()
    rig.manager.drop(block_id)
    others = [rig.seal(number) for number in range(1, 5)]
    rig.settle()
    assert rig.where(0) == ["ssd"]
    with held_reads(rig) as held:
        rig.prefetch(0)
        held.arrive()
        for _ in range(2):
            rig.manager.checkpoint("diary", []).wait()
        rig.manager.flush()
        assert rig.where(0) == [None]
        held.go()
        rig.prefetch_ends()
    assert rig.where(0) == [None]
    for block_id in others:
        rig.manager.drop(block_id)
    rig.settle()
    assert rig.manager.usage()["cpu"].num_blocks == 0


def test_what_the_policy_does_not_keep_is_not_listed_and_not_deleted(make_rig: MakeRig) -> None:
    first = make_rig(retain="window")
    block_id = first.seal(0)
    assert first.manager.checkpoint("diary", [(first.key_of(0), block_id)]).wait()
    first.manager.close()
    first.ssd.close()
    rig = make_rig(retain="window")  # it has not heard of the session yet
    rig.prefetch(0)
    rig.prefetch_ends()
    assert rig.where(0) == ["ssd"] and rig.count("prefetched") == 0
    assert rig.held(0) == [True]


def test_closing_takes_back_what_has_not_begun_and_waits_for_the_rest(make_rig: MakeRig) -> None:
    before = set(threading.enumerate())
    rig = rig_of(make_rig)
    with held_reads(rig, 4) as held:
        rig.prefetch(0, 1, 2, 3, 4, 5)
        held.arrive(4)
        closing = threading.Thread(target=rig.manager.close)
        closing.start()
        while len(rig.manager._prefetching._reads) > 4:
            threading.Event().wait(0.001)
        held.go()
        closing.join()
    assert set(threading.enumerate()) == before
    assert rig.ssd.counters["hits"] == 4
    rig.prefetch(4)
    assert rig.count("prefetch_skipped") == 1
    assert rig.held(4) == [True]
    rig.check()
    rig.manager.close()


def test_closing_leaves_a_hanging_read_alone(
    make_rig: MakeRig, caplog: pytest.LogCaptureFixture
) -> None:
    before = set(threading.enumerate())
    rig = rig_of(make_rig, read_limit_s=0.05)
    with held_reads(rig) as held:
        rig.prefetch(0)
        held.arrive()
        rig.manager.close()
        assert "left alone" in caplog.text
        held.go()
        for thread in set(threading.enumerate()) - before:
            thread.join()
    rig.check()


def test_a_prefetch_that_hangs_is_given_up_by_who_needs_the_block(make_rig: MakeRig) -> None:
    rig = rig_of(make_rig, read_limit_s=0.05)
    with held_reads(rig) as held:
        rig.prefetch(0)
        held.arrive()
        assert rig.held(0) == [False]
        assert rig.fetched(0, 103) == [False, True]
        assert (rig.count("reads_given_up"), rig.count("prefetch_waits")) == (2, 2)
        held.go()
        rig.prefetch_ends()
    assert rig.held(0) == [True]
    rig.settle()


def test_a_store_whose_directory_is_gone_is_still_read(make_rig: MakeRig, tmp_path: Path) -> None:
    rig = rig_of(make_rig)
    shutil.rmtree(tmp_path / "store")
    rig.prefetch(0)
    rig.prefetch_ends()
    assert rig.where(0) == ["cpu"] and rig.held(0, 1) == [True, True]


def test_a_store_that_fails_is_counted_and_nothing_is_raised(make_rig: MakeRig) -> None:
    rig = rig_of(make_rig)
    rig.ssd.close()
    rig.prefetch(0, 1)
    rig.prefetch_ends()
    assert (rig.count("read_errors"), rig.count("prefetched")) == (2, 0)
    assert rig.held(0, 103) == [False, True]
    rig.manager.check_integrity()


def test_a_damaged_record_is_not_listed(make_rig: MakeRig, tmp_path: Path) -> None:
    rig = rig_of(make_rig)
    pattern = rig.bytes_of(0).tobytes()[:16]
    rig.manager.close()
    rig.ssd.close()
    data = next(path for path in (tmp_path / "store").rglob("data.mdb"))
    content = bytearray(data.read_bytes())
    content[content.index(pattern)] ^= 1
    data.write_bytes(content)
    again = make_rig()
    again.prefetch(0, 1)
    again.prefetch_ends()
    assert (again.ssd.counters["corrupt"], again.count("prefetched")) == (1, 1)
    assert again.where(0, 1) == [None, "cpu"] and again.held(0, 1) == [False, True]
    again.settle()


def test_a_bug_in_a_read_is_logged_and_the_block_read_when_it_is_due(
    make_rig: MakeRig, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> None:
        raise RuntimeError("broken")

    rig = rig_of(make_rig)
    with inject("ssd.get", fail):
        rig.prefetch(0)
        rig.prefetch_ends()
    assert "a prefetch failed" in caplog.text
    rig.prefetch(1)
    rig.prefetch_ends()
    assert rig.where(0, 1) == ["ssd", "cpu"] and rig.held(0) == [True]
    rig.settle()


def test_a_forked_process_neither_prefetches_nor_waits_for_the_threads_it_lacks(
    make_rig: MakeRig,
) -> None:
    rig = rig_of(make_rig)
    rig.prefetch(0)
    rig.prefetch_ends()
    assert rig.held(0, 1) == [True, True]  # so that all threads are there
    with held_reads(rig) as held:
        rig.prefetch(2)
        held.arrive()
        with rig.manager._condition:  # no other thread holds it, so that the child may have it
            child = os.fork()
        if child == 0:
            signal.alarm(60)
            skipped = rig.count("prefetch_skipped")
            rig.prefetch(3)
            right = rig.count("prefetch_skipped") == skipped + 1
            right &= rig.fetched(0, 1, 2) == [True, False, False]  # the store refuses
            rig.manager.close(drain=False)
            os._exit(0 if right else 1)
        held.go()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    rig.prefetch_ends()
    assert rig.held(1, 2, 3) == [True] * 3


def test_prefetching_changes_nothing_of_what_is_read(make_rig: MakeRig) -> None:
    rng = np.random.default_rng(7)
    rig = rig_of(make_rig, num_stored=30)
    for _ in range(40):
        rig.prefetch(*rng.choice(30, 6, replace=False).tolist())
        numbers = rng.choice(36, 4, replace=False).tolist()
        assert rig.fetched(*numbers) == [number < 30 for number in numbers]
    rig.prefetch_ends()
    rig.settle()
