"""Attention of many consecutive queries of each sequence on a GPU, tile by tile.

A tile says which window entries any of its queries sees, so that a program reads no others; what
each query sees of them is exact, token by token. Where a step has too few tiles to keep a device
busy, several programs share the entries of a tile, and their parts are merged (flash-decoding, Dao
et al. 2023).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from streamkv.kernels.batch_table import BatchTable
from streamkv.kernels.gpu_merge import merge
from streamkv.kernels.gpu_shape import (
    MIN_ROWS,
    Launch,
    Shape,
    Softmax,
    check_queries,
    fitting_launch,
    prefill_bytes,
    require,
)
from streamkv.kernels.rope import RopeTables
from streamkv.kernels.triton_prefill import prefill_kernel

TILE_COLUMNS = 9
"""Numbers of a tile."""


@dataclass(frozen=True, slots=True, eq=False)
class PrefillScratch:
    """Room for what several programs found of the same queries.

    Attributes:
        parts: programs that share the entries of a tile.
        out: float32 [parts, T, num_q_heads, head_dim].
        lse: float32 [parts, T, num_q_heads].
    """

    parts: int
    out: Tensor
    lse: Tensor


def prefill_scratch(
    shape: Shape, num_tokens: int, parts: int, device: torch.device | str
) -> PrefillScratch:
    """Scratch for packed rows of so many tokens."""
    heads = (parts, num_tokens, shape.num_kv_heads * shape.group)
    out = torch.empty(*heads, shape.head_dim, device=device)
    return PrefillScratch(parts, out, torch.empty(*heads, device=device))


def prefill_tiles(
    table: BatchTable,
    query_starts: Tensor,
    num_queries: list[int],
    shape: Shape,
    rows: int,
    parts: int = 1,
) -> Tensor:
    """The tiles of a packed row, on the CPU: int32 [num_tiles * parts, TILE_COLUMNS].

    Args:
        table, query_starts: on the CPU.
        num_queries: of each sequence.
        shape: of the pool.
        rows: (query, query head) of a tile.
        parts: programs that share the entries of a tile, which is here as often.

    Returns:
        For each tile its sequence, its first query there, that query's packed row, its number of
        queries, then what this part of it reads: sink and recalled entries [first, end) and window
        entries [low, high), of all that any of the queries sees; at last which part this is.
    """
    per_tile, tiles, packed = max(1, rows // shape.group), [], 0
    for seq, count in enumerate(num_queries):
        lasting = int(table.num_sink_entries[seq]) + int(table.num_recalled_entries[seq])
        entries = int(table.num_entries[seq])
        starts, ends = table.starts[seq, lasting:entries], table.end_valid[seq, lasting:entries]
        window, begin = int(table.window_sizes[seq]), int(query_starts[seq])
        for first in range(0, count, per_tile):
            size = min(per_tile, count - first)
            oldest, newest = begin + first - window + 1, begin + first + size - 1
            seen = ((starts + ends > oldest) & (starts <= newest)).nonzero()[:, 0]
            low = lasting + int(seen[0]) if len(seen) else 0
            high = lasting + int(seen[-1]) + 1 if len(seen) else 0
            for part in range(parts):
                share = _share(part, parts, lasting, low, high)
                tiles.append((seq, first, packed + first, size, *share, part))
        packed += count
    return torch.tensor(tiles, dtype=torch.int32).view(-1, TILE_COLUMNS)


def _share(part: int, parts: int, lasting: int, low: int, high: int) -> tuple[int, int, int, int]:
    """What a part reads of `lasting` entries and of [low, high), one list that is cut evenly."""
    total = lasting + high - low
    begin, end = part * total // parts, (part + 1) * total // parts
    ahead = low - lasting
    return (
        min(begin, lasting),
        min(end, lasting),
        max(begin, lasting) + ahead,
        max(end, lasting) + ahead,
    )


def prefill_launch(shape: Shape) -> Launch:
    """Rows of a prefill tile: as many as registers and shared memory hold.

    Raises:
        ConfigError: the device has too little shared memory.
    """
    wanted = Launch(8, 2, 128) if shape.head_dim <= 128 else Launch(8, 2, 64)
    if shape.dtype == torch.float32:
        wanted = Launch(4, 1, 32)
    return fitting_launch(shape, wanted, lambda each: prefill_bytes(shape, each), MIN_ROWS)


def prefill(
    q: Tensor,
    pool: Tensor,
    layer: int,
    table: BatchTable,
    query_starts: Tensor,
    tiles: Tensor,
    rope: RopeTables,
    softmax: Softmax,
    launch: Launch | None = None,
    scratch: PrefillScratch | None = None,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of many consecutive queries of each sequence.

    Args:
        q: [T, num_q_heads, head_dim], un-rotated, packed sequence by sequence.
        pool, layer, table, rope, softmax: as for `decode`.
        query_starts: int64 [S], token index of each sequence's first query.
        tiles: of `prefill_tiles` with the rows of the launch, on the device.
        launch: of the kernel; chosen by shape if not given.
        scratch: for tiles in parts; with as many parts, for T tokens.
        out: contiguous, as what is returned, to write to; made if not given.

    Returns:
        out [T, num_q_heads, head_dim] and lse float32 [T, num_q_heads].
    """
    shape = check_queries(q, pool, layer, rope)
    out = torch.empty_like(q, memory_format=torch.contiguous_format) if out is None else out
    fits = out.shape == q.shape and out.dtype == q.dtype and out.is_contiguous()
    require("out", list(out.shape), fits, f"Pass contiguous {q.dtype} {list(q.shape)}.")
    lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    if not tiles.shape[0]:
        return out, lse
    # A learned logit counts once: in the parts together, if there are several.
    has_sinks = softmax.sink_logits is not None and scratch is None
    found = (out, lse) if scratch is None else (scratch.out, scratch.lse)
    if scratch is not None:
        expected = (scratch.parts, *q.shape)
        fits = scratch.out.shape == expected and scratch.lse.shape == expected[:-1]
        require("scratch", list(scratch.out.shape), fits, f"Make it for {list(expected)}.")
    launch = prefill_launch(shape) if launch is None else launch
    constants = shape.constants()
    prefill_kernel[(tiles.shape[0], shape.num_kv_heads)](
        q,
        tiles,
        table.addresses,
        table.starts,
        table.caps,
        table.first_valid,
        table.end_valid,
        table.num_sink_entries,
        table.window_sizes,
        query_starts,
        rope.cos,
        rope.sin,
        softmax.sink_logits if has_sinks else lse,
        *found,
        layer * shape.layer_bytes,
        shape.value_offset,
        softmax.scale,
        softmax.softcap or 1.0,
        *q.stride()[:2],
        table.capacity,
        q.shape[0],
        **constants,
        ROWS=launch.rows,
        HAS_SOFTCAP=softmax.softcap is not None,
        HAS_SINK_LOGITS=has_sinks,
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
    )
    if scratch is None:
        return out, lse
    return merge(scratch.out, scratch.lse, softmax.sink_logits, out)
