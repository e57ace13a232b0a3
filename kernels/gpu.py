"""Attention, writing and copying on a GPU: the Triton kernels behind checked wrappers.

    pool    [num_blocks + 1, num_layers, 2, num_kv_heads, block_size, head_dim], contiguous; the
            last block of the first pool is the guard block
    table   a `BatchTable`; its addresses may lie in any pool of that layout that the GPU can read

Every wrapper has a twin in `batch_reference` with the same arguments. Head sizes up to 256, any
rotary dimension, groups of 1 to 16 query heads. Element types float16, bfloat16 and float32; scores
and sums are float32. float32 is exact (no TF32), for checks rather than for speed.
"""

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from streamkv.kernels.batch_table import BatchTable
from streamkv.kernels.gpu_shape import (
    MIN_ROWS,
    Launch,
    Shape,
    check_layer,
    decode_bytes,
    fitting_launch,
    prefill_bytes,
    require,
)
from streamkv.kernels.rope import RopeTables
from streamkv.kernels.triton_copy import copy_kernel
from streamkv.kernels.triton_decode import decode_kernel, merge_splits_kernel, seen_kernel
from streamkv.kernels.triton_prefill import prefill_kernel
from streamkv.kernels.triton_write import write_kernel

__all__ = [
    "DecodeScratch",
    "Launch",
    "Shape",
    "Softmax",
    "copy_blocks",
    "decode",
    "decode_launch",
    "decode_rows",
    "decode_scratch",
    "decode_splits",
    "plan_decode",
    "prefill",
    "prefill_launch",
    "prefill_tiles",
    "write_kv",
]

MAX_DECODE_QUERIES = 8
DECODE_AHEAD = False
"""With PDL, ask the L2 cache for a program's first block while the kernel before still runs."""

_COPY_WORDS = 1024
_SEEN_ENTRIES = 256


@dataclass(frozen=True, slots=True, eq=False)
class Softmax:
    """How scores become weights.

    Attributes:
        scale: factor of the scores.
        softcap: scores become softcap * tanh(score / softcap); `None` leaves them.
        sink_logits: float [num_q_heads], a logit that takes weight and gives no value.
    """

    scale: float
    softcap: float | None = None
    sink_logits: Tensor | None = None


@dataclass(frozen=True, slots=True, eq=False)
class DecodeScratch:
    """Room for partial results, kept so that captured graphs find it where it was.

    Attributes:
        splits: programs that share the entries of a sequence and KV head.
        out: float32 [S * num_kv_heads * splits * rows * head_dim].
        lse: float32 [S * num_kv_heads * splits * rows].
    """

    splits: int
    out: Tensor
    lse: Tensor


def decode_rows(shape: Shape, num_queries: int) -> int:
    """Rows of a decode program: (query, query head) padded to what `tl.dot` takes."""
    padded: int = triton.next_power_of_2(num_queries * shape.group)
    return max(MIN_ROWS, padded)


def decode_scratch(
    shape: Shape, num_sequences: int, num_queries: int, splits: int, device: torch.device | str
) -> DecodeScratch:
    """Scratch for steps of so many sequences."""
    parts = num_sequences * shape.num_kv_heads * splits * decode_rows(shape, num_queries)
    return DecodeScratch(
        splits,
        torch.empty(parts * shape.head_dim, device=device),
        torch.empty(parts, device=device),
    )


