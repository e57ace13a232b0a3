"""Runs the steps of a session for a caller who waits, or for one who awaits.

What a session does is written once, as a generator that yields

    Compute, Call    an operation of the engine's thread; its result is sent back
    Reply            what an operation handed back before its end; its result is sent back
    NEED_ITEM        the next item of the user's iterable, or END
    anything else    an output for the user

The two classes here drive such a generator: `Outputs` from an ordinary thread, `AsyncOutputs` from
an event loop that is never blocked. Both are lazy, may be abandoned at any point, and refuse to go
on once the session has done something else in between.
"""

import asyncio
import contextlib
import threading
import warnings
from collections.abc import AsyncIterator, Generator, Iterable, Iterator
from concurrent.futures import CancelledError
from enum import Enum
from typing import Any, Generic, TypeVar

from streamkv.errors import SessionError, StreamKVError
from streamkv.reply import Reply
from streamkv.step_loop import Call, Compute, StepLoop

T = TypeVar("T")


class Signal(Enum):
    """What passes between a session's generator and its driver besides data."""

    NEED_ITEM = "need item"
    END = "end"


NEED_ITEM = Signal.NEED_ITEM
END = Signal.END

Steps = Generator[Any, Any, None]

_OPERATIONS = (Compute, Call)


class Turnstile:
    """Lets one operation of a session proceed at a time, and only the newest."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._busy = threading.Lock()
        self._newest: _Run[Any] | None = None

    def enter(self, operation: "_Run[Any]", first: bool) -> None:
        """Begin or go on with an operation; a new one ends the one before it.

        Raises:
            SessionError: another call is being carried out, or came in between.
        """
        if not self._busy.acquire(blocking=False):
            raise SessionError(
                f"session {self._name!r} is busy with another call. Use one session from one place "
                "at a time; open another session to work in parallel."
            )
        try:
            self._admit(operation, first)
        except BaseException:
            self._busy.release()
            raise

    def _admit(self, operation: "_Run[Any]", first: bool) -> None:
        if first:
            if self._newest is not None:
                self._newest.see_through()
                self._newest.finish(self._stale())
            self._newest = operation
        elif self._newest is not operation:
            # Ended by another thread, after this one had seen that it was not.
            raise self._stale()

    def _stale(self) -> SessionError:
        return SessionError(
            f"session {self._name!r} has gone on with another call, so this iterator is stale. "
            "Start a new one."
        )

    def is_in(self, operation: "_Run[Any]") -> bool:
        """Whether it is being carried out right now."""
        return self._newest is operation and self._busy.locked()

    def leave(self) -> None:
        """The caller has control again."""
        self._busy.release()

    def end(self, error: StreamKVError, even_if_busy: bool = False) -> None:
        """End the operation that is suspended, if there is one.

        Args:
            error: what its iterator raises from now on.
            even_if_busy: leave an operation that is being carried out to its own end.

        Raises:
            SessionError: it is not suspended but being carried out.
        """
        if self._busy.locked():
            if even_if_busy:
                return
            raise SessionError(
                f"session {self._name!r} is busy with another call. End that one first."
            )
        if self._newest is not None:
            self._newest.see_through()
            self._newest.finish(error)
            self._newest = None


class _Run(Generic[T]):
    """State that both drivers share."""

    def __init__(self, loop: StepLoop, gate: Turnstile, steps: Steps, what: str) -> None:
        self._loop = loop
        self._gate = gate
        self._steps = steps
        self._what = what
        self._started = False
        self._ended = False
        self._ended_by: StreamKVError | None = None
        self._is_closed = False
        self._step: Reply[Any] | None = None

    def _enter(self) -> None:
        self._gate.enter(self, first=not self._started)
        self._started = True

    def see_through(self) -> None:
        """Wait for the step that was left behind when the wait for it was broken off."""
        if self._step is not None:
            self._step.cancel()
            self._step.wait()

    def finish(self, ended_by: StreamKVError | None = None) -> None:
        """Close the generator: it journals that the operation ended here.

        Args:
            ended_by: what the iterator raises from now on; without it, it is simply at its end.
        """
        if not self._ended:
            self._ended = True
            self._ended_by = ended_by
        if not self._is_closed:
            self._is_closed = True
            self._steps.close()

    def __del__(self) -> None:
        if not self._started and not self._ended:
            warnings.warn(
                f"{self._what} was never iterated, so it did nothing. Loop over it, or call run().",
                ResourceWarning,
                stacklevel=2,
            )


class Outputs(_Run[T], Iterator[T]):
    """Outputs of a session operation, computed as they are asked for."""

    def __init__(
        self, loop: StepLoop, gate: Turnstile, steps: Steps, what: str, items: Iterable[Any] = ()
    ) -> None:
        super().__init__(loop, gate, steps, what)
        self._items = iter(items)
        self._awaited: Reply[Any] | None = None

    def __iter__(self) -> "Outputs[T]":
        return self

    def __next__(self) -> T:
        if self._ended:
            raise self._ended_by or StopIteration
        self._enter()
        try:
            output = self._advance()
        except CancelledError:
            was_closed = self._ended
            self.finish()
            if not was_closed:
                raise
            raise StopIteration from None  # by another thread, while this one waited
        except BaseException:
            self.finish()
            raise
        else:
            if self._ended:
                self.finish()
            return output
        finally:
            self._gate.leave()

    def _advance(self) -> T:
        output = next(self._steps)
        while True:
            try:
                if isinstance(output, _OPERATIONS):
                    answer = self._wait(self._loop.submit(output))
                elif isinstance(output, Reply):
                    answer = self._wait(output)
                elif output is NEED_ITEM:
                    answer = next(self._items, END)
                else:
                    return output  # type: ignore[no-any-return]  # the generator yields T
            except BaseException as error:
                output = self._steps.throw(error)
            else:
                output = self._steps.send(answer)

    def _wait(self, reply: Reply[Any]) -> Any:
        """Result of a step. An interrupt is raised only once the step, which goes on, has ended."""
        self._awaited = reply
        if self._ended:
            reply.cancel()
        try:
            return reply.result()
        except BaseException:
            if not reply.done() and not reply.cancel():
                self._step = reply
                reply.exception()
            raise

    def close(self) -> None:
        """Stop here. The session stays usable.

        From another thread than the one that iterates: a call that waits for room, or for its turn,
        ends at once; one that is being computed ends with the step.
        """
        reply = self._awaited
        if self._gate.is_in(self):
            self._ended = True
            if reply is not None:
                reply.cancel()
            return
        self.finish()

    def run(self) -> list[T]:
        """Carry the operation to its end and return all outputs."""
        return list(self)


class AsyncOutputs(_Run[T], AsyncIterator[T]):
    """The same for an event loop."""

    def __init__(
        self,
        loop: StepLoop,
        gate: Turnstile,
        steps: Steps,
        what: str,
        items: "AsyncIterator[Any] | Iterator[Any]",
    ) -> None:
        super().__init__(loop, gate, steps, what)
        self._items = items

    def __aiter__(self) -> "AsyncOutputs[T]":
        return self

    async def __anext__(self) -> T:
        if self._ended:
            raise self._ended_by or StopAsyncIteration
        self._enter()
        try:
            return await self._advance()
        except GeneratorExit:
            # Its event loop is closed and nothing can be awaited; on whatever thread this happens,
            # it is not the place to wait for a disk. The session's next call ends the operation.
            self._ended = True
            raise
        except BaseException:
            await self.aclose()
            raise
        finally:
            self._gate.leave()

    async def _advance(self) -> T:
        loop = self._loop
        output = _resume(self._steps, None)
        while True:
            try:
                if isinstance(output, _OPERATIONS):
                    output = loop.submit(output)
                if isinstance(output, Reply):
                    try:
                        answer = await loop.waiter(output)
                    except asyncio.CancelledError:
                        await self._see_step_through(output)
                        raise
                    except GeneratorExit:
                        if not output.done():
                            self._step = output
                        raise
                elif output is NEED_ITEM:
                    answer = await self._next_item()
                elif output is END:
                    raise StopAsyncIteration
                else:
                    return output  # type: ignore[no-any-return]  # the generator yields T
            except (StopAsyncIteration, GeneratorExit):
                raise
            except BaseException as error:
                output = _throw(self._steps, error)
            else:
                output = _resume(self._steps, answer)

    async def _see_step_through(self, reply: Reply[Any]) -> None:
        """Wait for a step whose caller was cancelled."""
        # What has not begun need not: it waits for the session to wake.
        reply.cancel()
        # However often it is cancelled: until then the step is about the session's tokens.
        while not reply.done():
            try:
                with contextlib.suppress(Exception, asyncio.CancelledError):
                    await self._loop.waiter(reply)
            except GeneratorExit:
                if not reply.done():
                    self._step = reply
                raise

    async def _next_item(self) -> Any:
        if isinstance(self._items, AsyncIterator):
            return await anext(self._items, END)
        return next(self._items, END)

    async def aclose(self) -> None:
        """Stop here. The session stays usable."""
        if not self._ended:
            await asyncio.to_thread(self.finish)

    async def run(self) -> list[T]:
        """Carry the operation to its end and return all outputs."""
        return [output async for output in self]


def _resume(steps: Steps, answer: Any) -> Any:
    """The generator's next output, END when it has ended (StopIteration cannot cross an await)."""
    try:
        return steps.send(answer)
    except StopIteration:
        return END


def _throw(steps: Steps, error: BaseException) -> Any:
    """The same after raising `error` where the generator waits."""
    try:
        return steps.throw(error)
    except StopIteration:
        return END
