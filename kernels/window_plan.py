"""What window attention of a chunk reads, found on the host once for all layers of a step.

A sink token inside the window is a key of the window like any other, for it is not capped before it
leaves; sink tokens that have left are listed apart. So the keys are all tokens from the oldest one
that the first query sees to the chunk's end, in whichever entry they are. This module computes
nothing on a device.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from streamkv.kernels.batch_table import BatchTable
from streamkv.kernels.window_cut import SIZE_STEP, Cut, Segment, cut
from streamkv.kernels.window_limits import MIN_QUERIES, MIN_WINDOW

SINK_SLOTS = 16
"""Fewest slots of a tile of sink tokens: what `tl.dot` takes."""


@dataclass(frozen=True, slots=True, eq=False)
class WindowPlan:
    """Window attention of one chunk, for all layers.

    Attributes:
        cut: the chunk in pieces.
        first_start: token index of slot 0 of the first block.
        addresses: int64 [num_blocks], of each block from there to the chunk's end.
        sinks: int64 [n, 5], tiles of sink tokens that leave the window of some query: address,
            start and cap of the entry, first slot, one past the last.
        sink_slots: most slots of such a tile.
        uncapped: ranges of tokens whose query sees a sink token that has left the window and is not
            yet capped.
    """

    cut: Cut
    first_start: int
    addresses: Tensor
    sinks: Tensor
    sink_slots: int
    uncapped: tuple[tuple[int, int], ...]

    def has_uncapped(self, segment: Segment) -> bool:
        """Whether a query of the segment sees such a sink token."""
        low = self.cut.query_start + segment.first
        high = min(low + segment.num_pieces * segment.size, self.cut.end)
        return any(first < high and end > low for first, end in self.uncapped)


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
    pieces = cut(query_start, num_queries, window, size_step)
    first_key, end = pieces.first_key, pieces.end
    num_sinks = int(table.num_sink_entries[index])
    num_lasting = num_sinks + int(table.num_recalled_entries[index])
    sinks, recalled, others = (
        list(_entries(table, index, 0, num_sinks)),
        list(_entries(table, index, num_sinks, num_lasting)),
        list(_entries(table, index, num_lasting, int(table.num_entries[index]))),
    )
    keys = [entry for entry in sinks + others if entry.first < end and entry.last > first_key]
    if any(entry.is_capped_within(window) for entry in keys):
        return None
    blocks = _blocks(keys, first_key, end, block_size)
    if blocks is None:
        return None
    # A recalled entry shows what has left the window, as a sink entry does besides.
    gone = [entry for entry in sinks + recalled if entry.first <= end - 1 - window]
    slots = _sink_slots(gone, block_size)
    tiles = [tile for entry in gone for tile in entry.tiles(slots)]
    return WindowPlan(
        pieces,
        min(blocks),
        torch.tensor([blocks[start] for start in sorted(blocks)]).to(device),
        torch.tensor(tiles, dtype=torch.int64).view(-1, 5).to(device),
        slots,
        tuple((entry.first + window, entry.start + entry.cap + 1) for entry in gone),
    )


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

    def tiles(self, slots: int) -> Iterator[tuple[int, int, int, int, int]]:
        """The rows of `WindowPlan.sinks` of an entry, `slots` at a time."""
        end = self.last - self.start
        for first in range(self.first - self.start, end, slots):
            yield self.address, self.start, self.cap, first, min(first + slots, end)


def _entries(table: BatchTable, index: int, low: int, high: int) -> Iterator[_Entry]:
    columns = (table.addresses, table.starts, table.caps, table.first_valid, table.end_valid)
    rows = (column[index, low:high].tolist() for column in columns)
    for address, start, cap, first, end in zip(*rows, strict=True):
        if first < end:
            yield _Entry(address, start, cap, start + first, start + end)


def _blocks(
    keys: Sequence[_Entry], first_key: int, end: int, block_size: int
) -> dict[int, int] | None:
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


def _sink_slots(sinks: Sequence[_Entry], block_size: int) -> int:
    """Slots of a tile of sink tokens: few where few are used."""
    most = max((entry.last - entry.first for entry in sinks), default=0)
    return SINK_SLOTS if most <= SINK_SLOTS else min(block_size, 4 * SINK_SLOTS)
