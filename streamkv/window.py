"""Which tokens a query sees: sink tokens, window, and what has expired. Pure arithmetic.

Ranges are half-open and in token indices of the stream. For a query at token index t with window
size W, and sink ranges S (each `[start, end)`):

    [t - W + 1, t + 1)   the window, the current token included
    S                    sink tokens, seen by every query at or after them, never counted twice
    the rest             expired for attention in mode `window`

Positions follow policy `cache` (StreamingLLM, section 3.2): the distance to a sink token is counted
over what is in the cache, so it stops growing once the window has moved away from it. This module
knows neither blocks in memory nor tensors.
"""

from bisect import bisect_right
from dataclasses import dataclass

NO_CAP = 2**62
"""Cap of an entry whose distance is never capped."""


@dataclass(frozen=True, slots=True)
class Window:
    """Window size and sink ranges in force.

    Attributes:
        window_size: tokens in the window, the current one included.
        sink_ranges: disjoint, ascending ranges of sink tokens.
    """

    window_size: int
    sink_ranges: tuple[tuple[int, int], ...] = ()

    @property
    def num_sink_tokens(self) -> int:
        """Tokens that are attended for ever."""
        return sum(end - start for start, end in self.sink_ranges)

    @property
    def last_sink_index(self) -> int:
        """One past the last sink token; 0 without sink tokens."""
        return self.sink_ranges[-1][1] if self.sink_ranges else 0

    def first_visible(self, token_index: int) -> int:
        """Oldest token in the window of the query at `token_index`."""
        return max(0, token_index - self.window_size + 1)

    def with_sinks(self, start: int, end: int) -> "Window":
        """The same window with `[start, end)` added to the sink tokens."""
        merged: list[tuple[int, int]] = []
        for first, last in sorted([*self.sink_ranges, (start, end)]):
            # Ranges that only touch stay apart: the caps of the first grew with the second, so
            # that their blocks must not be named like those of one range.
            if merged and first < merged[-1][1]:
                merged[-1] = (merged[-1][0], max(last, merged[-1][1]))
            else:
                merged.append((first, last))
        return Window(self.window_size, tuple(merged))

    def cache_position(self, sink_token: int) -> int:
        """Position of a sink token in the cache: sink tokens before it."""
        position = 0
        for start, end in self.sink_ranges:
            if sink_token < end:
                return position + max(0, sink_token - start)
            position += end - start
        return position

    def sink_cap(self, sink_token: int) -> int:
        """Largest distance from a query to this sink token under policy `cache`.

        A full cache holds `num_sink_tokens + window_size` tokens; the query is the last of them.
        """
        return self.num_sink_tokens + self.window_size - 1 - self.cache_position(sink_token)

    def sinks_in(self, start: int, end: int) -> list[tuple[int, int]]:
        """Sink tokens within `[start, end)`, as ranges."""
        first = bisect_right(self.sink_ranges, (start, start)) - 1
        found = []
        for low, high in self.sink_ranges[max(0, first) :]:
            if low >= end:
                break
            if high > start:
                found.append((max(low, start), min(high, end)))
        return found

    def others_in(self, start: int, end: int) -> list[tuple[int, int]]:
        """Tokens within `[start, end)` that are not sink tokens, as ranges."""
        found = []
        for low, high in self.sinks_in(start, end):
            if low > start:
                found.append((start, low))
            start = high
        if start < end:
            found.append((start, end))
        return found

    def is_expired(self, start: int, end: int, next_query: int) -> bool:
        """Whether no query at or after `next_query` sees any token of `[start, end)`."""
        return end <= self.first_visible(next_query) and not self.sinks_in(start, end)
