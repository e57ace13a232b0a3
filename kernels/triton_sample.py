"""Chooses the token of each row of logits: the likeliest one, or a draw by Gumbel-max.

Each row is split into parts of TILE tokens; a second kernel joins the parts. Equal values: the
lowest id wins, within a part and between parts, so that the split cannot be seen in the result. The
noise is Philox-4x32-10 (Salmon et al., 2011) with the counter (token id, low and high half of the
token index, 0) and the seed as key; everything after the raw logits is float64. A row of kind 0 is
neither read nor written. The grid depends on the number of rows and on the vocabulary alone.
"""

import triton
import triton.language as tl

NOWHERE = tl.constexpr(2**31 - 1)
"""Id of a part that keeps no token."""


@triton.jit
def lowest_best(values, ids):
    """The highest of `values` (none of them NaN) and the lowest of `ids` that has it."""
    best = tl.max(values, 0)
    return best, tl.min(tl.where(values == best, ids, NOWHERE), 0)


@triton.jit
def uniform(seed, token_index, ids):
    """Uniform float64 in (0, 1) of each id: (word + 1/2) / 2^32, exactly."""
    low = (token_index & 0xFFFFFFFF).to(tl.uint32)
    high = ((token_index >> 32) & 0xFFFFFFFF).to(tl.uint32)
    zeros = tl.zeros_like(ids).to(tl.uint32)
    word, _, _, _ = tl.philox(seed, ids.to(tl.uint32), zeros + low, zeros + high, zeros)
    return (word.to(tl.float64) + 0.5) * 2.3283064365386963e-10


@triton.jit
def highest_parts_kernel(
    logits,
    kinds,
    part_best,
    part_second,
    part_ids,
    row_stride,
    vocab_size,
    TILE: tl.constexpr,
):
    """Of one part of one row: the two highest logits and the id of the first; NaN if one is NaN."""
    row, part = tl.program_id(0), tl.program_id(1)
    if tl.load(kinds + row) != 0:
        ids = part * TILE + tl.arange(0, TILE)
        place = logits + row.to(tl.int64) * row_stride + ids
        x = tl.load(place, mask=ids < vocab_size, other=-float("inf")).to(tl.float32)
        is_nan = x != x
        x = tl.where(is_nan, -float("inf"), x)
        best, best_id = lowest_best(x, ids)
        second = tl.max(tl.where(ids == best_id, -float("inf"), x), 0)
        any_nan = tl.max(is_nan.to(tl.int32), 0) > 0
        at = row * tl.num_programs(1) + part
        tl.store(part_best + at, tl.where(any_nan, float("nan"), best))
        tl.store(part_second + at, second)
        tl.store(part_ids + at, best_id)


@triton.jit
def join_highest_kernel(
    kinds,
    part_best,
    part_second,
    part_ids,
    out_ids,
    out_info,
    num_parts,
    PARTS_PAD: tl.constexpr,
):
    """Of one row: the id of the highest logit, its lead over the second, and itself (or NaN)."""
    row, parts = tl.program_id(0), tl.arange(0, PARTS_PAD)
    if tl.load(kinds + row) != 0:
        at, is_part = row * num_parts + parts, parts < num_parts
        x = tl.load(part_best + at, mask=is_part, other=-float("inf"))
        second = tl.load(part_second + at, mask=is_part, other=-float("inf"))
        ids = tl.load(part_ids + at, mask=is_part, other=NOWHERE)
        is_nan = x != x
        x = tl.where(is_nan, -float("inf"), x)
        best, best_id = lowest_best(x, ids)
        others = tl.where(ids == best_id, -float("inf"), x)
        lead = best - tl.maximum(tl.max(second, 0), tl.max(others, 0))
        any_nan = tl.max(is_nan.to(tl.int32), 0) > 0
        tl.store(out_ids + row, best_id.to(tl.int64))
        tl.store(out_info + row * 2, lead)
        tl.store(out_info + row * 2 + 1, tl.where(any_nan, float("nan"), best))


@triton.jit
def draw_parts_kernel(
    logits,
    kinds,
    seeds,
    token_indices,
    temperatures,
    log_min_ps,
    edge_logits,
    edge_ids,
    info,
    part_best,
    part_ids,
    row_stride,
    vocab_size,
    TILE: tl.constexpr,
):
    """Of one part of one row of kind 2: the highest noisy logit among the kept tokens, and its id.

    Kept are the finite logits down to the row's edge, (edge logit, edge id) included, that are at
    least min_p times as likely as the likeliest.
    """
    row, part = tl.program_id(0), tl.program_id(1)
    if tl.load(kinds + row) == 2:
        ids = part * TILE + tl.arange(0, TILE)
        place = logits + row.to(tl.int64) * row_stride + ids
        x = tl.load(place, mask=ids < vocab_size, other=-float("inf")).to(tl.float64)
        edge = tl.load(edge_logits + row)
        kept = (x > edge) | ((x == edge) & (ids <= tl.load(edge_ids + row)))
        temperature = tl.load(temperatures + row)
        highest = tl.load(info + row * 2 + 1).to(tl.float64)
        least = highest / temperature + tl.load(log_min_ps + row)
        scaled = x / temperature
        kept = kept & (x > -float("inf")) & (scaled >= least)
        best = tl.full([], -float("inf"), tl.float64)
        best_id = tl.full([], NOWHERE, tl.int32)
        # Truncation leaves most parts empty, and the noise is the dear thing here.
        if tl.max(kept.to(tl.int32), 0) > 0:
            u = uniform(tl.load(seeds + row), tl.load(token_indices + row), ids)
            noisy = tl.where(kept, scaled - tl.log(-tl.log(u)), -float("inf"))
            best = tl.max(noisy, 0)
            best_id = tl.min(tl.where(kept & (noisy == best), ids, NOWHERE), 0)
        at = row * tl.num_programs(1) + part
        tl.store(part_best + at, best)
        tl.store(part_ids + at, best_id)


@triton.jit
def join_draw_kernel(kinds, part_best, part_ids, out_ids, num_parts, PARTS_PAD: tl.constexpr):
    """Of one row of kind 2: the id of the highest noisy logit; 0 if no token is kept."""
    row, parts = tl.program_id(0), tl.arange(0, PARTS_PAD)
    if tl.load(kinds + row) == 2:
        at, is_part = row * num_parts + parts, parts < num_parts
        noisy = tl.load(part_best + at, mask=is_part, other=-float("inf"))
        ids = tl.load(part_ids + at, mask=is_part, other=NOWHERE)
        _, best_id = lowest_best(noisy, ids)
        tl.store(out_ids + row, tl.where(best_id == NOWHERE, 0, best_id).to(tl.int64))
