"""Attention of many consecutive queries of each sequence: a tile and one KV head a program.

Queries are turned once, by their distance to the tile's first token (the anchor), and each block
once, by the one angle from the anchor to its start: never one angle for each query and block. Where
a sink entry has reached its cap the query is not turned, and the block is turned back by the cap; a
tile in which the cap begins reads that entry twice, each time for its own rows. Which entries a
program sees is in its row of `tiles`, so that blocks nobody sees are not visited, and several
programs may share the entries of a tile.
"""

import triton
import triton.language as tl

from streamkv.kernels.triton_decode import LOG2E, capped_scores
from streamkv.kernels.triton_rotate import angles, partners


@triton.jit
def turned_keys(
    base,
    place,
    partner_place,
    is_element,
    cos,
    sin,
    position,
    angle,
    rotates,
    sign,
    HALF: tl.constexpr,
):
    """Keys [BLOCK, DIM_PAD] float32 turned by `position`, which may be negative."""
    own = tl.load(base + place, mask=is_element, other=0.0).to(tl.float32)
    other = tl.load(base + partner_place, mask=is_element, other=0.0).to(tl.float32)
    c, s = angles(cos, sin, tl.abs(position), angle, rotates, HALF)
    s = tl.where(position < 0, -s, s) * sign
    return own * c[None, :] + other * s[None, :]


@triton.jit
def visit(
    rows,
    keys,
    value,
    visible,
    best,
    total,
    out,
    scale,
    softcap,
    dtype: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    EXACT: tl.constexpr,
):
    """One step of the running softmax."""
    if EXACT:
        scores = tl.dot(rows, tl.trans(keys), input_precision="ieee")
    else:
        scores = tl.dot(rows.to(dtype), tl.trans(keys.to(dtype)))
    scores = capped_scores(scores * scale, softcap, HAS_SOFTCAP) * LOG2E
    scores = tl.where(visible, scores, -float("inf"))
    higher = tl.maximum(best, tl.max(scores, 1))
    base_score = tl.where(higher == -float("inf"), 0.0, higher)
    shrink = tl.exp2(best - base_score)
    weights = tl.exp2(scores - base_score[:, None])
    total = total * shrink + tl.sum(weights, 1)
    out = out * shrink[:, None]
    if EXACT:
        out += tl.dot(weights, value.to(tl.float32), input_precision="ieee")
    else:
        out += tl.dot(weights.to(dtype), value)
    return higher, total, out


