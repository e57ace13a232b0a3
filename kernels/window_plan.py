"""How window attention of a chunk is cut into causal squares: bookkeeping on the host, once a step.

A piece is at most W = window_size consecutive queries. Query i of the piece that starts at token a
sees

    own         keys a + j with j <= i: a causal square
    triangle    the keys b = 1 .. n after token a - W, of which it sees b > i: with queries and keys
                both in reversed order again a causal square
    rectangle   the other keys before a, which every query of the piece sees

where n is one less than the piece has queries, so that a piece of W needs no rectangle; a piece
that starts at a token a < W - 1 ends with token W - 1 and sees every key before it. The last piece
is padded with queries and keys of zeros at its end: causality keeps them from the real queries, and
few sizes occur. A sink token inside the window is a key of the window like any other (not capped
before it leaves); those that have left are listed apart.

Rows in forward order hold the chunk's tokens; in reversed order row r holds, counted from the end,
the query `num_rows - 1 - r` of the chunk, or the key of token `last_start - 1 - r`. This module
knows no element types and computes nothing on a device.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from streamkv.kernels.batch_table import BatchTable

MIN_QUERIES = 1024
MIN_WINDOW = 2048
"""Fewer queries, or a smaller window, are not worth the copies: one kernel does them in place."""

SIZE_STEP = 256
"""Sizes of pieces are multiples of it, or the window: every other size costs a plan of cuDNN."""

SINK_SLOTS = 16
"""Fewest slots of a tile of sink tokens: what `tl.dot` takes."""


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


@dataclass(frozen=True, slots=True, eq=False)
class WindowPlan:
    """Window attention of one chunk, for all layers.

    Attributes:
        query_start: token index of the first query.
        num_queries: of the chunk.
        window_size: tokens in the window, the query's own included.
        segments: pieces in order; they cover the chunk.
        first_start: token index of slot 0 of the first block.
        addresses: int64 [num_blocks], of each block from there to the chunk's end.
        sinks: int64 [n, 5], tiles of sink tokens that leave the window of some query: address,
            start and cap of the entry, first slot, one past the last.
        sink_slots: most slots of such a tile.
    """

    query_start: int
    num_queries: int
    window_size: int
    segments: tuple[Segment, ...]
    first_start: int
    addresses: Tensor
    sinks: Tensor
    sink_slots: int

    @property
    def first_key(self) -> int:
        """Oldest token that a query sees in its window."""
        return _first_key(self.query_start, self.window_size)

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


def window_plan(
    table: BatchTable,
    index: int,
    query_start: int,
    num_queries: int,
    block_size: int,
    device: torch.device | str,
    *,
    min_queries: int = MIN_QUERIES,
    min_window: int = MIN_WINDOW,
    size_step: int = SIZE_STEP,
) -> WindowPlan | None:
    """The plan of one sequence's chunk; `None` where `gpu.prefill` has to do it.

    Args:
        table: on the CPU, the chunk's own slots included.
        index: row of the sequence.
        query_start: token index of the first query.
        num_queries: of the chunk.
        block_size: slots of a block.
        device: where the kernels run.
        min_queries, min_window: the smallest that are worth it.
        size_step: sizes of pieces are multiples of it, or the window.

    Returns:
        `None` if chunk or window are small, if a key of some query's window is in no entry or in a
        block out of step with the others, or if a key is capped while it is in the window.
    """
    window = int(table.window_sizes[index])
    if num_queries < max(1, min_queries) or window < min_window:
        return None
    first_key, end = _first_key(query_start, window), query_start + num_queries
    num_sinks = int(table.num_sink_entries[index])
    sinks, others = (
        list(_entries(table, index, 0, num_sinks)),
        list(_entries(table, index, num_sinks, int(table.num_entries[index]))),
    )
    keys = [entry for entry in sinks + others if entry.first < end and entry.last > first_key]
    if any(entry.is_capped_within(window) for entry in keys):
        return None
    blocks = _blocks(keys, first_key, end, block_size)
    if blocks is None:
        return None
    tiles, sink_slots = _sink_tiles(sinks, end - window, block_size)
    return WindowPlan(
        query_start,
        num_queries,
        window,
        cut(query_start, num_queries, window, size_step),
        min(blocks),
        torch.tensor([blocks[start] for start in sorted(blocks)]).to(device),
        torch.tensor(tiles, dtype=torch.int64).view(-1, 5).to(device),
        sink_slots,
    )


def cut(
    query_start: int, num_queries: int, window_size: int, size_step: int = SIZE_STEP
) -> tuple[Segment, ...]:
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
    return tuple(found)


class _Entry(NamedTuple):
    """An entry in token indices: tokens [first, last) of the block whose slot 0 is `start`."""

    address: int
    start: int
    cap: int
    first: int
    last: int

    def is_capped_within(self, window_size: int) -> bool:
        """Whether the distance of its last token stops growing before that leaves the window."""
        return self.cap < self.last - 1 + window_size - 1 - self.start


def _entries(table: BatchTable, index: int, low: int, high: int) -> Iterator[_Entry]:
    columns = (table.addresses, table.starts, table.caps, table.first_valid, table.end_valid)
    rows = (column[index, low:high].tolist() for column in columns)
    for address, start, cap, first, end in zip(*rows, strict=True):
        if first < end:
            yield _Entry(address, start, cap, start + first, start + end)


def _blocks(keys: list[_Entry], first_key: int, end: int, block_size: int) -> dict[int, int] | None:
    """Addresses by first token of the blocks that hold all of [first_key, end), or `None`."""
    reached, blocks = first_key, dict[int, int]()
    for entry in sorted(keys, key=lambda entry: entry.first):
        out_of_step = (entry.start - keys[0].start) % block_size != 0
        if entry.first > reached or out_of_step:
            return None
        if blocks.setdefault(entry.start, entry.address) != entry.address:
            return None
        reached = max(reached, entry.last)
    return blocks if reached >= end else None


def _sink_tiles(
    sinks: list[_Entry], oldest: int, block_size: int
) -> tuple[list[tuple[int, int, int, int, int]], int]:
    """Tiles of the sink tokens before `oldest`, and how many slots a tile has."""
    gone = [entry for entry in sinks if entry.first < oldest]
    most = max((entry.last - entry.first for entry in gone), default=0)
    slots = SINK_SLOTS if most <= SINK_SLOTS else min(block_size, 4 * SINK_SLOTS)
    tiles = [
        (entry.address, entry.start, entry.cap, first, min(first + slots, entry.last - entry.start))
        for entry in gone
        for first in range(entry.first - entry.start, entry.last - entry.start, slots)
    ]
    return tiles, slots


def _first_key(query_start: int, window_size: int) -> int:
    return max(0, query_start - window_size + 1)


def _padded(rest: int, most: int, step: int) -> int:
    return min(most, -(-rest // step) * step)
