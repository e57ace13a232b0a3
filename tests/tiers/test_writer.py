"""The worker: jobs in order, each done or discarded once, and errors for all who wait."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from streamkv.errors import EngineClosedError, StoreError
from streamkv.tiers.faults import inject
from streamkv.tiers.writer import WriteBehind


class Owner:
    """Records what the worker does; a job is a number, and number 13 breaks it."""

    def __init__(self, idle_pieces: int = 0, max_pending: int = 8) -> None:
        self.condition = threading.Condition()
        self.done: list[int] = []
        self.discarded: list[tuple[int, BaseException]] = []
        self.idle_pieces = idle_pieces
        self.writer: WriteBehind[int] = WriteBehind(
            self.condition,
            perform=self.perform,
            discard=lambda job, error: self.discarded.append((job, error)),
            idle=self.idle,
            max_pending=max_pending,
        )

    def perform(self, job: int) -> None:
        if job == 13:
            raise RuntimeError("job 13")
        self.done.append(job)

    def idle(self) -> bool:
        if self.idle_pieces == 0:
            return False
        self.idle_pieces -= 1
        self.done.append(-self.idle_pieces)
        return True

    def submit(self, *jobs: int) -> None:
        with self.condition:
            for job in jobs:
                self.writer.submit(job)

    def wait_until(self, ready: Callable[[], bool]) -> None:
        with self.condition:
            self.writer.wait_for(ready)


@contextmanager
def stopped_worker() -> Iterator[None]:
    """While inside, the worker stands before its next job."""
    go = threading.Event()
    try:
        with inject("worker", go.wait):
            yield
            go.set()
    finally:
        go.set()


@pytest.fixture
def owner() -> Iterator[Owner]:
    made = Owner()
    yield made
    made.writer.close(drain=False)


def test_does_jobs_in_order(owner: Owner) -> None:
    owner.submit(1, 2, 3)
    owner.wait_until(owner.writer.is_quiet)
    assert owner.done == [1, 2, 3]


def test_jobs_go_before_idle_work_and_idle_work_is_finished() -> None:
    owner = Owner(idle_pieces=0)
    owner.wait_until(owner.writer.is_quiet)
    with stopped_worker():
        owner.idle_pieces = 3
        owner.submit(5, 6)
    owner.wait_until(owner.writer.is_quiet)
    owner.writer.close(drain=True)
    assert owner.done == [5, 6, -2, -1, 0]


def test_has_room_until_the_bound(owner: Owner) -> None:
    with stopped_worker():
        owner.submit(*range(9))
        with owner.condition:
            while len(owner.writer._queue) == 9:
                owner.condition.wait(0.01)
            assert not owner.writer.has_room()
    owner.wait_until(owner.writer.has_room)


def test_only_a_job_that_has_not_begun_can_be_cancelled(owner: Owner) -> None:
    with stopped_worker():
        owner.submit(0, 1, 2, 3)
        with owner.condition:
            assert owner.writer.cancel(lambda job: job >= 2) == 2
            assert owner.writer.cancel(lambda job: job == 2) is None
    owner.wait_until(owner.writer.is_quiet)
    assert owner.done == [0, 1, 3]
    assert owner.discarded == []


def test_closing_with_drain_finishes_the_queue() -> None:
    owner = Owner()
    with stopped_worker():
        owner.submit(1, 2, 3)
        closer = threading.Thread(target=lambda: owner.writer.close(drain=True))
        closer.start()
    closer.join()
    assert owner.done == [1, 2, 3] and owner.discarded == []


def test_closing_at_once_finishes_the_job_under_way_and_discards_the_rest() -> None:
    owner = Owner()
    arrived, go = threading.Event(), threading.Event()

    def stand() -> None:
        arrived.set()
        go.wait()

    with inject("worker", stand):
        owner.submit(1)
        arrived.wait()
        owner.submit(2, 3)
        closer = threading.Thread(target=lambda: owner.writer.close(drain=False))
        closer.start()
        with owner.condition:
            while len(owner.discarded) < 2:
                owner.condition.wait()
        go.set()
        closer.join()
    assert owner.done == [1]
    assert [job for job, _ in owner.discarded] == [2, 3]
    assert all(isinstance(error, EngineClosedError) for _, error in owner.discarded)


def test_close_is_idempotent_and_leaves_no_thread() -> None:
    before = threading.active_count()
    owner = Owner()
    assert threading.active_count() == before + 1
    owner.writer.close(drain=True)
    owner.writer.close(drain=False)
    assert threading.active_count() == before
    assert not owner.writer.is_running()
    with pytest.raises(EngineClosedError):
        owner.writer.raise_if_stopped()


def test_an_exception_stops_the_worker_discards_the_rest_and_reaches_waiters(
    caplog: pytest.LogCaptureFixture,
) -> None:
    owner = Owner()
    with stopped_worker():
        owner.submit(1, 13, 2)
    with pytest.raises(StoreError, match="the tiers' worker stopped: RuntimeError"):
        owner.wait_until(lambda: 2 in owner.done)
    assert owner.done == [1]
    assert [job for job, _ in owner.discarded] == [13, 2]
    assert {str(error) for _, error in owner.discarded} == {"job 13"}
    assert "the tiers' worker stopped" in caplog.text
    assert not owner.writer.is_running()
    owner.writer.close(drain=True)


def test_waits_are_counted_only_when_there_is_something_to_wait_for(owner: Owner) -> None:
    owner.wait_until(lambda: True)
    assert owner.writer.waits == 0
    with stopped_worker():
        owner.submit(1)
    owner.wait_until(owner.writer.is_quiet)
    before = owner.writer.waits
    owner.wait_until(owner.writer.is_quiet)
    assert owner.writer.waits == before
