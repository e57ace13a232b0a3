"""The oracle: writing KV and attending over blocks, as plainly as torch can say it.

Every other kernel is tested against these functions, and these against a dense float64 computation
with one position per (query, key) pair. Sums run in float32 (float64 for float64 input). Memory
grows with queries x entries; speed is of no concern here.

    pool    [num_blocks + 1, num_layers, 2, num_kv_heads, block_size, head_dim]; 0 of the 2 is K;
            the last block is the guard block, which no sequence writes
    K       stored rotated by its offset inside its block
    score   (query t, slot j of an entry) = rotate(q_t, distance) . K_stored(j) * scale

What a slot that is not visible holds (even NaN) never reaches a result.
"""

import math
from typing import Literal, overload

import torch
from torch import Tensor

from streamkv.kernels.rope import RopeTables, rotate
from streamkv.kernels.table import SequenceTable


def write_kv(
    pool: Tensor, k: Tensor, v: Tensor, slot_mapping: Tensor, layer: int, rope: RopeTables
) -> None:
    """Write un-rotated `k` and `v` of T tokens into their slots of one layer.

    Args:
        pool: see the module; changed in place.
        k, v: [T, num_kv_heads, head_dim].
        slot_mapping: int64 [T], block_id * block_size + offset; no slot twice.
        layer: index of the layer in the pool.
        rope: tables with at least block_size positions.
    """
    block_size = pool.shape[4]
    block_ids, offsets = slot_mapping // block_size, slot_mapping % block_size
    cos, sin = rope.rows(offsets)
    rotated = rotate(k, cos[:, None], sin[:, None])
    pool[block_ids, layer, 0, :, offsets] = rotated.to(pool.dtype)
    pool[block_ids, layer, 1, :, offsets] = v.to(pool.dtype)


@overload
def attend(
    q: Tensor,
    pool: Tensor,
    layer: int,
    table: SequenceTable,
    query_start: int,
    window_size: int,
    rope: RopeTables,
    scale: float,
    *,
    softcap: float | None = None,
    return_lse: Literal[False] = False,
) -> Tensor: ...
@overload
def attend(
    q: Tensor,
    pool: Tensor,
    layer: int,
    table: SequenceTable,
    query_start: int,
    window_size: int,
    rope: RopeTables,
    scale: float,
    *,
    softcap: float | None = None,
    return_lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...
def attend(
    q: Tensor,
    pool: Tensor,
    layer: int,
    table: SequenceTable,
    query_start: int,
    window_size: int,
    rope: RopeTables,
    scale: float,
    *,
    softcap: float | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of T consecutive queries of one sequence over the entries of its table.

    Args:
        q: [T, num_q_heads, head_dim], un-rotated; query i is token query_start + i, whose own K and
            V are already written. Query heads of one KV head are adjacent.
        pool: see the module.
        layer: index of the layer in the pool.
        table: the entries.
        query_start: token index of the first query.
        window_size: tokens that window entries show, the query's own included.
        rope: tables that hold every distance in use.
        scale: factor of the scores.
        softcap: scores become softcap * tanh(score / softcap), as in Gemma 2.
        return_lse: also return the log-sum-exp of the scores.

    Returns:
        [T, num_q_heads, head_dim] in q's type; with `return_lse` also float32 [T, num_q_heads]. A
        query that sees nothing gets zeros and -inf.
    """
    tokens = torch.arange(query_start, query_start + q.shape[0], device=q.device)
    visible = table.visible(tokens, window_size, pool.shape[4])
    slices, distances = pool[table.block_ids, layer], table.distances(tokens)
    out, lse = attend_slices(q, slices, visible, distances, rope, scale, softcap=softcap)
    return (out, lse) if return_lse else out


def attend_slices(
    q: Tensor,
    slices: Tensor,
    visible: Tensor,
    distances: Tensor,
    rope: RopeTables,
    scale: float,
    *,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of T queries over any E slices of one layer.

    Args:
        q: [T, num_q_heads, head_dim], un-rotated.
        slices: [E, 2, num_kv_heads, block_size, head_dim].
        visible: bool [T, E, block_size], the slots that each query sees.
        distances: int64 [T, E], from each query to each slice's start.
        rope, scale, softcap: as for `attend`.

    Returns:
        out in q's type and lse float32; zeros and -inf where a query sees nothing.
    """
    num_queries, num_q_heads, head_dim = q.shape
    num_kv_heads, block_size = slices.shape[2], slices.shape[3]
    exact = torch.float64 if q.dtype == torch.float64 else torch.float32

    # An entry without a visible slot may be at any distance, even a negative one.
    distances = distances.where(visible.any(-1), 0)
    cos, sin = rope.rows(distances)
    turned = rotate(q.to(exact)[:, None], cos[:, :, None], sin[:, :, None])
    heads = (num_kv_heads, num_q_heads // num_kv_heads, head_dim)
    turned = turned.view(*turned.shape[:2], *heads)

    # Nobody sees these slots, but 0 * NaN is NaN: they must not hold what they hold.
    unseen = ~visible.any(0)[:, None, :, None]
    keys, values = slices.to(exact).unbind(1)
    keys, values = keys.masked_fill(unseen, 0.0), values.masked_fill(unseen, 0.0)

    scores = torch.einsum("tehgd,ehjd->thgej", turned, keys) * scale
    if softcap is not None:
        scores = softcap * (scores / softcap).tanh()
    scores = scores.masked_fill(~visible[:, None, None], -math.inf).flatten(-2)
    lse = scores.logsumexp(-1)
    weights = (scores - lse.nan_to_num(neginf=0.0)[..., None]).exp()
    weights = weights.view(*weights.shape[:-1], slices.shape[0], block_size)
    out = torch.einsum("thgej,ehjd->thgd", weights, values)
    out = out.reshape(num_queries, num_q_heads, head_dim).to(q.dtype)
    return out, lse.reshape(num_queries, num_q_heads).float()


def merge(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over two disjoint sets of keys, from the attention over each.

    Args:
        out_a, out_b: [..., head_dim].
        lse_a, lse_b: float32 [...], -inf where a part saw nothing.

    Returns:
        out in out_a's type, and lse. Two empty parts give zeros and -inf.
    """
    lse = torch.logaddexp(lse_a, lse_b)
    base = lse.nan_to_num(neginf=0.0)
    weight_a, weight_b = (lse_a - base).exp()[..., None], (lse_b - base).exp()[..., None]
    return (out_a * weight_a + out_b * weight_b).to(out_a.dtype), lse
