"""Steps that are under way: launched and landed in order, the next before the last was seen.

On a device that works by itself a decode step need not wait for the host: the token that the step
before chose is on the device already. So as soon as every row of the newest step has a caller, the
step after it is launched, for the same sequences, *ahead* of anybody asking for it; the caller who
then asks finds it running or done (`claim`). What nobody asks for costs a step and changes nothing:
the KV it wrote is that of a token which the caller was given, and is written again if need be.

At most two steps are under way. Only the engine's thread comes here.
"""

import time
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from streamkv.batch import Batch, Flight, SequenceStep, StepResult, Wanted
from streamkv.errors import StreamKVError
from streamkv.operations import Compute
from streamkv.reply import Reply
from streamkv.scheduler import Work
from streamkv.sequence import Sequence
from streamkv.window import Window

MAX_UNDER_WAY = 2

PATIENCE_S = 0.001
"""How long a step that is done is waited with for those who were handed a token just now and have
not asked for the next: without them sessions fall apart into groups that take turns. Where the
device is slower than its callers nobody is waited for."""


@dataclass(slots=True, eq=False)
class Job:
    """An operation under way and who waits for it.

    Attributes:
        operation: what was asked for.
        work: what is left of it.
        future: where its result goes.
        scores: of its steps so far.
        asked_s: since when it waits for its first step; `None` once that is under way.
    """

    operation: Compute
    work: Work
    future: Reply[Any]
    scores: list[Tensor] = field(default_factory=list)
    asked_s: float | None = None

    def launched(self) -> None:
        """Its last step is under way: from now on the result goes to a reply of its own."""
        waiting, self.future = self.future, Reply()
        waiting.set_result(self.future)


class LaunchExecutor(Protocol):
    """What launches steps."""

    @property
    def max_sequences(self) -> int:
        """Sequences of one step, at most."""

    def prepare(self, step: SequenceStep) -> None:
        """Make live the blocks that a part of a step writes."""

    def launch(self, batch: Batch) -> Flight:
        """Start the batch."""

    def postprocess(self, step: SequenceStep) -> None:
        """Count its tokens as computed; seal full blocks, drop expired ones."""


@dataclass(slots=True, eq=False)
class _Row:
    """One sequence in a step that is under way or landed.

    Attributes:
        step: what is computed.
        job: who asked for it; `None`: nobody yet.
        window: in force when it was launched.
        parent: the row whose token it goes on from.
        result: once it has landed.
        is_last: the job's work ends with it.
        source: where the token after it is on the device; `None`: nowhere, or tried already.
        recalled: version of the old blocks that it attends to.
    """

    step: SequenceStep
    job: Job | None
    window: Window
    parent: "_Row | None" = None
    result: StepResult | None = None
    is_last: bool = True
    source: int | None = None
    recalled: int = field(init=False)

    def __post_init__(self) -> None:
        self.recalled = self.step.sequence.table.recalled.version


