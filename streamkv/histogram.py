"""How often something took how long: counts by size, cheap enough for every token. Pure.

Observing costs a bisection and a few additions under a lock; everything else is left to whoever
looks. Bounds are chosen once, so that histograms of several engines can be added up.
"""

import threading
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate


@dataclass(frozen=True, slots=True)
class Observed:
    """What a histogram has seen.

    Attributes:
        bounds: upper bounds, ascending; one more bucket has no bound.
        counts: of each bucket, values beyond the bound before it and up to its own.
        total: sum of all values.
    """

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    total: float

    @property
    def num_values(self) -> int:
        """How many values were seen."""
        return sum(self.counts)

    @property
    def up_to(self) -> list[int]:
        """Values up to each bound, and all of them at the end."""
        return list(accumulate(self.counts))


class Histogram:
    """Counts values by size; safe to use from several threads.

    Args:
        bounds: upper bounds of the buckets, ascending; a value equal to one belongs to it.
    """

    def __init__(self, bounds: Sequence[float]) -> None:
        assert list(bounds) == sorted(set(bounds)), "bounds have to ascend"
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(bounds) + 1)
        self._total = 0.0
        self._lock = threading.Lock()

    def observe(self, value: float) -> None:
        """Count a value."""
        bucket = bisect_left(self._bounds, value)
        with self._lock:
            self._counts[bucket] += 1
            self._total += value

    def observed(self) -> Observed:
        """What was seen so far."""
        with self._lock:
            return Observed(self._bounds, tuple(self._counts), self._total)
