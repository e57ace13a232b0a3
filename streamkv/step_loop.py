"""The engine's own thread: schedule, launch, land.

Callers on any thread submit a `Compute` or a `Call` and get a reply. Everything that touches the
model, the pools or a journal in the course of a step happens on this one thread, so none of it
needs a lock. A step that fails fails its own caller and nobody else.
"""

import asyncio
import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Any, Protocol, TypeVar

import torch

from streamkv.admission import State
from streamkv.batch import Batch, Flight, SequenceStep, StepResult, Wanted
from streamkv.errors import EngineClosedError
from streamkv.flights import PATIENCE_S, Flights, Job
from streamkv.instruments import Instruments
from streamkv.mailbox import Mailbox
from streamkv.operations import Call, Compute
from streamkv.reply import Reply, called_aside
from streamkv.scheduler import Scheduler, Work
from streamkv.sequence import Sequence
from streamkv.sleepers import Sleepers

__all__ = ["Call", "Compute", "StepExecutor", "StepLoop"]

T = TypeVar("T")

POLL_S = 0.0005
"""How often the end of a step is looked for while callers are waited for, too."""


class StepExecutor(Protocol):
    """What the loop drives: makes blocks live, runs the model, seals and drops blocks."""

    @property
    def max_sequences(self) -> int:
        """Sequences of one step, at most."""

    def prepare(self, step: SequenceStep) -> None:
        """Make live the blocks that a part of a step writes."""

    def launch(self, batch: Batch) -> Flight:
        """Start the batch."""

    def postprocess(self, step: SequenceStep) -> None:
        """Count its tokens as computed; seal full blocks, drop expired ones."""

    def advance(self, sequence: Sequence, num_tokens: int) -> None:
        """The same for tokens whose KV exists already."""

    def between_steps(self, idle: bool) -> bool:
        """A piece of what is to be done when no step waits; whether there is more."""


