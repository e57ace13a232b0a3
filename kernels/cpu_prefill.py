"""Attention of many queries of one sequence on the CPU.

The slots that any query sees are gathered token by token into one run of keys, so that what is
masked or was never written is not even read. Queries are worked on in tiles, with masks made once
per step. A token is seen from one query on, until another:

    run      entry     seen from                   until                 relative position
    near     window    token                       token + window_size   query - token
    near     lasting   token + delay               start + cap           query - token
    capped   lasting   max(token + delay, ...cap)  for ever              cap - slot

A lasting entry is a sink entry (delay 0) or a recalled one (delay window_size).

Near keys are turned by one angle per block to the first query, and queries by their distance to it,
once per layer; torch's flash kernel does the rest. Capped keys are turned back by their cap, for
queries that are not turned at all, and joined to the kernel's result by log-sum-exp.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from streamkv.kernels.rope import RopeTables, rotate_into
from streamkv.kernels.table import NO_CAP, SequenceTable

NEAR_QUERIES = 128
"""Queries of a near tile: fewer make small products, more make masked scores (measured)."""

CAPPED_SCORES = 1 << 16
"""Scores of a head in a capped tile; they are kept whole, and should stay in the cache."""

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


@dataclass(frozen=True, slots=True)
class Tile:
    """Rows of queries (query-major, `group` to a query) and the keys [low, high) that they see.

    Attributes:
        rows: of [num_queries * group].
        low, high: of the run; equal if the tile sees nothing.
        mask: [1, num_rows, high - low], added to the scores; None if every row sees every key.
        blind: bool [1, num_rows], rows that see no key; None if there are none.
    """

    rows: slice
    low: int
    high: int
    mask: Tensor | None
    blind: Tensor | None


@dataclass(frozen=True, slots=True)
class Run:
    """Keys in the order of their tokens, and room to gather and turn them in.

    Attributes:
        rows: int64 [2 * num_kv_heads * num_keys], rows of layer 0 in the pool as [-1, head_dim].
        turn: cos and sin [num_keys, rotary_dim / 2].
        gathered: scratch [2, num_kv_heads, num_keys, head_dim].
        turned: scratch [num_kv_heads, num_keys, head_dim].
    """

    rows: Tensor
    turn: tuple[Tensor, Tensor]
    gathered: Tensor
    turned: Tensor

    def read(self, pool: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        """Turned keys and values, both [num_kv_heads, num_keys, head_dim], until the next read."""
        layer_rows = pool.view(-1, pool.shape[5])[layer * rows_per_layer(pool) :]
        torch.index_select(layer_rows, 0, self.rows, out=self.gathered.view(-1, pool.shape[5]))
        keys, values = self.gathered.unbind(0)
        rotate_into(self.turned, keys, *self.turn)
        return self.turned, values


@dataclass(frozen=True, slots=True)
class PrefillPlan:
    """What the layers of a step share. It owns scratch: one call at a time.

    Attributes:
        near, capped: the two runs of keys; either may be empty.
        near_tiles: cover all rows.
        capped_tiles: those with a visible key.
        turn: cos and sin [num_queries, 1, rotary_dim / 2] of the queries for the near run.
        queries: scratch [num_kv_heads, num_queries, group, head_dim], turned.
        unturned: scratch float32 of the same shape, for the capped run.
        out: scratch of the same shape.
        lse: scratch float32 [num_kv_heads, num_queries * group].
    """

    near: Run
    capped: Run
    near_tiles: tuple[Tile, ...]
    capped_tiles: tuple[Tile, ...]
    turn: tuple[Tensor, Tensor]
    queries: Tensor
    unturned: Tensor
    out: Tensor
    lse: Tensor


@dataclass(frozen=True, slots=True)
class _Keys:
    """Where the keys of a run lie and who sees them: int64 [num_keys], in the order of tokens.

    Attributes:
        rows: row of layer 0, K, head 0 in the pool as [-1, head_dim].
        angles: positions that the key is turned by.
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


