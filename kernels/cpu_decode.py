"""Attention of a few queries of one sequence on the CPU.

Blocks are gathered whole, head by head, and not turned: each entry gets its own turned copy of the
queries, which is far less work than turning the keys. Slots that hold no token are cleared in V
after the gather, because 0 * NaN is NaN, and their scores are masked.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from streamkv.kernels.rope import RopeTables, rotate_into
from streamkv.kernels.table import SequenceTable


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """What the layers of a step share. It owns scratch: one call at a time.

    Attributes:
        rows: int64 [2 * num_kv_heads * num_entries], rows of layer 0 in the pool as
            [-1, block_size * head_dim].
        empty_rows: int64, rows without a token, of V as
            [num_kv_heads * num_entries * block_size, head_dim].
        hidden: bool [num_entries, num_queries, 1, block_size], slots that a query must not see.
        blind: bool [num_queries, 1, 1], queries that see nothing; None if there are none.
        turn: cos and sin [num_entries, num_queries, 1, rotary_dim / 2].
        gathered: scratch [2, num_kv_heads, num_entries, block_size, head_dim].
        queries: scratch [num_kv_heads, num_entries, num_queries, group, head_dim].
    """

    rows: Tensor
    empty_rows: Tensor
    hidden: Tensor
    blind: Tensor | None
    turn: tuple[Tensor, Tensor]
    gathered: Tensor
    queries: Tensor


def plan_decode(
    table: SequenceTable,
    query_start: int,
    num_queries: int,
    window_size: int,
    rope: RopeTables,
    pool: Tensor,
    num_q_heads: int,
) -> DecodePlan:
    """Plan of attention, as `cpu.plan_attention` describes it."""
    num_kv_heads, block_size, head_dim = pool.shape[3:]
    tokens = torch.arange(query_start, query_start + num_queries)
    visible = table.visible(tokens, window_size, block_size)
    seen = visible.any(-1)
    cos, sin = rope.rows(table.distances(tokens).where(seen, 0).t())
    blind = ~seen.any(-1)[:, None, None]
    slots = torch.arange(block_size)
    empty = (slots < table.first_valid[:, None]) | (slots >= table.end_valid[:, None])
    heads = torch.arange(num_kv_heads)[:, None]
    planes = torch.arange(2 * num_kv_heads)[:, None]
    group = num_q_heads // num_kv_heads
    return DecodePlan(
        rows=(table.block_ids * pool[0, :, :, :, 0, 0].numel() + planes).view(-1),
        empty_rows=(heads * empty.numel() + empty.view(-1).nonzero()[:, 0]).view(-1),
        hidden=~visible.transpose(0, 1)[:, :, None],
        blind=blind if bool(blind.any()) else None,
        turn=(cos[:, :, None].to(pool.dtype), sin[:, :, None].to(pool.dtype)),
        gathered=pool.new_empty(2, num_kv_heads, table.num_entries, block_size, head_dim),
        queries=pool.new_empty(num_kv_heads, table.num_entries, num_queries, group, head_dim),
    )


def attend_decode(
    q: Tensor, pool: Tensor, layer: int, plan: DecodePlan, scale: float
) -> tuple[Tensor, Tensor]:
    """out [T, num_q_heads, head_dim] and scores float32 [num_kv_heads, T * group, num_keys]."""
    num_kv_heads, num_entries, num_queries, group, head_dim = plan.queries.shape
    block_size = plan.gathered.shape[3]
    layer_rows = pool.view(-1, block_size * head_dim)[layer * 2 * num_kv_heads :]
    gathered = plan.gathered.view(plan.rows.shape[0], -1)
    torch.index_select(layer_rows, 0, plan.rows, out=gathered)
    keys, values = plan.gathered.unbind(0)
    values.view(-1, head_dim).index_fill_(0, plan.empty_rows, 0.0)
    by_head = q.view(num_queries, num_kv_heads, 1, group, head_dim).transpose(0, 1)
    rotate_into(plan.queries, by_head.transpose(1, 2), *plan.turn)

    batch = num_kv_heads * num_entries
    scores = torch.bmm(
        plan.queries.view(batch, -1, head_dim), keys.view(batch, -1, head_dim).transpose(1, 2)
    )
    scores = scores.view(*plan.queries.shape[:-1], block_size).float() * scale
    scores = scores.masked_fill_(plan.hidden, -math.inf).permute(0, 2, 3, 1, 4)
    scores = scores.reshape(num_kv_heads, num_queries * group, -1)
    weights = scores.softmax(-1).to(q.dtype)
    out = torch.bmm(weights, values.view(num_kv_heads, -1, head_dim))
    out = out.view(num_kv_heads, num_queries, group, head_dim).transpose(0, 1)
    if plan.blind is not None:
        out = out.masked_fill(plan.blind[..., None], 0.0)
    return out.reshape(q.shape), scores


def decode_lse(scores: Tensor, plan: DecodePlan) -> Tensor:
    """float32 [T, num_q_heads], log-sum-exp of the scores that `attend_decode` returned."""
    num_kv_heads, _, num_queries, group, _ = plan.queries.shape
    lse = scores.logsumexp(-1).view(num_kv_heads, num_queries, group)
    return lse.transpose(0, 1).reshape(num_queries, -1)
