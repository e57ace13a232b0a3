"""The tables of many sequences side by side, as kernels on a GPU read them.

Capacity is fixed and lengths lie on the device, so that a captured graph serves every length. A
block is named twice: by an id that counts through the pools one after another (the torch twins read
it), and by the address of its first byte (kernels read it, wherever the block lies). Unused entries
name the guard block and are beyond `num_entries`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from streamkv.kernels.table import SequenceTable


@dataclass(frozen=True, slots=True, eq=False)
class BatchTable:
    """Entries of S sequences with room for C each, all on one device.

    Attributes:
        block_ids: int64 [S, C], counted through the pools.
        addresses: int64 [S, C], of the block's first byte.
        starts, caps: int64 [S, C], as in `SequenceTable`.
        first_valid, end_valid: int32 [S, C].
        num_entries: int32 [S].
        num_sink_entries, num_recalled_entries: int32 [S]; sink entries come first, then recalled
            ones.
        window_sizes: int64 [S].
    """

    block_ids: Tensor
    addresses: Tensor
    starts: Tensor
    caps: Tensor
    first_valid: Tensor
    end_valid: Tensor
    num_entries: Tensor
    num_sink_entries: Tensor
    num_recalled_entries: Tensor
    window_sizes: Tensor

    @property
    def num_sequences(self) -> int:
        """Rows of the table."""
        return self.addresses.shape[0]

    @property
    def capacity(self) -> int:
        """Entries that a sequence may have."""
        return self.addresses.shape[1]

    def to(self, device: torch.device | str) -> "BatchTable":
        """The same on another device."""
        columns = (self.block_ids, self.addresses, self.starts, self.caps)
        counts = (self.num_entries, self.num_sink_entries, self.num_recalled_entries)
        every = (*columns, self.first_valid, self.end_valid, *counts, self.window_sizes)
        return BatchTable(*columns_to(every, device))

    def sequence(self, index: int) -> SequenceTable:
        """The table of one sequence, with ids as block ids."""
        count = int(self.num_entries[index])
        columns = (self.block_ids, self.starts, self.caps, self.first_valid, self.end_valid)
        block_ids, starts, caps, first, end = (c[index, :count].long() for c in columns)
        kinds = int(self.num_sink_entries[index]), int(self.num_recalled_entries[index])
        return SequenceTable(block_ids, starts, caps, first, end, *kinds)


def columns_to(columns: Sequence[Tensor], device: torch.device | str) -> list[Tensor]:
    """The same columns on another device; nothing waits for copies to a GPU."""
    if torch.device(device).type != "cuda":
        # Not waited for, they could be read before they are there.
        return [column.to(device) for column in columns]
    # Torch keeps pinned memory until a copy out of it is made.
    pinned = (column if column.is_cuda else column.pin_memory() for column in columns)
    return [column.to(device, non_blocking=True) for column in pinned]


def block_addresses(block_ids: Tensor, pools: Sequence[Tensor]) -> Tensor:
    """Address of the first byte of each block.

    Args:
        block_ids: int64 [...], counted through the pools.
        pools: each [num_blocks, ...], contiguous, of one layout of a block.
    """
    addresses = torch.zeros_like(block_ids)
    first = 0
    for pool in pools:
        here = (block_ids >= first) & (block_ids < first + pool.shape[0])
        step = pool.stride(0) * pool.element_size()
        addresses = addresses.where(~here, pool.data_ptr() + (block_ids - first) * step)
        first += pool.shape[0]
    assert bool((block_ids < first).all()), "a block that no pool has"
    return addresses


def batch_table(
    tables: Sequence[SequenceTable],
    window_sizes: Sequence[int],
    pools: Sequence[Tensor],
    capacity: int,
    device: torch.device | str,
) -> BatchTable:
    """Put the tables of sequences side by side.

    Args:
        tables: on the CPU, ids counted through `pools`.
        window_sizes: of each sequence.
        pools: whose blocks the ids name; the last block of the first one is the guard block.
        capacity: at least the entries of the longest table.
        device: where the kernels run.
    """
    shape = (len(tables), capacity)
    guard = pools[0].shape[0] - 1
    block_ids = torch.full(shape, guard)
    starts, caps = torch.zeros(shape, dtype=torch.int64), torch.zeros(shape, dtype=torch.int64)
    first, end = torch.zeros(shape, dtype=torch.int32), torch.zeros(shape, dtype=torch.int32)
    for row, table in enumerate(tables):
        count = table.num_entries
        assert count <= capacity, (count, capacity)
        block_ids[row, :count] = table.block_ids
        starts[row, :count] = table.starts
        caps[row, :count] = table.caps
        first[row, :count] = table.first_valid
        end[row, :count] = table.end_valid
    counts = torch.tensor([table.num_entries for table in tables], dtype=torch.int32)
    sinks = torch.tensor([table.num_sink_entries for table in tables], dtype=torch.int32)
    recalled = torch.tensor([table.num_recalled_entries for table in tables], dtype=torch.int32)
    windows = torch.tensor(window_sizes, dtype=torch.int64)
    addresses = block_addresses(block_ids, pools)
    columns = (block_ids, addresses, starts, caps, first, end, counts, sinks, recalled, windows)
    return BatchTable(*(column.to(device) for column in columns))
