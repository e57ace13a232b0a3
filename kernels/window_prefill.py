"""Exact window attention of one sequence's chunk by the fastest dense operators of the device.

    copies   queries and keys, turned to one anchor, in forward and in reversed order
    squares  a causal square of each piece against itself, one in reversed order against the keys
             before it (see `window_cut`), for short pieces a rectangle: `causal.Squares`
    join     by log-sum-exp, with the sink tokens that have left the window

Its twin is `gpu.prefill`, which takes any table and any soft cap, and serves every chunk that has
no plan. Parts are rounded to the pool's type before they are joined.
"""

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from streamkv.kernels.causal import Squares
from streamkv.kernels.gpu_shape import Launch, Shape, Softmax, check_layer, require
from streamkv.kernels.rope import RopeTables
from streamkv.kernels.triton_window import gather_kernel, join_kernel, turn_kernel
from streamkv.kernels.window_cut import SIZE_STEP, Part, Rows, Segment
from streamkv.kernels.window_plan import WindowPlan

__all__ = ["WindowScratch", "num_positions", "window_prefill", "window_scratch"]

_TURN_TOKENS = 16


@dataclass(frozen=True, slots=True, eq=False)
class WindowScratch:
    """Room for turned copies, all of the pool's type; one serves every layer.

    Attributes:
        q_forward, q_reversed: [rows, num_q_heads, head_dim].
        k_forward, v_forward: [rows, num_kv_heads, head_dim].
        k_reversed, v_reversed: [previous rows, num_kv_heads, head_dim].
    """

    q_forward: Tensor
    q_reversed: Tensor
    k_forward: Tensor
    v_forward: Tensor
    k_reversed: Tensor
    v_reversed: Tensor


def window_scratch(
    shape: Shape, num_queries: int, window_size: int, device: torch.device | str
) -> WindowScratch:
    """Scratch for chunks of up to so many queries."""
    rows = num_queries + SIZE_STEP
    return _scratch(shape, rows, num_queries + window_size, device)


def join_launch(shape: Shape) -> Launch:
    """Rows of a tile of the join: as many as leave registers for two programs."""
    return Launch(4, 1, 32 if shape.dtype == torch.float32 or shape.head_dim > 128 else 64)


def num_positions(num_queries: int, window_size: int, block_size: int) -> int:
    """Rows that rope tables must have: largest angle of a query, or back to a block's start."""
    return max(num_queries + 1, window_size + block_size)


