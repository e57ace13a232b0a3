"""Digests of blocks, and which blocks a set of queries would look at.

The digest of a block is its keys, exactly, of those few KV heads whose query heads look facts up.
Keys are stored rotated by their offset in the block, so that a query turned by a distance scores
them as if the block started there.

Each of these query heads and each query says by a softmax over all tokens how much it would look at
each block, and the mean decides: one choice for all layers (measured: docs/recall.md). Sink tokens
are attended in any case, so what they draw counts for no block.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from streamkv.kernels.recall_limits import SCRATCH_BYTES
from streamkv.kernels.rope import rotate


def block_digests(pool: Tensor, block_ids: Tensor, kv_heads: Tensor) -> Tensor:
    """Digests of full blocks: [R, n, block_size, head_dim], in the pool's type.

    Args:
        pool: [blocks, num_layers, 2, num_kv_heads, block_size, head_dim].
        block_ids: int64 [n].
        kv_heads: int64 [R, 2], layer and KV head of each row of a digest.
    """
    layers, heads = kv_heads[:, :1], kv_heads[:, 1:]
    return pool[block_ids, layers, 0, heads]


def block_weights(
    queries: Tensor,
    pages: Sequence[Tensor],
    rows: Sequence[int],
    cos: Tensor,
    sin: Tensor,
    scales: Sequence[float],
    num_sinks: int = 0,
) -> Tensor:
    """How much of their attention queries would give to each block: float32 [n].

    The sum is 1, less what sink tokens draw.

    Nothing waits for the device.

    Args:
        queries: [H, T, head_dim], un-rotated, of H query heads, T at least 1.
        pages: digests of n blocks in pieces, in order, each [R, blocks, block_size, head_dim]; n at
            least 1.
        rows: of each query head, which row of a digest it reads.
        cos, sin: float32 [rotary_dim / 2], of the distance from each query to the start of a block,
            the same for all.
        scales: of the scores, of each query head.
        num_sinks: how many of the first block's tokens are sink tokens, fewer than all.
    """
    turned = rotate(queries.float(), cos, sin)
    num_blocks = sum(page.shape[1] for page in pages)
    block_size, head_dim = pages[0].shape[2:]
    # Keys and scores in 32 bits, of some blocks at a time.
    step = max(1, SCRATCH_BYTES // (4 * block_size * (head_dim + queries.shape[1])))
    assert num_sinks < block_size
    weights = torch.zeros(num_blocks, device=queries.device)
    for head, (row, scale) in enumerate(zip(rows, scales, strict=True)):
        query = turned[head].T * scale
        # Each piece is [blocks, T].
        pieces = [
            (keys.float() @ query).logsumexp(1)
            for page in pages
            for keys in torch.split(page[row], step)
        ]
        if num_sinks:
            first = pages[0][row, 0].float() @ query
            pieces[0][0] = first[num_sinks:].logsumexp(0)
            pieces.append(first[:num_sinks].logsumexp(0, keepdim=True))
        weights += torch.cat(pieces).softmax(0)[:num_blocks].mean(1)
    return weights / len(rows)
