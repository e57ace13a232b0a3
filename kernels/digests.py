"""Digests of blocks, and which blocks a set of queries would look at.

The digest of a block is the mean of its keys as they are stored, for each layer and KV head. Keys
are stored rotated by their offset in the block, so that a query's product with the digest is the
mean of its scores with the block's tokens, at any distance that the block is given.

All layers choose together: each layer, head and query says by a softmax over the blocks where it
would look, and the mean of these decides (measured: docs/recall.md).
"""

import torch
from torch import Tensor

from streamkv.kernels.rope import RopeTables, rotate


def block_digests(pool: Tensor, block_ids: Tensor) -> Tensor:
    """Digests of full blocks: float32 [n, num_layers, num_kv_heads, head_dim].

    Args:
        pool: [blocks, num_layers, 2, num_kv_heads, block_size, head_dim].
        block_ids: int64 [n].
    """
    return pool[block_ids, :, 0].float().mean(-2)


def block_weights(
    queries: Tensor, digests: Tensor, distance: int, rope: RopeTables, scales: list[float]
) -> Tensor:
    """How much of their attention queries would give to each block: float32 [n], summing to 1.

    Args:
        queries: [num_layers, T, num_q_heads, head_dim], un-rotated, T at least 1.
        digests: [n, num_layers, num_kv_heads, head_dim], n at least 1.
        distance: from each query to the start of a block, the same for all.
        rope: tables that hold the distance.
        scales: of the scores, by layer.
    """
    num_layers, num_queries, num_q_heads, head_dim = queries.shape
    num_kv_heads = digests.shape[2]
    cos, sin = rope.rows(torch.tensor([distance], device=queries.device))
    turned = rotate(queries.float(), cos, sin)
    heads = (num_kv_heads, num_q_heads // num_kv_heads, head_dim)
    turned = turned.view(num_layers, num_queries, *heads)
    weights = torch.zeros(digests.shape[0], device=digests.device)
    # Layer by layer: the scores of all of them at once would be large for a long history.
    for layer in range(num_layers):
        scores = torch.einsum("thgd,nhd->thgn", turned[layer], digests[:, layer].float())
        weights += (scores * scales[layer]).softmax(-1).mean((0, 1, 2))
    return weights / num_layers
