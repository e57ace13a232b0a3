"""A session's generator of steps, driven from a thread and from an event loop."""

import asyncio
import gc
import os
import signal
import sys
import threading
import types
from collections.abc import AsyncIterator, Iterable, Iterator
from typing import Any

import pytest

from streamkv.batch import Batch, Flight, SequenceStep
from streamkv.driver import END, NEED_ITEM, AsyncOutputs, Outputs, Steps, Turnstile
from streamkv.errors import EngineClosedError, SessionError
from streamkv.sequence import Sequence
from streamkv.step_loop import Call, StepLoop

WAIT_S = 30


class IdleExecutor:
    """For a loop that carries out calls only."""

    def prepare(self, step: SequenceStep) -> None:
        raise AssertionError("no step is asked for")

    max_sequences = 1

    def between_steps(self, idle: bool) -> bool:
        return False

    def launch(self, batch: Batch) -> Flight:
        raise AssertionError("no step is asked for")

    def postprocess(self, step: SequenceStep) -> None:
        raise AssertionError("no step is asked for")

    def advance(self, sequence: Sequence, num_tokens: int) -> None:
        raise AssertionError("no step is asked for")


CLOSED = SessionError("session 'diary' is closed.")


@pytest.fixture
def loop() -> Iterator[StepLoop]:
    loop = StepLoop(IdleExecutor(), prefill_chunk=1)
    yield loop
    loop.close()


@pytest.fixture
def gate() -> Turnstile:
    return Turnstile("diary")


def echo(log: list[Any]) -> Steps:
    """Hands out each item after the engine's thread has doubled it; notes how it ended."""
    try:
        while (item := (yield NEED_ITEM)) is not END:
            doubled = yield Call(lambda item=item: 2 * item)
            log.append((item, doubled))
            yield doubled
        log.append("no more items")
    finally:
        log.append("ended")


def fail(error: BaseException) -> None:
    raise error


def outputs(loop: StepLoop, gate: Turnstile, steps: Steps, items: Iterable[Any]) -> Outputs[Any]:
    return Outputs(loop, gate, steps, "echo of session 'diary'", items)


def test_nothing_is_taken_or_done_before_it_is_asked_for(loop: StepLoop, gate: Turnstile) -> None:
    log, taken = list[Any](), list[int]()

    def items() -> Iterator[int]:
        for number in (3, 4, 5):
            taken.append(number)
            yield number

    run = outputs(loop, gate, echo(log), items())
    assert (taken, log) == ([], [])
    assert next(run) == 6
    assert (taken, log) == ([3], [(3, 6)])
    assert run.run() == [8, 10]
    assert log[3:] == ["no more items", "ended"]
    assert list(run) == []


def test_a_closed_iterator_ends_its_operation_once_and_gives_nothing_more(
    loop: StepLoop, gate: Turnstile
) -> None:
    log = list[Any]()
    run = outputs(loop, gate, echo(log), [1, 2])
    next(run)
    run.close()
    run.close()
    assert list(run) == []
    assert log == [(1, 2), "ended"]


def test_an_operation_may_handle_the_error_of_its_step(loop: StepLoop, gate: Turnstile) -> None:
    def steps() -> Steps:
        try:
            yield Call(lambda: fail(ValueError("full")))
        except ValueError as error:
            yield f"handled {error}"
        yield (yield Call(lambda: "went on"))

    assert outputs(loop, gate, steps(), ()).run() == ["handled full", "went on"]


@pytest.mark.parametrize("where", ["step", "item", "operation"])
def test_an_error_ends_the_operation_and_frees_the_session(
    loop: StepLoop, gate: Turnstile, where: str
) -> None:
    log = list[Any]()

    def steps() -> Steps:
        try:
            if where == "step":
                yield Call(lambda: fail(ValueError(where)))
            if where == "item":
                yield NEED_ITEM
            raise ValueError(where)
        finally:
            log.append("ended")

    def items() -> Iterator[int]:
        fail(ValueError("item"))
        yield 1

    run = outputs(loop, gate, steps(), items())
    with pytest.raises(ValueError, match=where):
        next(run)
    assert log == ["ended"] and list(run) == []
    assert outputs(loop, gate, echo(log), [4]).run() == [8]


def test_a_new_operation_ends_the_one_that_was_left(loop: StepLoop, gate: Turnstile) -> None:
    first_log, second_log = list[Any](), list[Any]()
    first = outputs(loop, gate, echo(first_log), [1, 2])
    second = outputs(loop, gate, echo(second_log), [3, 4])
    next(first)
    assert next(second) == 6
    assert first_log == [(1, 2), "ended"]
    for _ in range(2):
        with pytest.raises(SessionError, match="this iterator is stale"):
            next(first)
    assert second.run() == [8]
    assert list(second) == []