def rows_per_layer(pool: Tensor) -> int:
    """Rows of head_dim elements in one layer of one block."""
    return 2 * pool.shape[3] * pool.shape[4]


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
    near, capped = (
        keys.between(query_start, query_start + num_queries)
        for keys in _keys(table, query_start, window_size, pool)
    )
    tokens = torch.arange(query_start, query_start + num_queries)
    masks = _Masks(group, pool.dtype)
    cos, sin = (row[:, None].to(pool.dtype) for row in rope.rows(tokens - query_start))
    capped_queries = max(NEAR_QUERIES, CAPPED_SCORES // max(1, capped.rows.shape[0]) // group)
    capped_tiles = _tiles(capped, tokens, capped_queries, masks)
    by_head = (num_kv_heads, num_queries, group, head_dim)
    return PrefillPlan(
        near=_run(near, rope, pool),
        capped=_run(capped, rope, pool),
        near_tiles=_tiles(near, tokens, NEAR_QUERIES, masks),
        capped_tiles=tuple(tile for tile in capped_tiles if tile.low < tile.high),
        turn=(cos, sin),
        queries=pool.new_empty(by_head),
        unturned=torch.empty(by_head),
        out=pool.new_empty(by_head),
        lse=torch.empty(num_kv_heads, num_queries * group),
    )


def _keys(
    table: SequenceTable, query_start: int, window_size: int, pool: Tensor
) -> tuple[_Keys, _Keys]:
    """Near keys and capped keys of every slot that exists."""
    slots = torch.arange(pool.shape[4])
    exists = (slots >= table.first_valid[:, None]) & (slots < table.end_valid[:, None])
    entries, slots = exists.nonzero(as_tuple=True)
    order = (table.starts[entries] + slots).argsort()
    entries, slots = entries[order], slots[order]
    starts, caps = table.starts[entries], table.caps[entries]
    tokens, capped_from = starts + slots, starts + caps
    rows = table.block_ids[entries] * (pool.shape[1] * rows_per_layer(pool)) + slots
    is_lasting = entries < table.num_lasting_entries
    visible_from = tokens + table.delays(window_size)[entries]
    near_until = capped_from.where(is_lasting, tokens + window_size)
    near = _Keys(rows, starts - query_start, visible_from, near_until)
    capped = is_lasting & (caps < NO_CAP)
    seen_from = torch.maximum(visible_from, capped_from)[capped]
    for_ever = torch.full_like(seen_from, NO_CAP)
    return near, _Keys(rows[capped], -caps[capped], seen_from, for_ever)


class _Masks:
    """Makes the masks of a plan. Tiles in mid-stream look alike and share one, which stays hot."""

    def __init__(self, group: int, dtype: torch.dtype) -> None:
        self.group = group
        self._dtype = dtype
        self._made: list[tuple[Tensor, Tensor]] = []

    def of(self, visible: Tensor) -> Tensor | None:
        """[1, num_queries * group, num_keys] from bool [num_queries, num_keys]."""
        if bool(visible.all()):
            return None
        for like, mask in self._made:
            if torch.equal(like, visible):
                return mask
        mask = torch.zeros(visible.shape, dtype=self._dtype).masked_fill_(~visible, -math.inf)
        mask = mask.repeat_interleave(self.group, 0)[None]
        self._made.append((visible, mask))
        return mask

    def blind(self, visible: Tensor) -> Tensor | None:
        """bool [1, num_queries * group], or None if every query sees a key."""
        blind = ~visible.any(-1)
        return blind.repeat_interleave(self.group)[None] if bool(blind.any()) else None


def _tiles(keys: _Keys, tokens: Tensor, num_queries: int, masks: _Masks) -> tuple[Tile, ...]:
    tiles = []
    for first in range(0, tokens.shape[0], num_queries):
        queries = tokens[first : first + num_queries]
        rows = slice(first * masks.group, (first + queries.shape[0]) * masks.group)
        tiles.append(_tile(keys, queries, rows, masks))
    return tuple(tiles)


def _tile(keys: _Keys, queries: Tensor, rows: slice, masks: _Masks) -> Tile:
    columns = (keys.seen_from <= queries[-1]) & (keys.seen_until > queries[0])
    places = columns.nonzero()[:, 0]
    low, high = (int(places[0]), int(places[-1]) + 1) if places.numel() else (0, 0)
    queries = queries[:, None]
    visible = (keys.seen_from[low:high] <= queries) & (keys.seen_until[low:high] > queries)
    return Tile(rows, low, high, masks.of(visible), masks.blind(visible))


def _run(keys: _Keys, rope: RopeTables, pool: Tensor) -> Run:
    num_kv_heads, block_size, head_dim = pool.shape[3:]
    num_keys = keys.rows.shape[0]
    planes = torch.arange(2 * num_kv_heads)[:, None] * block_size
    cos, sin = (row.to(pool.dtype) for row in rope.rows(keys.angles))
    return Run(
        rows=(planes + keys.rows).view(-1),
        turn=(cos, sin),
        gathered=pool.new_empty(2, num_kv_heads, num_keys, head_dim),
        turned=pool.new_empty(num_kv_heads, num_keys, head_dim),
    )


def attend_prefill(
    q: Tensor, pool: Tensor, layer: int, plan: PrefillPlan, scale: float
) -> tuple[Tensor, Tensor]:
    """out [T, num_q_heads, head_dim] in q's type and lse float32 [T, num_q_heads]."""
    num_kv_heads, num_queries, group, head_dim = plan.queries.shape
    rows = (num_kv_heads, num_queries * group, head_dim)
    by_head = q.view(num_queries, num_kv_heads, group, head_dim).transpose(0, 1)
    rotate_into(plan.queries, by_head, *plan.turn)
    keys, values = plan.near.read(pool, layer)
    for tile in plan.near_tiles:
        _attend_near(plan, plan.queries.view(rows), keys, values, tile, scale)
    if plan.capped_tiles:
        keys, values = plan.capped.read(pool, layer)
        queries = plan.unturned.copy_(by_head).view(rows)
        for tile in plan.capped_tiles:
            _join_capped(plan, queries, keys, values, tile, scale)
    # Fresh memory: the plan's own is written again in the next layer.
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    out.view(by_head.transpose(0, 1).shape).copy_(plan.out.transpose(0, 1))
    lse = plan.lse.view(num_kv_heads, num_queries, group).transpose(0, 1)
    return out, lse.clone(memory_format=torch.contiguous_format).view(q.shape[:2])


def _attend_near(
    plan: PrefillPlan, q: Tensor, keys: Tensor, values: Tensor, tile: Tile, scale: float
) -> None:
    """Fill a tile's rows of the plan's out and lse from turned queries; all [num_kv_heads, ...]."""
    out, lse = plan.out.view(q.shape)[:, tile.rows], plan.lse[:, tile.rows]
    if tile.low == tile.high:
        out.fill_(0.0)
        lse.fill_(-math.inf)
        return
    tile_out, tile_lse = _flash(
        q[None, :, tile.rows],
        keys[None, :, tile.low : tile.high],
        values[None, :, tile.low : tile.high],
        attn_mask=None if tile.mask is None else tile.mask[None],
        scale=scale,
    )
    out.copy_(tile_out[0])
    lse.copy_(tile_lse[0])
    if tile.blind is not None:
        # The kernel reports 0 for a row without a key, as if its scores summed to one.
        lse.masked_fill_(tile.blind, -math.inf)


def _join_capped(
    plan: PrefillPlan, q: Tensor, keys: Tensor, values: Tensor, tile: Tile, scale: float
) -> None:
    """Join capped keys to a tile's rows of the plan's out and lse; the queries are not turned."""
    out, lse = plan.out.view(q.shape)[:, tile.rows], plan.lse[:, tile.rows]
    columns = slice(tile.low, tile.high)
    # Key by row, not row by key: softmax over the few keys then runs along the many rows.
    scores = torch.bmm(keys[:, columns].float() * scale, q[:, tile.rows].transpose(1, 2))
    if tile.mask is not None:
        scores += tile.mask.transpose(1, 2)
    # The near keys take part as one more key, whose score is their lse and whose value their out.
    scores = torch.cat((lse[:, None], scores), 1)
    weights = scores.softmax(1)
    if tile.blind is not None:
        weights = weights.nan_to_num_(0.0)
    weights = weights.to(out.dtype)
    out.mul_(weights[:, 0, :, None]).baddbmm_(weights[:, 1:].transpose(1, 2), values[:, columns])
    lse.copy_(scores.logsumexp(1))
