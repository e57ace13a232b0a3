"""The entries that one sequence attends to: which block, where it starts, which of its slots count.

    slot j of entry e     is token starts[e] + j; it exists iff first_valid[e] <= j < end_valid[e]
    sink entries          the first: a token is visible to every query at or after it
    recalled entries      the next: token i is visible to query t iff i <= t - window_size
    window entries        the rest: token i is visible to query t iff t - window_size < i <= t
    distance of entry e   from query t: min(t - starts[e], caps[e])

An entry never changes while the stream moves, except that its last valid slot grows while the block
is open. One block may have several entries (its sink slots, its window slots, the same slots once
more as recalled ones): no query sees a token in two of them. The table knows neither pools nor
layers: ids are those of the pool handed to attention with it.
"""

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

NO_CAP: Final = 1 << 62
"""Cap of an entry whose distance grows with the stream."""


@dataclass(frozen=True, slots=True, eq=False)
class SequenceTable:
    """Entries of one sequence: int64 vectors of one length on one device, sink entries first.

    Attributes:
        block_ids: block in the pool; unused entries name the guard block and have no valid slot.
        starts: token index of slot 0.
        caps: largest distance of the entry, or `NO_CAP`.
        first_valid: first slot that belongs to the entry.
        end_valid: one past the last such slot.
        num_sink_entries: how many of the first entries are sink entries.
        num_recalled_entries: how many entries after these are recalled ones.
    """

    block_ids: Tensor
    starts: Tensor
    caps: Tensor
    first_valid: Tensor
    end_valid: Tensor
    num_sink_entries: int
    num_recalled_entries: int = 0

    def __post_init__(self) -> None:
        shape = self.block_ids.shape
        for column in (self.block_ids, self.starts, self.caps, self.first_valid, self.end_valid):
            assert column.shape == shape and column.dtype == torch.int64
        assert len(shape) == 1 and self.num_sink_entries >= 0 and self.num_recalled_entries >= 0
        assert self.num_lasting_entries <= shape[0]

    @property
    def num_entries(self) -> int:
        """Entries of every kind together."""
        return self.block_ids.shape[0]

    @property
    def num_lasting_entries(self) -> int:
        """Entries that no query is too new for: sink entries and recalled ones."""
        return self.num_sink_entries + self.num_recalled_entries

    def delays(self, window_size: int) -> Tensor:
        """Age from which a token of each entry is visible: int64 [num_entries]."""
        delays = torch.zeros_like(self.starts)
        delays[self.num_sink_entries : self.num_lasting_entries] = window_size
        return delays

    def distances(self, token_indices: Tensor) -> Tensor:
        """Distance of every entry from queries at `token_indices` [T]: int64 [T, num_entries].

        Negative where the entry starts after the query; none of its slots is visible then.
        """
        return torch.minimum(token_indices[:, None] - self.starts, self.caps)

    def visible(self, token_indices: Tensor, window_size: int, block_size: int) -> Tensor:
        """Which slots queries at `token_indices` [T] see: bool [T, num_entries, block_size]."""
        slots = torch.arange(block_size, device=self.starts.device)
        exists = (slots >= self.first_valid[:, None]) & (slots < self.end_valid[:, None])
        age = token_indices[:, None, None] - (self.starts[:, None] + slots)
        reach = torch.full_like(self.starts, window_size)
        reach[: self.num_lasting_entries] = NO_CAP
        return exists & (age >= self.delays(window_size)[:, None]) & (age < reach[:, None])
