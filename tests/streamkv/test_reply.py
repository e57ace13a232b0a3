"""A reply against a `concurrent.futures.Future`, whose meaning it has, and between threads."""

import threading
from concurrent.futures import CancelledError, Future, InvalidStateError
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamkv.reply import Reply

WAIT_S = 30
OPERATIONS = (
    *("cancel", "set_running_or_notify_cancel", "set_result", "set_exception"),
    *("cancelled", "done", "result", "exception", "add_done_callback"),
)


def outcome(subject: Any, name: str, heard: list[object]) -> object:
    """What an operation returns, or the kind of what it raises."""
    method = getattr(subject, name)
    try:
        match name:
            case "set_result":
                return method(5)
            case "set_exception":
                return method(ValueError("no"))
            case "result" | "exception":
                found = method(0)
                return type(found) if isinstance(found, BaseException) else found
            case "add_done_callback":
                return method(lambda done: heard.append((done.done(), done.cancelled())))
        return method()
    except (CancelledError, TimeoutError, ValueError) as error:
        return type(error)


def may_not(future: "Future[Any]", name: str) -> bool:
    """What is a mistake of our own, or of no meaning to what was given up."""
    if name == "set_running_or_notify_cancel":
        return future.running() or future.done()
    return name in ("set_result", "set_exception") and future.done()


@settings(max_examples=400, deadline=None)
@given(st.lists(st.sampled_from(OPERATIONS), max_size=12))
def test_whatever_is_done_with_it_is_as_with_a_future(names: list[str]) -> None:
    reply: Reply[int] = Reply()
    future: Future[int] = Future()
    by_reply, by_future = list[object](), list[object]()
    for name in names:
        if may_not(future, name):
            continue
        assert outcome(reply, name, by_reply) == outcome(future, name, by_future), name
        assert by_reply == by_future


def test_what_was_cancelled_has_no_result_whoever_brings_one() -> None:
    reply: Reply[int] = Reply()
    assert reply.cancel() and reply.cancel()
    reply.set_result(3)
    reply.set_exception(ValueError())
    assert not reply.set_running_or_notify_cancel()
    assert reply.cancelled()
    with pytest.raises(CancelledError):
        reply.result()
    with pytest.raises(InvalidStateError):
        future: Future[int] = Future()
        future.cancel()
        future.set_result(3)


def test_threads_that_wait_are_woken_by_the_end() -> None:
    for end in (
        lambda reply: reply.set_result(7),
        lambda reply: reply.set_exception(ValueError("no")),
        lambda reply: reply.cancel(),
    ):
        reply: Reply[int] = Reply()
        found: list[object] = []

        def wait(reply: Reply[int] = reply, found: list[object] = found) -> None:
            try:
                found.append(reply.result(WAIT_S))
            except (ValueError, CancelledError) as error:
                found.append(type(error))

        threads = [threading.Thread(target=wait) for _ in range(4)]
        for thread in threads:
            thread.start()
        end(reply)
        for thread in threads:
            thread.join(WAIT_S)
        [kind] = set(found)
        assert len(found) == 4 and kind in (7, ValueError, CancelledError)


def test_of_beginning_and_cancelling_one_wins() -> None:
    """Both at once, from two threads: whoever cancels successfully finds that it never began."""
    for _ in range(300):
        reply: Reply[int] = Reply()
        barrier, found = threading.Barrier(2), dict[str, bool]()

        def begin(reply: Reply[int] = reply, barrier: Any = barrier, found: Any = found) -> None:
            barrier.wait(WAIT_S)
            found["begun"] = reply.set_running_or_notify_cancel()

        def cancel(reply: Reply[int] = reply, barrier: Any = barrier, found: Any = found) -> None:
            barrier.wait(WAIT_S)
            found["cancelled"] = reply.cancel()

        threads = [threading.Thread(target=each) for each in (begin, cancel)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(WAIT_S)
        assert found["begun"] is not found["cancelled"]


def test_a_callback_is_called_once_however_it_meets_the_end() -> None:
    for _ in range(300):
        reply: Reply[int] = Reply()
        barrier, heard = threading.Barrier(2), list[int]()

        def end(reply: Reply[int] = reply, barrier: Any = barrier) -> None:
            barrier.wait(WAIT_S)
            reply.set_result(1)

        thread = threading.Thread(target=end)
        thread.start()
        barrier.wait(WAIT_S)
        reply.add_done_callback(lambda done, heard=heard: heard.append(done.result(0)))
        thread.join(WAIT_S)
        assert heard == [1]
