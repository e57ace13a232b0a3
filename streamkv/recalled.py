"""Old blocks that a sequence attends besides its window: where they lie and how far away they seem.

A recalled block shows a query those of its tokens that are older than the query's window and no
sink tokens, so that no token is attended twice. How far away it seems is the position policy:

    far        as far as any token just beyond the window: window_size + block_size
    cache      as if recalled blocks stood between sink tokens and window, in their order
    absolute   as far as it is, up to the trained length; sink tokens, too

`far` gives all far tokens one distance, as InfLLM does (Xiao et al. 2024, section 3.2), but block
by block, so that the order inside a block stays. Pure bookkeeping.
"""

from collections.abc import Iterator, Mapping
from typing import Literal, get_args

import numpy as np

from streamkv.entry_columns import Int64s, have_sinks, in_order, listed, plain
from streamkv.table_entry import TableEntry
from streamkv.window import NO_CAP, Window

PositionPolicy = Literal["far", "cache", "absolute"]
POSITION_POLICIES: tuple[PositionPolicy, ...] = get_args(PositionPolicy)


def farthest(policy: PositionPolicy, window_size: int, num_blocks: int, block_size: int) -> int:
    """Distance to the start of the farthest recalled block; 0 if the policy sets no bound."""
    match policy:
        case "far":
            return window_size + block_size
        case "cache":
            return window_size + num_blocks * block_size
        case "absolute":
            return 0


class RecalledBlocks:
    """Recalled blocks of one sequence, by block index, ascending.

    Attributes:
        block_size: tokens per block.
        policy: how far away they seem.
        trained_length: under `absolute` nothing seems farther away than the model has seen.
        version: grows whenever they change.
    """

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.policy: PositionPolicy = "far"
        self.trained_length = NO_CAP
        self.version = 0
        self._blocks: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._blocks)

    def __iter__(self) -> Iterator[int]:
        return iter(self._blocks)

    def __getitem__(self, block_index: int) -> int:
        """Where the block lies in the gpu pool."""
        return self._blocks[block_index]

    def __contains__(self, block_index: object) -> bool:
        return block_index in self._blocks

    def sink_cap(self, window: Window, token_index: int) -> int:
        """Largest distance to a sink token, beside these blocks."""
        if self.policy == "absolute":
            return self.trained_length - 1
        between = len(self._blocks) * self.block_size if self.policy == "cache" else 0
        return window.sink_cap(token_index) + between

    def set_policy(self, policy: PositionPolicy) -> None:
        """From now on they seem so far away."""
        if policy != self.policy:
            self.policy = policy
            self.version += 1

    def set(self, blocks: Mapping[int, int]) -> None:
        """From now on these are recalled: block index to block id."""
        if dict(blocks) != self._blocks:
            self._blocks = dict(sorted(blocks.items()))
            self.version += 1

    def entries(self, window: Window, query_end: int) -> list[TableEntry]:
        """Entries for queries before `query_end`."""
        found: list[TableEntry] = []
        for rank, index in enumerate(self._blocks):
            found.extend(self._shown(window, query_end, rank, index))
        return found

    def columns(self, window: Window, query_end: int) -> Int64s:
        """The same as arrays: int64 [5, n], see `EntryColumns`."""
        size, count = self.block_size, len(self._blocks)
        if not count:
            return listed(())
        starts = np.fromiter(self._blocks, np.int64, count) * size
        block_ids = np.fromiter(self._blocks.values(), np.int64, count)
        are_cut = have_sinks(window, starts, size)
        are_plain = ~are_cut & (starts < query_end - window.window_size)
        ranks = np.nonzero(are_plain)[0]
        starts = starts[ranks]
        # Alike, or in equal steps from the oldest to the newest.
        oldest = self._cap(window, 0)
        step = self._cap(window, 1) - oldest
        found = plain(block_ids[ranks], starts, oldest + step * ranks, starts + size)
        if not are_cut.any():
            return found
        indices = list(self._blocks)
        cut = [
            entry
            for rank in np.nonzero(are_cut)[0].tolist()
            for entry in self._shown(window, query_end, rank, indices[rank])
        ]
        return in_order(listed(cut), found)

    def _shown(self, window: Window, query_end: int, rank: int, index: int) -> list[TableEntry]:
        """Entries of one block."""
        start, cap, block_id = index * self.block_size, self._cap(window, rank), self._blocks[index]
        # What the newest of the queries sees beyond its window.
        end_visible = query_end - window.window_size
        return [
            TableEntry("gpu", block_id, start, cap, low - start, high - start)
            for low, high in window.others_in(start, start + self.block_size)
            if low < end_visible
        ]

    def _cap(self, window: Window, rank: int) -> int:
        if self.policy == "absolute":
            return self.trained_length - 1
        left = len(self._blocks) - rank if self.policy == "cache" else 1
        return window.window_size + left * self.block_size
