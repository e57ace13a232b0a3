"""What a tier holds, and the counters of what happened in it.

Invariant: every counter exists, with value 0, from the start, so that a metric that never moves is
seen as 0 and not as missing. This module knows no tier.
"""

import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TierUsage:
    """Blocks and bytes that a tier holds, and its limit in bytes."""

    num_blocks: int = 0
    num_bytes: int = 0
    limit_bytes: int = 0


class Counters:
    """Named whole numbers that only grow; safe to use from several threads.

    Args:
        names: all names there will be.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self._values = dict.fromkeys(names, 0)
        # Whoever is collected as garbage in the middle of it may count, too, on the same thread.
        self._lock = threading.RLock()

    def add(self, name: str, amount: int = 1) -> None:
        """Add `amount` to a counter that was named at the start."""
        with self._lock:
            assert name in self._values, f"no counter is called {name!r}"
            self._values[name] += amount

    def add_all(self, amounts: Mapping[str, int]) -> None:
        """Add to several counters at once: nobody sees some of it."""
        with self._lock:
            for name, amount in amounts.items():
                assert name in self._values, f"no counter is called {name!r}"
                self._values[name] += amount

    def snapshot(self) -> dict[str, int]:
        """A copy of all counters."""
        with self._lock:
            return dict(self._values)