def test_while_a_call_is_carried_out_others_are_refused(loop: StepLoop, gate: Turnstile) -> None:
    log, refused = list[Any](), list[str]()

    def items() -> Iterator[int]:
        for act in (outputs(loop, gate, echo(log), [9]).run, lambda: gate.end(CLOSED)):
            with pytest.raises(SessionError, match="'diary' is busy") as error:
                act()
            refused.append(str(error.value))
        gate.end(CLOSED, even_if_busy=True)
        yield 1

    assert outputs(loop, gate, echo(log), items()).run() == [2]
    assert len(refused) == 2
    assert log == [(1, 2), "no more items", "ended"]


def test_the_end_of_a_session_ends_what_is_suspended(loop: StepLoop, gate: Turnstile) -> None:
    log = list[Any]()
    run = outputs(loop, gate, echo(log), [1, 2])
    next(run)
    gate.end(CLOSED)
    gate.end(CLOSED)
    assert log == [(1, 2), "ended"]
    for _ in range(2):
        with pytest.raises(SessionError, match="is closed"):
            next(run)


def test_only_an_operation_that_never_began_is_warned_about(
    loop: StepLoop, gate: Turnstile, recwarn: pytest.WarningsRecorder
) -> None:
    run = outputs(loop, gate, echo([]), [1])
    next(run)
    closed = outputs(loop, gate, echo([]), [1])
    closed.close()
    del run, closed
    gate.end(CLOSED)
    gc.collect()
    assert [str(warning.message) for warning in recwarn] == []
    outputs(loop, gate, echo([]), [1])
    gc.collect()
    assert ["echo of session 'diary' was never iterated" in str(w.message) for w in recwarn] == [
        True
    ]


def place_in(ident: int, code: types.CodeType) -> int | None:
    """Which instruction of a function a thread is at; `None` outside of it."""
    frame = sys._current_frames().get(ident)
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    return None if frame is None else frame.f_lasti


def wait_until_blocked(ident: int, code: types.CodeType) -> None:
    """Return once a thread has stayed at one instruction of a function for a thousand looks.

    An interrupt between two instructions there can leave a lock taken for ever: that is Python's.
    """
    place, looks = None, 0
    while looks < 1000:
        now = place_in(ident, code)
        looks = looks + 1 if now is not None and now == place else 0
        place = now
        os.sched_yield()


def test_an_interrupt_is_raised_only_once_the_step_has_ended(
    loop: StepLoop, gate: Turnstile
) -> None:
    interrupted, log = threading.Event(), list[str]()
    main = threading.main_thread().ident
    assert main is not None and main == threading.get_ident()

    def handle(number: int, frame: types.FrameType | None) -> None:
        interrupted.set()
        raise KeyboardInterrupt

    def step() -> None:
        wait_until_blocked(main, threading.Condition.wait.__code__)
        signal.pthread_kill(main, signal.SIGUSR1)
        assert interrupted.wait(WAIT_S)
        log.append("step ended")

    def steps() -> Steps:
        try:
            yield Call(step)
        finally:
            log.append("operation ended")

    before = signal.signal(signal.SIGUSR1, handle)
    try:
        with pytest.raises(KeyboardInterrupt):
            outputs(loop, gate, steps(), ()).run()
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert log == ["step ended", "operation ended"]


def async_outputs(
    loop: StepLoop, gate: Turnstile, steps: Steps, items: AsyncIterator[Any] | Iterator[Any]
) -> AsyncOutputs[Any]:
    return AsyncOutputs(loop, gate, steps, "echo of session 'diary'", items)


def test_an_event_loop_gets_the_same_from_both_kinds_of_items(
    loop: StepLoop, gate: Turnstile
) -> None:
    async def arriving() -> AsyncIterator[int]:
        for number in (3, 4):
            await asyncio.sleep(0)
            yield number

    async def main() -> None:
        for items in (arriving(), iter([3, 4])):
            log = list[Any]()
            run = async_outputs(loop, gate, echo(log), items)
            assert [output async for output in run] == [6, 8]
            assert log == [(3, 6), (4, 8), "no more items", "ended"]
            assert await run.run() == []

    asyncio.run(main())


def test_an_async_operation_may_handle_the_error_of_its_step_or_end_by_it(
    loop: StepLoop, gate: Turnstile
) -> None:
    def handling() -> Steps:
        try:
            yield Call(lambda: fail(ValueError("full")))
        except ValueError:
            yield "handled"

    def swallowing() -> Steps:
        try:
            yield Call(lambda: fail(ValueError("full")))
        except ValueError:
            return

    def failing() -> Steps:
        yield Call(lambda: fail(ValueError("full")))

    async def main() -> None:
        assert await async_outputs(loop, gate, handling(), iter(())).run() == ["handled"]
        assert await async_outputs(loop, gate, swallowing(), iter(())).run() == []
        with pytest.raises(ValueError, match="full"):
            await async_outputs(loop, gate, failing(), iter(())).run()
        assert await async_outputs(loop, gate, echo([]), iter([1])).run() == [2]

    asyncio.run(main())


