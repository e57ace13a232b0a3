"""What lies between the products of a Llama-shaped decoder, a row or a piece of one a program."""

import triton
import triton.language as tl


@triton.jit
def embed_kernel(
    ids,
    sources,
    sampled,
    table,
    norm,
    out,
    scaled,
    squares,
    WIDTH: tl.constexpr,
    PAD: tl.constexpr,
    PDL: tl.constexpr,
):
    """Embedding of each row's token, times a norm's weight, and the sum of its squares.

    Where `sources` is not negative the token is the one `sampled` there, which the host need not
    have seen yet.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row, d = tl.program_id(0), tl.arange(0, PAD)
    source = tl.load(sources + row)
    token = tl.load(sampled + tl.maximum(source, 0))
    token = tl.where(source >= 0, token, tl.load(ids + row))
    value = tl.load(table + token * WIDTH + d, mask=d < WIDTH, other=0.0)
    weight = tl.load(norm + d, mask=d < WIDTH, other=0.0).to(tl.float32)
    wide = value.to(tl.float32)
    place = row.to(tl.int64) * WIDTH + d
    tl.store(out + place, value, mask=d < WIDTH)
    tl.store(scaled + place, (wide * weight).to(value.dtype), mask=d < WIDTH)
    tl.store(squares + row, tl.sum(wide * wide, 0))


@triton.jit
def norm_kernel(
    x,
    norm,
    out,
    eps,
    x_stride,
    WIDTH: tl.constexpr,
    PAD: tl.constexpr,
    PER_ROW: tl.constexpr,
):
    """RMSNorm of pieces of `WIDTH`, `PER_ROW` of them side by side in each row."""
    row, piece, d = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, PAD)
    place = row * x_stride + piece * WIDTH + d
    value = tl.load(x + place, mask=d < WIDTH, other=0.0).to(tl.float32)
    weight = tl.load(norm + d, mask=d < WIDTH, other=0.0).to(tl.float32)
    value = value * tl.rsqrt(tl.sum(value * value, 0) / WIDTH + eps) * weight
    place = (row * PER_ROW + piece) * WIDTH + d
    tl.store(out + place, value.to(out.dtype.element_ty), mask=d < WIDTH)


@triton.jit
def gated_kernel(both, out, WIDTH: tl.constexpr, PIECE: tl.constexpr):
    """silu(gate) * up of rows [2 * WIDTH] that hold the gate first."""
    row, d = tl.program_id(0).to(tl.int64), tl.program_id(1) * PIECE + tl.arange(0, PIECE)
    gate = tl.load(both + row * (2 * WIDTH) + d, mask=d < WIDTH, other=0.0).to(tl.float32)
    up = tl.load(both + row * (2 * WIDTH) + WIDTH + d, mask=d < WIDTH, other=0.0).to(tl.float32)
    value = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out + row * WIDTH + d, value.to(out.dtype.element_ty), mask=d < WIDTH)
