"""Attention of one or a few queries per sequence, over blocks in any memory a GPU can address.

A program takes one KV head and one split of a sequence's entries. The query is turned by the
distance to each entry (block-local RoPE), so that keys are read as they lie. Partial results are
joined by their log-sum-exp. The grid depends on capacities only: lengths are read on the device, so
that one captured graph serves a stream as it grows.

Flash-decoding: Dao et al. 2023. Reading pinned host blocks from the kernel: unified addressing.
"""

import triton
import triton.language as tl

from streamkv.kernels.triton_cache import into_cache
from streamkv.kernels.triton_rotate import angles, partners

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def capped_scores(scores, softcap, HAS_SOFTCAP: tl.constexpr):
    """softcap * tanh(scores / softcap), as Gemma 2 has it."""
    if HAS_SOFTCAP:
        grown = tl.exp2(scores * (2.0 * LOG2E / softcap))
        scores = softcap * (1.0 - 2.0 / (grown + 1.0))
    return scores


@triton.jit
def seen_kernel(
    starts,
    caps,
    first_valid,
    end_valid,
    num_entries,
    num_sink_entries,
    num_recalled_entries,
    window_sizes,
    query_starts,
    seen,
    capacity,
    QUERIES: tl.constexpr,
    ENTRIES: tl.constexpr,
):
    """What one query sees of each entry: `seen` int32 [S * QUERIES, C, 4], once for all layers.

    The four are the distance to turn the query by, the first slot, one past the last, and 0.
    """
    row = tl.program_id(0)
    seq = row // QUERIES
    entry = tl.program_id(1) * ENTRIES + tl.arange(0, ENTRIES)
    inside = entry < capacity
    at = seq * capacity + entry
    token = tl.load(query_starts + seq) + row % QUERIES
    distance = token - tl.load(starts + at, mask=inside, other=0)
    cap = tl.load(caps + at, mask=inside, other=0)
    low = tl.load(first_valid + at, mask=inside, other=0).to(tl.int64)
    high = tl.load(end_valid + at, mask=inside, other=0).to(tl.int64)
    num_sinks = tl.load(num_sink_entries + seq)
    is_window = entry >= num_sinks + tl.load(num_recalled_entries + seq)
    # What the window begins with: window entries show slots from there on, recalled ones before.
    oldest = distance + 1 - tl.load(window_sizes + seq)
    low = tl.where(is_window, tl.maximum(low, oldest), low)
    high = tl.minimum(high, tl.where(is_window | (entry < num_sinks), distance + 1, oldest))
    any_seen = (entry < tl.load(num_entries + seq)) & (low < high)
    place = seen + (row * capacity + entry).to(tl.int64) * 4
    position = tl.maximum(tl.minimum(distance, cap), 0)
    tl.store(place, tl.where(any_seen, position, 0).to(tl.int32), mask=inside)
    tl.store(place + 1, tl.where(any_seen, low, 0).to(tl.int32), mask=inside)
    tl.store(place + 2, tl.where(any_seen, high, 0).to(tl.int32), mask=inside)
    tl.store(place + 3, tl.zeros_like(entry), mask=inside)


