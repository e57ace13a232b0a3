"""Attention over contiguous keys with its log-sum-exp, by the fastest operator a device has.

    q           [N, num_q_heads, T, head_dim]; any strides with a contiguous last dimension
    k, v        [N, num_kv_heads, S, head_dim]; heads of one KV head are adjacent in q
    out         [N, T, num_q_heads, head_dim], contiguous
    lse         float32 [N, num_q_heads, T], natural logarithm, contiguous

cuDNN is the fastest on Hopper (608 TFLOP/s causal, bf16, head_dim 128, on an H200) but makes a plan
for every new size, which pays only where sizes recur; FlashAttention takes any size as it comes.
Which of them works, and how, is found out by trying. Causal means square: query i sees keys 0 to i.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from streamkv.kernels.gpu_shape import Shape

Attend = Callable[[Tensor, Tensor, Tensor, float, bool], tuple[Tensor, Tensor]]
"""(q, k, v, scale, is_causal) to (out, lse)."""

_TRIED = ((319, 319, True), (319, 192, False))
"""Queries, keys and causality of a trial: no multiples of a tile."""
_TOLERANCE = 0.02


@dataclass(frozen=True, slots=True)
class Squares:
    """The operators of a device.

    Attributes:
        name: of both, for people.
        recurring: for sizes that come again and again.
        single: for sizes that may never come again.
        is_fast: whether any of them is faster than Triton's prefill.
    """

    name: str
    recurring: Attend
    single: Attend
    is_fast: bool

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, scale: float, *, is_causal: bool, recurring: bool
    ) -> tuple[Tensor, Tensor]:
        """Attention by the one or the other; shapes as in the module."""
        chosen = self.recurring if recurring else self.single
        return chosen(q, k, v, scale, is_causal)


def plain_squares() -> Squares:
    """By `plain`, on any device."""
    return Squares("plain", plain, plain, is_fast=False)


def choose_squares(shape: Shape, device: torch.device | str) -> Squares:
    """The fastest operators that give right results; tries them, so call it once for a device.

    Args:
        shape: heads, sizes and type that will be used.
        device: where.
    """
    device = torch.device(device)
    if device.type != "cuda":
        return plain_squares()
    flash = _first_right((("flash", _flash), ("flash, keys repeated", repeated(_flash))), shape)
    cudnn = _first_right((("cudnn", _cudnn), ("cudnn, keys repeated", repeated(_cudnn))), shape)
    recurring, single = cudnn or flash, flash or cudnn
    if recurring is None or single is None:
        return plain_squares()
    name = f"{recurring[0]}; {single[0]}"
    return Squares(name, recurring[1], single[1], is_fast=cudnn is not None)


def plain(q: Tensor, k: Tensor, v: Tensor, scale: float, is_causal: bool) -> tuple[Tensor, Tensor]:
    """In float32 by products and softmax: the twin of all others. Memory grows with T x S."""
    count, num_heads, num_queries, head_dim = q.shape
    num_kv_heads, num_keys = k.shape[1:3]
    grouped = q.float().reshape(count, num_kv_heads, -1, num_queries, head_dim)
    scores = grouped @ k.float()[:, :, None].transpose(-1, -2) * scale
    if is_causal:
        assert num_queries == num_keys, (num_queries, num_keys)
        later = torch.ones(num_queries, num_keys, dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(later, -math.inf)
    out = (scores.softmax(-1) @ v.float()[:, :, None]).to(q.dtype)
    shape = (count, num_heads, num_queries)
    return _by_token(out.view(*shape, head_dim)), scores.logsumexp(-1).view(shape)


def repeated(attend: Attend) -> Attend:
    """For operators that want as many KV heads as query heads."""

    def with_repeated_keys(
        q: Tensor, k: Tensor, v: Tensor, scale: float, is_causal: bool
    ) -> tuple[Tensor, Tensor]:
        group = q.shape[1] // k.shape[1]
        k, v = (rows.repeat_interleave(group, 1) for rows in (k, v))
        return attend(q, k, v, scale, is_causal)

    return with_repeated_keys


def _cudnn(q: Tensor, k: Tensor, v: Tensor, scale: float, is_causal: bool) -> tuple[Tensor, Tensor]:
    operator = torch.ops.aten._scaled_dot_product_cudnn_attention
    out, lse = operator(q, k, v, None, True, 0.0, is_causal, False, scale=scale)[:2]
    return _by_token(out), lse.reshape(out.shape[:3]).contiguous()


def _flash(q: Tensor, k: Tensor, v: Tensor, scale: float, is_causal: bool) -> tuple[Tensor, Tensor]:
    operator = torch.ops.aten._scaled_dot_product_flash_attention
    out, lse = operator(q, k, v, 0.0, is_causal, False, scale=scale)[:2]
    return _by_token(out), lse.reshape(out.shape[:3]).contiguous()


def _by_token(out: Tensor) -> Tensor:
    """[N, heads, T, dim] as [N, T, heads, dim]: how all of them lay it out already."""
    return out.transpose(1, 2).contiguous()


def _first_right(
    candidates: tuple[tuple[str, Attend], ...], shape: Shape
) -> tuple[str, Attend] | None:
    for name, attend in candidates:
        try:
            right = all(_is_right(attend, shape, *sizes) for sizes in _TRIED)
        except RuntimeError:  # what torch raises for all that an operator does not take
            continue
        if right:
            return name, attend
    return None


def _is_right(
    attend: Attend, shape: Shape, num_queries: int, num_keys: int, is_causal: bool
) -> bool:
    """Whether an operator agrees with `plain` on rows that lie as those of a window do."""
    generator = torch.Generator(device="cuda").manual_seed(0)

    def rows(length: int, num_heads: int) -> Tensor:
        size = (2, length + 1, num_heads, shape.head_dim)
        made = torch.randn(size, generator=generator, device="cuda").to(shape.dtype)
        return made[:, 1:].transpose(1, 2)

    q = rows(num_queries, shape.num_q_heads)
    k, v = (rows(num_keys, shape.num_kv_heads) for _ in range(2))
    scale = shape.head_dim**-0.5
    found = attend(q, k, v, scale, is_causal)
    expected = plain(q, k, v, scale, is_causal)
    return all(
        one.shape == other.shape
        and bool((one.float() - other.float()).norm() <= _TOLERANCE * other.float().norm())
        for one, other in zip(found, expected, strict=True)
    )
