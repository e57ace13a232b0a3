"""What each query of a decode sees of each entry, planned on the device once for all layers.

A plan holds four int32 for each (query, entry): the distance to turn the query by, the first slot,
one past the last, and 0. Windows and lengths are read on the device, so that a captured graph makes
the plan of every step.
"""

import torch
import triton
from torch import Tensor

from streamkv.kernels.batch_table import BatchTable
from streamkv.kernels.gpu_shape import require
from streamkv.kernels.triton_decode import seen_kernel

MAX_DECODE_QUERIES = 8

_SEEN_ENTRIES = 256


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
    _check_starts(table, query_starts, num_queries)
    rows = table.num_sequences * num_queries
    seen = _room(seen, (rows, table.capacity, 4), query_starts.device)
    if rows:
        seen_kernel[(rows, triton.cdiv(table.capacity, _SEEN_ENTRIES))](
            table.starts,
            table.caps,
            table.first_valid,
            table.end_valid,
            table.num_entries,
            table.num_sink_entries,
            table.num_recalled_entries,
            table.window_sizes,
            query_starts,
            seen,
            table.capacity,
            QUERIES=num_queries,
            ENTRIES=_SEEN_ENTRIES,
            num_warps=4,
        )
    return seen


def check_plan(name: str, seen: Tensor, shape: tuple[int, ...]) -> None:
    """Raise `ConfigError` unless a plan has this shape and lies in one piece."""
    fits = seen.shape == shape and seen.dtype == torch.int32 and seen.is_contiguous()
    require(name, list(seen.shape), fits, f"Pass {list(shape)}, int32 and contiguous.")


def _check_starts(table: BatchTable, query_starts: Tensor, num_queries: int) -> None:
    fits = query_starts.shape == (table.num_sequences,) and query_starts.dtype == torch.int64
    wanted = f"Pass int64 [{table.num_sequences}]."
    require("query_starts", list(query_starts.shape), fits, wanted)
    most = MAX_DECODE_QUERIES
    require("num_queries", num_queries, 1 <= num_queries <= most, f"Use 1 to {most}.")


def _room(seen: Tensor | None, shape: tuple[int, ...], device: torch.device) -> Tensor:
    if seen is None:
        return torch.empty(shape, dtype=torch.int32, device=device)
    check_plan("seen", seen, shape)
    return seen
