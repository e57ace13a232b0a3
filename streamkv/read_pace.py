"""How long reading took that is done a piece at a time, between the steps of others.

What is under way goes on while others take their steps, unseen: if they took most of the time, it
is not known how long reading takes, because a guess either way would mislead whoever compares
speeds. No I/O but a clock.
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
        self._lap_s = 0.0
        self._entered_s = 0.0
        self._spent_s = 0.0

    def __enter__(self) -> None:
        self._entered_s = self._clock()
        if self._begun_s is None:
            self._begun_s = self._lap_s = self._entered_s

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._spent_s += self._clock() - self._entered_s

    def lap_s(self) -> float:
        """Seconds since the lap before, or since it was first entered; all laps are the whole."""
        begun_s, self._lap_s = self._lap_s, self._clock()
        return self._lap_s - begun_s

    def is_known(self) -> bool:
        """Whether others spent no more of the time up to now than the reader himself.

        Only between entering and leaving. Of the whole, because a single lap may be short when
        what was under way has ended together.
        """
        assert self._begun_s is not None
        now_s = self._clock()
        return 2 * (self._spent_s + now_s - self._entered_s) >= now_s - self._begun_s