@triton.jit
def prefill_kernel(
    q,
    tiles,
    addresses,
    starts,
    caps,
    first_valid,
    end_valid,
    num_sink_entries,
    window_sizes,
    query_starts,
    cos,
    sin,
    sink_logits,
    out_rows,
    lse_rows,
    layer_bytes,
    value_offset,
    scale,
    softcap,
    q_token_stride,
    q_head_stride,
    capacity,
    num_tokens,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SINK_LOGITS: tl.constexpr,
    EXACT: tl.constexpr,
):
    """`tiles` int32 [num_tiles, 9]: of `gpu.prefill_tiles`; part p of row t is row p * T + t."""
    tile, head = tiles + tl.program_id(0) * 9, tl.program_id(1)
    dtype = q.dtype.element_ty
    seq, first_query = tl.load(tile), tl.load(tile + 1)
    packed, count = tl.load(tile + 2), tl.load(tile + 3)
    first_lasting, end_lasting = tl.load(tile + 4), tl.load(tile + 5)
    low, high, part = tl.load(tile + 6), tl.load(tile + 7), tl.load(tile + 8)
    rows = tl.arange(0, ROWS)
    query, group = rows // GROUP, rows % GROUP
    d, slots = tl.arange(0, DIM_PAD), tl.arange(0, BLOCK)
    is_row = query < count
    is_row_element = is_row[:, None] & (d < DIM)[None, :]
    partner, sign, angle = partners(d, HALF)
    rotates = d < 2 * HALF
    anchor = tl.load(query_starts + seq) + first_query
    token = anchor + query
    q_row = q + (packed + query).to(tl.int64)[:, None] * q_token_stride
    q_row += (head * GROUP + group)[:, None] * q_head_stride
    plain = tl.load(q_row + d[None, :], mask=is_row_element, other=0.0).to(tl.float32)
    other = tl.load(q_row + partner[None, :], mask=is_row_element, other=0.0).to(tl.float32)
    c, s = angles(cos, sin, query[:, None], angle[None, :], rotates[None, :], HALF)
    near = plain * c + other * (sign[None, :] * s)

    num_sinks, window = tl.load(num_sink_entries + seq), tl.load(window_sizes + seq)
    best = tl.full([ROWS], -float("inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    out = tl.zeros([ROWS, DIM_PAD], tl.float32)
    place = slots[:, None] * DIM + d[None, :]
    partner_place = slots[:, None] * DIM + partner[None, :]
    for entry in range(first_lasting, end_lasting):
        at = seq * capacity + entry
        start, cap = tl.load(starts + at), tl.load(caps + at)
        first, end = tl.load(first_valid + at), tl.load(end_valid + at)
        base = (tl.load(addresses + at) + layer_bytes).to(tl.pointer_type(dtype))
        base = tl.multiple_of(base, 16) + head * (BLOCK * DIM)
        exists = (slots >= first) & (slots < end)
        is_element = exists[:, None] & (d < DIM)[None, :]
        value = tl.load(base + value_offset + place, mask=is_element, other=0.0)
        # A recalled entry shows what the window does not.
        newest = tl.where(entry < num_sinks, token, token - window)
        seen = exists[None, :] & (start + slots[None, :] <= newest[:, None]) & is_row[:, None]
        is_capped = token - start > cap
        if anchor - start <= cap:
            keys = turned_keys(
                base, place, partner_place, is_element, cos, sin, start - anchor, angle, rotates,
                sign, HALF,
            )  # fmt: skip
            best, total, out = visit(
                near, keys, value, seen & (~is_capped)[:, None], best, total, out, scale, softcap,
                dtype, HAS_SOFTCAP, EXACT,
            )  # fmt: skip
        if anchor + count - 1 - start > cap:
            keys = turned_keys(
                base, place, partner_place, is_element, cos, sin, -cap, angle, rotates, sign, HALF
            )
            best, total, out = visit(
                plain, keys, value, seen & is_capped[:, None], best, total, out, scale, softcap,
                dtype, HAS_SOFTCAP, EXACT,
            )  # fmt: skip
    for entry in range(low, high):
        at = seq * capacity + entry
        start = tl.load(starts + at)
        first, end = tl.load(first_valid + at), tl.load(end_valid + at)
        base = (tl.load(addresses + at) + layer_bytes).to(tl.pointer_type(dtype))
        base = tl.multiple_of(base, 16) + head * (BLOCK * DIM)
        exists = (slots >= first) & (slots < end)
        is_element = exists[:, None] & (d < DIM)[None, :]
        value = tl.load(base + value_offset + place, mask=is_element, other=0.0)
        age = token[:, None] - (start + slots[None, :])
        seen = exists[None, :] & (age >= 0) & (age < window) & is_row[:, None]
        keys = turned_keys(
            base, place, partner_place, is_element, cos, sin, start - anchor, angle, rotates, sign,
            HALF,
        )  # fmt: skip
        best, total, out = visit(
            near, keys, value, seen, best, total, out, scale, softcap, dtype, HAS_SOFTCAP, EXACT
        )
    if HAS_SINK_LOGITS:
        q_head = head * GROUP + group
        logit = tl.load(sink_logits + q_head).to(tl.float32) * LOG2E
        higher = tl.maximum(best, logit)
        shrink = tl.exp2(best - higher)
        total = total * shrink + tl.exp2(logit - higher)
        out, best = out * shrink[:, None], higher
    is_seen = total > 0.0
    out = out / tl.where(is_seen, total, 1.0)[:, None]
    at = part.to(tl.int64) * num_tokens + packed + query
    at = at * (NUM_KV_HEADS * GROUP) + head * GROUP + group
    out = out.to(out_rows.dtype.element_ty)
    tl.store(out_rows + at[:, None] * DIM + d[None, :], out, mask=is_row_element)
    lse = (best + tl.log2(tl.where(is_seen, total, 1.0))) / LOG2E
    tl.store(lse_rows + at, tl.where(is_seen, lse, -float("inf")), mask=is_row)