class StepLoop:
    """Owns the engine's thread.

    Args:
        executor: what a step does; may be given later, by `drive`, to be made on the thread.
        prefill_chunk: tokens of one sequence in one step, at most.
        num_threads: torch threads of the step, or `None`.
        mixed_chunk: tokens of one sequence in a step in which others decode.
        mixes: a step may have tokens of sequences that decode and a chunk.
        instruments: where waiting and giving way are counted.
    """

    def __init__(
        self,
        executor: StepExecutor | None,
        prefill_chunk: int,
        num_threads: int | None = None,
        mixed_chunk: int | None = None,
        mixes: bool = True,
        instruments: Instruments | None = None,
    ) -> None:
        self._instruments = instruments if instruments is not None else Instruments()
        self._given_executor: StepExecutor | None = None
        self._given_flights: Flights | None = None
        self._sleepers: Sleepers | None = None
        self._just_served: set[Sequence] = set()
        self._served_s = 0.0
        self._has_idle_work = False
        self._notify_at = 1
        self._scheduler = Scheduler(prefill_chunk, mixed_chunk, mixes=mixes)
        self._num_threads = num_threads
        self._jobs: dict[Work, Job] = {}
        self._calls: deque[tuple[Call, Reply[Any]]] = deque()
        self._inbox: deque[Job] = deque()
        self._mailboxes: dict[asyncio.AbstractEventLoop, Mailbox] = {}
        self._to_wake: set[Mailbox] = set()
        if executor is not None:
            self.drive(executor)
        # Taken by itself it costs a third of what it costs by way of the condition.
        self._mutex = threading.RLock()
        self._condition = threading.Condition(self._mutex)
        self._closed = False
        self._thread = threading.Thread(target=self._main, name="streamkv-engine", daemon=True)
        self._thread.start()

    @property
    def _executor(self) -> StepExecutor:
        assert self._given_executor is not None, "a step before there is an executor"
        return self._given_executor

    @property
    def _flights(self) -> Flights:
        assert self._given_flights is not None, "a step before there is an executor"
        return self._given_flights

    def drive(self, executor: StepExecutor, sleepers: Sleepers | None = None) -> None:
        """Take steps with `executor` from now on, of sessions that `sleepers` puts to sleep."""
        self._given_executor = executor
        self._sleepers = sleepers
        self._has_idle_work = True
        self._given_flights = Flights(
            executor, self._counted, self._deliver, self._fail, mixes=self._scheduler.mixes
        )

    def submit(self, operation: Compute | Call) -> Reply[Any]:
        """Queue an operation.

        Raises:
            EngineClosedError: the loop is closed.
        """
        reply: Reply[Any] = Reply()
        if isinstance(operation, Call):
            with self._mutex:
                self._require_open()
                self._calls.append((operation, reply))
                self._condition.notify()
            return reply
        sequence, params = operation.sequence, operation.params
        work = Work(sequence, operation.num_tokens, operation.wanted, params)
        job = Job(operation, work, reply, asked_s=time.monotonic())
        with self._mutex:
            self._require_open()
            self._inbox.append(job)
            if len(self._inbox) >= self._notify_at:
                self._condition.notify()
        return reply

    def _require_open(self) -> None:
        if self._closed:
            raise EngineClosedError("The engine is closed. Open a new Engine.")

    def waiter(self, reply: Reply[Any]) -> "asyncio.Future[Any]":
        """A future of the running event loop that is done when `reply` is."""
        loop = asyncio.get_running_loop()
        found = self._mailboxes.get(loop)
        mailbox = found if found is not None else self._mailbox_of(loop)
        waiter = loop.create_future()

        def arrived(reply: Reply[Any]) -> None:
            mailbox.put(waiter, reply)
            if threading.get_ident() == self._thread.ident:
                self._to_wake.add(mailbox)
            else:
                mailbox.wake()

        reply.add_done_callback(arrived)
        return waiter

    def _mailbox_of(self, loop: asyncio.AbstractEventLoop) -> Mailbox:
        """The mailbox of an event loop, which is the only one to ask for it."""
        with self._mutex:
            for other in [other for other in self._mailboxes if other.is_closed()]:
                del self._mailboxes[other]
            made = self._mailboxes[loop] = Mailbox(loop)
            return made

    def settle(self, sequence: Sequence) -> None:
        """Wait until nothing is under way for a sequence, also nothing that nobody asked for."""
        with contextlib.suppress(EngineClosedError):
            self.submit(Call(lambda: self._flights.forget(sequence))).wait()

    @contextlib.contextmanager
    def held(self, sequence: Sequence, *, awake: bool) -> Iterator[None]:
        """Keep the engine's thread from a sequence, of which nothing is under way.

        It stays as it is, awake or asleep, for as long as the context lasts.

        Args:
            sequence: it.
            awake: have it woken first, and wait for that.

        Raises:
            PoolFullError: it is to be awake, and there will be no room.
            Exception: whatever keeps it from waking.
        """
        is_held = False
        try:
            with contextlib.suppress(EngineClosedError):
                if awake:
                    self._wait_to_hold(sequence)
                else:
                    held: Reply[None] = Reply()
                    self.submit(Call(lambda: self._hold_as_it_is(sequence, held))).result()
                    held.result()
                is_held = True
            yield
        finally:
            if is_held:
                with contextlib.suppress(EngineClosedError):
                    self.submit(Call(lambda: self._release(sequence), is_aside=True))

    def held_steps(self, sequence: Sequence, function: Callable[[], T]) -> Generator[Any, Any, T]:
        """Call a function, on a thread of its own, while a sequence is awake and held.

        The same as `held`, as steps of a driver: whoever waits for room may be cancelled, and what
        has begun is seen through.
        """
        held: list[bool] = []

        def hold() -> None:
            self._hold(sequence)
            held.append(True)

        try:
            yield Call(hold, sequence)
            result: T = yield called_aside(function)
            return result
        finally:
            if held:
                with contextlib.suppress(EngineClosedError):
                    self.submit(Call(lambda: self._release(sequence), is_aside=True))

    def _wait_to_hold(self, sequence: Sequence) -> None:
        """Hold a sequence once it is awake; whoever is interrupted meanwhile holds nothing."""
        held = self.submit(Call(lambda: self._hold(sequence), sequence))
        try:
            held.result()
        except BaseException:
            if not held.cancel() and held.exception() is None:
                self.submit(Call(lambda: self._release(sequence), is_aside=True))
            raise

    def status(self, sequence: Sequence) -> tuple[str, int | None]:
        """Whether a session is awake, asleep or on its way, and its place in the queue."""
        return self._sleepers.status(sequence) if self._sleepers is not None else ("awake", None)

    def session_states(self, num_open: int) -> dict[str, int]:
        """How many of `num_open` open sessions are in each state."""
        if self._sleepers is not None:
            return self._sleepers.count()
        return {state.value: num_open * (state is State.AWAKE) for state in State}

    @property
    def num_running(self) -> int:
        """Sessions that are awake and have something to compute; from any thread."""
        return len(self._jobs)

    def counters(self) -> dict[str, int]:
        """How often sessions fell asleep and woke, since the start."""
        sleepers = self._sleepers
        return {
            "sessions_slept": sleepers.num_slept if sleepers is not None else 0,
            "sessions_woken": sleepers.num_woken if sleepers is not None else 0,
        }

    def _hold(self, sequence: Sequence) -> None:
        self._flights.forget(sequence)
        if self._sleepers is not None:
            self._sleepers.hold(sequence)

    def _hold_as_it_is(self, sequence: Sequence, held: Reply[None]) -> None:
        def hold() -> None:
            self._hold(sequence)
            held.set_result(None)

        if self._sleepers is None:
            hold()
        else:
            self._sleepers.when_settled(sequence, hold)

    def _release(self, sequence: Sequence) -> None:
        if self._sleepers is not None:
            self._sleepers.release(sequence)

    def close(self) -> None:
        """Finish the step in hand, fail what waits with `EngineClosedError`, end the thread."""
        with self._condition:
            self._closed = True
            self._condition.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _main(self) -> None:
        if self._num_threads is not None:
            torch.set_num_threads(self._num_threads)
        error: BaseException = EngineClosedError(
            "The engine was closed before this was done. Nothing was lost."
        )
        try:
            while self._receive():
                if self._sleepers is not None:
                    self._let_come_and_go(self._sleepers)
                self._take_step()
                self._wake_all()
            if self._given_flights is not None:
                self._flights.drain()
        except BaseException as caught:
            # A mistake of our own: whoever waits must not wait for ever.
            error = caught
            with self._condition:
                self._closed = True
        self._fail_all(error)
        self._wake_all()

    def _let_come_and_go(self, sleepers: Sleepers) -> None:
        sleepers.advance(self._may_leave, self._interrupt)
        is_idle = not self._is_flying() and not self._may_launch()
        if is_idle and sleepers.wait_for_copies():
            # Sooner than whoever looks again in half a millisecond.
            sleepers.advance(self._may_leave, self._interrupt)

    def _take_step(self) -> None:
        if self._may_launch():
            self._launch()
        elif self._is_flying() and (self._flights.is_full or self._flights.has_landed):
            # Full: nothing else can be done before the oldest step has landed.
            self._wake_all()
            self._flights.land()

    def _wake_all(self) -> None:
        """Tell event loops what has arrived: once for all that a round brought."""
        for mailbox in self._to_wake:
            mailbox.wake()
        self._to_wake.clear()

    def _receive(self) -> bool:
        """Take what has arrived, waiting if there is nothing to do; False when closed."""
        while not self._wait():
            self._has_idle_work = self._executor.between_steps(idle=True)
        with self._condition:
            if self._closed:
                return False
            calls, jobs = list(self._calls), list(self._inbox)
            self._calls.clear()
            self._inbox.clear()
        try:
            self._carry_out(calls, jobs)
        except BaseException as error:
            # A mistake of our own: nobody else knows of these any more.
            for reply in [*(reply for _, reply in calls), *(job.future for job in jobs)]:
                if not reply.done():
                    reply.set_exception(error)
            raise
        return True

    def _carry_out(self, calls: list[tuple[Call, Reply[Any]]], jobs: list[Job]) -> None:
        for call, reply in calls:
            self._call_when_awake(call, reply)
        for job in jobs:
            self._admit_when_awake(job)
        if not self._is_flying():
            # The next step may be carried out where it is launched, and take its time.
            self._wake_all()

    def _wait(self) -> bool:
        """Wait until there is something to do; False: only what can be done when idle."""
        with self._condition:
            while True:
                flying = self._is_flying()
                # Woken by each caller the thread would take the interpreter from the next one.
                self._notify_at = max(1, self._flights.num_awaited) if flying else 1
                if self._closed or self._has_mail() or self._has_work():
                    return True
                sleepers = self._sleepers
                has_business = sleepers is not None and sleepers.has_business
                if self._has_idle_work and not flying and not has_business:
                    return False
                look_s = sleepers.next_look_s if sleepers is not None else None
                holds_back = len(self._scheduler) > 0 and bool(self._just_served)
                is_soon = flying or has_business or holds_back
                timeout_s = POLL_S if is_soon else look_s
                if not self._condition.wait(timeout_s) and (has_business or not flying):
                    # Who was to come or to go may have; and who rests may rest long enough.
                    return True

    def _has_mail(self) -> bool:
        return bool(self._calls) or len(self._inbox) >= self._notify_at

    def _is_flying(self) -> bool:
        return self._given_flights is not None and len(self._flights) > 0

    def _has_work(self) -> bool:
        if self._given_flights is None:
            return False
        return self._may_launch() or self._flights.is_full or self._flights.has_landed

    def _may_launch(self) -> bool:
        if self._given_flights is None or not self._flights.may_launch:
            return False
        if len(self._scheduler) == 0:
            return self._flights.can_go_on
        return not self._awaits_callers()

    def _awaits_callers(self) -> bool:
        """Whether those who were handed a token just now are about to ask for the next.

        With nothing under way the first to ask would else have a step of his own, and all others
        the one after it.
        """
        if not self._just_served:
            return False
        if self._is_flying() or time.monotonic() - self._served_s >= PATIENCE_S:
            self._just_served.clear()
        return bool(self._just_served)

    def _may_leave(self, sequence: Sequence) -> bool:
        """Whether nothing of a sequence is under way; what is, is not awaited any more."""
        self._flights.forget(sequence)
        return not self._flights.is_flying(sequence)

    def _interrupt(self, sequence: Sequence) -> None:
        """Take what a sequence has to compute out of the queue until it is awake again."""
        work = self._scheduler.take_back(sequence)
        if work is None or self._sleepers is None:
            return
        job = self._jobs.pop(work)
        self._instruments.counted.add("preemptions")
        self._sleepers.end_job(sequence)
        self._sleepers.wait_for_turn(
            sequence, lambda: self._go_on(job), lambda error: self._refuse(job.future, error)
        )

    def _go_on(self, job: Job) -> None:
        self._begin(job)
        self._scheduler.add(job.work)

    def _begin(self, job: Job) -> None:
        self._jobs[job.work] = job
        if self._sleepers is not None:
            self._sleepers.begin_job(job.work.sequence)

    def _end(self, job: Job) -> None:
        if self._jobs.pop(job.work, None) is not None and self._sleepers is not None:
            self._sleepers.end_job(job.work.sequence)

    def _refuse(self, reply: Reply[Any], error: BaseException) -> None:
        if not reply.done():
            reply.set_exception(error)

    def _admit_when_awake(self, job: Job) -> None:
        sequence = job.work.sequence
        self._just_served.discard(sequence)
        if self._sleepers is None or self._sleepers.is_at_work(sequence):
            self._admit(job)
            return
        self._sleepers.when_awake(
            sequence,
            lambda: self._admit(job),
            lambda error: self._refuse(job.future, error),
            lambda: not job.future.cancelled(),
        )

    def _admit(self, job: Job) -> None:
        if not job.future.set_running_or_notify_cancel():
            return
        work = job.work
        needs_head = work.wanted is Wanted.SCORES or (
            work.wanted is Wanted.LOGITS and work.num_tokens == 1
        )
        try:
            if work.sequence.head_is_written and not needs_head:
                self._executor.advance(work.sequence, 1)
                work.num_tokens -= 1
        except BaseException as error:
            job.future.set_exception(error)
            return
        if work.num_tokens == 0:
            job.future.set_result(None)
            return
        self._begin(job)
        try:
            is_claimed = self._flights.claim(job)
        except BaseException as error:
            self._fail(job, error)
            return
        if is_claimed:
            self._note_begun([job])
        else:
            self._scheduler.add(work)

    def _call_when_awake(self, call: Call, reply: Reply[Any]) -> None:
        if self._sleepers is None or call.sequence is None:
            self._call(call, reply)
            return
        self._sleepers.when_awake(
            call.sequence,
            lambda: self._call(call, reply),
            lambda error: self._refuse(reply, error),
            lambda: not reply.cancelled(),
        )

    def _call(self, call: Call, reply: Reply[Any]) -> None:
        if not reply.set_running_or_notify_cancel():
            return
        if not call.is_aside and self._given_flights is not None:
            # A call may give blocks back, or read what a step writes.
            self._flights.drain()
            self._wake_all()
        try:
            reply.set_result(call.function())
        except BaseException as error:
            reply.set_exception(error)

    def _launch(self) -> None:
        taken = self._scheduler.schedule(
            self._executor.max_sequences, others_decode=self._flights.can_go_on
        )
        asked = [(self._jobs[work], step) for work, step in taken]
        self._note_begun(job for job, _ in asked)
        self._flights.launch(asked)
        self._executor.between_steps(idle=False)
        # On a CPU a step has landed when it was launched.
        while self._flights.has_landed:
            self._flights.land()

    def _note_begun(self, jobs: Iterable[Job]) -> None:
        """Tell how long jobs waited for their first step."""
        now_s = time.monotonic()
        for job in jobs:
            if job.asked_s is not None:
                self._instruments.queue_s.observe(now_s - job.asked_s)
                job.asked_s = None

    def _counted(self, job: Job, query_len: int) -> bool:
        if self._sleepers is not None:
            self._sleepers.computed(job.work.sequence, query_len)
        return self._scheduler.postprocess(job.work, query_len)

    def _deliver(self, job: Job, result: StepResult, is_last: bool) -> None:
        if job.future.done():
            return
        if result.scores is not None:
            job.scores.append(result.scores)
        if not is_last:
            return
        try:
            value = self._value(job, result)
        except BaseException as error:
            self._fail(job, error)
            return
        self._end(job)
        if job.operation.wanted is Wanted.LOGITS:
            self._just_served.add(job.work.sequence)
            self._served_s = time.monotonic()
        job.future.set_result(value)

    def _fail(self, job: Job, error: BaseException) -> None:
        self._scheduler.remove(job.work)
        self._end(job)
        if not job.future.done():
            job.future.set_exception(error)

    def _value(self, job: Job, result: StepResult) -> object:
        if result.error is not None:
            raise result.error
        match job.operation.wanted:
            case Wanted.SCORES:
                return torch.cat(job.scores)
            case Wanted.LOGITS:
                if result.token is not None:
                    return result.token
                assert result.logits is not None and job.operation.on_logits is not None
                return job.operation.on_logits(result.logits)
            case Wanted.NOTHING:
                return None

    def _fail_all(self, error: BaseException) -> None:
        self._scheduler.drain()
        if self._sleepers is not None:
            self._sleepers.close(error)
        for job in [*self._jobs.values(), *self._inbox]:
            if not job.future.done():
                job.future.set_exception(error)
        for _, reply in self._calls:
            if not reply.done():
                reply.set_exception(error)
        self._jobs.clear()
