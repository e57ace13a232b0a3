"""Linear layers of few rows on the CPU, by the fastest eager way, without compiling anything.

With few rows a linear layer is a stream of weights through memory, and libraries differ in how well
they read: `benchmarks/cpu_linear.py` has the figures behind each choice. Results equal
`torch.nn.functional.linear` up to rounding. Which rows belong together is the caller's business.
"""

from typing import Final

import torch
from torch import Tensor

FEW_ROWS: Final = 8
"""Beyond so many rows, `torch.nn.functional.linear` packs the weights and wins."""

MIN_NUMPY_ELEMENTS: Final = 1 << 19
"""Below, waking the threads of numpy's BLAS costs more than its faster reads save."""


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`x` [..., in] times `weight` [out, in], plus `bias` [out]: [..., out] in x's type.

    All on the CPU and of one type; no gradient is recorded.
    """
    rows = x.detach().reshape(-1, x.shape[-1])
    if weight.dtype == torch.float32:
        out = _float32(rows, weight.detach())
    else:
        out = _narrow(rows, weight.detach())
    if bias is not None:
        out = out + bias.detach()
    return out.view(*x.shape[:-1], weight.shape[0])


def _float32(rows: Tensor, weight: Tensor) -> Tensor:
    if rows.shape[0] == 1 and weight.is_contiguous() and weight.numel() >= MIN_NUMPY_ELEMENTS:
        return torch.from_numpy(weight.numpy().dot(rows[0].numpy()))[None]
    return torch.nn.functional.linear(rows, weight)


def _narrow(rows: Tensor, weight: Tensor) -> Tensor:
    """bfloat16 and float16, where torch's own choice for few rows reads at half the speed."""
    if rows.shape[0] == 1:
        return torch.mv(weight, rows[0])[None]
    if rows.shape[0] <= FEW_ROWS:
        return torch.mm(weight, rows.t()).t()
    return torch.nn.functional.linear(rows, weight)