def window_prefill(
    q: Tensor,
    pool: Tensor,
    layer: int,
    plan: WindowPlan,
    rope: RopeTables,
    softmax: Softmax,
    squares: Squares,
    scratch: WindowScratch | None = None,
    out: Tensor | None = None,
    launch: Launch | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of one sequence's chunk, whose own K and V are already written.

    Args:
        q: [T, num_q_heads, head_dim], un-rotated.
        pool: the first pool of the table; gives layout and type.
        layer: of the pool.
        plan: of the chunk, on the device.
        rope: tables on the device of at least `num_positions` rows, that hold every cap in use.
        softmax: how scores become weights; without a soft cap.
        squares: operators of the device.
        scratch: kept copies; made for the call if not given.
        out: [T, num_q_heads, head_dim] to write to, contiguous; made if not given.
        launch: of the join; chosen by shape if not given.

    Returns:
        out and lse float32 [T, num_q_heads].

    Raises:
        ConfigError: a shape, stride, type or soft cap that the kernels are not made for.
    """
    shape = _check(q, pool, layer, plan, rope, softmax)
    if out is None:
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
    fits = out.shape == q.shape and out.dtype == q.dtype and out.is_contiguous()
    require("out", list(out.shape), fits, f"Pass contiguous {shape.dtype} {list(q.shape)}.")
    if scratch is None:
        scratch = _scratch(shape, plan.cut.num_rows, plan.cut.num_previous, q.device)
    enough = scratch.q_forward.shape[0] >= plan.cut.num_rows
    enough = enough and scratch.k_reversed.shape[0] >= plan.cut.num_previous
    wanted = f"Make it for {plan.cut.num_queries} queries and a window of {plan.cut.window_size}."
    require("scratch", scratch.q_forward.shape[0], enough, wanted)
    lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    launch = join_launch(shape) if launch is None else launch
    turn_queries(q, plan, shape, rope, scratch)
    gather(layer, plan, shape, rope, scratch)
    for segment in plan.cut.segments:
        attended = attend_parts(plan, segment, softmax.scale, squares, scratch)
        join(q, layer, plan, segment, shape, rope, softmax, attended, out, lse, launch)
    return out, lse


def turn_queries(
    q: Tensor, plan: WindowPlan, shape: Shape, rope: RopeTables, scratch: WindowScratch
) -> None:
    """Fill the queries of `scratch`: turned by their index in the chunk."""
    constants = shape.constants()
    del constants["BLOCK"], constants["EXACT"]
    turn_kernel[(triton.cdiv(plan.cut.num_rows, _TURN_TOKENS), shape.num_kv_heads)](
        q,
        rope.cos,
        rope.sin,
        scratch.q_forward,
        scratch.q_reversed,
        plan.cut.num_queries,
        plan.cut.num_rows,
        *q.stride()[:2],
        **constants,
        TOKENS=_TURN_TOKENS,
        num_warps=4,
    )


def gather(
    layer: int, plan: WindowPlan, shape: Shape, rope: RopeTables, scratch: WindowScratch
) -> None:
    """Fill the keys and values of `scratch`: K turned by the angle from the chunk's first token."""
    constants = shape.constants()
    del constants["GROUP"], constants["EXACT"]
    span = plan.cut.query_start + plan.cut.num_rows - plan.first_start
    gather_kernel[(triton.cdiv(span, shape.block_size), shape.num_kv_heads)](
        plan.addresses,
        rope.cos,
        rope.sin,
        scratch.k_forward,
        scratch.v_forward,
        scratch.k_reversed,
        scratch.v_reversed,
        plan.first_start,
        plan.cut.first_key,
        plan.cut.query_start,
        plan.cut.end,
        plan.cut.last_start,
        plan.cut.num_rows,
        plan.addresses.shape[0],
        layer * shape.layer_bytes,
        shape.value_offset,
        **constants,
        num_warps=8,
    )


@dataclass(frozen=True, slots=True, eq=False)
class Attended:
    """Outputs and log-sum-exps of a segment's parts, as `causal` shapes them.

    Attributes:
        own: queries against their own piece.
        triangle, rectangle: against the keys before; `None` where there are none.
    """

    own: tuple[Tensor, Tensor]
    triangle: tuple[Tensor, Tensor] | None
    rectangle: tuple[Tensor, Tensor] | None


def attend_parts(
    plan: WindowPlan,
    segment: Segment,
    scale: float,
    squares: Squares,
    scratch: WindowScratch,
) -> Attended:
    """The dense attention of a segment."""

    def attend(part: Part) -> tuple[Tensor, Tensor]:
        backward = part.is_reversed
        q = scratch.q_reversed if backward else scratch.q_forward
        k = scratch.k_reversed if backward else scratch.k_forward
        v = scratch.v_reversed if backward else scratch.v_forward
        return squares.attend(
            runs(q, part.queries),
            runs(k, part.keys),
            runs(v, part.keys),
            scale,
            is_causal=part.is_causal,
            recurring=segment.recurring,
        )

    triangle, rectangle = plan.cut.triangle(segment), plan.cut.rectangle(segment)
    return Attended(
        attend(plan.cut.own(segment)),
        None if triangle is None else attend(triangle),
        None if rectangle is None else attend(rectangle),
    )


def join(
    q: Tensor,
    layer: int,
    plan: WindowPlan,
    segment: Segment,
    shape: Shape,
    rope: RopeTables,
    softmax: Softmax,
    attended: Attended,
    out: Tensor,
    lse: Tensor,
    launch: Launch,
) -> None:
    """Write a segment's rows of `out` and `lse`: its parts and the sink tokens."""
    own = attended.own
    triangle, rectangle = attended.triangle or own, attended.rectangle or own
    has_logits = softmax.sink_logits is not None
    tiles = segment.num_pieces * triton.cdiv(segment.size, launch.rows // shape.group)
    join_kernel[(tiles, shape.num_kv_heads)](
        q,
        *own,
        *triangle,
        *rectangle,
        plan.sinks,
        softmax.sink_logits if has_logits else lse,
        rope.cos,
        rope.sin,
        out,
        lse,
        segment.first,
        segment.num_pieces,
        segment.size,
        plan.cut.num_queries,
        plan.cut.query_start,
        plan.cut.window_size,
        plan.sinks.shape[0],
        layer * shape.layer_bytes,
        shape.value_offset,
        softmax.scale,
        *q.stride()[:2],
        **shape.constants(),
        ROWS=launch.rows,
        SLOTS=plan.sink_slots,
        HAS_NEAR=plan.has_uncapped(segment),
        HAS_TRIANGLE=attended.triangle is not None,
        HAS_RECTANGLE=attended.rectangle is not None,
        HAS_SINK_LOGITS=has_logits,
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
    )


def runs(array: Tensor, rows: Rows) -> Tensor:
    """Runs of rows of [rows, heads, dim] as [num_runs, heads, size, dim], without a copy."""
    token, head, one = array.stride()
    size = (rows.num_runs, array.shape[1], rows.size, array.shape[2])
    first = array.storage_offset() + rows.first * token
    return array.as_strided(size, (rows.step * token, head, token, one), first)


def _scratch(shape: Shape, rows: int, previous: int, device: torch.device | str) -> WindowScratch:
    def empty(count: int, num_heads: int) -> Tensor:
        return torch.empty(count, num_heads, shape.head_dim, dtype=shape.dtype, device=device)

    queries = [empty(rows, shape.num_q_heads) for _ in range(2)]
    own = [empty(rows, shape.num_kv_heads) for _ in range(2)]
    before = [empty(previous, shape.num_kv_heads) for _ in range(2)]
    return WindowScratch(*queries, *own, *before)


def _check(
    q: Tensor, pool: Tensor, layer: int, plan: WindowPlan, rope: RopeTables, softmax: Softmax
) -> Shape:
    require("q", list(q.shape), q.dim() == 3, "Pass [T, num_q_heads, head_dim].")
    shape = Shape.of(pool, q.shape[1], rope)
    check_layer(shape, layer)
    rows = (plan.cut.num_queries, shape.head_dim)
    require("q", list(q.shape), (q.shape[0], q.shape[2]) == rows, f"Its T and head_dim: {rows}.")
    require("q", q.dtype, q.dtype == shape.dtype, f"Pass {shape.dtype}, as the pool has.")
    require("q", q.stride(), q.stride(2) == 1, "Its last stride must be 1.")
    require("softcap", softmax.softcap, softmax.softcap is None, "Use gpu.prefill for one.")
    needed = num_positions(plan.cut.num_queries, plan.cut.window_size, shape.block_size)
    enough = rope.num_positions >= needed
    require("rope", rope.num_positions, enough, f"Make tables of at least {needed} positions.")
    return shape
