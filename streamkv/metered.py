"""A runner that tells how much it computes, and how fast.

Only steps of a whole block or more are timed: short ones say little about the speed at which a
prefix is computed, and a decode step has no time to spare. A step counts as long as a device says
that it was at it: whoever waits for it may come late, held up by a disk. Where no device says
anything, it counts from its launch, or from the end of the one before it, to its end. The first of
them is not counted: it also makes buffers and handles and loads kernels, which no later one does,
and an engine that has computed little would take itself for slow, and read what it computes sooner.
"""

import time
from collections.abc import Sequence as Many

from streamkv.batch import Batch, Flight, StepResult
from streamkv.cost_gate import CostGate
from streamkv.executor import StepRunner
from streamkv.instruments import Instruments
from streamkv.observed_queries import ObservedQueries

TIMED_TOKENS = 64
"""Tokens of the shortest step that is timed."""


class MeteredRunner:
    """Runs batches on another runner. Only the engine's thread comes here.

    Args:
        runner: what computes; who made it closes it.
        gate: is told tokens and seconds.
        instruments: where steps and their tokens are counted.
    """

    def __init__(
        self, runner: StepRunner, gate: CostGate, instruments: Instruments | None = None
    ) -> None:
        self._runner = runner
        self._gate = gate
        self._instruments = instruments if instruments is not None else Instruments()
        self._ended_s: float | None = None

    @property
    def max_sequences(self) -> int:
        """Sequences of one step, at most."""
        return self._runner.max_sequences

    def launch(self, batch: Batch) -> Flight:
        """Start computing the batch."""
        launched_s = time.monotonic()
        flight = self._runner.launch(batch)
        # One that could not be launched computed nothing.
        num_tokens = self._instruments.launched(batch)
        if num_tokens < TIMED_TOKENS:
            return flight
        return _TimedFlight(flight, self, num_tokens, launched_s)

    def observe(self, seq_id: int, queries: ObservedQueries | None) -> None:
        """Show the queries of a sequence to `queries` from now on."""
        self._runner.observe(seq_id, queries)

    def wait_until_fast(self) -> bool:
        """Wait until the fastest way is ready or given up; whether there is one."""
        return self._runner.wait_until_fast()

    def close(self) -> None:
        """End what the runner has begun in the background."""
        self._runner.close()

    def ended(self, num_tokens: int, launched_s: float, device_s: float | None) -> None:
        """A timed step has ended."""
        now = time.monotonic()
        if self._ended_s is not None:
            waited_s = now - max(launched_s, self._ended_s)
            self._gate.note_computed(num_tokens, waited_s if device_s is None else device_s)
        self._ended_s = now


class _TimedFlight:
    """A step whose end is told."""

    def __init__(
        self, flight: Flight, meter: MeteredRunner, num_tokens: int, launched_s: float
    ) -> None:
        self._flight = flight
        self._meter = meter
        self._num_tokens = num_tokens
        self._launched_s = launched_s

    @property
    def sources(self) -> Many[int | None]:
        """Where the token after each part is on the device, if it is."""
        return self._flight.sources

    def done(self) -> bool:
        """Whether it has ended; never waits."""
        return self._flight.done()

    def results(self) -> list[StepResult]:
        """Wait for its end; one result for each part."""
        results = self._flight.results()
        self._meter.ended(self._num_tokens, self._launched_s, self._flight.device_s())
        return results

    def device_s(self) -> float | None:
        """Once it has ended: seconds that a device was at it."""
        return self._flight.device_s()
