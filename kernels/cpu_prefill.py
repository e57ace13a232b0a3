"""Attention of many queries of one sequence on the CPU.

The slots that any query sees are gathered token by token into one run of keys, so that what is
masked or was never written is not even read. Once per layer, keys are turned by one angle per block
to a common anchor and queries by their distance to it; torch's flash kernel then works on tiles of
queries, each over the run of keys that the tile sees, with masks made once per step.

A token is seen from one query on, until another:

    part     entry     seen from                   until                 angle of the query
    near     window    token                       token + window_size   its distance
    near     sink      token                       start + cap           its distance
    capped   sink      max(token, start + cap)     for ever              the cap

A sink token is thus near to some queries and capped for others; the two parts are merged by
log-sum-exp.
"""

import math
from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor

from streamkv.kernels.reference import merge
from streamkv.kernels.rope import RopeTables, rotate_into
from streamkv.kernels.table import NO_CAP, SequenceTable

TILE_QUERIES = 128
"""Queries of a tile: fewer make small products, more make masked scores (measured)."""

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


@dataclass(frozen=True, slots=True)
class Tile:
    """Queries [first, end) over keys [low, high) of their part.

    Attributes:
        mask: [1, 1, (end - first) * group, high - low], added to the scores.
        blind: bool [1, (end - first) * group], rows that see nothing; None if there are none.
    """

    first: int
    end: int
    low: int
    high: int
    mask: Tensor
    blind: Tensor | None


@dataclass(frozen=True, slots=True)
class Part:
    """Keys with a common anchor, and the tiles that see some of them.

    Attributes:
        rows: int64 [2 * num_kv_heads * num_keys], rows of layer 0 in the pool as [-1, head_dim].
        key_turn: cos and sin [num_keys, rotary_dim / 2], from the anchor to the key's block.
        query_turn: cos and sin [num_queries or 1, 1, rotary_dim / 2], from the anchor to the query.
        tiles: none of them without a visible key.
        gathered: scratch [2, num_kv_heads, num_keys, head_dim].
        keys: scratch [1, num_kv_heads, num_keys, head_dim].
    """

    rows: Tensor
    key_turn: tuple[Tensor, Tensor]
    query_turn: tuple[Tensor, Tensor]
    tiles: tuple[Tile, ...]
    gathered: Tensor
    keys: Tensor


@dataclass(frozen=True, slots=True)
class PrefillPlan:
    """What the layers of a step share. It owns scratch: one call at a time.

    Attributes:
        parts: those that have a visible key.
        queries: scratch [num_kv_heads, num_queries, group, head_dim].
    """

    parts: tuple[Part, ...]
    queries: Tensor


@dataclass(frozen=True, slots=True)
class _Keys:
    """Slots of a part, in the order of their tokens: int64 [num_keys] each.

    Attributes:
        rows: row of layer 0, K, head 0 in the pool as [-1, head_dim].
        angles: from the anchor to the start of the block.
        seen_from, seen_until: queries [seen_from, seen_until) see the key.
    """

    rows: Tensor
    angles: Tensor
    seen_from: Tensor
    seen_until: Tensor

    def between(self, query_start: int, query_end: int) -> "_Keys":
        """Only the keys that a query in [query_start, query_end) sees."""
        first = self.seen_from.clamp(min=query_start)
        chosen = (first < self.seen_until) & (first < query_end)
        columns = (self.rows, self.angles, self.seen_from, self.seen_until)
        return _Keys(*(column[chosen] for column in columns))


def plan_prefill(
    table: SequenceTable,
    query_start: int,
    num_queries: int,
    window_size: int,
    rope: RopeTables,
    pool: Tensor,
    num_q_heads: int,
) -> PrefillPlan:
    """Plan of attention, as `cpu.plan_attention` describes it."""
    num_kv_heads, head_dim = pool.shape[3], pool.shape[5]
    group = num_q_heads // num_kv_heads
    near, capped, top_cap = _keys(table, query_start, window_size, pool)
    tokens = torch.arange(query_start, query_start + num_queries)
    top = torch.tensor([top_cap])
    parts = [
        _part(
            keys.between(query_start, query_start + num_queries), tokens, angles, rope, pool, group
        )
        for keys, angles in ((near, tokens - query_start), (capped, top))
    ]
    queries = pool.new_empty(num_kv_heads, num_queries, group, head_dim)
    return PrefillPlan(tuple(part for part in parts if part.tiles), queries)