def decode_splits(shape: Shape, num_sequences: int, capacity: int, num_processors: int) -> int:
    """Splits that keep every multiprocessor busy without making more parts than entries."""
    programs = num_sequences * shape.num_kv_heads
    return max(1, min(capacity, 4 * num_processors // programs))


def decode_launch(shape: Shape, rows: int, num_queries: int = 1) -> Launch:
    """Few warps while the rows are few: the kernel waits for memory, not for arithmetic.

    Raises:
        ConfigError: the device has too little shared memory.
    """
    small = shape.head_dim <= 128 and shape.dtype != torch.float32
    wanted = Launch(2 if rows <= 16 and small else 4, 2, rows)
    # Rows are all of a sequence's queries: there cannot be fewer.
    return fitting_launch(shape, wanted, lambda each: decode_bytes(shape, each, num_queries), rows)


def write_kv(
    pool: Tensor,
    k: Tensor,
    v: Tensor,
    slot_mapping: Tensor,
    layer: int,
    rope: RopeTables,
    pdl: bool = False,
) -> None:
    """Write un-rotated `k` and `v` of a packed row into their slots of one layer.

    Args:
        pool: changed in place.
        k, v: [T, num_kv_heads, head_dim]; the last dimension is contiguous.
        slot_mapping: int64 [T], block_id * block_size + offset; no slot twice; a token whose slot
            is negative is not written.
        layer: of the pool.
        rope: tables on the pool's device, for at least block_size positions.
        pdl: overlap with the kernel before (Hopper and later).
    """
    shape = Shape.of(pool, pool.shape[3], rope)
    check_layer(shape, layer)
    expected = (slot_mapping.shape[0], shape.num_kv_heads, shape.head_dim)
    for name, rows in (("k", k), ("v", v)):
        require(name, list(rows.shape), tuple(rows.shape) == expected, f"Pass {list(expected)}.")
        require(name, rows.stride(), rows.stride(2) == 1, "Its last stride must be 1.")
    require("slot_mapping", slot_mapping.dtype, slot_mapping.dtype == torch.int64, "Pass int64.")
    if not slot_mapping.shape[0]:
        return
    constants = shape.constants()
    del constants["GROUP"], constants["EXACT"]
    write_kernel[(slot_mapping.shape[0],)](
        pool,
        k,
        v,
        slot_mapping,
        rope.cos,
        rope.sin,
        layer * 2 * shape.value_offset,
        shape.value_offset,
        pool.stride(0),
        *k.stride()[:2],
        *v.stride()[:2],
        HEADS_PAD=triton.next_power_of_2(shape.num_kv_heads),
        **constants,
        PDL=pdl,
        num_warps=4,
        **_pdl_option(pdl),
    )


def plan_decode(
    table: BatchTable, query_starts: Tensor, num_queries: int, seen: Tensor | None = None
) -> Tensor:
    """What each query sees of each entry; made once for all layers of a step.

    Args:
        table: entries of S sequences, the queries' own slots included.
        query_starts: int64 [S], token index of each sequence's first query.
        num_queries: of each sequence.
        seen: int32 [S * num_queries, C, 4] to write to; made if not given.
    """
    fits = query_starts.shape == (table.num_sequences,) and query_starts.dtype == torch.int64
    wanted = f"Pass int64 [{table.num_sequences}]."
    require("query_starts", list(query_starts.shape), fits, wanted)
    most = MAX_DECODE_QUERIES
    require("num_queries", num_queries, 1 <= num_queries <= most, f"Use 1 to {most}.")
    rows = table.num_sequences * num_queries
    if seen is None:
        shape = (rows, table.capacity, 4)
        seen = torch.empty(shape, dtype=torch.int32, device=query_starts.device)
    if rows:
        seen_kernel[(rows, triton.cdiv(table.capacity, _SEEN_ENTRIES))](
            table.starts,
            table.caps,
            table.first_valid,
            table.end_valid,
            table.num_entries,
            table.num_sink_entries,
            table.window_sizes,
            query_starts,
            seen,
            table.capacity,
            QUERIES=num_queries,
            ENTRIES=_SEEN_ENTRIES,
            num_warps=4,
        )
    return seen


def decode(
    q: Tensor,
    pool: Tensor,
    layer: int,
    table: BatchTable,
    seen: Tensor,
    rope: RopeTables,
    softmax: Softmax,
    scratch: DecodeScratch | None = None,
    out: Tensor | None = None,
    launch: Launch | None = None,
    pdl: bool = False,
) -> tuple[Tensor, Tensor]:
    """Attention of the same small number of consecutive queries of each sequence.

    Args:
        q: [S * num_queries, num_q_heads, head_dim], un-rotated, sequence by sequence.
        pool: the first pool of the table; gives layout and type.
        layer: of the pool.
        table: entries of S sequences, the queries' own slots included.
        seen: of `plan_decode`.
        rope: tables on the device that hold every distance in use.
        softmax: how scores become weights.
        scratch: kept partial results; made for the call if not given.
        out: [S * num_queries, num_q_heads, head_dim] to write to; made if not given.
        launch: of the kernel; chosen by shape if not given.
        pdl: overlap with the kernel before (Hopper and later).

    Returns:
        out and lse float32 [S * num_queries, num_q_heads]; a query that sees nothing gets zeros and
        -inf (or its sink logit).
    """
    shape = _check_queries(q, pool, layer, rope)
    num_sequences = table.num_sequences
    whole = seen.shape == (q.shape[0], table.capacity, 4) and seen.is_contiguous()
    require("seen", list(seen.shape), whole, f"Pass {[q.shape[0], table.capacity, 4]}.")
    out = torch.empty_like(q, memory_format=torch.contiguous_format) if out is None else out
    fits = out.shape == q.shape and out.dtype == q.dtype and out.is_contiguous()
    require("out", list(out.shape), fits, f"Pass contiguous {q.dtype} {list(q.shape)}.")
    lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    if not q.shape[0]:
        return out, lse
    num_queries = q.shape[0] // num_sequences
    if scratch is None:
        splits = decode_splits(shape, num_sequences, table.capacity, _processors(q.device))
        scratch = decode_scratch(shape, num_sequences, num_queries, splits, q.device)
    rows = decode_rows(shape, num_queries)
    launch = decode_launch(shape, rows, num_queries) if launch is None else launch
    constants = shape.constants() | {"QUERIES": num_queries, "ROWS": rows}
    has_sinks = softmax.sink_logits is not None
    # Where there are none, any pointer will do: it is not read.
    sinks = softmax.sink_logits if has_sinks else lse
    decode_kernel[(num_sequences, shape.num_kv_heads, scratch.splits)](
        q,
        table.addresses,
        seen,
        table.num_entries,
        rope.cos,
        rope.sin,
        scratch.out,
        scratch.lse,
        sinks,
        out,
        lse,
        layer * shape.layer_bytes,
        shape.value_offset,
        softmax.scale,
        softmax.softcap or 1.0,
        *q.stride()[:2],
        table.capacity,
        **constants,
        SPLITS=scratch.splits,
        HAS_SOFTCAP=softmax.softcap is not None,
        HAS_SINK_LOGITS=has_sinks,
        PDL=pdl,
        AHEAD=DECODE_AHEAD and shape.head_dim == triton.next_power_of_2(shape.head_dim),
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
        **_pdl_option(pdl),
    )
    if scratch.splits == 1:
        return out, lse
    for name in ("HALF", "BLOCK", "EXACT"):
        del constants[name]
    merge_splits_kernel[(q.shape[0], shape.num_q_heads)](
        scratch.out,
        scratch.lse,
        sinks,
        out,
        lse,
        **constants,
        SPLITS=scratch.splits,
        SPLITS_PAD=triton.next_power_of_2(scratch.splits),
        HAS_SINK_LOGITS=has_sinks,
        PDL=pdl,
        num_warps=4,
        **_pdl_option(pdl),
    )
    return out, lse


def prefill_tiles(
    table: BatchTable, query_starts: Tensor, num_queries: list[int], shape: Shape, rows: int
) -> Tensor:
    """The tiles of a packed row, on the CPU: int32 [num_tiles, 6].

    Args:
        table, query_starts: on the CPU.
        num_queries: of each sequence.
        shape: of the pool.
        rows: (query, query head) of a tile.

    Returns:
        For each tile its sequence, its first query there, that query's packed row, its number of
        queries, and the window entries [low, high) that any of them sees.
    """
    per_tile, tiles, packed = max(1, rows // shape.group), [], 0
    for seq, count in enumerate(num_queries):
        sinks, entries = int(table.num_sink_entries[seq]), int(table.num_entries[seq])
        starts, ends = table.starts[seq, sinks:entries], table.end_valid[seq, sinks:entries]
        window, begin = int(table.window_sizes[seq]), int(query_starts[seq])
        for first in range(0, count, per_tile):
            size = min(per_tile, count - first)
            oldest, newest = begin + first - window + 1, begin + first + size - 1
            seen = ((starts + ends > oldest) & (starts <= newest)).nonzero()[:, 0]
            low = sinks + int(seen[0]) if len(seen) else 0
            high = sinks + int(seen[-1]) + 1 if len(seen) else 0
            tiles.append((seq, first, packed + first, size, low, high))
        packed += count
    return torch.tensor(tiles, dtype=torch.int32).view(-1, 6)


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
) -> tuple[Tensor, Tensor]:
    """Attention of many consecutive queries of each sequence.

    Args:
        q: [T, num_q_heads, head_dim], un-rotated, packed sequence by sequence.
        pool, layer, table, rope, softmax: as for `decode`.
        query_starts: int64 [S], token index of each sequence's first query.
        tiles: of `prefill_tiles` with the rows of the launch, on the device.
        launch: of the kernel; chosen by shape if not given.

    Returns:
        out [T, num_q_heads, head_dim] and lse float32 [T, num_q_heads].
    """
    shape = _check_queries(q, pool, layer, rope)
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    if not tiles.shape[0]:
        return out, lse
    has_sinks = softmax.sink_logits is not None
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
        out,
        lse,
        layer * shape.layer_bytes,
        shape.value_offset,
        softmax.scale,
        softmax.softcap or 1.0,
        *q.stride()[:2],
        table.capacity,
        **constants,
        ROWS=launch.rows,
        HAS_SOFTCAP=softmax.softcap is not None,
        HAS_SINK_LOGITS=has_sinks,
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
    )
    return out, lse


def copy_blocks(sources: Tensor, targets: Tensor, num_bytes: int) -> None:
    """Copy pieces of memory, all in one launch.

    Args:
        sources, targets: int64 [N], addresses that the GPU can read and write, multiples of 16.
        num_bytes: of each piece, a multiple of 16.
    """
    require("num_bytes", num_bytes, num_bytes % 16 == 0, "Use a multiple of 16.")
    same = sources.shape == targets.shape and sources.dim() == 1
    require("targets", list(targets.shape), same, "Pass one target for each source.")
    for name, tensor in (("sources", sources), ("targets", targets)):
        require(name, tensor.dtype, tensor.dtype == torch.int64, "Pass int64.")
    if not sources.shape[0] or not num_bytes:
        return
    words = num_bytes // 8
    grid = (sources.shape[0], triton.cdiv(words, _COPY_WORDS))
    copy_kernel[grid](sources, targets, words, WORDS=_COPY_WORDS, num_warps=4)


def _check_queries(q: Tensor, pool: Tensor, layer: int, rope: RopeTables) -> Shape:
    require("q", list(q.shape), q.dim() == 3, "Pass [T, num_q_heads, head_dim].")
    shape = Shape.of(pool, q.shape[1], rope)
    check_layer(shape, layer)
    require("q", list(q.shape), q.shape[2] == shape.head_dim, f"Its head_dim is {shape.head_dim}.")
    require("q", q.dtype, q.dtype == shape.dtype, f"Pass {shape.dtype}, as the pool has.")
    require("q", q.stride(), q.stride(2) == 1, "Its last stride must be 1.")
    return shape


def _pdl_option(pdl: bool) -> dict[str, bool]:
    # The interpreter does not know the option.
    return {"launch_pdl": True} if pdl else {}


def _processors(device: torch.device) -> int:
    """Multiprocessors of a GPU; in the interpreter those of an H200, so that splits occur."""
    if device.type != "cuda":
        return 132
    count: int = torch.cuda.get_device_properties(device).multi_processor_count
    return count
