"""Compares native attention with the oracle before it is used.

A stream of a few blocks is attended to with every kind of entry at once: sinks near and beyond
their cap, a block cut by the window, a block not yet full.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from streamkv.kernels import reference
from streamkv.kernels.native_attention import NativeAttention
from streamkv.kernels.native_build import NativeUnavailableError
from streamkv.kernels.rope import RopeTables
from streamkv.kernels.table import NO_CAP, SequenceTable

NUM_BLOCKS = 5
NUM_TOKENS = 300
NUM_QUERIES = 70
WINDOW_SIZE = 100
NUM_SINKS = 4
ALLOWED = {torch.float32: 1e-4, torch.bfloat16: 0.03}
"""Allowed largest difference, as a share of the largest value."""


@torch.inference_mode()
def check_attention(
    bind: Callable[[Tensor], NativeAttention], pool: Tensor, rope: RopeTables
) -> None:
    """Compare with `reference` in one layer.

    Args:
        bind: makes the attention of a pool.
        pool: of at least `NUM_BLOCKS` blocks; it is overwritten.
        rope: of the model.

    Raises:
        NativeUnavailableError: they differ, or it does not know the pool's shape.
    """
    attention = bind(pool)
    generator = torch.Generator().manual_seed(1)
    pool[:NUM_BLOCKS, 0].normal_(generator=generator)
    heads, dim = attention.num_q_heads, pool.shape[5]
    q = torch.randn(NUM_QUERIES, heads, dim, generator=generator).to(pool.dtype)
    start, scale = NUM_TOKENS - NUM_QUERIES, dim**-0.5
    table = _table()
    plan = attention.plan(table, start, NUM_QUERIES, WINDOW_SIZE)
    found = attention.attend(q, 0, plan, scale)
    expected = reference.attend(
        q.float(), pool.float(), 0, table, start, WINDOW_SIZE, rope, scale, return_lse=True
    )
    for one, other in zip(found, expected, strict=True):
        allowed = ALLOWED[pool.dtype] * other.abs().max()
        difference = (one.float() - other).abs().max()
        if not difference <= allowed:
            raise NativeUnavailableError(
                f"native attention differs by {difference:.2g}, {allowed:.2g} is allowed"
            )


def _table() -> SequenceTable:
    """Sinks with caps that some queries have reached, and every later block."""
    rows = [(0, 0, NUM_TOKENS - NUM_QUERIES // 2, 0, NUM_SINKS)]
    for index in range(1, NUM_BLOCKS):
        start = 64 * index
        rows.append((index, start, NO_CAP, 0, min(64, NUM_TOKENS - start)))
    block_ids, *rest = torch.tensor(rows).t().contiguous().unbind(0)
    starts, caps, first_valid, end_valid = rest
    return SequenceTable(block_ids, starts, caps, first_valid, end_valid, num_sink_entries=1)
