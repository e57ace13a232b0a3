"""What a captured decode step reads of its sequences: one buffer on the host, copied in one go.

The entries of a sequence change only when a block comes or goes (`BlockTable.version`) or the query
moves to another block, and a row keeps those that were written to it, so that a step writes a
handful of numbers; a sequence that moves to another row brings its entries along. Unused rows have
no entries and no slot.
"""

from collections.abc import Sequence as Rows
from typing import Any

import numpy as np
import torch
from torch import Tensor

from streamkv.batch import SequenceStep
from streamkv.entry_columns import BLOCK_ID, CAP, END_VALID, FIRST_VALID, START, EntryColumns
from streamkv.kernels.batch_table import BatchTable
from streamkv.sequence import Sequence
from streamkv.staged_words import StagedWords

_PER_ROW = ("ids", "sources", "slots", "targets", "query_starts", "window_sizes")
_PER_ENTRY = ("addresses", "starts", "caps")
_COUNTS = ("num_entries", "num_sink_entries", "num_recalled_entries")


class _Layout:
    """Where the columns lie in a buffer of 64-bit words."""

    def __init__(self, num_rows: int, capacity: int) -> None:
        self.num_rows, self.capacity = num_rows, capacity
        row, table = num_rows, num_rows * capacity
        sizes = [row] * len(_PER_ROW) + [table] * len(_PER_ENTRY)
        # Columns of 32-bit numbers: four of rows, two of entries.
        sizes += [2 * row, table]
        self.ends = np.cumsum(sizes).tolist()

    @property
    def num_words(self) -> int:
        words: int = self.ends[-1]
        return words

    def columns(self, words: Any, narrow: Any) -> dict[str, Any]:
        """Views by name of an array or a tensor; `narrow` views words as 32-bit numbers."""
        parts = [words[a:b] for a, b in zip([0, *self.ends[:-1]], self.ends, strict=True)]
        shape = (self.num_rows, self.capacity)
        found = dict(zip(_PER_ROW, parts, strict=False))
        for name, part in zip(_PER_ENTRY, parts[len(_PER_ROW) :], strict=False):
            found[name] = part.reshape(shape)
        counts, valid = narrow(parts[-2]), narrow(parts[-1])
        # The last is not used; with it the words are whole.
        found |= zip(_COUNTS, counts.reshape(4, self.num_rows)[:3], strict=True)
        found["first_valid"], found["end_valid"] = valid.reshape(2, *shape)
        return found


def most_entries(sequence: Sequence) -> int:
    """A bound of the entries that any query sees."""
    return sequence.table.most_entries(len(sequence.window.sink_ranges))


class StepTable:
    """Rows of the decode steps of one bucket.

    Args:
        num_rows: of the bucket.
        capacity: entries that a sequence may have.
        pool: the gpu pool whose blocks the entries name.

    Attributes:
        ids, sources, slots, query_starts: int64 [num_rows] on the device; see `rows.embed`.
        targets: int64 [num_rows] on the device, where the queries of each row are kept; 0: nowhere.
        table: entries on the device.
    """

    def __init__(self, num_rows: int, capacity: int, pool: Tensor) -> None:
        device = pool.device
        self._layout = layout = _Layout(num_rows, capacity)
        self._words = StagedWords(layout.num_words, device)
        self._columns = layout.columns(self._words.host, lambda words: words.view(np.int32))
        found = layout.columns(self._words.device, lambda words: words.view(torch.int32))
        self.ids, self.sources, self.slots = found["ids"], found["sources"], found["slots"]
        self.targets, self.query_starts = found["targets"], found["query_starts"]
        self.table = BatchTable(
            # The kernels read addresses; ids are for the twins.
            block_ids=found["addresses"],
            addresses=found["addresses"],
            starts=found["starts"],
            caps=found["caps"],
            first_valid=found["first_valid"],
            end_valid=found["end_valid"],
            num_entries=found["num_entries"],
            num_sink_entries=found["num_sink_entries"],
            num_recalled_entries=found["num_recalled_entries"],
            window_sizes=found["window_sizes"],
        )
        self._pool_address = pool.data_ptr()
        self._block_bytes = pool.stride(0) * pool.element_size()
        self._in_row: list[EntryColumns | None] = [None] * num_rows
        self._clear(0, num_rows)

    def fits(self, steps: Rows[SequenceStep]) -> bool:
        """Whether every sequence has room for its entries."""
        return max(most_entries(step.sequence) for step in steps) <= self._layout.capacity

    def write(self, steps: Rows[SequenceStep], targets: Rows[int] = ()) -> None:
        """Describe a step of one query a sequence; the copy is on the current stream.

        Args:
            steps: its parts.
            targets: where the queries of each are kept; of none if not given.
        """
        columns, count = self._columns, len(steps)
        sources, ids, slots, starts = list[int](), list[int](), list[int](), list[int]()
        for row, step in enumerate(steps):
            sequence, start, source = step.sequence, step.start, step.source
            if source is None:
                sources.append(-1)
                ids.append(sequence.pending[0])
            else:
                sources.append(source)
                ids.append(0)
            table = sequence.table
            slots.append(table.slot(start))
            starts.append(start)
            # Of the whole block, so that the row holds for every query of it, also for one before
            # this: attention itself begins at the window's edge and ends at the query.
            first = start - start % table.block_size
            entries = table.columns(sequence.window, first, first + table.block_size)
            if self._in_row[row] is not entries:
                self._fill(row, entries, sequence.window.window_size)
                self._in_row[row] = entries
        self._clear(count, self._layout.num_rows)
        columns["targets"][: len(targets)] = targets
        columns["targets"][len(targets) :] = 0
        # One store for all rows: one for each costs ten times as much.
        for name, values in (
            ("sources", sources),
            ("ids", ids),
            ("slots", slots),
            ("query_starts", starts),
        ):
            columns[name][:count] = values
        self._words.upload()

    def _fill(self, row: int, entries: EntryColumns, window_size: int) -> None:
        columns, values = self._columns, entries.values
        count = values.shape[1]
        assert count <= self._layout.capacity, (count, self._layout.capacity)
        columns["addresses"][row, :count] = (
            self._pool_address + values[BLOCK_ID] * self._block_bytes
        )
        columns["starts"][row, :count] = values[START]
        columns["caps"][row, :count] = values[CAP]
        columns["first_valid"][row, :count] = values[FIRST_VALID]
        columns["end_valid"][row, :count] = values[END_VALID]
        columns["num_entries"][row] = count
        columns["num_sink_entries"][row] = entries.num_sinks
        columns["num_recalled_entries"][row] = entries.num_recalled
        columns["window_sizes"][row] = window_size

    def _clear(self, first: int, end: int) -> None:
        for row in range(first, end):
            if self._in_row[row] is not None or first == 0:
                self._columns["num_entries"][row] = 0
                self._columns["slots"][row] = -1
                self._columns["sources"][row] = -1
                self._columns["ids"][row] = 0
                self._in_row[row] = None
