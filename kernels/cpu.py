"""The fast CPU path: the same results as `reference`, from plans made once per step.

A plan turns a table into indices, angles and masks that all layers of the step share, so that no
layer loops over blocks. Few queries and many queries are computed differently (`cpu_decode`,
`cpu_prefill`), or both natively (`native_attention`); callers need not know which. The pool must be
contiguous; queries and pool have one type. Softmax and sums run in float32.
"""

from dataclasses import dataclass
from typing import Literal, overload

import torch
from torch import Tensor

from streamkv.kernels.cpu_decode import DecodePlan, attend_decode, decode_lse, plan_decode
from streamkv.kernels.cpu_prefill import (
    PrefillPlan,
    attend_prefill,
    plan_prefill,
    rows_per_layer,
)
from streamkv.kernels.native_attention import NativeAttention, NativePlan
from streamkv.kernels.reference import merge
from streamkv.kernels.rope import RopeTables, rotate_into
from streamkv.kernels.table import SequenceTable

__all__ = ["Plan", "WritePlan", "attend", "merge", "plan_attention", "plan_write", "write_kv"]

DECODE_QUERIES = 8
"""Up to so many queries, turning queries per entry beats turning keys (measured)."""

Plan = DecodePlan | PrefillPlan | NativePlan


@dataclass(frozen=True, slots=True)
class WritePlan:
    """Where and at which angle the tokens of a step are written. It owns scratch, as plans do.

    Attributes:
        rows: int64 [2 * T * num_kv_heads], rows of layer 0 in the pool as [-1, head_dim].
        cos, sin: float32 [T, 1, rotary_dim / 2].
        turned: scratch float32 [T, num_kv_heads, head_dim].
        tokens: scratch [2, T, num_kv_heads, head_dim].
    """

    rows: Tensor
    cos: Tensor
    sin: Tensor
    turned: Tensor
    tokens: Tensor


def plan_write(slot_mapping: Tensor, rope: RopeTables, pool: Tensor) -> WritePlan:
    """Plan writing T tokens to `slot_mapping` (int64 [T]), block_id * block_size + offset each."""
    num_kv_heads, block_size = pool.shape[3:5]
    block_ids, offsets = slot_mapping // block_size, slot_mapping % block_size
    planes = torch.arange(2 * num_kv_heads).view(2, 1, num_kv_heads) * block_size
    first = block_ids * (pool.shape[1] * rows_per_layer(pool)) + offsets
    cos, sin = rope.rows(offsets)
    shape = (offsets.shape[0], num_kv_heads, pool.shape[5])
    return WritePlan(
        rows=(first[:, None] + planes).view(-1),
        cos=cos[:, None],
        sin=sin[:, None],
        turned=torch.empty(shape),
        tokens=pool.new_empty(2, *shape),
    )


def write_kv(pool: Tensor, k: Tensor, v: Tensor, layer: int, plan: WritePlan) -> None:
    """Write un-rotated `k` and `v` [T, num_kv_heads, head_dim] into one layer of the pool."""
    head_dim = pool.shape[5]
    layer_rows = pool.view(-1, head_dim)[layer * rows_per_layer(pool) :]
    # In float32 whatever the pool's type: what is stored is rounded once.
    rotate_into(plan.turned, k.float(), plan.cos, plan.sin)
    plan.tokens[0].copy_(plan.turned)
    plan.tokens[1].copy_(v)
    layer_rows.index_copy_(0, plan.rows, plan.tokens.view(-1, head_dim))


def plan_attention(
    table: SequenceTable,
    query_start: int,
    num_queries: int,
    window_size: int,
    rope: RopeTables,
    pool: Tensor,
    num_q_heads: int,
    native: NativeAttention | None = None,
) -> Plan:
    """Plan the attention of consecutive queries of one sequence, for all layers of a step.

    Args:
        table: the entries, with the slots of this step's own tokens already valid.
        query_start: token index of the first query.
        num_queries: at least 1.
        window_size: tokens that window entries show, the query's own included.
        rope: angles; distances beyond its tables are computed.
        pool: [num_blocks + 1, num_layers, 2, num_kv_heads, block_size, head_dim], contiguous.
        num_q_heads: a multiple of num_kv_heads; query heads of one KV head are adjacent.
        native: bound to the same pool; attends in torch's stead.
    """
    assert pool.is_contiguous() and num_q_heads % pool.shape[3] == 0
    if native is not None and table.num_entries > 0:
        return native.plan(table, query_start, num_queries, window_size)
    few = num_queries <= DECODE_QUERIES and table.num_entries > 0
    make = plan_decode if few else plan_prefill
    return make(table, query_start, num_queries, window_size, rope, pool, num_q_heads)


@overload
def attend(
    q: Tensor,
    pool: Tensor,
    layer: int,
    plan: Plan,
    scale: float,
    *,
    return_lse: Literal[False] = False,
) -> Tensor: ...
@overload
def attend(
    q: Tensor, pool: Tensor, layer: int, plan: Plan, scale: float, *, return_lse: Literal[True]
) -> tuple[Tensor, Tensor]: ...
def attend(
    q: Tensor, pool: Tensor, layer: int, plan: Plan, scale: float, *, return_lse: bool = False
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of the planned queries in one layer.

    Args:
        q: [T, num_q_heads, head_dim], un-rotated; its tokens' K and V are already written.
        pool: the pool of the plan.
        layer: index of the layer in the pool.
        plan: of `plan_attention`. It owns scratch, so one thread uses it at a time.
        scale: factor of the scores.
        return_lse: also return the log-sum-exp of the scores.

    Returns:
        [T, num_q_heads, head_dim] in q's type; with `return_lse` also float32 [T, num_q_heads]. A
        query that sees nothing gets zeros and -inf.
    """
    if isinstance(plan, NativePlan):
        out, lse = plan.attention.attend(q, layer, plan, scale)
        return (out, lse) if return_lse else out
    if isinstance(plan, DecodePlan):
        out, scores = attend_decode(q, pool, layer, plan, scale)
        return (out, decode_lse(scores, plan)) if return_lse else out
    out, lse = attend_prefill(q, pool, layer, plan, scale)
    return (out, lse) if return_lse else out
