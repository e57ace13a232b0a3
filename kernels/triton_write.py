"""Writes the K (turned by its offset in the block) and V of a packed row into their slots.

The queries of tokens that are observed are kept by the same programs: a launch of its own for each
layer would cost more than they do.
"""

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
    q,
    q_targets,
    q_offset,
    q_token_stride,
    q_head_stride,
    NUM_KV_HEADS: tl.constexpr,
    HEADS_PAD: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    NUM_Q_HEADS: tl.constexpr,
    Q_HEADS_PAD: tl.constexpr,
    OBSERVES: tl.constexpr,
    PDL: tl.constexpr,
):
    """One token: all its KV heads; nothing where its slot is negative.

    Its queries go where the address in `q_targets` points, if it is none of 0.
    """
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
    if OBSERVES:
        target = tl.load(q_targets + token)
        if target != 0:
            q_heads = tl.arange(0, Q_HEADS_PAD)
            is_query = (q_heads < NUM_Q_HEADS)[:, None] & (d < DIM)[None, :]
            q_row = q + token * q_token_stride + q_heads[:, None] * q_head_stride
            query = tl.load(q_row + d[None, :], mask=is_query, other=0.0)
            kept = tl.multiple_of(target.to(tl.pointer_type(q.dtype.element_ty)), 16)
            kept += q_offset + q_heads[:, None] * DIM + d[None, :]
            tl.store(kept, query, mask=is_query)
