"""Results on their way to event loops: each to its own waiter, many for one call."""

import asyncio
import threading
from concurrent.futures import Future
from typing import Any

import pytest

from streamkv.mailbox import Mailbox

WAIT_S = 30


def done(value: Any = None, error: BaseException | None = None) -> "Future[Any]":
    future: Future[Any] = Future()
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(value)
    return future


def test_each_waiter_gets_its_own_result_and_one_call_brings_them_all() -> None:
    async def main() -> list[int]:
        loop = asyncio.get_running_loop()
        mailbox = Mailbox(loop)
        waiters = [loop.create_future() for _ in range(50)]

        def deliver() -> None:
            for number, waiter in enumerate(waiters):
                mailbox.put(waiter, done(number))
            mailbox.wake()

        await asyncio.to_thread(deliver)
        return list(await asyncio.wait_for(asyncio.gather(*waiters), WAIT_S))

    assert asyncio.run(main()) == list(range(50))


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (ValueError("full"), ValueError),
        (KeyboardInterrupt(), KeyboardInterrupt),
        (StopIteration("no more"), RuntimeError),
    ],
)
def test_an_error_reaches_its_waiter_and_those_behind_it_get_their_results(
    error: BaseException, raised: type[BaseException]
) -> None:
    async def main() -> tuple[BaseException | None, int]:
        loop = asyncio.get_running_loop()
        mailbox, failing, waiting = Mailbox(loop), loop.create_future(), loop.create_future()
        mailbox.put(failing, done(error=error))
        mailbox.put(waiting, done(5))
        mailbox.wake()
        result = await asyncio.wait_for(waiting, WAIT_S)
        return failing.exception(), result

    found, result = asyncio.run(main())
    assert isinstance(found, raised) and result == 5


def test_who_waits_no_more_is_left_alone_and_what_was_cancelled_is_cancelled() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        mailbox = Mailbox(loop)
        gone, cancelled, waiting = (loop.create_future() for _ in range(3))
        gone.cancel()
        given_up: Future[Any] = Future()
        given_up.cancel()
        for waiter, future in ((gone, done(1)), (cancelled, given_up), (waiting, done(3))):
            mailbox.put(waiter, future)
        mailbox.wake()
        assert await asyncio.wait_for(waiting, WAIT_S) == 3
        assert gone.cancelled() and cancelled.cancelled()

    asyncio.run(main())


def test_a_closed_event_loop_waits_for_nothing() -> None:
    loop = asyncio.new_event_loop()
    mailbox, waiter = Mailbox(loop), loop.create_future()
    loop.close()
    mailbox.put(waiter, done(1))
    mailbox.wake()
    assert not waiter.done()


def test_results_put_by_many_threads_all_arrive() -> None:
    async def main() -> list[int]:
        loop = asyncio.get_running_loop()
        mailbox = Mailbox(loop)
        waiters = [loop.create_future() for _ in range(400)]

        def deliver(first: int) -> None:
            for number in range(first, 400, 4):
                mailbox.put(waiters[number], done(number))
                mailbox.wake()

        threads = [threading.Thread(target=deliver, args=(first,)) for first in range(4)]
        for thread in threads:
            thread.start()
        found = await asyncio.wait_for(asyncio.gather(*waiters), WAIT_S)
        for thread in threads:
            thread.join()
        return list(found)

    assert asyncio.run(main()) == list(range(400))
