"""Norms, gates, embeddings and scores of rows on a GPU: the kernels behind their checks."""

import torch
import triton
from torch import Tensor

from streamkv.kernels.gpu_shape import require
from streamkv.kernels.triton_rows import embed_kernel, gated_kernel, norm_kernel
from streamkv.kernels.triton_scores import score_kernel

_PIECE = 1024


def rms_norm(x: Tensor, weight: Tensor, eps: float, out: Tensor | None = None) -> Tensor:
    """RMSNorm over the last dimension (Zhang and Sennrich, 2019).

    Args:
        x: [rows, width] or [rows, pieces, width]; all but the first dimension contiguous.
        weight: [width].
        eps: added to the mean of squares.
        out: contiguous, of x's shape; made if not given.
    """
    require("x", list(x.shape), x.dim() in (2, 3), "Pass [rows, width] or [rows, pieces, width].")
    width, pieces = x.shape[-1], x.shape[1] if x.dim() == 3 else 1
    inner = x.stride(-1) == 1 and (x.dim() == 2 or x.stride(1) == width)
    require("x", x.stride(), inner, "Rows must be contiguous.")
    require("weight", list(weight.shape), weight.shape == (width,), f"Pass [{width}].")
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device) if out is None else out
    if x.shape[0]:
        norm_kernel[(x.shape[0], pieces)](
            x,
            weight,
            out,
            eps,
            x.stride(0),
            WIDTH=width,
            PAD=triton.next_power_of_2(width),
            PER_ROW=pieces,
            num_warps=_warps(width),
        )
    return out


def gated_silu(both: Tensor) -> Tensor:
    """silu(gate) * up [rows, width] of rows [rows, 2 * width] that hold the gate first."""
    fits = both.dim() == 2 and both.is_contiguous() and both.shape[1] % 2 == 0
    require("both", list(both.shape), fits, "Pass contiguous [rows, 2 * width].")
    width = both.shape[1] // 2
    out = torch.empty(both.shape[0], width, dtype=both.dtype, device=both.device)
    if both.shape[0]:
        grid = (both.shape[0], triton.cdiv(width, _PIECE))
        gated_kernel[grid](both, out, WIDTH=width, PIECE=_PIECE, num_warps=4)
    return out


def embed(
    ids: Tensor,
    sources: Tensor,
    sampled: Tensor,
    table: Tensor,
    norm: Tensor,
    out: Tensor,
    scaled: Tensor,
    squares: Tensor,
    pdl: bool,
) -> None:
    """Embedding of each row's token, prepared for a product as `small_batch` wants it.

    Args:
        ids: int64 [rows].
        sources: int64 [rows], where in `sampled` a row's token is, or -1: it is in `ids`.
        sampled: int64 [max rows], tokens that were chosen on the device.
        table: [vocab_size, width].
        norm: [width].
        out, scaled: [max rows, width], written: the embedding, and that times `norm`.
        squares: float32 [max rows], written.
        pdl: overlap with the kernel before.
    """
    for name, tensor in (("ids", ids), ("sources", sources), ("sampled", sampled)):
        require(name, tensor.dtype, tensor.dtype == torch.int64, "Pass int64.")
    width = table.shape[1]
    embed_kernel[(ids.shape[0],)](
        ids,
        sources,
        sampled,
        table,
        norm,
        out,
        scaled,
        squares,
        WIDTH=width,
        PAD=triton.next_power_of_2(width),
        PDL=pdl,
        num_warps=_warps(width),
        **({"launch_pdl": True} if pdl else {}),
    )


def score(logits: Tensor, targets: Tensor) -> Tensor:
    """Log-probability float32 [rows] of each row's target.

    Args:
        logits: [rows, vocab_size], the last dimension contiguous.
        targets: int64 [rows].
    """
    fits = logits.dim() == 2 and logits.stride(1) == 1
    require("logits", list(logits.shape), fits, "Pass [rows, vocab_size].")
    matches = targets.shape == logits.shape[:1] and targets.dtype == torch.int64
    require("targets", list(targets.shape), matches, f"Pass int64 [{logits.shape[0]}].")
    scores = torch.empty(logits.shape[0], dtype=torch.float32, device=logits.device)
    if logits.shape[0]:
        score_kernel[(logits.shape[0],)](
            logits, targets, scores, logits.shape[1], logits.stride(0), PIECE=_PIECE, num_warps=4
        )
    return scores


def _warps(width: int) -> int:
    return 8 if width > 2048 else 4 if width > 256 else 1
