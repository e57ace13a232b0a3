"""What window attention by causal squares needs besides the squares: copies before, a join after.

Everything is turned to one anchor, the chunk's first token: queries by their index in the chunk,
a block by the one angle from the anchor to its start, both in float32 and rounded once. Queries and
keys are written in forward and in reversed order (see `window_cut`). The join adds up the parts
of a query by their log-sum-exp, and with them the sink tokens that have left its window. Padding is
written as zeros; what a slot holds that is no key never reaches a result.
"""

import triton
import triton.language as tl

from streamkv.kernels.triton_decode import LOG2E
from streamkv.kernels.triton_prefill import turned_keys, visit
from streamkv.kernels.triton_rotate import angles, partners


# Kernels specialised for sizes and token indices of a chunk would be compiled in mid-stream.
@triton.jit(do_not_specialize=["num_queries", "num_rows"])
def turn_kernel(
    q,
    cos,
    sin,
    forward,
    reversed_rows,
    num_queries,
    num_rows,
    q_token_stride,
    q_head_stride,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    TOKENS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    HALF: tl.constexpr,
):
    """Queries of TOKENS tokens and one KV head into [num_rows, num_q_heads, DIM], both orders."""
    query = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    d = tl.arange(0, DIM_PAD)
    partner, sign, angle = partners(d, HALF)
    is_query = (query < num_queries)[:, None]
    is_element = is_query & (d < DIM)[None, :]
    is_stored = (query < num_rows)[:, None] & (d < DIM)[None, :]
    rotates = is_query & (d < 2 * HALF)[None, :]
    c, s = angles(cos, sin, query[:, None], angle[None, :], rotates, HALF)
    s = s * sign[None, :]
    for group in tl.static_range(GROUP):
        head = tl.program_id(1) * GROUP + group
        row = q + query.to(tl.int64)[:, None] * q_token_stride + head * q_head_stride
        own = tl.load(row + d[None, :], mask=is_element, other=0.0).to(tl.float32)
        other = tl.load(row + partner[None, :], mask=is_element, other=0.0).to(tl.float32)
        turned = (own * c + other * s).to(forward.dtype.element_ty)
        at = query.to(tl.int64)[:, None] * (NUM_KV_HEADS * GROUP) + head
        tl.store(forward + at * DIM + d[None, :], turned, mask=is_stored)
        at = (num_rows - 1 - query).to(tl.int64)[:, None] * (NUM_KV_HEADS * GROUP) + head
        tl.store(reversed_rows + at * DIM + d[None, :], turned, mask=is_stored)


