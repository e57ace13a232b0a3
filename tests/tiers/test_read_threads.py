"""Reads on threads: run once or taken back, waited for no longer than the limit, ended by close."""

import threading
from collections.abc import Callable, Iterator

import pytest

from streamkv.tiers.read_threads import Read, ReadThreads


@pytest.fixture
def threads() -> Iterator[ReadThreads]:
    made = ReadThreads("reader", 2)
    yield made
    assert made.close(60.0)


class Log:
    """What was read and let go of, by name."""

    def __init__(self) -> None:
        self.read: list[str] = []
        self.let_go: list[str] = []

    def submit(
        self, threads: ReadThreads, name: str, action: Callable[[], object] | None = None
    ) -> Read:
        def read() -> bool:
            if action is not None:
                action()
            self.read.append(name)
            return name.isupper()

        return threads.submit(read, lambda: self.let_go.append(name))


def test_each_read_runs_once_and_lets_go_once(threads: ReadThreads) -> None:
    log = Log()
    reads = [log.submit(threads, name) for name in "aBcDe"]
    assert all(threads.wait(read, 60.0) for read in reads)
    assert [read.found for read in reads] == [False, True, False, True, False]
    assert sorted(log.read) == sorted(log.let_go) == sorted("aBcDe")


def test_an_exception_is_kept_for_who_waits_and_stops_no_thread(threads: ReadThreads) -> None:
    log, broken = Log(), RuntimeError("broken")

    def fail() -> None:
        raise broken

    reads = [log.submit(threads, name, fail) for name in "abc"]
    assert all(threads.wait(read, 60.0) for read in reads)
    assert [read.error for read in reads] == [broken] * 3
    assert sorted(log.let_go) == ["a", "b", "c"]
    last = log.submit(threads, "D")
    assert threads.wait(last, 60.0) and last.found


def test_what_has_not_begun_can_be_taken_back(threads: ReadThreads) -> None:
    log, begun, go = Log(), threading.Semaphore(0), threading.Event()

    def stand() -> None:
        begun.release()
        go.wait()

    held = [log.submit(threads, name, stand) for name in "ab"]
    for _ in held:
        begun.acquire()
    queued = log.submit(threads, "c")
    assert not threads.cancel(held[0])
    assert threads.cancel(queued) and not threads.cancel(queued)
    assert log.let_go == ["c"]
    go.set()
    assert all(threads.wait(read, 60.0) for read in held)
    assert sorted(log.read) == ["a", "b"]


def test_a_read_that_hangs_is_given_up_and_lets_go_when_it_ends(threads: ReadThreads) -> None:
    log, go = Log(), threading.Event()
    hanging = log.submit(threads, "a", go.wait)
    assert not threads.wait(hanging, 0.02)
    assert log.let_go == []
    other = log.submit(threads, "B")
    assert threads.wait(other, 60.0) and other.found  # the second thread goes on
    go.set()
    assert threads.wait(hanging, 60.0)
    assert sorted(log.let_go) == ["B", "a"]


def test_behind_threads_that_all_hang_a_read_is_given_up_and_never_begins(
    threads: ReadThreads,
) -> None:
    log, go = Log(), threading.Event()
    hanging = [log.submit(threads, name, go.wait) for name in "ab"]
    behind = log.submit(threads, "c")
    assert not threads.wait(behind, 0.02)
    assert log.let_go == ["c"]
    go.set()
    assert all(threads.wait(read, 60.0) for read in hanging)
    assert sorted(log.read) == ["a", "b"]


def test_a_queued_read_is_not_given_up_while_others_end() -> None:
    log, threads = Log(), ReadThreads("reader", 1)
    reads = [log.submit(threads, str(number)) for number in range(200)]
    assert threads.wait(reads[-1], 60.0)
    assert log.read == [str(number) for number in range(200)]
    assert threads.close(60.0)


def test_closing_reads_what_is_queued_and_ends_the_threads() -> None:
    before = set(threading.enumerate())
    log, threads, go = Log(), ReadThreads("reader", 2), threading.Event()
    reads = [log.submit(threads, name, go.wait) for name in "abcd"]
    assert set(threading.enumerate()) - before
    assert not threads.close(0.02)  # both hang
    go.set()
    assert threads.close(60.0)
    assert all(read.ended for read in reads) and sorted(log.read) == list("abcd")
    assert set(threading.enumerate()) == before
    late = log.submit(threads, "E")
    assert late.found and threads.wait(late, 0.0) and log.let_go.count("E") == 1


def test_threads_start_only_when_there_is_something_to_read() -> None:
    before = set(threading.enumerate())
    threads = ReadThreads("reader")
    assert set(threading.enumerate()) == before
    assert threads.close(60.0)
