"""What becomes of something that another thread was asked for: a future that is cheap to make.

One is made for each token, and a `concurrent.futures.Future` with its condition takes a tenth of
what a token costs on the host. This has the part of it that is used here, with the same meaning; a
thread that waits makes what it waits with, and an event loop, which is called back, makes nothing.
"""

import threading
from collections.abc import Callable
from concurrent.futures import CancelledError
from concurrent.futures import TimeoutError as WaitedTooLong
from typing import Generic, TypeVar, cast

T = TypeVar("T")

_PENDING, _RUNNING, _CANCELLED, _FINISHED = range(4)


class Reply(Generic[T]):
    """A result, an error, or neither because it was cancelled. Safe to use from several threads."""

    __slots__ = ("_arrived", "_callbacks", "_error", "_lock", "_state", "_value")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._state = _PENDING
        self._value: T | None = None
        self._error: BaseException | None = None
        self._callbacks: list[Callable[[Reply[T]], object]] | None = None
        self._arrived: threading.Event | None = None

    def set_running_or_notify_cancel(self) -> bool:
        """It is begun and can be cancelled no more; False: it was cancelled."""
        with self._lock:
            if self._state == _CANCELLED:
                return False
            assert self._state == _PENDING, "begun twice"
            self._state = _RUNNING
            return True

    def cancel(self) -> bool:
        """Give it up if it has not begun; whether it is given up."""
        with self._lock:
            if self._state != _PENDING:
                return self._state == _CANCELLED
            self._state = _CANCELLED
        self._tell()
        return True

    def set_result(self, value: T) -> None:
        """It has ended well. Nothing happens if it was cancelled."""
        self._end(value, None)

    def set_exception(self, error: BaseException) -> None:
        """It has failed. Nothing happens if it was cancelled."""
        self._end(None, error)

    def cancelled(self) -> bool:
        """Whether it was given up."""
        return self._state == _CANCELLED

    def done(self) -> bool:
        """Whether nothing more will happen to it."""
        return self._state >= _CANCELLED

    def result(self, timeout_s: float | None = None) -> T:
        """Wait for its result.

        Raises:
            CancelledError: it was cancelled.
            TimeoutError: it did not end within `timeout_s` seconds.
            BaseException: what it failed with.
        """
        error = self.exception(timeout_s)
        if error is not None:
            try:
                raise error
            finally:
                # Else the error would keep this frame, and the frame the error.
                del error, self
        return cast(T, self._value)

    def exception(self, timeout_s: float | None = None) -> BaseException | None:
        """Wait for its end; what it failed with, if it did. Raises as `result`."""
        if not self.wait(timeout_s):
            raise WaitedTooLong
        if self._state == _CANCELLED:
            raise CancelledError
        return self._error

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until it is done; whether it is."""
        if self._state >= _CANCELLED:
            return True
        with self._lock:
            if self._state >= _CANCELLED:
                return True
            if self._arrived is None:
                self._arrived = threading.Event()
            arrived = self._arrived
        return arrived.wait(timeout_s)

    def add_done_callback(self, callback: Callable[["Reply[T]"], object]) -> None:
        """Have it called with this once it is done: where that happens, or at once.

        Args:
            callback: raises nothing.
        """
        with self._lock:
            if self._state < _CANCELLED:
                if self._callbacks is None:
                    self._callbacks = [callback]
                else:
                    self._callbacks.append(callback)
                return
        callback(self)

    def _end(self, value: T | None, error: BaseException | None) -> None:
        with self._lock:
            if self._state == _CANCELLED:
                return
            assert self._state != _FINISHED, "ended twice"
            self._value, self._error = value, error
            self._state = _FINISHED
        self._tell()

    def _tell(self) -> None:
        # Nobody adds anything to what is done.
        if self._arrived is not None:
            self._arrived.set()
        callbacks, self._callbacks = self._callbacks, None
        for callback in callbacks or ():
            callback(self)


def called_aside(function: Callable[[], T]) -> Reply[T]:
    """Call a function on a thread of its own; what it returns or raises is the reply's."""
    reply: Reply[T] = Reply()
    reply.set_running_or_notify_cancel()

    def call() -> None:
        try:
            result = function()
        except BaseException as error:
            reply.set_exception(error)
        else:
            reply.set_result(result)

    threading.Thread(target=call, name="streamkv-aside", daemon=True).start()
    return reply
