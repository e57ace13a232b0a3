"""How many threads a decode step takes: all of them, or one when the others' cores are busy.

A step has a barrier after each product, and a barrier waits for the slowest thread. On a quiet
machine two threads read memory twice as fast as one; beside a busy process a thread that was put
aside holds up all the others for whole time slices, and one thread alone is several times faster.
So both are tried now and then and the faster one is taken. Results do not depend on the choice.
Pure: no clock, no threads.
"""

PROBE_EVERY = 32
"""Steps between two tries of the count that is not in use."""

WEIGHT = 0.3
"""Share of the newest time in the running mean."""


class ThreadChoice:
    """Chooses between all threads and one.

    Args:
        num_threads: all of them; at least 1.
    """

    def __init__(self, num_threads: int) -> None:
        assert num_threads >= 1
        self._counts = (num_threads, 1) if num_threads > 1 else (1,)
        self._times: dict[int, float] = {}
        self._num_steps = 0

    def next(self) -> int:
        """Threads of the next step."""
        self._num_steps += 1
        untried = [count for count in self._counts if count not in self._times]
        # Twice, because the first step of all pays for what is touched first.
        if untried and self._num_steps > 2:
            return untried[0]
        best = min(self._counts, key=lambda count: self._times.get(count, 0.0))
        if self._num_steps % PROBE_EVERY == 0 and len(self._counts) > 1:
            return self._counts[1 - self._counts.index(best)]
        return best

    def took(self, num_threads: int, seconds: float) -> None:
        """A step with so many threads took so long."""
        before = self._times.get(num_threads)
        mean = seconds if before is None else (1 - WEIGHT) * before + WEIGHT * seconds
        if self._num_steps > 2:
            self._times[num_threads] = mean