class Flights:
    """Launches and lands steps.

    Args:
        executor: what runs them.
        counted: called with a job whose step is under way and the tokens of it; whether the job's
            work ends with it.
        deliver: called with a job, the result of a step, and whether it is the last one.
        fail: called with a job and the error that its step ended with.
        clock: seconds.
        mixes: a step may have both parts of one query and a longer one.
    """

    def __init__(
        self,
        executor: LaunchExecutor,
        counted: Callable[[Job, int], bool],
        deliver: Callable[[Job, StepResult, bool], None],
        fail: Callable[[Job, BaseException], None],
        clock: Callable[[], float] = time.monotonic,
        mixes: bool = True,
    ) -> None:
        self._clock = clock
        self._mixes = mixes
        self._patient_with: tuple[Flight, float] | None = None
        self._executor = executor
        self._counted = counted
        self._deliver = deliver
        self._fail = fail
        self._under_way: deque[tuple[Flight, list[_Row]]] = deque()
        self._ahead: dict[Sequence, _Row] = {}

    def __len__(self) -> int:
        return len(self._under_way)

    @property
    def is_full(self) -> bool:
        """Whether nothing may be launched before the oldest step has landed."""
        return len(self._under_way) >= MAX_UNDER_WAY

    @property
    def may_launch(self) -> bool:
        """Whether waiting longer would not make the next step larger."""
        if not self._under_way:
            return True
        flight, rows = self._under_way[-1]
        if self.is_full:
            return False
        if all(row.job is not None for row in rows):
            return True
        return _is_done(flight) and self._has_waited(flight)

    def _has_waited(self, flight: Flight) -> bool:
        """Whether a step that is done was waited with for long enough."""
        now_s = self._clock()
        if self._patient_with is None or self._patient_with[0] is not flight:
            self._patient_with = flight, now_s
        return now_s - self._patient_with[1] >= PATIENCE_S

    @property
    def can_go_on(self) -> bool:
        """Whether the newest step has rows that can go on without being asked."""
        if not self._under_way or self.is_full:
            return False
        return any(_goes_on(row) for row in self._under_way[-1][1])

    def is_flying(self, sequence: Sequence) -> bool:
        """Whether a step of a sequence is under way."""
        return any(row.step.sequence is sequence for _, rows in self._under_way for row in rows)

    @property
    def num_awaited(self) -> int:
        """Rows of the newest step that nobody has asked for yet."""
        if not self._under_way:
            return 0
        return sum(row.job is None for row in self._under_way[-1][1])

    @property
    def has_landed(self) -> bool:
        """Whether the oldest step is done."""
        return bool(self._under_way) and _is_done(self._under_way[0][0])

    def claim(self, job: Job) -> bool:
        """Give a job the row that was launched ahead for it, if there is one that fits."""
        work = job.work
        row = self._ahead.pop(work.sequence, None)
        if row is None or not _answers(row, work):
            return False
        # A row that kept the one before would keep the whole stream.
        row.job, row.parent = job, None
        try:
            self._postprocess(row, job)
        except BaseException:
            row.source = None
            raise
        if row.result is not None:
            self._deliver(job, row.result, True)
        return True

    def launch(self, asked: Many[tuple[Job, SequenceStep]]) -> None:
        """Start a step: what was asked for, and what will be."""
        rows = [
            _Row(step, job, step.sequence.window)
            for job, step in asked
            if self._prepared(step, job)
        ]
        asked_for = {row.step.sequence for row in rows}
        if self._mixes or all(row.step.query_len == 1 for row in rows):
            rows = [*self._next_rows(asked_for), *rows]
        # Longer parts come last in a packed row.
        rows.sort(key=lambda row: row.step.query_len > 1)
        if rows:
            self._launch(rows)

    def _launch(self, rows: list[_Row]) -> None:
        try:
            flight = self._executor.launch(Batch(tuple(row.step for row in rows)))
        except BaseException as error:
            self._not_launched(rows, error)
            return
        self._under_way.append((flight, rows))
        for row, source in zip(rows, flight.sources, strict=True):
            row.source = source
            if row.job is None:
                self._ahead[row.step.sequence] = row
            else:
                self._count(row, row.job)

    def _not_launched(self, rows: list[_Row], error: BaseException) -> None:
        """Find out whose part is to blame: launch each by itself, of those that were asked for."""
        for _, newest in self._under_way:
            for row in newest:
                # What the device had chosen may be overwritten.
                row.source = None
        if len(rows) == 1:
            self._fail_all(rows, error)
            return
        for row in rows:
            self.drain()
            if row.job is not None and not row.job.future.done():
                self._launch([row])

    def forget(self, sequence: Sequence) -> None:
        """Nobody will ask for what was launched ahead for a sequence."""
        self._ahead.pop(sequence, None)

    def land(self) -> None:
        """Wait for the oldest step and hand out its results."""
        flight, rows = self._under_way.popleft()
        try:
            results = flight.results()
        except BaseException as error:
            self._fail_all(rows, error)
            return
        for row, result in zip(rows, results, strict=True):
            row.result = result
            if row.job is not None:
                self._deliver(row.job, result, row.is_last)

    def drain(self) -> None:
        """Land everything."""
        while self._under_way:
            self.land()

    def _prepared(self, step: SequenceStep, job: Job) -> bool:
        try:
            self._executor.prepare(step)
        except BaseException as error:
            self._fail(job, error)
            return False
        return True

    def _count(self, row: _Row, job: Job) -> None:
        """What a job's step leaves behind on the host; the device does it in this order anyway."""
        try:
            self._postprocess(row, job)
            row.is_last = self._counted(job, row.step.query_len)
        except BaseException as error:
            # Its caller goes on to something else.
            row.source = None
            self._fail(job, error)
            return
        if row.is_last and row.step.wanted is Wanted.NOTHING:
            # There is nothing to wait for: what follows is carried out after it anyway.
            self._deliver(job, StepResult(), True)
        elif row.is_last and job.operation.resolves_at_launch and not job.future.done():
            job.launched()

    def _postprocess(self, row: _Row, job: Job) -> None:
        self._executor.postprocess(row.step)
        if job.operation.after_step is not None:
            job.operation.after_step()

    def _next_rows(self, asked: set[Sequence]) -> list[_Row]:
        """Rows that go on from the newest step, of sequences that were not asked for."""
        found: list[_Row] = []
        if not self._under_way:
            return found
        rows = self._under_way[-1][1]
        rows = [row for row in rows if _goes_on(row) and row.step.sequence not in asked]
        room = self._executor.max_sequences - len(asked)
        # Without room for all those go on that had to wait for this step: they lie at its end.
        for row in rows[max(0, len(rows) - room) :]:
            step, row.source = self._step_after(row.step, row.source), None
            if step is not None:
                found.append(_Row(step, None, row.window, parent=row))
        return found

    def _step_after(self, step: SequenceStep, source: int | None) -> SequenceStep | None:
        sequence, start = step.sequence, step.start + step.query_len
        boundary = sequence.next_boundary
        if boundary is not None and boundary <= start:
            return None
        ahead = SequenceStep(sequence, 1, Wanted.LOGITS, step.params, start, source)
        try:
            self._executor.prepare(ahead)
        except StreamKVError:
            # No room, or a writer that stopped: whoever asks for the step will hear of it.
            return None
        return ahead

    def _fail_all(self, rows: list[_Row], error: BaseException) -> None:
        for row in rows:
            if self._ahead.get(row.step.sequence) is row:
                del self._ahead[row.step.sequence]
            if row.job is not None:
                self._fail(row.job, error)


def _is_done(flight: Flight) -> bool:
    """Whether nothing has to be waited for, be it for results or for an error."""
    try:
        return flight.done()
    except Exception:
        return True


def _goes_on(row: _Row) -> bool:
    """Whether the next token of a row can be computed before it is asked for."""
    return row.job is not None and row.source is not None


def _answers(row: _Row, work: Work) -> bool:
    """Whether a row that was launched ahead computes what is now asked for."""
    step, sequence = row.step, work.sequence
    before = row.parent.result if row.parent is not None else None
    if before is None or before.token is None:
        return False
    return (
        work.wanted is Wanted.LOGITS
        and work.num_tokens == 1
        and work.params == step.params
        and sequence.num_computed == step.start
        and sequence.window == row.window
        and sequence.table.recalled.version == row.recalled
        and sequence.next_ids(1) == [before.token.token_id]
    )
