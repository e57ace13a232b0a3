"""Digests of blocks that could be kept, and how much of their attention queries give by each.

The keys of a block lie rotated by their offset in it, queries are turned by the distance to its
start. A digest is a few vectors a block, and a query's score of a block the log-sum-exp over them;
only the bounds of Quest are scored in their own way. Pure arithmetic: no engine, no text.
"""

from collections.abc import Callable

import torch
from torch import Tensor

BOUNDS = "bounds"
EXACT = "exact"
ROWS_AT_ONCE = 256
"""Blocks whose distances between keys are made at once."""


def means(num_means: int) -> Callable[[Tensor], Tensor]:
    """Makes digests of `num_means` means of keys that follow each other."""

    def make(keys: Tensor) -> Tensor:
        return keys.unflatten(2, (num_means, -1)).mean(3)

    return make


def bounds(keys: Tensor) -> Tensor:
    """Smallest and largest element of each channel (Quest, Tang et al. 2024, arXiv:2406.10774)."""
    return torch.stack((keys.amin(2), keys.amax(2)), 2)


def far_keys(num_keys: int) -> Callable[[Tensor], Tensor]:
    """Makes digests of `num_keys` keys that are far from each other.

    Representatives of a block, as in InfLLM (Xiao et al. 2024, arXiv:2402.04617), which takes those
    that the block's own queries look at; queries are not kept here.
    """

    def make(keys: Tensor) -> Tensor:
        parts = torch.split(keys, ROWS_AT_ONCE, 1)
        return torch.cat([_far_keys(part, num_keys) for part in parts], 1)

    return make


def _far_keys(keys: Tensor, num_keys: int) -> Tensor:
    """First the key farthest from the mean, then whichever is farthest from those taken."""
    distance = (keys - keys.mean(2, keepdim=True)).square().sum(-1)
    taken: list[Tensor] = []
    for _ in range(num_keys):
        place = distance.argmax(-1)[..., None, None].expand(-1, -1, 1, keys.shape[-1])
        taken.append(keys.gather(2, place))
        from_it = (keys - taken[-1]).square().sum(-1)
        distance = from_it if len(taken) == 1 else torch.minimum(distance, from_it)
    return torch.cat(taken, 2)


def bits_2(keys: Tensor) -> Tensor:
    """Keys of which each channel has four values in a block, from its smallest to its largest."""
    low, high = keys.amin(2, keepdim=True), keys.amax(2, keepdim=True)
    step = ((high - low) / 3).clamp_min(1e-12)
    return low + ((keys - low) / step).round() * step


def bits_1(keys: Tensor) -> Tensor:
    """Keys of which each channel has two values in a block: means of those above and below its."""
    above = keys > keys.mean(2, keepdim=True)
    total_above, num_above = (keys * above).sum(2, True), above.sum(2, True)
    total_below = keys.sum(2, True) - total_above
    high = total_above / num_above.clamp_min(1)
    low = total_below / (keys.shape[2] - num_above).clamp_min(1)
    return torch.where(above, high, low)


KINDS: dict[str, Callable[[Tensor], Tensor]] = {
    "mean": means(1),
    "means_4": means(4),
    "means_16": means(16),
    BOUNDS: bounds,
    "far_keys_4": far_keys(4),
    "bits_1": bits_1,
    "bits_2": bits_2,
    EXACT: lambda keys: keys,
}
"""Makers of digests float32 [num_kv_heads, n, vectors, head_dim] of keys of the same kind, with the
tokens of a block in the place of the vectors."""

TOKEN_BY_TOKEN = frozenset({"bits_1", "bits_2", EXACT})
"""Kinds that have a vector for each token."""


def block_scores(kind: str, digests: Tensor, queries: Tensor) -> Tensor:
    """Scores of blocks, up to what all have in common: float32 [num_kv_heads, Q, n].

    Args:
        kind: of `KINDS`.
        digests: [num_kv_heads, n, vectors, head_dim].
        queries: [num_kv_heads, Q, head_dim], turned and scaled.
    """
    if kind == BOUNDS:
        low, high = digests.unbind(2)
        return queries.clamp_max(0) @ low.mT + queries.clamp_min(0) @ high.mT
    num_blocks, num_vectors = digests.shape[1:3]
    scores = queries @ digests.flatten(1, 2).mT
    return scores.unflatten(2, (num_blocks, num_vectors)).logsumexp(-1)


def scores_beside_sinks(
    kind: str, digests: Tensor, queries: Tensor, num_sinks: int
) -> tuple[Tensor, Tensor]:
    """Scores of blocks, and of what the first one's sink tokens draw beside them.

    Only a digest with a vector for each token tells them apart; of others the second is empty.

    Args:
        kind, digests, queries: as `block_scores` takes them.
        num_sinks: sink tokens of the first block.
    """
    scores = block_scores(kind, digests, queries)
    if kind not in TOKEN_BY_TOKEN:
        return scores, scores[..., :0]
    first = digests[:, :1]
    scores[..., :1] = block_scores(kind, first[:, :, num_sinks:], queries)
    return scores, block_scores(kind, first[:, :, :num_sinks], queries)


def head_weights(scores: Tensor, num_queries: int) -> Tensor:
    """What each head gives to each block, the mean over its queries: [num_q_heads, n].

    Args:
        scores: [num_kv_heads, Q, n], in Q the heads that share a KV head, each with its queries.
        num_queries: of a head.
    """
    return scores.unflatten(1, (-1, num_queries)).flatten(0, 1).softmax(-1).mean(1)


def rank(weights: Tensor, is_wanted: Tensor) -> int:
    """How many blocks weigh more than the heaviest of those that are wanted."""
    return int((weights > weights[is_wanted].max()).sum())