@triton.jit
def decode_kernel(
    q,
    addresses,
    seen,
    num_entries,
    cos,
    sin,
    part_out,
    part_lse,
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
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    QUERIES: tl.constexpr,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SINK_LOGITS: tl.constexpr,
    EXACT: tl.constexpr,
    PDL: tl.constexpr,
    AHEAD: tl.constexpr,
):
    """Partial out float32 [S, KV heads, SPLITS, ROWS, DIM]; lse, base 2, without DIM.

    With one split there is nothing to join: out and lse are written where they belong.
    """
    seq, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    dtype = q.dtype.element_ty
    # Tables were there before the step began; keys and values but those of the new token, too.
    end = tl.load(num_entries + seq)
    per_split = tl.cdiv(end, SPLITS)
    first_entry = split * per_split
    end_entry = tl.minimum(first_entry + per_split, end)
    head_offset = head * (BLOCK * DIM)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        if AHEAD & (first_entry < end_entry):
            ahead = tl.load(addresses + seq * capacity + first_entry) + layer_bytes
            line = tl.arange(0, BLOCK * DIM_PAD // 64) * 64
            lines = ahead.to(tl.pointer_type(dtype)) + head_offset + line
            into_cache(lines)
            into_cache(lines + value_offset)
        tl.extra.cuda.gdc_wait()
    rows = tl.arange(0, ROWS)
    is_query = rows < QUERIES * GROUP
    query = tl.where(is_query, rows // GROUP, 0)
    d, slots = tl.arange(0, DIM_PAD), tl.arange(0, BLOCK)
    is_row = is_query[:, None] & (d < DIM)[None, :]
    partner, sign, angle = partners(d, HALF)
    rotates = d < 2 * HALF
    q_row = q + (seq * QUERIES + query)[:, None] * q_token_stride
    q_row += (head * GROUP + rows % GROUP)[:, None] * q_head_stride
    own = tl.load(q_row + d[None, :], mask=is_row, other=0.0).to(tl.float32)
    other = tl.load(q_row + partner[None, :], mask=is_row, other=0.0).to(tl.float32)
    other = other * sign[None, :]

    place = slots[:, None] * DIM + d[None, :]

    best = tl.full([ROWS], -float("inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    out = tl.zeros([ROWS, DIM_PAD], tl.float32)
    for entry in range(first_entry, end_entry):
        base = tl.load(addresses + seq * capacity + entry) + layer_bytes
        base = tl.multiple_of(base.to(tl.pointer_type(dtype)), 16) + head_offset
        if QUERIES == 1:
            at = seen + (seq * capacity + entry) * 4
            position, low, high = tl.load(at), tl.load(at + 1), tl.load(at + 2)
            visible = ((slots >= low) & (slots < high))[None, :]
            exists = (slots >= low) & (slots < high)
            c, s = angles(cos, sin, position, angle, rotates, HALF)
            turned = own * c[None, :] + other * s[None, :]
        else:
            at = seen + ((seq * QUERIES + query) * capacity + entry) * 4
            position, low, high = tl.load(at), tl.load(at + 1), tl.load(at + 2)
            visible = (slots[None, :] >= low[:, None]) & (slots[None, :] < high[:, None])
            oldest = tl.min(tl.where(low < high, low, BLOCK), 0)
            exists = (slots >= oldest) & (slots < tl.max(high, 0))
            c, s = angles(cos, sin, position[:, None], angle[None, :], rotates[None, :], HALF)
            turned = own * c + other * s
        # What no row sees is not fetched; a value of NaN must not be multiplied, not even by 0.
        is_element = exists[:, None] if DIM == DIM_PAD else exists[:, None] & (d < DIM)[None, :]
        key = tl.load(base + place, mask=is_element, other=0.0)
        value = tl.load(base + value_offset + place, mask=is_element, other=0.0)
        if EXACT:
            scores = tl.dot(turned, tl.trans(key.to(tl.float32)), input_precision="ieee")
        else:
            scores = tl.dot(turned.to(dtype), tl.trans(key))
        scores = capped_scores(scores * scale, softcap, HAS_SOFTCAP) * LOG2E
        scores = tl.where(visible, scores, -float("inf"))
        higher = tl.maximum(best, tl.max(scores, 1))
        # A row that has seen nothing yet would subtract infinities.
        base_score = tl.where(higher == -float("inf"), 0.0, higher)
        shrink = tl.exp2(best - base_score)
        weights = tl.exp2(scores - base_score[:, None])
        total = total * shrink + tl.sum(weights, 1)
        out = out * shrink[:, None]
        if EXACT:
            out += tl.dot(weights, value.to(tl.float32), input_precision="ieee")
        else:
            out = tl.dot(weights.to(dtype), value, out)
        best = higher
    q_head = head * GROUP + rows % GROUP
    if SPLITS == 1 and HAS_SINK_LOGITS:
        logit = tl.load(sink_logits + q_head).to(tl.float32) * LOG2E
        higher = tl.maximum(best, logit)
        shrink = tl.exp2(best - higher)
        total = total * shrink + tl.exp2(logit - higher)
        out, best = out * shrink[:, None], higher
    is_seen = total > 0.0
    out = out / tl.where(is_seen, total, 1.0)[:, None]
    lse = tl.where(is_seen, best + tl.log2(tl.where(is_seen, total, 1.0)), -float("inf"))
    if SPLITS == 1:
        at = (seq * QUERIES + query) * (NUM_KV_HEADS * GROUP) + q_head
        tl.store(out_rows + at[:, None] * DIM + d[None, :], out.to(dtype), mask=is_row)
        tl.store(lse_rows + at, lse / LOG2E, mask=is_query)
    else:
        part = ((seq * NUM_KV_HEADS + head) * SPLITS + split) * ROWS + rows
        tl.store(part_out + part[:, None] * DIM + d[None, :], out, mask=is_row)
        tl.store(part_lse + part, lse)


@triton.jit
def merge_splits_kernel(
    part_out,
    part_lse,
    sink_logits,
    out,
    lse,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    QUERIES: tl.constexpr,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    SPLITS: tl.constexpr,
    SPLITS_PAD: tl.constexpr,
    HAS_SINK_LOGITS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Join the splits of one query head; a learned sink logit takes part once, with no value."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row, q_head = tl.program_id(0), tl.program_id(1)
    seq, query = row // QUERIES, row % QUERIES
    head, group = q_head // GROUP, q_head % GROUP
    splits, d = tl.arange(0, SPLITS_PAD), tl.arange(0, DIM_PAD)
    part = ((seq * NUM_KV_HEADS + head) * SPLITS + splits) * ROWS + query * GROUP + group
    each = tl.load(part_lse + part, mask=splits < SPLITS, other=-float("inf"))
    best = tl.max(each, 0)
    if HAS_SINK_LOGITS:
        logit = tl.load(sink_logits + q_head).to(tl.float32) * LOG2E
        best = tl.maximum(best, logit)
    base = tl.where(best == -float("inf"), 0.0, best)
    weights = tl.exp2(each - base)
    total = tl.sum(weights, 0)
    if HAS_SINK_LOGITS:
        total += tl.exp2(logit - base)
    is_part = (splits < SPLITS)[:, None] & (d < DIM)[None, :]
    parts = tl.load(part_out + part[:, None] * DIM + d[None, :], mask=is_part, other=0.0)
    seen = total > 0.0
    mixed = tl.sum(parts * weights[:, None], 0) / tl.where(seen, total, 1.0)
    at = row * (NUM_KV_HEADS * GROUP) + q_head
    tl.store(out + at * DIM + d, mixed.to(out.dtype.element_ty), mask=d < DIM)
    found = (base + tl.log2(tl.where(seen, total, 1.0))) / LOG2E
    tl.store(lse + at, tl.where(seen, found, -float("inf")))
