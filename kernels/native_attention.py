"""Attention of one layer as a native call: `attention.c`, compiled when first needed.

A plan holds what the layers of a step share: entries, angles, strides. Whoever has no compiler, a
processor without wide vectors, or KV of another type gets `NativeUnavailableError` with the reason
and stays on torch's kernels (`cpu_prefill`). This module knows neither models nor sessions.
"""

import ctypes
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from streamkv.kernels.native_build import NativeUnavailableError
from streamkv.kernels.rope import RopeTables
from streamkv.kernels.table import NO_CAP, SequenceTable

BLOCK_SIZE = 64
LANES = 16
MAX_HEAD_DIM = 256
TILE_ROWS = 384
"""Rows (query, query head) of a tile: what is packed of an entry serves so many (measured)."""

_TYPES = {torch.float32: 0, torch.bfloat16: 1}


class _Attention(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int64) for name in ("num_layers", "num_q_heads", "num_kv_heads")),
        *((name, ctypes.c_int64) for name in ("head_dim", "rotary_half", "kv_type", "num_threads")),
        ("scale", ctypes.c_float),
        ("pool", ctypes.c_void_p),
    ]


class _Queries(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int64) for name in ("layer", "num_queries", "query_start")),
        *((name, ctypes.c_int64) for name in ("window_size", "num_entries", "num_sink_entries")),
        ("num_lasting_entries", ctypes.c_int64),
        *((name, ctypes.c_int64) for name in ("token_stride", "head_stride", "tile_queries")),
        *((name, ctypes.c_void_p) for name in ("block_ids", "starts", "caps", "first", "end")),
        *((name, ctypes.c_void_p) for name in ("near_cos", "near_sin", "capped_cos", "capped_sin")),
        *((name, ctypes.c_void_p) for name in ("query_cos", "query_sin", "q", "out", "lse")),
    ]


@dataclass(frozen=True, slots=True, eq=False)
class NativePlan:
    """Attention of consecutive queries of one sequence, for all layers of a step.

    Attributes:
        attention: what made the plan.
        queries: the call's arguments but for a layer's own.
        kept: tensors that `queries` points into.
    """

    attention: "NativeAttention"
    queries: _Queries
    kept: tuple[Tensor, ...]


class NativeAttention:
    """Attention bound to a pool. One thread uses it at a time.

    Args:
        library: what `native_build.build` returned.
        pool: [blocks, layers, 2, kv_heads, 64, head_dim], contiguous, float32 or bfloat16.
        rope: of the model.
        num_q_heads: a multiple of the KV heads; query heads of one KV head are adjacent.
        num_threads: threads of a call.

    Raises:
        NativeUnavailableError: a shape, a type or a processor that it is not made for.
    """

    def __init__(
        self, library: Path, pool: Tensor, rope: RopeTables, num_q_heads: int, num_threads: int
    ) -> None:
        self._library = ctypes.CDLL(str(library))
        if not self._library.skv_attention_is_fast():
            raise NativeUnavailableError("native attention needs vectors of 512 bits")
        _check_shapes(pool, rope, num_q_heads)
        self._pool = pool
        self._rope = rope
        self.num_q_heads = num_q_heads
        self._args = _Attention(
            num_layers=pool.shape[1],
            num_q_heads=num_q_heads,
            num_kv_heads=pool.shape[3],
            head_dim=pool.shape[5],
            rotary_half=rope.inv_freq.shape[0],
            kv_type=_TYPES[pool.dtype],
            num_threads=num_threads,
            pool=pool.data_ptr(),
        )

    def plan(
        self, table: SequenceTable, query_start: int, num_queries: int, window_size: int
    ) -> NativePlan:
        """Plan of attention, as `cpu.plan_attention` describes it."""
        table_rows = (table.block_ids, table.starts, table.caps, table.first_valid, table.end_valid)
        entries = tuple(row.contiguous() for row in table_rows)
        caps = entries[2]
        turned = (
            *self._rope.rows(entries[1] - query_start),
            # Entries without a cap are never read so; their angle is any.
            *self._rope.rows(-caps.where(caps != NO_CAP, 0)),
            *self._rope.rows(torch.arange(num_queries)),
        )
        angles = tuple(row.contiguous() for row in turned)
        queries = _Queries(
            num_queries=num_queries,
            query_start=query_start,
            window_size=window_size,
            num_entries=table.num_entries,
            num_sink_entries=table.num_sink_entries,
            num_lasting_entries=table.num_lasting_entries,
            tile_queries=max(1, TILE_ROWS * self._pool.shape[3] // self.num_q_heads),
        )
        names = ("block_ids", "starts", "caps", "first", "end")
        angle_names = ("near_cos", "near_sin", "capped_cos", "capped_sin", "query_cos", "query_sin")
        for name, tensor in zip((*names, *angle_names), (*entries, *angles), strict=True):
            setattr(queries, name, tensor.data_ptr())
        return NativePlan(self, queries, (*entries, *angles))

    def attend(
        self, q: Tensor, layer: int, plan: NativePlan, scale: float
    ) -> tuple[Tensor, Tensor]:
        """out [T, num_q_heads, head_dim] in q's type and lse float32 [T, num_q_heads]."""
        assert q.stride(2) == 1 and q.dtype == self._pool.dtype
        out, lse = q.new_empty(q.shape), torch.empty(q.shape[:2])
        queries = plan.queries
        queries.layer = layer
        queries.token_stride, queries.head_stride = q.stride(0), q.stride(1)
        queries.q, queries.out, queries.lse = q.data_ptr(), out.data_ptr(), lse.data_ptr()
        self._args.scale = scale
        failed = self._library.skv_attend(ctypes.byref(self._args), ctypes.byref(queries))
        if failed:
            raise MemoryError("no memory for the scratch of attention")
        return out, lse


def _check_shapes(pool: Tensor, rope: RopeTables, num_q_heads: int) -> None:
    num_kv_heads, block_size, head_dim = pool.shape[3:]
    _require(head_dim % LANES == 0 and head_dim <= MAX_HEAD_DIM, f"head_dim {head_dim}")
    _require(num_q_heads % num_kv_heads == 0, f"{num_q_heads} query heads for {num_kv_heads}")
    _require(rope.rotary_dim <= head_dim, f"{rope.rotary_dim} rotary elements")
    _require(block_size == BLOCK_SIZE, f"blocks of {block_size} tokens")
    _require(pool.dtype in _TYPES, f"KV of type {pool.dtype}")
    _require(pool.is_contiguous(), "a pool that is not contiguous")
    _require(pool.device.type == "cpu", f"a pool on {pool.device}")


def _require(fits: bool, what: str) -> None:
    if not fits:
        raise NativeUnavailableError(f"native attention does not know {what}")
