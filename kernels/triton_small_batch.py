"""Products of up to 64 rows with a weight matrix, at the speed at which the weights are read.

    value[m, n] = rms(m) * sum over k of x[m, k] * w[n, k] + bias[n]
    value[m, n] = silu(value[m, n]) * value[m, n + num_out]     where gate and up are one matrix
    out[m, n]   = added[m, n] + value[m, n]

What a decoder does between two products happens at the ends of them. RMSNorm is cut in two: who
writes a row of the residual stream also writes it times the next norm's weight, and the squares of
its own outputs; who reads it sums the squares and scales at the end.

With PDL (programmatic dependent launch, Hopper and later) a program asks the L2 cache for its first
weights while the kernel before it still runs; it waits before it reads anything that one wrote.
"""

import triton
import triton.language as tl

from streamkv.kernels.triton_cache import into_cache


@triton.jit
def _dot(a, b, into, EXACT: tl.constexpr):
    if EXACT:
        return tl.dot(a, tl.trans(b), into, input_precision="ieee")
    return tl.dot(a, tl.trans(b), into)


@triton.jit
def product_kernel(
    x,
    w,
    weights,
    out,
    added,
    bias,
    squares,
    scaled,
    norm,
    own_squares,
    num_rows,
    num_out,
    eps,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    OUT: tl.constexpr,
    CHUNK: tl.constexpr,
    PARTS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_ADDED: tl.constexpr,
    HAS_NORM: tl.constexpr,
    GATED: tl.constexpr,
    SWAP: tl.constexpr,
    EXACT: tl.constexpr,
    PDL: tl.constexpr,
    AHEAD: tl.constexpr,
):
    """`OUT` outputs of all rows.

    x, w are tensor descriptors of [rows, K] and [num_out (2 x if GATED), K] with blocks
    [ROWS, CHUNK] and [OUT, CHUNK]; `weights` is w's pointer; squares float32 [PARTS, ROWS], not
    read where PARTS is 0; own_squares float32 [programs, ROWS]. AHEAD: columns of weights that are
    asked for before the wait. SWAP multiplies weights by rows, for matrix units that want 64 of the
    first.
    """
    first_out = tl.program_id(0) * OUT
    m, n = tl.arange(0, ROWS), first_out + tl.arange(0, OUT)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        if AHEAD > 0:
            line = tl.arange(0, AHEAD // 64) * 64
            ahead = weights + n[:, None].to(tl.int64) * K + line[None, :]
            into_cache(ahead)
            if GATED:
                ahead += num_out.to(tl.int64) * K
                into_cache(ahead)
        tl.extra.cuda.gdc_wait()
    sums = tl.zeros([OUT, ROWS] if SWAP else [ROWS, OUT], tl.float32)
    up_sums = tl.zeros([OUT, ROWS] if SWAP else [ROWS, OUT], tl.float32)
    for k in range(0, K, CHUNK):
        part, weight = x.load([0, k]), w.load([first_out, k])
        sums = _dot(weight, part, sums, EXACT) if SWAP else _dot(part, weight, sums, EXACT)
        if GATED:
            up_weight = w.load([num_out + first_out, k])
            if SWAP:
                up_sums = _dot(up_weight, part, up_sums, EXACT)
            else:
                up_sums = _dot(part, up_weight, up_sums, EXACT)
    value, up = sums, up_sums
    if SWAP:
        value, up = tl.trans(sums), tl.trans(up_sums)
    if PARTS > 0:
        total = tl.zeros([ROWS], tl.float32)
        for first in tl.static_range(0, PARTS, 32):
            at = first + tl.arange(0, 32)
            each = squares + at[:, None] * ROWS + m[None, :]
            total += tl.sum(tl.load(each, mask=(at < PARTS)[:, None], other=0.0), 0)
        rms = tl.rsqrt(total / K + eps)[:, None]
        value, up = value * rms, up * rms
    if HAS_BIAS:
        value += tl.load(bias + n, mask=n < num_out, other=0.0).to(tl.float32)[None, :]
    if GATED:
        value = value / (1.0 + tl.exp(-value)) * up
    place = m[:, None] * num_out + n[None, :]
    inside = (m < num_rows)[:, None] & (n < num_out)[None, :]
    if HAS_ADDED:
        value += tl.load(added + place, mask=inside, other=0.0).to(tl.float32)
    rounded = value.to(out.dtype.element_ty)
    tl.store(out + place, rounded, mask=inside)
    if HAS_NORM:
        value = tl.where(inside, rounded.to(tl.float32), 0.0)
        weight = tl.load(norm + n, mask=n < num_out, other=0.0).to(tl.float32)
        tl.store(scaled + place, (value * weight[None, :]).to(out.dtype.element_ty), mask=inside)
        tl.store(own_squares + tl.program_id(0) * ROWS + m, tl.sum(value * value, 1))
