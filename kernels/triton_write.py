"""Writes the K (turned by its offset in the block) and V of a packed row into their slots."""

import triton
import triton.language as tl

from streamkv.kernels.triton_rotate import angles, partners


@triton.jit
def write_kernel(
    pool,
    k,
    v,
    slot_mapping,
    cos,
    sin,
    layer_offset,
    value_offset,
    block_stride,
    k_token_stride,
    k_head_stride,
    v_token_stride,
    v_head_stride,
    NUM_KV_HEADS: tl.constexpr,
    HEADS_PAD: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """One token: all its KV heads; nothing where its slot is negative."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    token = tl.program_id(0)
    heads, d = tl.arange(0, HEADS_PAD), tl.arange(0, DIM_PAD)
    slot = tl.load(slot_mapping + token)
    num_heads = tl.where(slot >= 0, NUM_KV_HEADS, 0)
    is_element = (heads < num_heads)[:, None] & (d < DIM)[None, :]
    slot = tl.maximum(slot, 0)
    block, offset = slot // BLOCK, slot % BLOCK
    partner, sign, angle = partners(d, HALF)
    c, s = angles(cos, sin, offset, angle, d < 2 * HALF, HALF)
    k_row = k + token * k_token_stride + heads[:, None] * k_head_stride
    own = tl.load(k_row + d[None, :], mask=is_element, other=0.0).to(tl.float32)
    other = tl.load(k_row + partner[None, :], mask=is_element, other=0.0).to(tl.float32)
    turned = own * c[None, :] + other * (sign * s)[None, :]
    v_row = v + token * v_token_stride + heads[:, None] * v_head_stride
    value = tl.load(v_row + d[None, :], mask=is_element, other=0.0)
    place = pool + block * block_stride + layer_offset
    place += heads[:, None] * (BLOCK * DIM) + offset * DIM + d[None, :]
    tl.store(place, turned.to(pool.dtype.element_ty), mask=is_element)
    tl.store(place + value_offset, value.to(pool.dtype.element_ty), mask=is_element)
