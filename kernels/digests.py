"""Digests of blocks, and which blocks a set of queries would look at.

The digest of a block is the mean of its keys as they are stored, for each layer and KV head. Keys
are stored rotated by their offset in the block, so that a query's product with the digest is the
mean of its scores with the block's tokens, at any distance that the block is given.

All layers choose together: each layer, head and query says by a softmax over the blocks where it
would look, and the mean of these decides (measured: docs/recall.md).
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from streamkv.kernels.recall_limits import SCRATCH_BYTES
from streamkv.kernels.rope import rotate


def block_digests(pool: Tensor, block_ids: Tensor) -> Tensor:
    """Digests of full blocks: float32 [n, num_layers, num_kv_heads, head_dim].

    Args:
        pool: [blocks, num_layers, 2, num_kv_heads, block_size, head_dim].
        block_ids: int64 [n].
    """
    return pool[block_ids, :, 0].float().mean(-2)


def block_weights(
    queries: Tensor, pages: Sequence[Tensor], cos: Tensor, sin: Tensor, scales: Tensor
) -> Tensor:
    """How much of their attention queries would give to each block: float32 [n], summing to 1.

    Nothing waits for the device.

    Args:
        queries: [num_layers, T, num_q_heads, head_dim], un-rotated, T at least 1.
        pages: digests of n blocks in pieces, in order, each
            [num_layers * num_kv_heads, blocks, head_dim]; n at least 1. Pieces that lie in pinned
            memory are copied to the device of the queries, a part at a time.
        cos, sin: float32 [rotary_dim / 2], of the distance from each query to the start of a block,
            the same for all.
        scales: float32 [num_layers], of the scores.
    """
    num_layers, num_queries, num_q_heads, head_dim = queries.shape
    num_units = pages[0].shape[0]
    num_kv_heads = num_units // num_layers
    group = num_q_heads // num_kv_heads
    turned = rotate(queries.float(), cos, sin) * scales[:, None, None, None]
    turned = turned.view(num_layers, num_queries, num_kv_heads, group, head_dim).transpose(1, 2)
    # A unit is one KV head of one layer.
    turned = turned.reshape(num_units, num_queries * group, head_dim)
    num_blocks = sum(page.shape[1] for page in pages)
    weights = torch.zeros(num_blocks, device=queries.device)
    # Some units at a time: the scores of all of them would be large for a long history.
    unit_bytes = 4 * num_blocks * (2 * num_queries * group + head_dim)
    step = max(1, SCRATCH_BYTES // unit_bytes)
    for low in range(0, num_units, step):
        part = turned[low : low + step]
        scores = torch.cat([part @ _keys(page, low, part) for page in pages], -1)
        weights += scores.softmax(-1).sum((0, 1))
    return weights / (num_units * num_queries * group)


def _keys(page: Tensor, low: int, part: Tensor) -> Tensor:
    """Digests as a product with the units `part` takes them: float32 [units, head_dim, blocks]."""
    here = page[low : low + part.shape[0]].to(part.device, non_blocking=True)
    return here.float().transpose(1, 2)
