"""The digests of a stream's sealed blocks, and which of them to recall.

One row for each sealed block, in the order of the stream, of 16-bit numbers on the pool's device.
What is chosen depends only on what is in the index and on the queries, not on where blocks lie.
"""

import torch
from torch import Tensor

from streamkv.kernels.digests import block_weights
from streamkv.kernels.rope import RopeTables
from streamkv.tiers.spec import BlockKey, KVSpec

_FIRST_ROWS = 64


class DigestIndex:
    """Digests by block index.

    Args:
        spec: layout of a block.
        device: of the pool.
    """

    def __init__(self, spec: KVSpec, device: torch.device | str) -> None:
        self._shape = (spec.num_layers, spec.num_kv_heads, spec.head_dim)
        self._keys: list[BlockKey | None] = []
        self._rows = torch.empty(_FIRST_ROWS, *self._shape, dtype=torch.float16, device=device)

    def __len__(self) -> int:
        return len(self._keys)

    @property
    def num_bytes(self) -> int:
        """Of digests, room to grow included."""
        return self._rows.numel() * self._rows.element_size()

    def key(self, block_index: int) -> BlockKey | None:
        """The block's key; `None` if it has none and cannot be recalled."""
        return self._keys[block_index]

    def append(self, key: BlockKey | None, digest: Tensor | None) -> None:
        """The next block of the stream was sealed.

        Args:
            key: `None` for a block that cannot be found again: it is never chosen.
            digest: [num_layers, num_kv_heads, head_dim], given if the key is.
        """
        self.put(len(self), key, digest)

    def put(self, block_index: int, key: BlockKey | None, digest: Tensor | None) -> None:
        """A block of the stream was sealed, perhaps once more; see `append`."""
        assert (key is None) == (digest is None) and block_index <= len(self)
        if block_index == self._rows.shape[0]:
            more = self._rows.new_empty(2 * len(self), *self._shape)
            more[: len(self)] = self._rows
            self._rows = more
        if digest is not None:
            # A 16-bit number has an end; no key of a sound model comes near it.
            self._rows[block_index] = digest.clamp(-65504.0, 65504.0).view(self._shape)
        self._keys[block_index : block_index + 1] = [key]

    def row(self, block_index: int) -> Tensor:
        """The digest as it is kept: float16 [num_layers, num_kv_heads, head_dim]."""
        return self._rows[block_index]

    def truncate(self, num_blocks: int) -> None:
        """Forget the blocks from `num_blocks` on: the stream was rewound."""
        del self._keys[num_blocks:]

    def copy(self) -> "DigestIndex":
        """The same digests for a fork."""
        other = object.__new__(DigestIndex)
        other._shape = self._shape
        other._keys = list(self._keys)
        other._rows = self._rows.clone()
        return other

    def choose(
        self,
        queries: Tensor,
        first_block: int,
        end_block: int,
        num_blocks: int,
        distance: int,
        rope: RopeTables,
        scales: list[float],
    ) -> tuple[int, ...]:
        """Indices of the blocks that the queries would look at most, ascending.

        Args:
            queries: [num_layers, T, num_q_heads, head_dim], un-rotated.
            first_block, end_block: only blocks from the one on and before the other.
            num_blocks: how many, fewer if there are not so many.
            distance, rope, scales: as `block_weights` takes them.
        """
        blocks = range(first_block, min(end_block, len(self)))
        candidates = [index for index in blocks if self._keys[index] is not None]
        if len(candidates) <= num_blocks:
            return tuple(candidates)
        if len(candidates) == len(blocks):
            digests = self._rows[first_block:end_block]
        else:
            digests = self._rows[torch.tensor(candidates, device=self._rows.device)]
        weights = block_weights(queries, digests, distance, rope, scales)
        # On a tie the earlier block, wherever this runs.
        order = weights.sort(descending=True, stable=True).indices[:num_blocks]
        return tuple(sorted(candidates[place] for place in order.tolist()))
