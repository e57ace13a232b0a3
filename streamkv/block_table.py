"""A sequence's live blocks in order, and the entries that attention reads. Pure bookkeeping.

A block is live while a query still to come may see one of its tokens. A live block contributes

    one sink entry per run of sink tokens in it       (distance capped, seen for ever)
    one window entry per run of other tokens in it    (never capped, seen for `window_size` tokens)

and a recalled block

    one recalled entry per run of other tokens in it  (capped by the position policy, seen once they
                                                       have left the window)

and no entry ever changes while the stream moves, except the growing end of the open block.
"""

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from streamkv.entry_columns import EntryColumns, by_kind, in_order, listed, plain_blocks
from streamkv.recalled import RecalledBlocks
from streamkv.table_entry import TableEntry
from streamkv.tiers.spec import BlockKey
from streamkv.window import NO_CAP, Window

__all__ = ["BlockTable", "Entries", "LiveBlock", "TableEntry"]


_MadeFor = tuple[int, Window, int, int]
"""Version of a table, window and queries that columns were made for."""


class Entries(NamedTuple):
    """What some queries see, by kind, in the order in which kernels take them."""

    sinks: list[TableEntry]
    recalled: list[TableEntry]
    recent: list[TableEntry]


@dataclass(slots=True)
class LiveBlock:
    """A block of the gpu pool that the sequence holds.

    Attributes:
        block_index: which block of the stream: its first token is `block_index * block_size`.
        block_id: where it lies in the gpu pool.
        key: its name once it is full and exact, else `None`.
    """

    block_index: int
    block_id: int
    key: BlockKey | None = None


