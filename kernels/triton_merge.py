"""Joins attention over disjoint sets of keys by log-sum-exp.

Two passes over the log-sum-exps, one over the results. A part that saw nothing (-inf) has no
weight, and what its result holds is not read. Differences are taken before they are scaled for
exp2, so that large log-sum-exps lose no digits.
"""

import triton
import triton.language as tl

from streamkv.kernels.triton_decode import LOG2E


@triton.jit
def merge_kernel(
    outs,
    lses,
    sink_logits,
    out,
    lse,
    num_parts,
    num_rows,
    out_part_stride,
    out_token_stride,
    out_head_stride,
    lse_part_stride,
    lse_token_stride,
    lse_head_stride,
    NUM_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    ROWS: tl.constexpr,
    HAS_SINK_LOGITS: tl.constexpr,
):
    """Rows (token, head) [ROWS * program_id(0), ...) of `out` [T, NUM_HEADS, DIM], and `lse`."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    inside, d = row < num_rows, tl.arange(0, DIM_PAD)
    token, head = row // NUM_HEADS, row % NUM_HEADS
    lse_at = lses + token * lse_token_stride + head * lse_head_stride
    out_at = outs + (token * out_token_stride + head * out_head_stride)[:, None] + d[None, :]
    best = tl.full([ROWS], -float("inf"), tl.float32)
    each_at = lse_at
    for _ in range(num_parts):
        best = tl.maximum(best, tl.load(each_at, mask=inside, other=0.0))
        each_at += lse_part_stride
    if HAS_SINK_LOGITS:
        logit = tl.load(sink_logits + head, mask=inside, other=0.0).to(tl.float32)
        best = tl.maximum(best, logit)
    # Where nothing was seen, infinities would be subtracted.
    base = tl.where(best == -float("inf"), 0.0, best)
    total = tl.zeros([ROWS], tl.float32)
    if HAS_SINK_LOGITS:
        total += tl.exp2((logit - base) * LOG2E)
    mixed = tl.zeros([ROWS, DIM_PAD], tl.float32)
    for _ in range(num_parts):
        each = tl.load(lse_at, mask=inside, other=0.0)
        weight = tl.exp2((each - base) * LOG2E)
        is_read = (inside & (each != -float("inf")))[:, None] & (d < DIM)[None, :]
        value = tl.load(out_at, mask=is_read, other=0.0)
        mixed += value.to(tl.float32) * weight[:, None]
        total += weight
        # Many parts may span more than 2^31 elements; a pointer that advances does not mind.
        lse_at += lse_part_stride
        out_at += out_part_stride
    # A NaN is not nothing: it stays to be seen.
    is_empty = total == 0.0
    mixed = mixed / tl.where(is_empty, 1.0, total)[:, None]
    is_element = inside[:, None] & (d < DIM)[None, :]
    tl.store(out + row[:, None] * DIM + d[None, :], mixed.to(out.dtype.element_ty), mask=is_element)
    found = base + tl.log2(tl.where(is_empty, 1.0, total)) / LOG2E
    tl.store(lse + row, tl.where(is_empty, -float("inf"), found), mask=inside)
