"""Scores of digests: how much each query would look at each block, as a log-sum-exp.

A program takes the keys of one block and one KV head, wherever a GPU can address them, and scores
all query heads that read them, so that every key is read once. What it computes for a block depends
on nothing but that block's keys and the queries.
"""

import triton
import triton.language as tl

from streamkv.kernels.triton_rotate import angles, partners


@triton.jit
def log_sum_exp(scores, counts):
    """Of those elements of each row that count; at least one does."""
    scores = tl.where(counts, scores, -float("inf"))
    best = tl.max(scores, 1)
    return best + tl.log(tl.sum(tl.exp(scores - best[:, None]), 1))


@triton.jit
def dot_exact_keys(queries, keys):
    """queries @ keys on tensor cores, which take 11 bits of a number: all that 16-bit keys have.

    Of the queries they are given the upper 11 bits, and then what is left.
    """
    bits = queries.to(tl.int32, bitcast=True) & -8192
    upper = bits.to(tl.float32, bitcast=True)
    rest = tl.dot(queries - upper, keys, input_precision="tf32")
    return tl.dot(upper, keys, rest, input_precision="tf32")


@triton.jit(do_not_specialize=["num_queries", "num_entries", "num_sinks"])
def digest_scores_kernel(
    queries,
    cos,
    sin,
    pages,
    scores,
    head_stride,
    query_stride,
    num_queries,
    num_entries,
    num_sinks,
    ROWS: tl.constexpr,
    HEADS: tl.constexpr,
    PLACES: tl.constexpr,
    SCALES: tl.constexpr,
    KEYS: tl.constexpr,
    QUERIES: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_PAD: tl.constexpr,
):
    """`scores` float32 [HEADS, num_queries, num_entries]: an entry a block, then the sink tokens.

    Of block `program_id(0)` of the page `pages[program_id(1)]`: int64 [4], its address, elements
    from row to row, the stream's block it begins with, and its blocks; and of its row
    `ROWS[program_id(2)]`. Head `HEADS[i]` of the queries reads row `ROWS[PLACES[i]]`.
    """
    at, page, place = tl.program_id(0), pages + tl.program_id(1) * 4, tl.program_id(2)
    if at < tl.load(page + 3):
        row = tl.full([], 0, tl.int64)
        for i in tl.static_range(len(ROWS)):
            row = tl.where(place == i, ROWS[i], row)
        block = tl.load(page + 2) + at
        base = tl.load(page).to(tl.pointer_type(KEYS)) + row * tl.load(page + 1)
        base = tl.multiple_of(base + at.to(tl.int64) * (BLOCK * DIM), 16)
        slots, d, query = tl.arange(0, BLOCK_PAD), tl.arange(0, DIM_PAD), tl.arange(0, QUERIES)
        # [BLOCK_PAD, DIM_PAD]
        is_key = (slots < BLOCK)[:, None] & (d < DIM)[None, :]
        keys = tl.load(base + slots[:, None] * DIM + d[None, :], mask=is_key, other=0.0)
        keys = tl.trans(keys.to(tl.float32))
        partner, sign, angle = partners(d, HALF)
        c, s = angles(cos, sin, 0, angle, d < 2 * HALF, HALF)
        s = s * sign
        is_row = query < num_queries
        is_element = is_row[:, None] & (d < DIM)[None, :]
        # Sink tokens are the first of the first block.
        end_sinks = tl.where(block == 0, num_sinks, 0)
        counts = ((slots >= end_sinks) & (slots < BLOCK))[None, :]
        are_sinks = (slots < end_sinks)[None, :]
        for i in tl.static_range(len(HEADS)):
            if place == PLACES[i]:
                # [QUERIES, DIM_PAD]
                head = queries + HEADS[i] * head_stride + query[:, None] * query_stride
                own = tl.load(head + d[None, :], mask=is_element, other=0.0).to(tl.float32)
                other = tl.load(head + partner[None, :], mask=is_element, other=0.0)
                turned = (own * c[None, :] + other.to(tl.float32) * s[None, :]) * SCALES[i]
                found = dot_exact_keys(turned, keys)
                out = scores + (i * num_queries + query).to(tl.int64) * num_entries
                tl.store(out + block, log_sum_exp(found, counts), mask=is_row)
                if end_sinks > 0:
                    sums = log_sum_exp(found, are_sinks)
                    tl.store(out + num_entries - 1, sums, mask=is_row)