def _keys(
    table: SequenceTable, query_start: int, window_size: int, pool: Tensor
) -> tuple[_Keys, _Keys, int]:
    """Near keys, anchored at the first query; capped keys and the cap that anchors them."""
    slots = torch.arange(pool.shape[4])
    exists = (slots >= table.first_valid[:, None]) & (slots < table.end_valid[:, None])
    entries, slots = exists.nonzero(as_tuple=True)
    starts, caps = table.starts[entries], table.caps[entries]
    order = (starts + slots).argsort()
    entries, slots, starts, caps = entries[order], slots[order], starts[order], caps[order]
    tokens, capped_from = starts + slots, starts + caps
    rows = table.block_ids[entries] * pool[0, :, :, :, :, 0].numel() + slots
    is_sink = entries < table.num_sink_entries
    near_until = capped_from.where(is_sink, tokens + window_size)
    near = _Keys(rows, starts - query_start, tokens, near_until)

    capped = is_sink & (caps < NO_CAP)
    top_cap = int(caps[capped].max()) if bool(capped.any()) else 0
    seen_from = torch.maximum(tokens, capped_from)[capped]
    for_ever = torch.full_like(seen_from, NO_CAP)
    return near, _Keys(rows[capped], top_cap - caps[capped], seen_from, for_ever), top_cap


def _part(
    keys: _Keys, tokens: Tensor, query_angles: Tensor, rope: RopeTables, pool: Tensor, group: int
) -> Part:
    num_kv_heads, block_size, head_dim = pool.shape[3:]
    num_keys = keys.rows.shape[0]
    heads = torch.arange(2 * num_kv_heads)[:, None] * block_size
    cos, sin = (row.to(pool.dtype) for row in rope.rows(keys.angles))
    query_cos, query_sin = (row[:, None].to(pool.dtype) for row in rope.rows(query_angles))
    return Part(
        rows=(heads + keys.rows).view(-1),
        key_turn=(cos, sin),
        query_turn=(query_cos, query_sin),
        tiles=_tiles(keys, tokens, group, pool.dtype),
        gathered=pool.new_empty(2, num_kv_heads, num_keys, head_dim),
        keys=pool.new_empty(1, num_kv_heads, num_keys, head_dim),
    )


def _tiles(keys: _Keys, tokens: Tensor, group: int, dtype: torch.dtype) -> tuple[Tile, ...]:
    tiles = []
    for first in range(0, tokens.shape[0], TILE_QUERIES):
        rows = tokens[first : first + TILE_QUERIES, None]
        seen = (keys.seen_from <= rows[-1]) & (keys.seen_until > rows[0])
        columns = seen.nonzero()[:, 0]
        if not columns.numel():
            continue
        low, high = int(columns[0]), int(columns[-1]) + 1
        visible = (keys.seen_from[low:high] <= rows) & (keys.seen_until[low:high] > rows)
        visible = visible.repeat_interleave(group, 0)
        mask = torch.zeros(visible.shape, dtype=dtype).masked_fill_(~visible, -math.inf)
        blind = ~visible.any(1)[None]
        end = first + rows.shape[0]
        has_blind = bool(blind.any())
        tiles.append(Tile(first, end, low, high, mask[None, None], blind if has_blind else None))
    return tuple(tiles)


def attend_prefill(
    q: Tensor, pool: Tensor, layer: int, plan: PrefillPlan, scale: float
) -> tuple[Tensor, Tensor]:
    """out [T, num_q_heads, head_dim] and lse float32 [T, num_q_heads]."""
    results = [_attend_part(q, pool, layer, plan, part, scale) for part in plan.parts]
    if not results:
        return torch.zeros_like(q), torch.full(q.shape[:2], -math.inf)
    return reduce(lambda a, b: merge(*a, *b), results)


def _attend_part(
    q: Tensor, pool: Tensor, layer: int, plan: PrefillPlan, part: Part, scale: float
) -> tuple[Tensor, Tensor]:
    num_kv_heads, num_queries, group, head_dim = plan.queries.shape
    by_head = q.view(num_queries, num_kv_heads, group, head_dim).transpose(0, 1)
    rotate_into(plan.queries, by_head, *part.query_turn)
    layer_rows = pool.view(-1, head_dim)[layer * pool[0, 0, :, :, :, 0].numel() :]
    torch.index_select(layer_rows, 0, part.rows, out=part.gathered.view(-1, head_dim))
    rotate_into(part.keys[0], part.gathered[0], *part.key_turn)

    out = q.new_zeros(num_queries, num_kv_heads, group, head_dim)
    lse = torch.full((num_queries, num_kv_heads, group), -math.inf)
    for tile in part.tiles:
        tile_out, tile_lse = _flash(
            plan.queries[:, tile.first : tile.end].reshape(1, num_kv_heads, -1, head_dim),
            part.keys[:, :, tile.low : tile.high],
            part.gathered[1:, :, tile.low : tile.high],
            attn_mask=tile.mask,
            scale=scale,
        )
        if tile.blind is not None:
            # The kernel reports 0 for a row without a key, as if the scores summed to one.
            tile_lse.masked_fill_(tile.blind, -math.inf)
        by_row = (num_kv_heads, tile.end - tile.first, group)
        out[tile.first : tile.end] = tile_out.view(*by_row, head_dim).transpose(0, 1)
        lse[tile.first : tile.end] = tile_lse.view(by_row).transpose(0, 1)
    return out.view(q.shape), lse.view(q.shape[:2])
