"""Copies that are late: no block is reused, half written, lost or waited for in vain.

Each guard has a twin test that takes it away and sees the corruption it prevents.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from streamkv.errors import EngineClosedError, StoreError
from streamkv.tiers.faults import inject
from streamkv.tiers.gpu_pool import GpuPool
from streamkv.tiers.manager import TierManager
from streamkv.tiers.residents import Residents
from streamkv.tiers.transfer import Completion, Finished, Transfer

MakeRig = Callable[..., Any]


class HeldWorker:
    """The worker, stopped before its next job until `go` is called."""

    def __init__(self) -> None:
        self._arrived = threading.Event()
        self._released = threading.Event()

    def stop(self) -> None:
        self._arrived.set()
        self._released.wait()

    def take_one(self) -> None:
        """Wait until the worker has taken a job off the queue and stands before it."""
        self._arrived.wait()

    def go(self) -> None:
        self._released.set()


@contextmanager
def held_worker() -> Iterator[HeldWorker]:
    worker = HeldWorker()
    try:
        with inject("worker", worker.stop):
            yield worker
    finally:
        worker.go()


def call(action: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    """Run an action on a thread of its own; its result or exception lands in the list."""
    outcome: list[Any] = []

    def run() -> None:
        try:
            outcome.append(action())
        except Exception as error:
            outcome.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, outcome


def until(rig: Any, name: str, value: int) -> None:
    """Spin until a counter has reached a value: the other thread has come to its wait."""
    while rig.count(name) < value:
        threading.Event().wait(0.001)


class CarelessResidents(Residents):
    """Does not keep a block while a copy of it is pending: what the guard is there for."""

    def hold(self, block_id: int) -> None:
        pass

    def unhold(self, block_id: int) -> None:
        pass


class CarelessManager(TierManager):
    def _make_residents(self) -> Residents:
        return CarelessResidents(self._free_list)


def reuse_while_a_copy_is_pending(rig: Any) -> int:
    """Drop a block whose copy is late, allocate and scribble. Returns how often it is reused."""
    with held_worker() as worker:
        dropped = rig.seal(0)
        rig.manager.drop(dropped)
        taken = [rig.manager.allocate() for _ in range(3)]
        for block_id in taken:
            rig.gpu_pool.fill_nan(block_id)
        worker.go()
    rig.manager.flush()
    for block_id in taken:
        rig.manager.free(block_id)
    return taken.count(dropped)


def test_a_dropped_block_is_not_reused_while_its_copy_is_pending(make_rig: MakeRig) -> None:
    rig = make_rig(gpu=4)
    assert reuse_while_a_copy_is_pending(rig) == 0
    rig.settle()
    assert rig.held(0) == [True]


def test_without_the_guard_the_copy_would_be_of_other_bytes(make_rig: MakeRig) -> None:
    rig = make_rig(gpu=4, manager_type=CarelessManager)
    assert reuse_while_a_copy_is_pending(rig) == 1
    with pytest.raises(AssertionError):
        rig.held(0)


@pytest.mark.parametrize("retain", ["all", "window"])
def test_a_block_of_a_pending_checkpoint_is_not_reused(make_rig: MakeRig, retain: str) -> None:
    rig = make_rig(gpu=4, cpu=None, retain=retain)
    with held_worker() as worker:
        dropped = rig.seal(0)
        ticket = rig.manager.checkpoint("diary", [(rig.key_of(0), dropped)])
        rig.manager.drop(dropped)
        taken = [rig.manager.allocate() for _ in range(3)]
        assert dropped not in taken
        assert not ticket.done()
        for block_id in taken:
            rig.gpu_pool.fill_nan(block_id)
            rig.manager.free(block_id)
        worker.go()
    assert ticket.wait() is True
    rig.settle()
    assert rig.held(0) == [True]


class LateKernel(Transfer):
    """The kernel that writes a block finishes only when the test says so."""

    def __init__(self, gpu_pool: GpuPool) -> None:
        super().__init__(gpu_pool)
        self.awaited = threading.Event()
        self.finished = threading.Event()

    def written(self) -> Completion:
        return LateCompletion(self)


class LateCompletion:
    def __init__(self, kernel: LateKernel) -> None:
        self._kernel = kernel

    def done(self) -> bool:
        return self._kernel.finished.is_set()

    def wait(self) -> None:
        self._kernel.awaited.set()
        self._kernel.finished.wait()


class UnawaitedKernel(LateKernel):
    """The same kernel, but nobody waits for it."""

    def written(self) -> Completion:
        return Finished()


def copy_while_a_kernel_writes(rig: Any, by: str) -> None:
    """Have a block copied whose bytes arrive only after the worker has come to the copy."""
    kernel = rig.manager._transfer
    block_id = rig.manager.allocate()
    rig.manager.seal(block_id, rig.key_of(0))
    if by == "checkpoint":
        rig.manager.checkpoint("diary", [(rig.key_of(0), block_id)])
    while not kernel.awaited.is_set() and not rig.manager._writer.is_quiet():
        threading.Event().wait(0.001)
    rig.gpu_pool.block_bytes(block_id)[:] = rig.bytes_of(0)
    kernel.finished.set()
    rig.manager.drop(block_id)
    rig.manager.flush()


BY = pytest.mark.parametrize(
    ("by", "options"),
    [("seal", {}), ("checkpoint", {"retain": "window", "cpu": None})],
    ids=["seal", "checkpoint"],
)


@BY
def test_a_copy_waits_for_the_kernel_that_writes_the_block(
    make_rig: MakeRig, by: str, options: dict[str, Any]
) -> None:
    rig = make_rig(transfer_type=LateKernel, **options)
    copy_while_a_kernel_writes(rig, by)
    assert rig.held(0) == [True]


@BY
def test_without_that_wait_the_copy_would_be_half_written(
    make_rig: MakeRig, by: str, options: dict[str, Any]
) -> None:
    rig = make_rig(transfer_type=UnawaitedKernel, **options)
    copy_while_a_kernel_writes(rig, by)
    with pytest.raises(AssertionError):
        rig.held(0)


def test_the_record_of_an_open_block_does_not_change_while_it_is_written(
    make_rig: MakeRig,
) -> None:
    rig = make_rig()
    block_id = rig.fill(3)
    with inject("ssd.put", lambda: rig.gpu_pool.fill_nan(block_id)):
        assert rig.manager.write_partial(rig.partial_key_of(3), block_id).wait() is True
    assert rig.restored(3, key=rig.partial_key_of(3))
    rig.manager.free(block_id)


def test_a_block_whose_copy_is_pending_can_be_restored(make_rig: MakeRig) -> None:
    rig = make_rig(gpu=4)
    with held_worker():
        rig.manager.drop(rig.seal(0))
        assert rig.held(0) == [True]
    rig.settle()
    assert rig.held(0) == [True]


def test_wait_blocks_the_seal_until_there_is_room_and_loses_nothing(make_rig: MakeRig) -> None:
    rig = make_rig(gpu=8, max_pending=2)
    with held_worker() as worker:
        rig.pass_through(0)
        worker.take_one()
        rig.pass_through(1, 2)
        thread, outcome = call(lambda: rig.pass_through(3))
        until(rig, "waits", 1)
        assert outcome == []
        worker.go()
        thread.join()
    assert outcome == [None]
    rig.settle()
    assert rig.held(0, 1, 2, 3) == [True] * 4
    assert (rig.count("dropped"), rig.count("waits")) == (0, 2)


def test_wait_blocks_an_allocation_until_a_copy_has_finished(make_rig: MakeRig) -> None:
    rig = make_rig(gpu=1)
    with held_worker() as worker:
        rig.pass_through(0)
        thread, outcome = call(rig.manager.allocate)
        until(rig, "waits", 1)
        assert outcome == []
        worker.go()
        thread.join()
    assert outcome == [0]
    rig.manager.free(0)
    rig.settle()
    assert rig.held(0) == [True]


def test_drop_gives_up_what_cannot_be_queued_and_counts_it(make_rig: MakeRig) -> None:
    rig = make_rig(gpu=8, max_pending=1, on_pressure="drop")
    with held_worker() as worker:
        rig.pass_through(0)
        worker.take_one()
        rig.pass_through(1, 2, 3, 4)
        assert (rig.count("dropped"), rig.count("waits")) == (3, 0)
    rig.settle()
    assert rig.held(0, 1, 2, 3, 4) == [True, True, False, False, False]


def test_drop_gives_up_a_pending_copy_when_its_block_is_wanted(make_rig: MakeRig) -> None:
    rig = make_rig(gpu=2, on_pressure="drop")
    with held_worker() as worker:
        rig.pass_through(0)
        worker.take_one()
        rig.pass_through(1)
        freed = rig.manager.allocate()  # the copy of block 1 is given up for it
        thread, outcome = call(rig.manager.allocate)  # the copy of block 0 has begun: wait
        until(rig, "waits", 1)
        assert outcome == []
        worker.go()
        thread.join()
    for block_id in (freed, *outcome):
        rig.manager.free(block_id)
    rig.settle()
    assert rig.held(0, 1) == [True, False]
    assert rig.count("dropped") == 1


def test_a_copy_that_is_not_needed_any_more_is_cancelled(make_rig: MakeRig) -> None:
    rig = make_rig(gpu=4, retain="window")
    with held_worker() as worker:
        block_id = rig.seal(0)
        worker.take_one()
        rig.manager.drop(block_id)
        rig.pass_through(*range(1, 10))
    rig.settle()
    assert rig.count("demotions") == 1
    assert rig.manager.usage()["cpu"].num_blocks == 0
    assert rig.held(*range(10)) == [False] * 10


def test_the_workers_exception_reaches_everyone_who_waits(make_rig: MakeRig) -> None:
    broken = RuntimeError("the worker broke")
    go = threading.Event()

    def break_down() -> None:
        go.wait()
        raise broken

    rig = make_rig(gpu=1, cpu=4)
    with inject("worker", break_down):
        block_id = rig.seal(0)
        ticket = rig.manager.checkpoint("diary", [(rig.key_of(0), block_id)])
        rig.manager.drop(block_id)
        thread, outcome = call(rig.manager.allocate)
        flusher, flushed = call(rig.manager.flush)
        until(rig, "waits", 2)
        go.set()
        thread.join()
        flusher.join()
    with pytest.raises(RuntimeError, match="the worker broke"):
        ticket.wait()
    assert isinstance(flushed[0], StoreError) and flushed[0].__cause__ is broken
    # The copy is given up, so its block came back in time for the allocation.
    assert outcome == [0]
    with pytest.raises(StoreError, match="the tiers' worker stopped: RuntimeError"):
        rig.manager.seal(0, rig.key_of(1))
    rig.manager.free(0)
    rig.check()
    assert rig.count("dropped") == 1
    rig.manager.close()
    rig.manager.close()


def test_closing_at_once_fails_what_is_pending_and_wakes_the_waiters(make_rig: MakeRig) -> None:
    rig = make_rig(gpu=2, max_pending=2)
    with held_worker() as worker:
        first = rig.seal(0)
        worker.take_one()
        second = rig.fill(1)
        tickets = [
            rig.manager.checkpoint("diary", [(rig.key_of(0), first)]),
            rig.manager.write_partial(rig.partial_key_of(1), second),
        ]
        waiter, waited = call(lambda: rig.manager.checkpoint("diary", []))
        until(rig, "waits", 1)
        closer, _ = call(lambda: rig.manager.close(drain=False))
        waiter.join()
        assert isinstance(waited[0], EngineClosedError)
        worker.go()
        closer.join()
    for ticket in tickets:
        with pytest.raises(EngineClosedError, match="closed before this was written"):
            ticket.wait()
    rig.manager.drop(first)
    rig.manager.free(second)
    rig.check()
    assert rig.manager.usage()["gpu"].num_blocks == 0


def test_draining_finishes_what_is_pending(make_rig: MakeRig) -> None:
    rig = make_rig(gpu=8)
    with held_worker() as worker:
        blocks = [(rig.key_of(number), rig.seal(number)) for number in range(4)]
        ticket = rig.manager.checkpoint("diary", blocks)
        closer, closed = call(rig.manager.close)
        worker.go()
        closer.join()
    assert closed == [None] and ticket.wait() is True
    assert all(rig.ssd.contains(key) for key, _ in blocks)
    for _, block_id in blocks:
        rig.manager.drop(block_id)
    rig.check()


def test_sessions_on_several_threads_never_get_each_others_bytes(make_rig: MakeRig) -> None:
    rig = make_rig(gpu=12, cpu=4)

    def run(session: int) -> int:
        first = 1000 * session
        for number in range(first, first + 60):
            rig.pass_through(number)
            if number % 7 == 0 and not rig.restored(max(first, number - 5)):
                raise AssertionError(f"block {number - 5} of session {session} is gone")
        return session

    threads = [call(lambda session=session: run(session)) for session in range(4)]
    for thread, _ in threads:
        thread.join()
    assert [outcome for _, outcome in threads] == [[0], [1], [2], [3]]
    rig.settle()
    assert all(rig.held(*range(60), *range(3000, 3060)))


def test_a_late_sync_does_not_hold_up_the_feed(make_rig: MakeRig) -> None:
    go = threading.Event()
    rig = make_rig(gpu=8, cpu=8)
    block_id = rig.seal(0)
    with inject("ssd.fsync", go.wait):
        ticket = rig.manager.checkpoint("diary", [(rig.key_of(0), block_id)])
        rig.pass_through(1, 2, 3)
        assert np.array_equal(rig.gpu_pool.block_bytes(block_id), rig.bytes_of(0))
        assert not ticket.done()
        go.set()
        assert ticket.wait() is True
    rig.manager.drop(block_id)
    rig.settle()
