"""Stop strings in a stream of text.

Invariant: nothing that belongs to a stop string is ever emitted, and what is held back is exactly
the longest end of the text that could still become one. Of several stop strings the one that is
complete first wins; of those that end at the same character, the longest. So the result does not
depend on how the text is cut. This module knows neither tokens nor sessions.
"""

from collections.abc import Sequence
from typing import NamedTuple

from streamkv.errors import ConfigError


class Emitted(NamedTuple):
    """Text that is safe to show, and whether a stop string ended the stream."""

    text: str
    stopped: bool


class StopMatcher:
    """Finds the first stop string and withholds it.

    Args:
        stops: the stop strings; may be none.
        pending: text that an earlier matcher held back.

    Raises:
        ConfigError: a stop string is empty or not a str.
    """

    def __init__(self, stops: Sequence[str], *, pending: str = "") -> None:
        self._stops = _checked(stops)
        self._tables = [_failure_table(stop) for stop in self._stops]
        self._matched = [0] * len(self._stops)
        self._pending = ""
        self._stop: str | None = None
        if pending:
            self.push(pending)

    @property
    def pending(self) -> str:
        """The text held back: all that is needed to go on later."""
        return self._pending

    @property
    def stop(self) -> str | None:
        """The stop string that was found."""
        return self._stop

    def push(self, text: str) -> Emitted:
        """The text that can no longer be part of a stop string. After a stop: nothing."""
        if not self._stops:
            return Emitted(text, False)
        if self._stop is not None:
            return Emitted("", True)
        text, seen = self._pending + text, len(self._pending)
        for index in range(seen, len(text)):
            self._stop = self._advance(text[index])
            if self._stop is not None:
                self._pending = ""
                return Emitted(text[: index + 1 - len(self._stop)], True)
        num_held = max(self._matched, default=0)
        self._pending = text[len(text) - num_held :]
        return Emitted(text[: len(text) - num_held], False)

    def flush(self) -> str:
        """The text held back, when no more text comes."""
        text, self._pending = self._pending, ""
        self._matched = [0] * len(self._stops)
        return text

    def _advance(self, char: str) -> str | None:
        complete = ""
        for index, stop in enumerate(self._stops):
            length = _extend(stop, self._tables[index], self._matched[index], char)
            self._matched[index] = length
            if length == len(stop) > len(complete):
                complete = stop
        return complete or None


def _checked(stops: Sequence[str]) -> list[str]:
    remedy = 'Pass a list of non-empty strings such as ["\\nUser:"].'
    if isinstance(stops, str):
        raise ConfigError("stop", stops, "a string where a list is needed", remedy)
    for stop in stops:
        if not isinstance(stop, str) or not stop:
            raise ConfigError("stop", stop, "an empty stop string or not a string", remedy)
    return list(dict.fromkeys(stops))


def _extend(stop: str, table: list[int], matched: int, char: str) -> int:
    """Length of the longest prefix of `stop` that ends the text after one more character."""
    while matched and (matched == len(stop) or stop[matched] != char):
        matched = table[matched - 1]
    return matched + (stop[matched] == char)


def _failure_table(stop: str) -> list[int]:
    """For each prefix, the length of its longest proper prefix that is also its suffix."""
    table = [0] * len(stop)
    for index in range(1, len(stop)):
        table[index] = _extend(stop, table, table[index - 1], stop[index])
    return table
