"""Linear layers of few rows on the CPU, by the fastest eager way, without compiling anything.

With few rows a linear layer is a stream of weights through memory, and libraries differ in how well
they read: `benchmarks/cpu_linear.py` has the figures behind each choice. Results equal
`torch.nn.functional.linear` up to rounding. Which rows belong together is the caller's business.
"""

from typing import Final

import torch
from torch import Tensor

FEW_ROWS: Final = 8
"""Beyond so many rows arithmetic counts, not reading, and torch's own choice is right."""

MIN_NUMPY_ELEMENTS: Final = 1 << 19
"""Below, waking the threads of numpy's BLAS costs more than its faster reads save."""


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`x` [..., in] times `weight` [out, in], plus `bias` [out]: [..., out] in x's type.

    All on the CPU and of one type; meant for inference, without gradients.
    """
    num_rows = x.numel() // x.shape[-1]
    if num_rows <= FEW_ROWS and weight.dtype != torch.float32:
        out = _narrow(x.reshape(num_rows, -1), weight)
    elif num_rows == 1 and weight.is_contiguous() and weight.numel() >= MIN_NUMPY_ELEMENTS:
        out = torch.from_numpy(weight.detach().numpy().dot(x.detach().reshape(-1).numpy()))
    else:
        return torch.nn.functional.linear(x, weight, bias)
    if bias is not None:
        out = out + bias
    return out.view(*x.shape[:-1], weight.shape[0])


def _narrow(rows: Tensor, weight: Tensor) -> Tensor:
    """bfloat16 and float16, where torch's own choice for few rows reads more slowly."""
    return torch.mv(weight, rows[0]) if rows.shape[0] == 1 else torch.mm(weight, rows.t()).t()
