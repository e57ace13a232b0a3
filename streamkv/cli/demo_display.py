"""What a person sees of the demo: a live picture of the reading, and lines.

    on a terminal   one picture, redrawn in place:  progress, what is attended, tiers
    elsewhere       the same as a line now and then
    with --json     nothing

It is told what happened and knows neither processes nor sessions.
"""

import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from streamkv.cli.console import Output, make_console
from streamkv.cli.demo_job import Reading
from streamkv.cli.progress import format_duration
from streamkv.config import format_size

LINE_EVERY_S = 10.0
REFRESH_PER_S = 8
TIERS = ("gpu", "cpu", "ssd")


class ReadingDisplay:
    """Shows one stretch of reading. A context manager.

    Args:
        output: of the command.
        what: names the reading process.
        clock: seconds; a test has its own.
        console: where a picture goes; by default to the terminal, if there is one.
    """

    def __init__(
        self,
        output: Output,
        what: str,
        clock: Callable[[], float] = time.monotonic,
        console: Console | None = None,
    ) -> None:
        self._output = output
        self._what = what
        self._clock = clock
        self._shown = clock()
        self._last: Reading | None = None
        self._live: Live | None = None
        if console is None and output.is_terminal and not output.as_json:
            console = make_console()
        if console is not None:
            self._live = Live(console=console, refresh_per_second=REFRESH_PER_S)

    def update(self, reading: Reading, num_chars: int, tokens_per_s: float) -> None:
        """Show where the reading stands.

        Args:
            reading: what the process said.
            num_chars: characters at which it ends.
            tokens_per_s: its rate.
        """
        if self._live is not None:
            self._live.update(self._picture(reading, num_chars, tokens_per_s))
        elif self._clock() - self._shown >= LINE_EVERY_S:
            self._shown = self._clock()
            self._line(reading, num_chars, tokens_per_s)

    def end(self, reading: Reading, num_chars: int, tokens_per_s: float) -> None:
        """Show the last state, which stays."""
        if self._live is not None:
            self._live.update(self._picture(reading, num_chars, tokens_per_s))
        elif reading != self._last:
            self._line(reading, num_chars, tokens_per_s)

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def _line(self, reading: Reading, num_chars: int, tokens_per_s: float) -> None:
        self._last = reading
        self._output.line("  " + reading_line(reading, num_chars, tokens_per_s))

    def _picture(self, reading: Reading, num_chars: int, tokens_per_s: float) -> Group:
        progress = Table.grid(padding=(0, 2))
        progress.add_row(
            f"  {self._what}",
            ProgressBar(total=num_chars, completed=reading.text_chars, width=30),
            f"{part_read(reading, num_chars):.0%}",
            f"{reading.token_index:,} tokens",
            f"{tokens_per_s:,.0f} tokens/s",
            f"{time_left(reading, num_chars, tokens_per_s)} left",
        )
        return Group(progress, Text(f"  {attended(reading)}"), _tier_table(reading))


def reading_line(reading: Reading, num_chars: int, tokens_per_s: float) -> str:
    """The picture as one line."""
    tiers = ", ".join(
        f"{name} {reading.tiers[name].num_blocks} blocks "
        f"{format_size(reading.tiers[name].num_bytes)}"
        for name in TIERS
        if name in reading.tiers
    )
    return (
        f"{part_read(reading, num_chars):4.0%}  {reading.token_index:,} tokens, "
        f"{tokens_per_s:,.0f} tokens/s, {time_left(reading, num_chars, tokens_per_s)} left; "
        f"{attended(reading)}; {tiers}"
    )


def part_read(reading: Reading, num_chars: int) -> float:
    """Of `num_chars` characters, at most 1: a plan may be made anew below what was read."""
    return min(1.0, reading.text_chars / num_chars)


def attended(reading: Reading) -> str:
    """What the model attends to now, and how small a part of all it is."""
    return (
        f"attends to {reading.num_sink_tokens} sink + {reading.num_window_tokens} window tokens "
        f"of {reading.token_index:,}"
    )


def time_left(reading: Reading, num_chars: int, tokens_per_s: float) -> str:
    """Time until `num_chars` characters are read, for people."""
    chars_per_s = tokens_per_s * reading.text_chars / max(reading.token_index, 1)
    return format_duration(max(0, num_chars - reading.text_chars) / max(chars_per_s, 1e-9))


def _tier_table(reading: Reading) -> Table:
    table = Table(box=None, padding=(0, 2), header_style="bold")
    table.add_column("tier")
    for column in ("blocks", "bytes", "limit"):
        table.add_column(column, justify="right")
    for name in TIERS:
        if name in reading.tiers:
            tier = reading.tiers[name]
            table.add_row(
                name,
                f"{tier.num_blocks:,}",
                format_size(tier.num_bytes),
                format_size(tier.limit_bytes),
            )
    return table
