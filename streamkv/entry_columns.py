"""The entries that attention reads, column by column: what `BlockTable.entries` lists, as arrays.

Nearly every block is *plain*: it has no sink token and shows all that it has. Those are made by
numpy, however many they are; only blocks that sink tokens cut are gone through one by one. So a row
of 66 entries costs microseconds, where as many tuples cost a millisecond that other threads of the
interpreter wait for. Pure bookkeeping.
"""

from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from streamkv.table_entry import TableEntry
from streamkv.window import NO_CAP, Window

Int64s = npt.NDArray[np.int64]

BLOCK_ID, START, CAP, FIRST_VALID, END_VALID = range(5)
"""Rows of `EntryColumns.values`."""


class EntryColumns(NamedTuple):
    """Entries in the order in which kernels take them: sinks, recalled, recent.

    Attributes:
        values: int64 [5, n]; its rows are the fields of `TableEntry` after the pool.
        num_sinks, num_recalled: how many of the n are of that kind.
    """

    values: Int64s
    num_sinks: int
    num_recalled: int


def listed(entries: Collection[TableEntry]) -> Int64s:
    """Entries as columns: int64 [5, n]."""
    if not entries:
        return np.empty((5, 0), dtype=np.int64)
    return np.array([entry[1:] for entry in entries], dtype=np.int64).T


def plain(block_ids: Int64s, starts: Int64s, caps: Int64s | int, ends: Int64s) -> Int64s:
    """Entries that show their blocks from the first token on: int64 [5, n].

    Args:
        block_ids: int64 [n].
        starts: first token of each block.
        caps: of each, or of all.
        ends: one past the last token that each shows.
    """
    values = np.zeros((5, len(starts)), dtype=np.int64)
    values[BLOCK_ID], values[START], values[CAP] = block_ids, starts, caps
    values[END_VALID] = ends - starts
    return values


def plain_blocks(
    indices: Sequence[int],
    block_ids: Sequence[int],
    block_size: int,
    window: Window,
    first_visible: int,
    query_end: int,
) -> tuple[Int64s, list[int]]:
    """The entries of those live blocks that have no sink token.

    Args:
        indices: of live blocks, ascending.
        block_ids: where they lie.
        block_size: tokens of each.
        window: its sink ranges.
        first_visible: what is shown ends behind this token.
        query_end: and begins before this one.

    Returns:
        int64 [5, n], and the indices of the blocks with sink tokens that begin before `query_end`.
    """
    count = len(indices)
    starts = np.fromiter(indices, np.int64, count) * block_size
    ids = np.fromiter(block_ids, np.int64, count)
    are_cut = have_sinks(window, starts, block_size)
    ends = np.minimum(starts + block_size, query_end)
    are_seen = ~are_cut & (starts < query_end) & (ends > first_visible)
    cut = starts[are_cut & (starts < query_end)] // block_size
    return plain(ids[are_seen], starts[are_seen], NO_CAP, ends[are_seen]), cut.tolist()


def by_kind(sinks: Int64s, recalled: Int64s, recent: Int64s) -> EntryColumns:
    """All of them, each int64 [5, n], one kind behind the other."""
    values = np.concatenate([sinks, recalled, recent], axis=1)
    return EntryColumns(values, sinks.shape[1], recalled.shape[1])


def in_order(*parts: Int64s) -> Int64s:
    """Entries by the tokens that they show, ascending."""
    values = np.concatenate(parts, axis=1)
    order = np.argsort(values[START] + values[FIRST_VALID], kind="stable")
    return values[:, order]


def have_sinks(window: Window, starts: Int64s, block_size: int) -> npt.NDArray[np.bool_]:
    """Which blocks have a sink token: bool [n].

    Args:
        window: its sink ranges.
        starts: int64 [n], ascending: first token of each block.
        block_size: tokens of each.
    """
    if not window.sink_ranges:
        return np.zeros(len(starts), dtype=np.bool_)
    lows, highs = np.array(window.sink_ranges, dtype=np.int64).T
    # Ranges are disjoint and ascend: of those that begin before a block ends, all but those that
    # end before it begins have a token of it.
    num_begun = np.searchsorted(lows, starts + block_size, side="left")
    num_ended = np.searchsorted(highs, starts, side="right")
    found: npt.NDArray[np.bool_] = num_begun > num_ended
    return found
