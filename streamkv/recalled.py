"""Old blocks that a sequence attends besides its window: where they lie and how far away they seem.

A recalled block shows a query those of its tokens that are older than the query's window and no
sink tokens, so that no token is attended twice. How far away it seems is the position policy:

    far        as far as any token just beyond the window: window_size + block_size
    cache      as if recalled blocks stood between sink tokens and window, in their order
    absolute   as far as it is

`far` gives all far tokens one distance, as InfLLM does (Xiao et al. 2024, section 3.2), but block
by block, so that the order inside a block stays. Pure bookkeeping.
"""

from collections.abc import Iterator, Mapping
from typing import Literal, get_args

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
        version: grows whenever they change.
    """

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.policy: PositionPolicy = "far"
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

    @property
    def num_cached_tokens(self) -> int:
        """Tokens that they put between the sink tokens and the window."""
        return len(self._blocks) * self.block_size if self.policy == "cache" else 0

    def set(self, blocks: Mapping[int, int]) -> None:
        """From now on these are recalled: block index to block id."""
        if dict(blocks) != self._blocks:
            self._blocks = dict(sorted(blocks.items()))
            self.version += 1

    def entries(self, window: Window, query_end: int) -> list[TableEntry]:
        """Entries for queries before `query_end`."""
        found: list[TableEntry] = []
        # What the newest of these queries sees beyond its window.
        end_visible = query_end - window.window_size
        for rank, (index, block_id) in enumerate(self._blocks.items()):
            start = index * self.block_size
            cap = self._cap(window, rank)
            for low, high in window.others_in(start, start + self.block_size):
                if low < end_visible:
                    found.append(TableEntry("gpu", block_id, start, cap, low - start, high - start))
        return found

    def _cap(self, window: Window, rank: int) -> int:
        if self.policy == "absolute":
            return NO_CAP
        left = len(self._blocks) - rank if self.policy == "cache" else 1
        return window.window_size + left * self.block_size
