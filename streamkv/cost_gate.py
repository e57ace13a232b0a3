"""Whether stored blocks are read or computed again: whichever this engine does faster.

Invariant: a wrong estimate costs time, never an answer; both ways lead to the same blocks. Speeds
are those measured so far, newer ones counting more; nothing is read from a clock here, and nothing
is known of blocks, files or models. Safe to use from several threads.
"""

import threading
from collections.abc import Mapping

from streamkv.tiers.policy import Place

ASSUMED_BYTES_PER_S: Mapping[Place, float] = {"gpu": 10e9, "cpu": 5e9, "ssd": 1e9}
"""Speed of a tier of which nothing was read yet: below what was measured on any machine so far."""

ASSUMED_S = 0.01
"""Seconds of reading that an assumption counts as, and after which it counts half: bytes that were
only assumed would otherwise hide for long how slow a tier of small blocks is."""

MEMORY_S = 2.0
"""Seconds of work after which what was measured before counts half."""

REFUSALS_BEFORE_RETRY = 15
"""A tier that was slow once is read again after so many runs that were computed instead."""


class Speed:
    """Amount per second, of late.

    Args:
        assumed_per_s: what to begin with; `None` for nothing.
    """

    def __init__(self, assumed_per_s: float | None = None) -> None:
        self._amount = self._seconds = 0.0
        self._assumed_per_s = assumed_per_s or 0.0
        self._assumed_s = ASSUMED_S if assumed_per_s else 0.0

    @property
    def per_s(self) -> float | None:
        """`None` if nothing was measured or assumed."""
        seconds = self._seconds + self._assumed_s
        if seconds <= 0:
            return None
        return (self._amount + self._assumed_per_s * self._assumed_s) / seconds

    def add(self, amount: float, seconds: float) -> None:
        """Count work that took so long; work that took no time at all tells nothing."""
        if amount <= 0 or seconds <= 0:
            return
        kept = 0.5 ** (seconds / MEMORY_S)
        self._amount = self._amount * kept + amount
        self._seconds = self._seconds * kept + seconds
        self._assumed_s *= 0.5 ** (seconds / ASSUMED_S)


class CostGate:
    """Chooses between reading and computing, and counts what it chose.

    Attributes:
        always_reads: read whatever is stored, however long it takes.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._reading = {place: Speed(speed) for place, speed in ASSUMED_BYTES_PER_S.items()}
        self._computing = Speed()
        self.always_reads = False
        self._refusals = 0
        self._num_reads = 0
        self._num_computes = 0

    def note_read(self, place: Place, num_bytes: int, seconds: float) -> None:
        """Count a read from a tier."""
        with self._lock:
            self._reading[place].add(num_bytes, seconds)

    def note_computed(self, num_tokens: int, seconds: float) -> None:
        """Count a step that computed so many tokens."""
        with self._lock:
            self._computing.add(num_tokens, seconds)

    def read_s(self, num_bytes: Mapping[Place, int]) -> float:
        """Estimated seconds of reading so many bytes of each tier."""
        with self._lock:
            return self._read_s(num_bytes)

    def compute_s(self, num_tokens: int) -> float | None:
        """Estimated seconds of computing so many tokens; `None` if none were computed yet."""
        with self._lock:
            return self._compute_s(num_tokens)

    def chooses_reading(self, num_tokens: int, num_bytes: Mapping[Place, int]) -> bool:
        """Whether to read blocks rather than compute the tokens that they stand for.

        While nothing was computed yet, reading is chosen.

        Args:
            num_tokens: tokens that need not be computed then.
            num_bytes: bytes to read of each tier.
        """
        with self._lock:
            reads = (
                self.always_reads
                or self._is_sooner_read(num_tokens, num_bytes)
                or self._refusals >= REFUSALS_BEFORE_RETRY
            )
            self._refusals = 0 if reads else self._refusals + 1
            self._num_reads += reads
            self._num_computes += not reads
            return reads

    def counters(self) -> dict[str, int]:
        """Runs of blocks that were read, and those computed although they were stored."""
        with self._lock:
            return {"gate_reads": self._num_reads, "gate_computes": self._num_computes}

    def _is_sooner_read(self, num_tokens: int, num_bytes: Mapping[Place, int]) -> bool:
        compute_s = self._compute_s(num_tokens)
        return compute_s is None or self._read_s(num_bytes) <= compute_s

    def _read_s(self, num_bytes: Mapping[Place, int]) -> float:
        total = 0.0
        for place, amount in num_bytes.items():
            speed = self._reading[place].per_s
            assert speed is not None, "every tier begins with an assumption"
            total += amount / speed
        return total

    def _compute_s(self, num_tokens: int) -> float | None:
        speed = self._computing.per_s
        return None if speed is None else num_tokens / speed
