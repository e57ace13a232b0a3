"""How long reading took that is done a piece at a time, between the steps of others.

What is under way goes on while others take their steps, unseen: then its time is not known, and
nothing is told, because a guess either way would mislead whoever compares speeds. No I/O but a
clock.
"""

import time
from collections.abc import Callable
from types import TracebackType


class ReadPace:
    """Times pieces of reading; a context manager around what the reader itself does.

    Args:
        clock: seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._begun_s: float | None = None
        self._entered_s = 0.0
        self._spent_s = 0.0

    def __enter__(self) -> None:
        self._entered_s = self._clock()
        if self._begun_s is None:
            self._begun_s = self._entered_s

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._spent_s += self._clock() - self._entered_s

    def lap_s(self) -> float | None:
        """Seconds since the lap before; `None` if most of it was spent by others.

        Only between entering and leaving.
        """
        assert self._begun_s is not None
        now_s = self._clock()
        elapsed_s = now_s - self._begun_s
        spent_s = self._spent_s + now_s - self._entered_s
        self._begun_s = self._entered_s = now_s
        self._spent_s = 0.0
        return elapsed_s if 2 * spent_s >= elapsed_s else None
