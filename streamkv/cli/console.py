"""Where the lines of a command go.

    standard output   what was asked for: text for people, or with --json JSON and nothing else
    standard error    notes, progress, warnings, errors

Invariant: with `as_json`, people's lines are not printed at all. Colours only on a terminal and
without NO_COLOR. Text is printed as it is, never as markup, and cannot steer the terminal.
"""

import json
import logging
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console

_CONTROL = {code: None for code in (*range(0x20), *range(0x7F, 0xA0))}
_STEERING = {code: None for code in _CONTROL if code not in (0x09, 0x0A)}


class Output:
    """The output of one command.

    Args:
        as_json: print JSON for scripts instead of lines for people.
    """

    def __init__(self, as_json: bool = False) -> None:
        self.as_json = as_json
        self._out = make_console()
        self.err = make_console(stderr=True)

    @property
    def is_terminal(self) -> bool:
        """Whether standard output is a terminal."""
        return self._out.is_terminal

    def line(self, text: str = "", style: str | None = None) -> None:
        """A line of the answer, for people."""
        if not self.as_json:
            _print(self._out, text, style)

    def columns(self, rows: Iterable[Sequence[object]], header: Sequence[str] = ()) -> None:
        """Aligned columns, for people; the header only if there is a row."""
        cells = [[str(cell) for cell in row] for row in rows]
        if self.as_json or not cells:
            return
        lines = [list(header), *cells] if header else cells
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        for place, row in enumerate(lines):
            padded = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
            self.line("  ".join(padded).rstrip(), "bold" if header and place == 0 else None)

    def fragment(self, text: str) -> None:
        """Part of a text that is being written, shown at once, for people."""
        if not self.as_json:
            sys.stdout.write(printable(text) if self.is_terminal else text)
            sys.stdout.flush()

    def json(self, value: dict[str, Any]) -> None:
        """One JSON object on a line of its own, for scripts."""
        if self.as_json:
            sys.stdout.write(json.dumps(value, ensure_ascii=False) + "\n")
            sys.stdout.flush()

    def note(self, text: str) -> None:
        """A line beside the answer, for people."""
        if not self.as_json:
            _print(self.err, text, "dim")

    @contextmanager
    def busy(self, text: str) -> Iterator[None]:
        """Say that something is going on, on a terminal only."""
        if self.as_json or not self.err.is_terminal:
            yield
            return
        with self.err.status(text, spinner="dots"):
            yield


class _WarningHandler(logging.Handler):
    """Shows the library's warnings as lines."""

    def emit(self, record: logging.LogRecord) -> None:
        _print(make_console(stderr=True), f"warning: {record.getMessage()}", "yellow")


@contextmanager
def warnings_as_lines() -> Iterator[None]:
    """Show what the library logs as `warning: ...` on standard error."""
    logger = logging.getLogger("streamkv")
    handler = _WarningHandler(logging.WARNING)
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


def print_error(text: str) -> None:
    """`error: ...` as one red line on standard error."""
    _print(make_console(stderr=True), "error: " + " ".join(text.split()), "red")


def printable(text: str) -> str:
    """`text` without control characters other than tabs and newlines."""
    return text.translate(_STEERING)


def make_console(stderr: bool = False) -> Console:
    """A console that prints text as it is, and lets the terminal break lines."""
    return Console(stderr=stderr, highlight=False, markup=False, emoji=False, soft_wrap=True)


def _print(console: Console, text: str, style: str | None) -> None:
    console.print(printable(text), style=style)