def test_a_cancelled_task_sees_its_step_through_before_the_operation_ends(
    loop: StepLoop, gate: Turnstile
) -> None:
    log, begun, may_end = list[str](), threading.Event(), threading.Event()

    def step() -> None:
        begun.set()
        assert may_end.wait(WAIT_S)
        log.append("step ended")

    def steps() -> Steps:
        try:
            yield Call(step)
        finally:
            log.append("operation ended")

    async def main() -> None:
        task = asyncio.create_task(async_outputs(loop, gate, steps(), iter(())).run())
        assert await asyncio.to_thread(begun.wait, WAIT_S)
        task.cancel()
        for _ in range(10):
            await asyncio.sleep(0)
        assert not task.done() and log == []
        may_end.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert log == ["step ended", "operation ended"]
        assert await async_outputs(loop, gate, echo([]), iter([1])).run() == [2]

    asyncio.run(main())


def held_step(log: list[Any], begun: threading.Event, may_end: threading.Event) -> Steps:
    """An operation whose only step waits until it may end."""

    def step() -> None:
        begun.set()
        assert may_end.wait(WAIT_S)
        log.append("step ended")

    try:
        yield Call(step)
    finally:
        log.append("operation ended")


def test_a_task_cancelled_again_and_again_sees_its_step_through(
    loop: StepLoop, gate: Turnstile
) -> None:
    log, begun, may_end = list[Any](), threading.Event(), threading.Event()

    async def main() -> None:
        run = async_outputs(loop, gate, held_step(log, begun, may_end), iter(()))
        task = asyncio.create_task(run.run())
        assert await asyncio.to_thread(begun.wait, WAIT_S)
        for _ in range(5):
            task.cancel()
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        assert not task.done() and log == []
        may_end.set()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert log == ["step ended", "operation ended"]


@pytest.mark.parametrize("act", ["call", "end"])
def test_a_session_is_free_again_after_an_event_loop_that_was_closed_in_the_middle_of_a_step(
    loop: StepLoop, gate: Turnstile, act: str
) -> None:
    log, begun, may_end = list[Any](), threading.Event(), threading.Event()
    run = async_outputs(loop, gate, held_step(log, begun, may_end), iter(()))
    event_loop = asyncio.new_event_loop()
    event_loop.set_exception_handler(lambda *_: None)
    task = event_loop.create_task(run.run())
    event_loop.run_until_complete(asyncio.to_thread(begun.wait, WAIT_S))
    event_loop.run_until_complete(event_loop.shutdown_default_executor())
    event_loop.close()
    del task
    gc.collect()
    with pytest.raises(SessionError, match="busy"):
        gate.end(CLOSED)
    may_end.set()
    loop.submit(Call(lambda: None)).result(WAIT_S)
    gc.collect()
    if act == "call":
        assert outputs(loop, gate, echo(log), [4]).run() == [8]
    else:
        gate.end(CLOSED)
    assert log[:2] == ["step ended", "operation ended"]
    assert asyncio.run(run.run()) == []


def test_a_step_that_two_interrupts_left_behind_is_waited_for_by_the_next_call(
    loop: StepLoop, gate: Turnstile
) -> None:
    interrupted, log, may_end = threading.Semaphore(0), list[Any](), threading.Event()
    main = threading.main_thread().ident
    assert main is not None and main == threading.get_ident()

    def handle(number: int, frame: types.FrameType | None) -> None:
        interrupted.release()
        raise KeyboardInterrupt

    def step() -> None:
        for _ in range(2):
            wait_until_blocked(main, threading.Condition.wait.__code__)
            signal.pthread_kill(main, signal.SIGUSR1)
            assert interrupted.acquire(timeout=WAIT_S)
        assert may_end.wait(WAIT_S)
        wait_until_blocked(main, threading.Condition.wait.__code__)
        log.append("step ended")

    def steps() -> Steps:
        yield Call(step)

    before = signal.signal(signal.SIGUSR1, handle)
    try:
        with pytest.raises(KeyboardInterrupt):
            outputs(loop, gate, steps(), ()).run()
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert log == []
    may_end.set()

    def next_steps() -> Steps:
        log.append("next call begins")
        yield 1

    assert outputs(loop, gate, next_steps(), ()).run() == [1]
    assert log == ["step ended", "next call begins"]


def test_other_tasks_run_while_a_step_is_computed(loop: StepLoop, gate: Turnstile) -> None:
    async def main() -> None:
        going_on = threading.Event()

        async def other() -> None:
            going_on.set()

        def steps() -> Steps:
            yield (yield Call(lambda: going_on.wait(WAIT_S)))

        task = asyncio.create_task(async_outputs(loop, gate, steps(), iter(())).run())
        await asyncio.gather(task, other())
        assert task.result() == [True]

    asyncio.run(main())


def test_an_engine_that_closes_ends_the_operation_with_its_error(
    loop: StepLoop, gate: Turnstile
) -> None:
    log = list[Any]()
    run = outputs(loop, gate, echo(log), [1, 2])
    next(run)
    loop.close()
    with pytest.raises(EngineClosedError):
        next(run)
    assert log == [(1, 2), "ended"]
