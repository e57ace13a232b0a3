"""The engine's own thread: schedule, run, postprocess.

Callers on any thread submit a `Compute` or a `Call` and get a future. Everything that touches the
model, the pools or a journal in the course of a step happens on this one thread, so none of it
needs a lock. A step that fails fails its own caller and nobody else.
"""

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from streamkv.batch import Batch, StepResult, Wanted
from streamkv.errors import EngineClosedError
from streamkv.scheduler import Scheduler, Work
from streamkv.sequence import Sequence


@dataclass(frozen=True, slots=True, eq=False)
class Compute:
    """Compute `num_tokens` pending tokens of `sequence`.

    Attributes:
        sequence: whose tokens.
        num_tokens: how many.
        wanted: NOTHING: the future's result is `None`; SCORES: float32 [n] log-probabilities;
            LOGITS: what `on_logits` returns.
        on_logits: called on the engine's thread with float32 [vocab_size].
        after_step: called on the engine's thread after each step, blocks already sealed.
    """

    sequence: Sequence
    num_tokens: int
    wanted: Wanted = Wanted.NOTHING
    on_logits: Callable[[Tensor], object] | None = None
    after_step: Callable[[], None] | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """Run a function on the engine's thread, between two steps."""

    function: Callable[[], object]


class StepExecutor(Protocol):
    """What the loop drives: makes blocks live, runs the model, seals and drops blocks."""

    def prepare(self, batch: Batch) -> None:
        """Make live the blocks that the batch writes."""

    def run(self, batch: Batch) -> list[StepResult]:
        """Compute the batch."""

    def postprocess(self, batch: Batch) -> None:
        """Count the tokens as computed; seal full blocks, drop expired ones."""

    def advance(self, sequence: Sequence, num_tokens: int) -> None:
        """The same for tokens whose KV exists already."""


@dataclass(slots=True, eq=False)
class _Job:
    operation: Compute
    work: Work
    future: "Future[Any]"
    scores: list[Tensor] = field(default_factory=list)


class StepLoop:
    """Owns the engine's thread.

    Args:
        executor: what a step does; may be given later, by `drive`, to be made on the thread.
        prefill_chunk: tokens of one sequence in one step, at most.
        num_threads: torch threads of the step, or `None`.
    """

    def __init__(
        self, executor: StepExecutor | None, prefill_chunk: int, num_threads: int | None = None
    ) -> None:
        self._given_executor = executor
        self._scheduler = Scheduler(prefill_chunk)
        self._num_threads = num_threads
        self._jobs: dict[Work, _Job] = {}
        self._calls: deque[tuple[Call, Future[Any]]] = deque()
        self._inbox: deque[_Job] = deque()
        self._condition = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._main, name="streamkv-engine", daemon=True)
        self._thread.start()

    @property
    def _executor(self) -> StepExecutor:
        assert self._given_executor is not None, "a step before there is an executor"
        return self._given_executor

    def drive(self, executor: StepExecutor) -> None:
        """Take steps with `executor` from now on."""
        self._given_executor = executor

    def submit(self, operation: Compute | Call) -> "Future[Any]":
        """Queue an operation.

        Raises:
            EngineClosedError: the loop is closed.
        """
        future: Future[Any] = Future()
        with self._condition:
            if self._closed:
                raise EngineClosedError("The engine is closed. Open a new Engine.")
            if isinstance(operation, Call):
                self._calls.append((operation, future))
            else:
                work = Work(operation.sequence, operation.num_tokens, operation.wanted)
                self._inbox.append(_Job(operation, work, future))
            self._condition.notify()
        return future

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
        while self._receive():
            scheduled = self._scheduler.schedule()
            if scheduled is not None:
                self._step(*scheduled)
        self._fail_all()

    def _receive(self) -> bool:
        """Take what has arrived, waiting if there is nothing to do; False when closed."""
        with self._condition:
            while not (self._closed or self._inbox or self._calls or len(self._scheduler)):
                self._condition.wait()
            if self._closed:
                return False
            calls, jobs = list(self._calls), list(self._inbox)
            self._calls.clear()
            self._inbox.clear()
        for call, future in calls:
            self._call(call, future)
        for job in jobs:
            if job.future.set_running_or_notify_cancel():
                self._admit(job)
        return True

    def _admit(self, job: _Job) -> None:
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
        else:
            self._jobs[work] = job
            self._scheduler.add(work)

    def _call(self, call: Call, future: "Future[Any]") -> None:
        if not future.set_running_or_notify_cancel():
            return
        try:
            future.set_result(call.function())
        except BaseException as error:
            future.set_exception(error)

    def _step(self, work: Work, batch: Batch) -> None:
        job = self._jobs[work]
        try:
            self._executor.prepare(batch)
            [result] = self._executor.run(batch)
            self._executor.postprocess(batch)
            if job.operation.after_step is not None:
                job.operation.after_step()
            if result.scores is not None:
                job.scores.append(result.scores)
            finished = self._scheduler.postprocess(work, batch)
            value = self._value(job, result) if finished else None
        except BaseException as error:
            self._scheduler.remove(work)
            del self._jobs[work]
            job.future.set_exception(error)
            return
        if finished:
            del self._jobs[work]
            job.future.set_result(value)

    def _value(self, job: _Job, result: StepResult) -> object:
        match job.operation.wanted:
            case Wanted.SCORES:
                return torch.cat(job.scores)
            case Wanted.LOGITS:
                assert result.logits is not None and job.operation.on_logits is not None
                return job.operation.on_logits(result.logits)
            case Wanted.NOTHING:
                return None

    def _fail_all(self) -> None:
        error = EngineClosedError("The engine was closed before this was done. Nothing was lost.")
        self._scheduler.drain()
        for job in [*self._jobs.values(), *self._inbox]:
            if not job.future.done():
                job.future.set_exception(error)
        for _, future in self._calls:
            if not future.done():
                future.set_exception(error)
        self._jobs.clear()
