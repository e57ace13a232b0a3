"""Digests of blocks, and which blocks a set of queries would look at.

The digest of a block is its keys, exactly, of those few KV heads whose query heads look facts up.
Keys are stored rotated by their offset in the block, so that a query turned by a distance scores
them as if the block started there.

Each of these query heads and each query says by a softmax over all tokens how much it would look at
each block, and the mean decides: one choice for all layers (measured: docs/recall.md). Sink tokens
are attended in any case, so what they draw counts for no block. What a text says may go on behind
the border of a block, so a block comes after the one before it with at least half of its weight.

Digests may lie in host memory: they are cut in the same way wherever they lie, and a piece is
brought to the device when its turn comes, so that the same numbers are added in the same order. On
a GPU this would be a thousand small operations; there `gpu_digests` does it in a few.
"""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from streamkv.kernels.recall_limits import SCRATCH_BYTES
from streamkv.kernels.rope import rotate

FOLLOWING = 0.5
"""Of a block's weight, what the block after it has at least."""


def block_digests(pool: Tensor, block_ids: Tensor, kv_heads: Tensor) -> Tensor:
    """Digests of full blocks: [R, n, block_size, head_dim], in the pool's type.

    Args:
        pool: [blocks, num_layers, 2, num_kv_heads, block_size, head_dim].
        block_ids: int64 [n].
        kv_heads: int64 [R, 2], layer and KV head of each row of a digest.
    """
    layers, heads = kv_heads[:, :1], kv_heads[:, 1:]
    return pool[block_ids, layers, 0, heads]


Fetch = Callable[[Tensor], Tensor]
"""Brings keys to the device of the queries, in the order of its work; they may be there already."""


def block_weights(
    queries: Tensor,
    pages: Sequence[Tensor],
    rows: Sequence[int],
    cos: Tensor,
    sin: Tensor,
    scales: Sequence[float],
    num_sinks: int = 0,
    fetch: Fetch | None = None,
) -> Tensor:
    """How much of their attention queries would give to each block: float32 [n].

    The sum is 1, less what sink tokens draw.

    Nothing waits for the device, and every key is brought to it once.

    Args:
        queries: [H, T, head_dim], un-rotated, of H query heads, T at least 1.
        pages: digests of n blocks in pieces, in order, each [R, blocks, block_size, head_dim], on
            the device or in host memory; n at least 1. Page-locked memory a GPU reads as it lies:
            until it has, the host must not write there, nor give it to others.
        rows: of each query head, which row of a digest it reads.
        cos, sin: float32 [rotary_dim / 2], of the distance from each query to the start of a block,
            the same for all.
        scales: of the scores, of each query head.
        num_sinks: how many of the first block's tokens are sink tokens, fewer than all.
        fetch: brings keys [blocks, block_size, head_dim] to the device; `None`: they are there.
    """
    if queries.is_cuda:
        # Where there is no GPU there need be no Triton.
        from streamkv.kernels import gpu_digests

        if gpu_digests.fits(queries, pages):
            return gpu_digests.block_weights(
                queries, pages, rows, cos, sin, scales, num_sinks, fetch
            )
    turned = rotate(queries.float(), cos, sin)
    num_blocks = sum(page.shape[1] for page in pages)
    assert num_sinks < pages[0].shape[2]
    weights = torch.zeros(num_blocks, device=queries.device)
    for row in dict.fromkeys(rows):
        heads = [head for head, its_row in enumerate(rows) if its_row == row]
        by_head = [turned[head].T * scales[head] for head in heads]
        keys = _pieces([page[row] for page in pages], queries.shape[1], fetch)
        for scores in _scores(keys, by_head, num_sinks):
            weights += scores.softmax(0)[:num_blocks].mean(1)
    return weights / len(rows)


def followed(weights: Tensor) -> Tensor:
    """By which blocks are chosen: their weights, and at least half of that of the block before.

    Heads that look a fact up look at where it begins. Where a border cut a number, its second half
    was left behind as soon as there were many blocks to choose from: of 18 such streams of 131,072
    tokens none was answered (docs/recall.md).

    Args:
        weights: float32 [n], of blocks that follow each other.
    """
    before = torch.cat((weights.new_zeros(1), weights[:-1]))
    return torch.maximum(weights, FOLLOWING * before)


def _pieces(pages: list[Tensor], num_queries: int, fetch: Fetch | None) -> Iterator[Tensor]:
    """Keys of some blocks at a time, float32 [blocks, block_size, head_dim].

    What is made of a piece is given up before the one after the next is made, in the order of the
    device's work: two pieces at a time are all that there is of them.
    """
    block_size, head_dim = pages[0].shape[1:]
    # Keys as they are kept, and keys and scores in 32 bits.
    one = block_size * (2 * head_dim + 4 * (head_dim + num_queries))
    for page in pages:
        for piece in torch.split(page, max(1, SCRATCH_BYTES // one)):
            yield (piece if fetch is None else fetch(piece)).float()


def _scores(keys: Iterator[Tensor], by_head: list[Tensor], num_sinks: int) -> list[Tensor]:
    """Log-sums of the scores of each block for each head: [n, T], sink tokens last if there are."""
    pieces: list[list[Tensor]] = [[] for _ in by_head]
    at_end: list[list[Tensor]] = [[] for _ in by_head]
    is_first = True
    for piece in keys:
        for head, query in enumerate(by_head):
            sums = (piece @ query).logsumexp(1)
            if is_first and num_sinks:
                first = piece[0] @ query
                sums[0] = first[num_sinks:].logsumexp(0)
                at_end[head].append(first[:num_sinks].logsumexp(0, keepdim=True))
            pieces[head].append(sums)
        is_first = False
    return [torch.cat(found + last) for found, last in zip(pieces, at_end, strict=True)]
