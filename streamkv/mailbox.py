"""Results on their way from the engine's thread to an event loop, many in one go.

Waking an event loop is a system call, in which the engine's thread gives way to the loop's; done
for each of 64 sessions it is a third of what a token costs on the host. So results are put into the
loop's mailbox, and the loop is woken once for all that a step returned.
"""

import asyncio
from collections import deque
from typing import Any

from streamkv.reply import Reply


class Mailbox:
    """What waits in one event loop for results of other threads.

    Args:
        loop: that waits.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._arrived: deque[tuple[asyncio.Future[Any], Reply[Any]]] = deque()

    def put(self, waiter: "asyncio.Future[Any]", reply: Reply[Any]) -> None:
        """A reply that `waiter` waits for is done; `wake` says so. From any thread."""
        self._arrived.append((waiter, reply))

    def wake(self) -> None:
        """Let the loop find what has arrived. From any thread; a closed loop waits for nothing."""
        try:
            self._loop.call_soon_threadsafe(self._hand_out)
        except RuntimeError:
            assert self._loop.is_closed()
            # Its tasks are let go with their waiters, and with them the sessions they were using.
            self._arrived.clear()

    def _hand_out(self) -> None:
        while self._arrived:
            waiter, reply = self._arrived.popleft()
            if waiter.done():
                continue
            if reply.cancelled():
                waiter.cancel()
            elif (error := reply.exception()) is not None:
                waiter.set_exception(_raisable(error))
            else:
                waiter.set_result(reply.result())


def _raisable(error: BaseException) -> BaseException:
    """An error as a future of an event loop takes it: any but that which ends an iterator."""
    if not isinstance(error, StopIteration):
        return error
    raisable = RuntimeError("a step raised StopIteration")
    raisable.__cause__ = error
    return raisable
