"""Attention of a few queries of each sequence on a GPU: its room, its splits, and the wrapper.

Lengths stay on the device: shapes and grids follow capacities, so that a captured graph serves a
stream as it grows. What each query sees comes from `decode_plan`.
"""

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from streamkv.kernels.batch_table import BatchTable
from streamkv.kernels.decode_plan import check_plan
from streamkv.kernels.gpu_shape import (
    MIN_ROWS,
    Launch,
    Shape,
    Softmax,
    check_queries,
    decode_bytes,
    fitting_launch,
    pdl_option,
    require,
)
from streamkv.kernels.rope import RopeTables
from streamkv.kernels.triton_decode import decode_kernel, merge_splits_kernel

DECODE_AHEAD = False
"""With PDL, ask the L2 cache for a program's first block while the kernel before still runs."""


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
    shape = check_queries(q, pool, layer, rope)
    check_plan("seen", seen, (q.shape[0], table.capacity, 4))
    out = torch.empty_like(q, memory_format=torch.contiguous_format) if out is None else out
    fits = out.shape == q.shape and out.dtype == q.dtype and out.is_contiguous()
    require("out", list(out.shape), fits, f"Pass contiguous {q.dtype} {list(q.shape)}.")
    lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    if not q.shape[0]:
        return out, lse
    num_sequences, num_queries = table.num_sequences, q.shape[0] // table.num_sequences
    if scratch is None:
        splits = decode_splits(shape, num_sequences, table.capacity, processors(q.device))
        scratch = decode_scratch(shape, num_sequences, num_queries, splits, q.device)
    rows = decode_rows(shape, num_queries)
    _check_scratch(scratch, num_sequences * shape.num_kv_heads * rows, shape.head_dim)
    launch = decode_launch(shape, rows, num_queries) if launch is None else launch
    has_sinks = softmax.sink_logits is not None
    # Where there are none, any pointer will do: it is not read.
    sinks = softmax.sink_logits if has_sinks else lse
    shared = {"QUERIES": num_queries, "ROWS": rows, "HAS_SINK_LOGITS": has_sinks, "PDL": pdl}
    constants = shape.constants() | shared | {"SPLITS": scratch.splits}
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
        HAS_SOFTCAP=softmax.softcap is not None,
        AHEAD=DECODE_AHEAD and shape.head_dim == triton.next_power_of_2(shape.head_dim),
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
        **pdl_option(pdl),
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
        SPLITS_PAD=triton.next_power_of_2(scratch.splits),
        num_warps=4,
        **pdl_option(pdl),
    )
    return out, lse


def _check_scratch(scratch: DecodeScratch, num_rows: int, head_dim: int) -> None:
    needed, found = num_rows * scratch.splits, scratch.lse.numel()
    fits = found >= needed and scratch.out.numel() >= needed * head_dim
    require("scratch", found, fits, f"Make it for {needed} rows, by `decode_scratch`.")


def processors(device: torch.device) -> int:
    """Multiprocessors of a GPU; in the interpreter those of an H200, so that splits occur."""
    if device.type != "cuda":
        return 132
    count: int = torch.cuda.get_device_properties(device).multi_processor_count
    return count
