"""Digests of blocks, and which blocks a set of queries would look at.

The digest of a block is its keys, exactly, of those few KV heads whose query heads look facts up.
Keys are stored rotated by their offset in the block, so that a query turned by a distance scores
them as if the block started there.

Each of these query heads and each query says by a softmax over all tokens how much it would look at
each block, and the mean decides: one choice for all layers (measured: docs/recall.md).
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from streamkv.kernels.rope import RopeTables, rotate

_BLOCKS_AT_ONCE = 2048
"""So that scores of a long history do not need much memory."""


def block_digests(pool: Tensor, block_ids: Tensor, kv_heads: Tensor) -> Tensor:
    """Digests of full blocks: [n, R, block_size, head_dim], in the pool's type.

    Args:
        pool: [blocks, num_layers, 2, num_kv_heads, block_size, head_dim].
        block_ids: int64 [n].
        kv_heads: int64 [R, 2], layer and KV head of each row of a digest.
    """
    layers, heads = kv_heads.unbind(1)
    return pool[block_ids[:, None], layers, 0, heads]


def block_weights(
    queries: Tensor,
    digests: Tensor,
    rows: Sequence[int],
    distance: int,
    rope: RopeTables,
    scales: Sequence[float],
) -> Tensor:
    """How much of their attention queries would give to each block: float32 [n], summing to 1.

    Args:
        queries: [H, T, head_dim], un-rotated, of H query heads, T at least 1.
        digests: [n, R, block_size, head_dim], n at least 1.
        rows: of each query head, which row of a digest it reads.
        distance: from each query to the start of a block, the same for all.
        rope: tables that hold the distance.
        scales: of the scores, of each query head.
    """
    cos, sin = rope.rows(torch.tensor([distance], device=queries.device))
    turned = rotate(queries.float(), cos, sin)
    total = torch.zeros(digests.shape[0], device=digests.device)
    for head, (row, scale) in enumerate(zip(rows, scales, strict=True)):
        parts = [
            (turned[head] @ keys[:, row].float().transpose(1, 2) * scale).logsumexp(-1)
            for keys in torch.split(digests, _BLOCKS_AT_ONCE)
        ]
        # Each part is [blocks, T].
        total += torch.cat(parts).softmax(0).mean(1)
    return total / len(rows)