@triton.jit(
    do_not_specialize=[
        "first_start", "first_key", "query_start", "end", "last_start", "num_rows", "num_blocks",
    ]
)  # fmt: skip
def gather_kernel(
    addresses,
    cos,
    sin,
    k_forward,
    v_forward,
    k_reversed,
    v_reversed,
    first_start,
    first_key,
    query_start,
    end,
    last_start,
    num_rows,
    num_blocks,
    layer_bytes,
    value_offset,
    NUM_KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """K and V of one block and head into [rows, num_kv_heads, DIM], both orders.

    Blocks from `num_blocks` on are padding.
    """
    block, head = tl.program_id(0), tl.program_id(1)
    dtype = k_forward.dtype.element_ty
    d, slots = tl.arange(0, DIM_PAD), tl.arange(0, BLOCK)
    partner, sign, angle = partners(d, HALF)
    start = first_start + block * BLOCK
    token = start + slots
    exists = (token >= first_key) & (token < end)
    is_element = exists[:, None] & (d < DIM)[None, :]
    base = tl.load(addresses + tl.minimum(block, num_blocks - 1)) + layer_bytes
    base = tl.multiple_of(base.to(tl.pointer_type(dtype)), 16) + head * (BLOCK * DIM)
    place = slots[:, None] * DIM + d[None, :]
    partner_place = slots[:, None] * DIM + partner[None, :]
    # Padding is not turned, and the tables need not reach it.
    position = tl.minimum(start, end) - query_start
    keys = turned_keys(
        base, place, partner_place, is_element, cos, sin, position, angle, d < 2 * HALF, sign, HALF
    ).to(dtype)
    values = tl.load(base + value_offset + place, mask=is_element, other=0.0)

    row = token - query_start
    is_stored = ((row >= 0) & (row < num_rows))[:, None] & (d < DIM)[None, :]
    at = (row.to(tl.int64)[:, None] * NUM_KV_HEADS + head) * DIM + d[None, :]
    tl.store(k_forward + at, keys, mask=is_stored)
    tl.store(v_forward + at, values, mask=is_stored)
    is_stored = is_element & (token < last_start)[:, None]
    row = last_start - 1 - token
    at = (row.to(tl.int64)[:, None] * NUM_KV_HEADS + head) * DIM + d[None, :]
    tl.store(k_reversed + at, keys, mask=is_stored)
    tl.store(v_reversed + at, values, mask=is_stored)


@triton.jit
def absorb(part_out, part_lse, row, lse_at, is_part, best, total, out, d, DIM: tl.constexpr):
    """The running softmax with a part that is attention over other keys."""
    is_element = is_part[:, None] & (d < DIM)[None, :]
    part = tl.load(
        part_out + row.to(tl.int64)[:, None] * DIM + d[None, :], mask=is_element, other=0.0
    )
    lse = tl.load(part_lse + lse_at, mask=is_part, other=-float("inf")) * LOG2E
    higher = tl.maximum(best, lse)
    base = tl.where(higher == -float("inf"), 0.0, higher)
    shrink, weight = tl.exp2(best - base), tl.exp2(lse - base)
    out = out * shrink[:, None] + part.to(tl.float32) * weight[:, None]
    return higher, total * shrink + weight, out


@triton.jit(
    do_not_specialize=["first", "num_pieces", "size", "num_queries", "query_start", "num_sinks"]
)
def join_kernel(
    q,
    own,
    own_lse,
    triangle,
    triangle_lse,
    rectangle,
    rectangle_lse,
    sinks,
    sink_logits,
    cos,
    sin,
    out_rows,
    lse_rows,
    first,
    num_pieces,
    size,
    num_queries,
    query_start,
    window,
    num_sinks,
    layer_bytes,
    value_offset,
    scale,
    q_token_stride,
    q_head_stride,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    SLOTS: tl.constexpr,
    HAS_NEAR: tl.constexpr,
    HAS_TRIANGLE: tl.constexpr,
    HAS_RECTANGLE: tl.constexpr,
    HAS_SINK_LOGITS: tl.constexpr,
    EXACT: tl.constexpr,
):
    """A tile of queries of one piece and one KV head; pieces side by side in `program_id(0)`.

    own        out [num_pieces, size, num_q_heads, DIM], lse [num_pieces, num_q_heads, size]
    triangle   the same with size - 1 in reversed order, the last piece first
    rectangle  the same with size in reversed order, of one piece
    sinks      int64 [num_sinks, 5]: of `WindowPlan`
    """
    head = tl.program_id(1)
    per_tile: tl.constexpr = ROWS // GROUP
    tiles = tl.cdiv(size, per_tile)
    piece, tile_first = tl.program_id(0) // tiles, tl.program_id(0) % tiles * per_tile
    dtype = q.dtype.element_ty
    num_heads: tl.constexpr = NUM_KV_HEADS * GROUP
    rows, d = tl.arange(0, ROWS), tl.arange(0, DIM_PAD)
    in_tile, q_head = rows // GROUP, head * GROUP + rows % GROUP
    i = tile_first + in_tile
    query = first + piece * size + i
    is_row = (in_tile < per_tile) & (i < size) & (query < num_queries)

    best = tl.full([ROWS], -float("inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    out = tl.zeros([ROWS, DIM_PAD], tl.float32)
    if num_sinks > 0:
        is_element = is_row[:, None] & (d < DIM)[None, :]
        partner, sign, angle = partners(d, HALF)
        rotates = d < 2 * HALF
        q_row = q + query.to(tl.int64)[:, None] * q_token_stride
        q_row += q_head[:, None] * q_head_stride
        plain = tl.load(q_row + d[None, :], mask=is_element, other=0.0)
        anchor = query_start + first + piece * size + tile_first
        newest = tl.minimum(anchor + per_tile, query_start + num_queries) - 1
        token = anchor + in_tile
        for tile in range(0, num_sinks):
            at = sinks + tile * 5
            start, cap = tl.load(at + 1), tl.load(at + 2)
            low, high = tl.load(at + 3).to(tl.int32), tl.load(at + 4).to(tl.int32)
            base = (tl.load(at) + layer_bytes).to(tl.pointer_type(dtype))
            base = tl.multiple_of(base, 16) + head * (BLOCK * DIM)
            slots = low + tl.arange(0, SLOTS)
            exists = slots < high
            place = slots[:, None] * DIM + d[None, :]
            partner_place = slots[:, None] * DIM + partner[None, :]
            is_key = exists[:, None] & (d < DIM)[None, :]
            value = tl.load(base + value_offset + place, mask=is_key, other=0.0)
            # Until then it is a key of the window.
            has_left = start + slots[None, :] <= token[:, None] - window
            seen = exists[None, :] & has_left & is_row[:, None]
            is_capped = token - start > cap
            if HAS_NEAR:  # noqa: SIM102  a constant: without it the branch costs registers
                if anchor - start <= cap:
                    other = tl.load(q_row + partner[None, :], mask=is_element, other=0.0)
                    c, s = angles(
                        cos, sin, in_tile[:, None], angle[None, :], rotates[None, :], HALF
                    )
                    near = plain.to(tl.float32) * c + other.to(tl.float32) * (sign[None, :] * s)
                    keys = turned_keys(
                        base, place, partner_place, is_key, cos, sin, start - anchor, angle,
                        rotates, sign, HALF,
                    )  # fmt: skip
                    best, total, out = visit(
                        near, keys, value, seen & (~is_capped)[:, None], best, total, out, scale,
                        1.0, dtype, False, EXACT,
                    )  # fmt: skip
            if newest - start > cap:
                keys = turned_keys(
                    base, place, partner_place, is_key, cos, sin, -cap, angle, rotates, sign, HALF
                )
                best, total, out = visit(
                    plain, keys, value, seen & is_capped[:, None], best, total, out, scale, 1.0,
                    dtype, False, EXACT,
                )  # fmt: skip
    row, lse_at = piece * size + i, (piece * num_heads + q_head) * size + i
    best, total, out = absorb(
        own, own_lse, row * num_heads + q_head, lse_at, is_row, best, total, out, d, DIM
    )
    if HAS_TRIANGLE:
        run, row = num_pieces - 1 - piece, size - 2 - i
        lse_at = (run * num_heads + q_head) * (size - 1) + row
        row = (run * (size - 1) + row) * num_heads + q_head
        is_part = is_row & (i < size - 1)
        best, total, out = absorb(
            triangle, triangle_lse, row, lse_at, is_part, best, total, out, d, DIM
        )
    if HAS_RECTANGLE:
        row, lse_at = (size - 1 - i) * num_heads + q_head, q_head * size + size - 1 - i
        best, total, out = absorb(
            rectangle, rectangle_lse, row, lse_at, is_row, best, total, out, d, DIM
        )

    if HAS_SINK_LOGITS:
        logit = tl.load(sink_logits + q_head).to(tl.float32) * LOG2E
        higher = tl.maximum(best, logit)
        shrink = tl.exp2(best - higher)
        total = total * shrink + tl.exp2(logit - higher)
        out, best = out * shrink[:, None], higher
    # Every query sees itself; rows that are none divide by 1.
    total = tl.where(is_row, total, 1.0)
    at = query.to(tl.int64) * num_heads + q_head
    is_element = is_row[:, None] & (d < DIM)[None, :]
    tl.store(
        out_rows + at[:, None] * DIM + d[None, :], (out / total[:, None]).to(dtype), mask=is_element
    )
    tl.store(lse_rows + at, (best + tl.log2(total)) / LOG2E, mask=is_row)
