"""How fast the engine computes is taken from steps of whole blocks, and from nothing else."""

from collections.abc import Sequence as Many

import pytest

from streamkv import metered
from streamkv.batch import Batch, SequenceStep, StepResult
from streamkv.cost_gate import CostGate
from streamkv.metered import MeteredRunner
from streamkv.sequence import Sequence
from streamkv.tiers.spec import BlockKey
from streamkv.window import Window


class Clock:
    """Seconds that a test sets."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def monotonic(self) -> float:
        return self.now_s


class SlowFlight:
    """A step that ends when its results are asked for, at a time that is given."""

    sources: Many[int | None] = (None,)

    def __init__(self, clock: Clock, ends_s: float, device_s: float | None) -> None:
        self._clock = clock
        self._ends_s = ends_s
        self._device_s = device_s

    def device_s(self) -> float | None:
        return self._device_s

    def done(self) -> bool:
        return self._clock.now_s >= self._ends_s

    def results(self) -> list[StepResult]:
        self._clock.now_s = max(self._clock.now_s, self._ends_s)
        return [StepResult()]


class SlowRunner:
    """Takes a second for a step, one after the other."""

    max_sequences = 3

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._free_s = 0.0
        self.device_s: float | None = None
        self.closed = False

    def launch(self, batch: Batch) -> SlowFlight:
        self._free_s = max(self._clock.now_s, self._free_s) + 1.0
        return SlowFlight(self._clock, self._free_s, self.device_s)

    def wait_until_fast(self) -> bool:
        return True

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(metered, "time", clock)
    return clock


def batch_of(num_tokens: int) -> Batch:
    sequence = Sequence(1, Window(64), 64, BlockKey(b"r" * 16))
    sequence.append([1] * num_tokens)
    return Batch((SequenceStep(sequence, num_tokens),))


def test_the_first_step_of_all_is_not_counted(clock: Clock) -> None:
    gate = CostGate()
    runner = MeteredRunner(SlowRunner(clock), gate)
    clock.now_s += 50.0
    runner.launch(batch_of(500)).results()
    assert gate.compute_s(500) is None
    runner.launch(batch_of(500)).results()
    assert gate.compute_s(500) == pytest.approx(1.0)


def warm_runner(clock: Clock, gate: CostGate) -> MeteredRunner:
    """One that has run a step."""
    runner = MeteredRunner(SlowRunner(clock), gate)
    runner.launch(batch_of(500)).results()
    return runner


def test_a_step_counts_from_its_launch_to_its_end(clock: Clock) -> None:
    gate = CostGate()
    runner = warm_runner(clock, gate)
    clock.now_s += 5.0
    flight = runner.launch(batch_of(500))
    assert not flight.done() and list(flight.sources) == [None]
    assert gate.compute_s(500) is None
    assert len(flight.results()) == 1 and flight.done()
    assert gate.compute_s(500) == pytest.approx(1.0)


def test_steps_in_a_row_do_not_count_the_time_of_those_before(clock: Clock) -> None:
    gate = CostGate()
    runner = warm_runner(clock, gate)
    flights = [runner.launch(batch_of(500)) for _ in range(4)]
    for flight in flights:
        flight.results()
    assert gate.compute_s(500) == pytest.approx(1.0)


def test_who_comes_late_for_a_step_does_not_make_it_longer(clock: Clock) -> None:
    """A device says how long it was at it, also while whoever waits is held up by a disk."""
    gate = CostGate()
    slow = SlowRunner(clock)
    runner = MeteredRunner(slow, gate)
    slow.device_s = 0.25
    for _ in range(3):
        flight = runner.launch(batch_of(500))
        clock.now_s += 9.0
        flight.results()
        assert flight.device_s() == 0.25
    assert gate.compute_s(500) == pytest.approx(0.25)


def test_short_steps_are_not_timed(clock: Clock) -> None:
    gate = CostGate()
    runner = warm_runner(clock, gate)
    flight = runner.launch(batch_of(63))
    assert isinstance(flight, SlowFlight)
    flight.results()
    assert gate.compute_s(1) is None


def test_all_else_is_the_runners(clock: Clock) -> None:
    inner = SlowRunner(clock)
    runner = MeteredRunner(inner, CostGate())
    assert runner.max_sequences == 3 and runner.wait_until_fast()
    runner.close()
    assert inner.closed
