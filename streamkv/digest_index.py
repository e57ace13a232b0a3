"""The digests of a stream's sealed blocks, and which of them to recall.

One digest for each sealed block, in the order of the stream, in 16 bits on the pool's device.
What is chosen depends only on what is in the index and on the queries, not on where blocks lie.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from streamkv.kernels.digests import block_weights
from streamkv.kernels.rope import RopeTables
from streamkv.tiers.spec import BlockKey, KVSpec

_FIRST_ROWS = 64


class DigestIndex:
    """Digests by block index.

    Args:
        num_rows: KV heads of a digest.
        spec: layout of a block.
        device: of the pool.
    """

    def __init__(self, num_rows: int, spec: KVSpec, device: torch.device | str) -> None:
        self._shape = (num_rows, spec.block_size, spec.head_dim)
        self._keys: list[BlockKey | None] = []
        dtype = torch.float16 if spec.dtype == "float32" else getattr(torch, spec.dtype)
        self._rows = torch.empty(_FIRST_ROWS, *self._shape, dtype=dtype, device=device)

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
            digest: [num_rows, block_size, head_dim], given if the key is.
        """
        assert (key is None) == (digest is None)
        if len(self) == self._rows.shape[0]:
            more = self._rows.new_empty(2 * len(self), *self._shape)
            more[: len(self)] = self._rows
            self._rows = more
        if digest is not None:
            if self._rows.dtype == torch.float16:
                # It has an end; no key of a sound model comes near it.
                digest = digest.clamp(-65504.0, 65504.0)
            self._rows[len(self)] = digest
        self._keys.append(key)

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
        rows: Sequence[int],
        distance: int,
        rope: RopeTables,
        scales: Sequence[float],
    ) -> tuple[int, ...]:
        """Indices of the blocks that the queries would look at most, ascending.

        Args:
            queries: [heads, T, head_dim], un-rotated.
            first_block, end_block: only blocks from the one on and before the other.
            num_blocks: how many, fewer if there are not so many.
            rows, distance, rope, scales: as `block_weights` takes them.
        """
        blocks = range(first_block, min(end_block, len(self)))
        candidates = [index for index in blocks if self._keys[index] is not None]
        if len(candidates) <= num_blocks:
            return tuple(candidates)
        if len(candidates) == len(blocks):
            digests = self._rows[first_block:end_block]
        else:
            digests = self._rows[torch.tensor(candidates, device=self._rows.device)]
        weights = block_weights(queries, digests, rows, distance, rope, scales)
        # On a tie the earlier block, wherever this runs.
        order = weights.sort(descending=True, stable=True).indices[:num_blocks]
        return tuple(sorted(candidates[place] for place in order.tolist()))
