"""Following what a reading process does, step by step, while showing it.

Invariant: a step is followed from its first event to its `StepDone`; nothing that is said gets lost
between two steps.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator

from streamkv.cli.console import Output
from streamkv.cli.demo_display import ReadingDisplay
from streamkv.cli.demo_job import Event, Note, Reading, Ready, StepDone, Wrote

RECENT_S = 10.0
"""A rate is that of the last seconds: other programs come and go."""


class Speed:
    """Measures one stretch of reading, from now on.

    Args:
        clock: seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began = clock()
        self._recent = deque([(self._began, 0)])

    @property
    def elapsed_s(self) -> float:
        """Seconds since it began."""
        return self._clock() - self._began

    def tokens_per_s(self, reading: Reading) -> float:
        """Rate of the last `RECENT_S` seconds, or since the report before them."""
        now = self._clock()
        while len(self._recent) > 1 and self._recent[1][0] <= now - RECENT_S:
            self._recent.popleft()
        since, num_tokens = self._recent[0]
        self._recent.append((now, reading.num_tokens))
        return (reading.num_tokens - num_tokens) / max(now - since, 1e-9)


class Follower:
    """Follows one process.

    Args:
        events: what it says.
        output: of the command.
        clock: seconds.
    """

    def __init__(
        self, events: Iterator[Event], output: Output, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._events = events
        self._output = output
        self._clock = clock

    def ready(self) -> Ready:
        """Wait until its session is open; shows what takes long meanwhile."""
        with self._output.busy("Starting a process and loading the model ..."):
            for event in self._events:
                if isinstance(event, Note):
                    self._output.line(f"   {event.text}")
                if isinstance(event, Ready):
                    return event
        raise AssertionError("a process ends with an event or an error")

    def read(self, what: str, num_chars: int) -> tuple[Reading | None, float]:
        """Follow a step that reads up to `num_chars` characters.

        Returns:
            Where it ended (`None` if there was nothing left to read) and its tokens per second.
        """
        speed, last, rate = Speed(self._clock), None, 0.0
        with ReadingDisplay(self._output, what, self._clock) as display:
            for event in self._step():
                if isinstance(event, Reading):
                    last, rate = event, speed.tokens_per_s(event)
                    display.update(event, num_chars, rate)
            if last is not None:
                display.end(last, num_chars, rate)
        return last, rate

    def quote(self) -> list[Wrote]:
        """Follow a step that generates; its text is shown as it comes, on one line."""
        tokens = []
        self._output.fragment("   > ")
        for event in self._step():
            if isinstance(event, Wrote):
                tokens.append(event)
                self._output.fragment(event.text.replace("\n", " "))
        self._output.fragment("\n")
        return tokens

    def _step(self) -> Iterator[Event]:
        for event in self._events:
            if isinstance(event, StepDone):
                return
            yield event