class BlockTable:
    """Live blocks of one sequence, by block index, ascending.

    Attributes:
        block_size: tokens per block.
        recalled: blocks attended besides the live ones.
    """

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.recalled = RecalledBlocks(block_size)
        self._version = 0
        self._blocks: dict[int, LiveBlock] = {}
        self._made: tuple[_MadeFor, EntryColumns] | None = None

    @property
    def version(self) -> int:
        """Grows whenever a block comes or goes."""
        return self._version + self.recalled.version

    def __len__(self) -> int:
        return len(self._blocks)

    def __iter__(self) -> Iterator[LiveBlock]:
        return iter(self._blocks.values())

    def __contains__(self, block_index: int) -> bool:
        return block_index in self._blocks

    def __getitem__(self, block_index: int) -> LiveBlock:
        return self._blocks[block_index]

    def add(self, block_index: int, block_id: int, key: BlockKey | None = None) -> None:
        """Append a block; block indices only grow."""
        assert not self._blocks or block_index > next(reversed(self._blocks))
        self._blocks[block_index] = LiveBlock(block_index, block_id, key)
        self._version += 1

    def add_all(self, blocks: Sequence[LiveBlock]) -> None:
        """Append several blocks, ascending."""
        indices = [block.block_index for block in blocks]
        assert all(map(operator.lt, indices, indices[1:])), indices
        assert not (self._blocks and blocks) or indices[0] > next(reversed(self._blocks))
        self._blocks.update(zip(indices, blocks, strict=True))
        self._version += 1

    def most_entries(self, num_ranges: int) -> int:
        """A bound of all entries, with so many ranges of sink tokens.

        A block has an entry, and each run of sink tokens in it two more at most. A recalled block
        has one more at most, for it shows what is no sink token.
        """
        num_live = len(self._blocks) + 2 * num_ranges
        num_recalled = len(self.recalled)
        return num_live + (num_recalled + num_ranges if num_recalled else 0)

    def missing(self, first_token: int, end_token: int) -> list[int]:
        """Block indices that hold `[first_token, end_token)` and are not live."""
        first = first_token // self.block_size
        last = (end_token - 1) // self.block_size
        if first == last:
            return [] if first in self._blocks else [first]
        return [index for index in range(first, last + 1) if index not in self._blocks]

    def take_expired(self, window: Window, next_query: int) -> list[LiveBlock]:
        """Remove and return the blocks that no query from `next_query` on sees."""
        size = self.block_size
        expired = [
            block
            for index, block in self._blocks.items()
            if window.is_expired(index * size, (index + 1) * size, next_query)
        ]
        for block in expired:
            del self._blocks[block.block_index]
        self._version += bool(expired)
        return expired

    def take(self, block_index: int) -> LiveBlock:
        """Remove and return a block."""
        self._version += 1
        return self._blocks.pop(block_index)

    def take_from(self, block_index: int) -> list[LiveBlock]:
        """Remove and return the blocks from `block_index` on."""
        taken = [block for index, block in self._blocks.items() if index >= block_index]
        for block in taken:
            del self._blocks[block.block_index]
        self._version += bool(taken)
        return taken

    def take_all(self) -> list[LiveBlock]:
        """Remove and return every block."""
        blocks = list(self._blocks.values())
        self._blocks.clear()
        self._version += 1
        return blocks

    def slot(self, token_index: int) -> int:
        """Slot of a token in the gpu pool: block_id * block_size + offset."""
        index, offset = divmod(token_index, self.block_size)
        return self._blocks[index].block_id * self.block_size + offset

    def slots(self, first_token: int, end_token: int) -> list[int]:
        """Slots of the tokens `[first_token, end_token)`."""
        found: list[int] = []
        size = self.block_size
        for index in range(first_token // size, (end_token - 1) // size + 1):
            base = self._blocks[index].block_id * size
            low = max(0, first_token - index * size)
            high = min(size, end_token - index * size)
            found.extend(range(base + low, base + high))
        return found

    def entries(self, window: Window, query_start: int, query_end: int) -> Entries:
        """What the queries `[query_start, query_end)` see."""
        sinks: list[TableEntry] = []
        recent: list[TableEntry] = []
        size = self.block_size
        first_visible = window.first_visible(query_start)
        for index, block in self._blocks.items():
            if index * size >= query_end:
                break
            self._show(window, block, first_visible, query_end, sinks, recent)
        return Entries(sinks, self.recalled.entries(window, query_end), recent)

    def columns(self, window: Window, query_start: int, query_end: int) -> EntryColumns:
        """The same as arrays, which nobody writes to; made once for as long as nothing changes."""
        made_for = (self.version, window, query_start, query_end)
        if self._made is None or self._made[0] != made_for:
            self._made = made_for, self._columns(window, query_start, query_end)
        return self._made[1]

    def _columns(self, window: Window, query_start: int, query_end: int) -> EntryColumns:
        first_visible = window.first_visible(query_start)
        ids = [block.block_id for block in self._blocks.values()]
        recent, cut = plain_blocks(
            list(self._blocks), ids, self.block_size, window, first_visible, query_end
        )
        sinks, others = list[TableEntry](), list[TableEntry]()
        for index in cut:
            self._show(window, self._blocks[index], first_visible, query_end, sinks, others)
        if others:
            recent = in_order(listed(others), recent)
        return by_kind(listed(sinks), self.recalled.columns(window, query_end), recent)

    def _show(
        self,
        window: Window,
        block: LiveBlock,
        first_visible: int,
        query_end: int,
        sinks: list[TableEntry],
        recent: list[TableEntry],
    ) -> None:
        """Append what a block shows to queries that come after its first token."""
        start = block.block_index * self.block_size
        end = min(start + self.block_size, query_end)
        found = window.sinks_in(start, end)
        for low, high in found:
            cap = self.recalled.sink_cap(window, low) + (low - start)
            sinks.append(TableEntry("gpu", block.block_id, start, cap, low - start, high - start))
        if end <= first_visible:
            return
        others = window.others_in(start, end) if found else [(start, end)]
        for low, high in others:
            if high > first_visible:
                recent.append(
                    TableEntry("gpu", block.block_id, start, NO_CAP, low - start, high - start)
                )
