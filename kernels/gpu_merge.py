"""Joining parts of one attention on a GPU: the Triton kernel behind a checked wrapper."""

import torch
import triton
from torch import Tensor

from streamkv.kernels.gpu_shape import DTYPES, MAX_HEAD_DIM, require
from streamkv.kernels.triton_merge import merge_kernel

_ELEMENTS = 2048


def merge(
    outs: Tensor, lses: Tensor, sink_logits: Tensor | None = None, out: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Attention over disjoint sets of keys, from the attention over each of P sets.

    The softmax over all keys is the mean of the parts' results, weighted by exp(lse); as in
    flash-decoding (Dao et al. 2023). The twin is `batch_reference.merge`.

    Args:
        outs: [P, T, num_q_heads, head_dim]; the last dimension is contiguous.
        lses: float32 [P, T, num_q_heads], natural log; -inf where a part saw nothing, and what its
            result holds there is not read.
        sink_logits: float [num_q_heads], a logit that takes weight once and gives no value; no part
            may have counted it.
        out: [T, num_q_heads, head_dim], contiguous, in any of the types, to write to; made in the
            type of `outs` if not given.

    Returns:
        out and lse float32; zeros and -inf where no part saw anything.

    Raises:
        ConfigError: a shape, stride or type that the kernel is not made for.
    """
    shape = list(outs.shape)
    require("outs", shape, outs.dim() == 4, "Pass [P, T, num_q_heads, head_dim].")
    require("outs", outs.dtype, outs.dtype in DTYPES, "Use float16, bfloat16 or float32.")
    require("outs", outs.stride(), outs.stride(3) == 1, "Its last stride must be 1.")
    num_parts, num_tokens, num_heads, head_dim = outs.shape
    require("head_dim", head_dim, 1 <= head_dim <= MAX_HEAD_DIM, f"Use 1 to {MAX_HEAD_DIM}.")
    fits = list(lses.shape) == shape[:3] and lses.dtype == torch.float32
    require("lses", f"{lses.dtype} {list(lses.shape)}", fits, f"Pass float32 {shape[:3]}.")
    has_sinks = sink_logits is not None
    if sink_logits is not None:
        fits = sink_logits.shape == (num_heads,) and sink_logits.is_contiguous()
        require("sink_logits", list(sink_logits.shape), fits, f"Pass contiguous [{num_heads}].")
    if out is None:
        out = torch.empty(shape[1:], dtype=outs.dtype, device=outs.device)
    fits = list(out.shape) == shape[1:] and out.dtype in DTYPES and out.is_contiguous()
    require("out", f"{out.dtype} {list(out.shape)}", fits, f"Pass contiguous {shape[1:]}.")
    lse = torch.empty(shape[1:3], dtype=torch.float32, device=outs.device)
    num_rows = num_tokens * num_heads
    if not num_rows:
        return out, lse
    padded = triton.next_power_of_2(head_dim)
    rows = max(1, _ELEMENTS // padded)
    merge_kernel[(triton.cdiv(num_rows, rows),)](
        outs,
        lses,
        sink_logits if has_sinks else lse,
        out,
        lse,
        num_parts,
        num_rows,
        *outs.stride()[:3],
        *lses.stride(),
        NUM_HEADS=num_heads,
        DIM=head_dim,
        DIM_PAD=padded,
        ROWS=rows,
        HAS_SINK_LOGITS=has_sinks,
        num_warps=4,
    )
    return out, lse
