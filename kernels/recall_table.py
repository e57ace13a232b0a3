"""The old blocks that each layer of many sequences recalls, as kernels on a GPU read them.

    slot j of an entry    is token start + j; it exists iff first_valid <= j < end_valid
    visible to query t    iff start + j <= t - window_size: what the window shows counts once
    distance              from query t: min(t - start, cap)

An entry names one layer's slice of a block, [2, num_kv_heads, block_size, head_dim], which may lie
in a pool or alone in a staging buffer, wherever a GPU can read. Sink tokens are cut out by the host
(`first_valid`), the window is cut out for each query. Layers differ in what they recall and in how
much; capacity is fixed and lengths lie on the device. Why a block was chosen is not known here.

The position policies are caps: `absolute` is `NO_CAP`, `far` one distance for every entry, `cache`
the distance that the entry has in a cache where blocks follow each other.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from streamkv.kernels.batch_table import block_addresses, columns_to
from streamkv.kernels.table import SequenceTable


@dataclass(frozen=True, slots=True, eq=False)
class RecallTable:
    """Recalled entries of S sequences and L layers with room for K each, all on one device.

    Attributes:
        slice_ids: int64 [S, L, K], of a layer's slice, counted through the pools: slice (block b,
            layer l) of a pool of n layers is its b * n + l. Only the torch twin reads them.
        addresses: int64 [S, L, K], of the slice's first byte, a multiple of 16.
        starts, caps: int64 [S, L, K].
        first_valid, end_valid: int32 [S, L, K].
        counts: int32 [S, L], entries in use.
    """

    slice_ids: Tensor
    addresses: Tensor
    starts: Tensor
    caps: Tensor
    first_valid: Tensor
    end_valid: Tensor
    counts: Tensor

    @property
    def num_sequences(self) -> int:
        """Rows of the table."""
        return self.addresses.shape[0]

    @property
    def num_layers(self) -> int:
        """Layers that recall, each for itself."""
        return self.addresses.shape[1]

    @property
    def capacity(self) -> int:
        """Entries that a layer of a sequence may recall."""
        return self.addresses.shape[2]

    def to(self, device: torch.device | str) -> "RecallTable":
        """The same on another device."""
        places = (self.slice_ids, self.addresses, self.starts, self.caps)
        columns = (*places, self.first_valid, self.end_valid, self.counts)
        return RecallTable(*columns_to(columns, device))

    def entries(self, index: int, layer: int) -> SequenceTable:
        """What one layer of one sequence recalls, with slice ids as block ids."""
        count = int(self.counts[index, layer])
        columns = (self.slice_ids, self.starts, self.caps, self.first_valid, self.end_valid)
        ids, starts, caps, first, end = (c[index, layer, :count].long() for c in columns)
        return SequenceTable(ids, starts, caps, first, end, num_sink_entries=0)


def recalled_visible(
    entries: SequenceTable, token_indices: Tensor, window_size: int, block_size: int
) -> Tensor:
    """Which slots queries at `token_indices` [T] see: bool [T, num_entries, block_size]."""
    slots = torch.arange(block_size, device=entries.starts.device)
    exists = (slots >= entries.first_valid[:, None]) & (slots < entries.end_valid[:, None])
    age = token_indices[:, None, None] - (entries.starts[:, None] + slots)
    return exists & (age >= window_size)


def slice_addresses(slice_ids: Tensor, pools: Sequence[Tensor]) -> Tensor:
    """Address of the first byte of each slice.

    Args:
        slice_ids: int64 [...], counted through the slices of the pools.
        pools: each [num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim], contiguous; a
            staging buffer of lone slices is a pool of one layer.
    """
    return block_addresses(slice_ids, [pool.flatten(0, 1) for pool in pools])


def recall_table(
    entries: Sequence[Sequence[SequenceTable]],
    pools: Sequence[Tensor],
    capacity: int,
    device: torch.device | str,
) -> RecallTable:
    """Put what sequences recall side by side.

    Args:
        entries: of each sequence, of each of its layers; on the CPU, with slice ids that count
            through `pools` as block ids.
        pools: see `slice_addresses`; the last slice of the first one belongs to the guard block.
        capacity: at least the entries of the longest.
        device: where the kernels run.
    """
    shape = (len(entries), len(entries[0]) if entries else 0, capacity)
    slice_ids = torch.full(shape, pools[0].shape[0] * pools[0].shape[1] - 1)
    starts, caps = torch.zeros(shape, dtype=torch.int64), torch.zeros(shape, dtype=torch.int64)
    first, end = torch.zeros(shape, dtype=torch.int32), torch.zeros(shape, dtype=torch.int32)
    counts = torch.zeros(shape[:2], dtype=torch.int32)
    for row, layers in enumerate(entries):
        for layer, table in enumerate(layers):
            count = table.num_entries
            assert count <= capacity, (count, capacity)
            counts[row, layer] = count
            slice_ids[row, layer, :count] = table.block_ids
            starts[row, layer, :count] = table.starts
            caps[row, layer, :count] = table.caps
            first[row, layer, :count] = table.first_valid
            end[row, layer, :count] = table.end_valid
    addresses = slice_addresses(slice_ids, pools)
    return RecallTable(slice_ids, addresses, starts, caps, first, end, counts).to(device)
