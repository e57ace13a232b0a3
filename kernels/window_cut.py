"""How window attention of a chunk is cut into causal squares: pure arithmetic.

A piece is at most W = window_size consecutive queries. Query i of the piece that starts at token a
sees

    own         keys a + j with j <= i: a causal square
    triangle    the keys b = 1 .. n after token a - W, of which it sees b > i: with queries and keys
                both in reversed order again a causal square
    rectangle   the other keys before a, which every query of the piece sees

where n is one less than the piece has queries, so that a piece of W needs no rectangle; a piece
that starts at a token a < W - 1 ends with token W - 1 and sees every key before it. The last piece
is padded with queries and keys of zeros at its end: causality keeps them from the real queries, and
few sizes occur.

Rows in forward order hold the chunk's tokens; in reversed order row r holds, counted from the end,
the query `num_rows - 1 - r` of the chunk, or the key of token `last_start - 1 - r`. This module
knows neither blocks nor tensors.
"""

from dataclasses import dataclass
from typing import NamedTuple

SIZE_STEP = 256
"""Sizes of pieces are multiples of it, or the window: every other size costs a plan of cuDNN."""


class Rows(NamedTuple):
    """Runs of rows: `num_runs` of `size` rows each, run p starting at row `first + p * step`."""

    first: int
    size: int
    num_runs: int
    step: int


class Part(NamedTuple):
    """Queries against keys: causal, or everything sees everything.

    Attributes:
        queries, keys: rows of the arrays in forward or in reversed order.
        is_reversed: which arrays.
        is_causal: query r of a run sees keys 0 to r; else all.
    """

    queries: Rows
    keys: Rows
    is_reversed: bool
    is_causal: bool


@dataclass(frozen=True, slots=True)
class Segment:
    """Pieces of one form, side by side.

    Attributes:
        first: first query, counted from the chunk's first.
        num_pieces: how many; each starts `size` after the one before it.
        size: queries of a piece, padding included.
        triangle: keys of the triangle.
        rectangle: keys of the rectangle.
        recurring: whether its sizes are few over the life of an engine.
    """

    first: int
    num_pieces: int
    size: int
    triangle: int
    rectangle: int
    recurring: bool

    @property
    def last(self) -> int:
        """First query of the last piece."""
        return self.first + (self.num_pieces - 1) * self.size


@dataclass(frozen=True, slots=True)
class Cut:
    """A chunk in pieces.

    Attributes:
        query_start: token index of the first query.
        num_queries: of the chunk.
        window_size: tokens in the window, the query's own included.
        segments: pieces in order; they cover the chunk.
    """

    query_start: int
    num_queries: int
    window_size: int
    segments: tuple[Segment, ...]

    @property
    def first_key(self) -> int:
        """Oldest token that a query sees in its window."""
        return max(0, self.query_start - self.window_size + 1)

    @property
    def num_rows(self) -> int:
        """Queries, padding included."""
        return self.segments[-1].last + self.segments[-1].size

    @property
    def last_start(self) -> int:
        """Token index of the first query of the last piece."""
        return self.query_start + self.segments[-1].last

    @property
    def num_previous(self) -> int:
        """Keys before the last piece: rows of the arrays in reversed order."""
        return self.last_start - self.first_key

    def own(self, segment: Segment) -> Part:
        """Queries against the keys of their own piece."""
        rows = Rows(segment.first, segment.size, segment.num_pieces, segment.size)
        return Part(rows, rows, is_reversed=False, is_causal=True)

    def triangle(self, segment: Segment) -> Part | None:
        """Queries against the oldest keys that their piece sees; its last run is the first piece's.

        Query i of a piece is row `triangle - 1 - i` of its run.
        """
        if not segment.triangle:
            return None
        size, count, step = segment.triangle, segment.num_pieces, segment.size
        first = self.num_rows - segment.last - size
        before = self.segments[-1].last - segment.last + segment.rectangle
        queries, keys = Rows(first, size, count, step), Rows(before, size, count, step)
        return Part(queries, keys, is_reversed=True, is_causal=True)

    def rectangle(self, segment: Segment) -> Part | None:
        """Queries of the one piece against keys that all of them see, in reversed order."""
        if not segment.rectangle:
            return None
        assert segment.num_pieces == 1, segment
        first = self.num_rows - segment.first - segment.size
        before = self.segments[-1].last - segment.first
        queries = Rows(first, segment.size, 1, segment.size)
        keys = Rows(before, segment.rectangle, 1, segment.rectangle)
        return Part(queries, keys, is_reversed=True, is_causal=False)

    @property
    def end(self) -> int:
        """Token index after the last query."""
        return self.query_start + self.num_queries


def cut(query_start: int, num_queries: int, window_size: int, size_step: int = SIZE_STEP) -> Cut:
    """Pieces of a chunk, those of one form together."""
    found, first = [], 0
    while first < num_queries:
        start, rest = query_start + first, num_queries - first
        if start < window_size - 1:
            size = _padded(rest, window_size - start, size_step)
            found.append(Segment(first, 1, size, 0, start, start % size_step == 0))
            first += size
        elif rest >= window_size:
            count = rest // window_size
            found.append(Segment(first, count, window_size, window_size - 1, 0, True))
            first += count * window_size
        else:
            size = _padded(rest, window_size, size_step)
            found.append(Segment(first, 1, size, size - 1, window_size - size, True))
            first += size
    return Cut(query_start, num_queries, window_size, tuple(found))


def _padded(rest: int, most: int, step: int) -> int:
    return min(most, -(-rest // step) * step)
