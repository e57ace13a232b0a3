"""How far something has come: a bar on a terminal, a line now and then elsewhere.

Both say rate and time left, on standard error. Nothing is shown within the first two seconds, nor
with --json. It knows only fractions and texts.
"""

import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

from rich.progress import BarColumn, TaskProgressColumn, TextColumn
from rich.progress import Progress as Bar

from streamkv.cli.console import Output

QUIET_S = 2.0
LINE_EVERY_S = 5.0
LEAST_FRACTION = 0.005
"""Done before the time left is more than a guess."""


class ProgressDisplay:
    """A display of one task; a context manager.

    Args:
        output: of the command.
        what: names the task, such as "reading book.txt".
        clock: seconds; a test has its own.
    """

    def __init__(
        self, output: Output, what: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._output = output
        self._what = what
        self._clock = clock
        self._started = self._shown = clock()
        self._first_fraction: float | None = None
        self._bar: Bar | None = None

    def update(self, fraction: float | None, text: str) -> None:
        """Show where the task stands.

        Args:
            fraction: done so far, 0 to 1; `None` if the end is not known.
            text: amount and rate, such as "1,234 tokens, 410 tokens/s".
        """
        if self._first_fraction is None:
            self._first_fraction = fraction
        now = self._clock()
        if self._output.as_json or now - self._started < QUIET_S:
            return
        left = self._time_left(fraction, now - self._started)
        text = f"{text}, {left} left" if left else text
        if self._output.err.is_terminal:
            self._show_bar(fraction, text)
        elif self._shown == self._started or now - self._shown >= LINE_EVERY_S:
            self._shown = now
            done = "" if fraction is None else f" {fraction:.0%},"
            self._output.note(f"{self._what}:{done} {text}")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def _time_left(self, fraction: float | None, elapsed: float) -> str:
        first = self._first_fraction
        if fraction is None or first is None or fraction - first < LEAST_FRACTION:
            return ""
        return format_duration(elapsed * (1 - fraction) / (fraction - first))

    def _show_bar(self, fraction: float | None, text: str) -> None:
        if self._bar is None:
            columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn())
            more = TextColumn("{task.fields[text]}")
            self._bar = Bar(*columns, more, console=self._output.err, transient=True)
            self._bar.add_task(self._what, total=None if fraction is None else 1.0, text=text)
            self._bar.start()
        [task] = self._bar.tasks
        self._bar.update(task.id, completed=fraction or 0.0, text=text)


def format_duration(seconds: float) -> str:
    """A duration for people, such as `42 s`, `3 min 20 s` or `2 h 5 min`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"
