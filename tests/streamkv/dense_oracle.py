"""The independent computation that streaming attention is compared with: one position per pair.

Every (query, key) pair gets its own distance, as StreamingLLM defines it by counting positions in
the cache; scores are plain float64 sums over the whole stream. Nothing here knows of blocks or
tables.
"""

import torch
from torch import Tensor

from streamkv.model import ModelAdapter


def visible_and_distance(
    token: int, num_sinks: int, window_size: int, num_tokens: int
) -> tuple[list[int], list[int]]:
    """Keys that the query at `token` sees, and how far each is in the cache."""
    first = max(0, token - window_size + 1)
    kept = [key for key in range(min(num_sinks, first))]
    cache = kept + list(range(first, token + 1))
    return cache, [len(cache) - 1 - place for place in range(len(cache))]


def dense_logits(adapter: ModelAdapter, ids: list[int], num_sinks: int, window_size: int) -> Tensor:
    """Logits [T, vocab_size] after every token, by brute force."""
    num_tokens = len(ids)
    rows = [
        visible_and_distance(token, num_sinks, window_size, num_tokens)
        for token in range(num_tokens)
    ]

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        group = q.shape[1] // k.shape[1]
        keys = k.double().repeat_interleave(group, 1)
        values = v.double().repeat_interleave(group, 1)
        out = torch.empty_like(q)
        for token, (cache, distances) in enumerate(rows):
            turned = turn(q[token].double(), distances, adapter.inv_freq)
            scores = (turned * keys[cache]).sum(-1) * scale
            weights = scores.softmax(0)
            out[token] = (weights[..., None] * values[cache]).sum(0).to(q.dtype)
        return out

    return adapter.logits(adapter.hidden(torch.tensor([ids]), attend))


def turn(q: Tensor, distances: list[int], inv_freq: Tensor) -> Tensor:
    """q [H, D] turned by each distance: [n, H, D]."""
    angles = torch.tensor(distances).double()[:, None, None] * inv_freq
    half = inv_freq.shape[0]
    first, second = q[None, :, :half], q[None, :, half : 2 * half]
    rest = q[None, :, 2 * half :].expand(len(distances), -1, -1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), -1)


def target_logprobs(logits: Tensor, ids: list[int]) -> list[float]:
    """Log-probability of each token but the first, given all before it."""
    logprobs = logits[:-1].double().log_softmax(-1)
    return logprobs.gather(1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()
