"""How the parts of one step attend on a GPU: planned once, carried out for every layer.

Parts of one query share one decode call. A long part attends by causal squares (`window_prefill`)
where that applies and pays; any other by tiles. Tables are made on the host and copied from pinned
memory; nothing waits for the device.
"""

from collections.abc import Sequence as Many
from typing import NamedTuple

import torch
from torch import Tensor

from streamkv.batch import SequenceStep
from streamkv.device_copies import to_device
from streamkv.kernels import gpu
from streamkv.kernels.batch_table import BatchTable, batch_table
from streamkv.kernels.causal import Squares, choose_squares
from streamkv.kernels.rope import RopeTables
from streamkv.kernels.window_plan import WindowPlan, window_plan
from streamkv.kernels.window_prefill import (
    WindowScratch,
    num_positions,
    window_prefill,
    window_scratch,
)
from streamkv.model_attention import Attend
from streamkv.observed_queries import layer_stride
from streamkv.runner import build_table


class _Decode(NamedTuple):
    table: BatchTable
    seen: Tensor


class _Tiles(NamedTuple):
    table: BatchTable
    query_starts: Tensor
    tiles: Tensor


class _Squares(NamedTuple):
    plan: WindowPlan
    scratch: WindowScratch


class GpuAttention:
    """Attention of steps over one pool.

    Args:
        pool: the gpu pool.
        rope: tables on its device, for every distance in use.
        shape: of pool and heads.
        softmax: by scale of the scores.
    """

    def __init__(
        self, pool: Tensor, rope: RopeTables, shape: gpu.Shape, softmax: dict[float, gpu.Softmax]
    ) -> None:
        self._pool = pool
        self._rope = rope
        self._shape = shape
        self._softmax = softmax
        self._squares: Squares | None = None
        if pool.device.type == "cuda":
            squares = choose_squares(shape, pool.device)
            self._squares = squares if squares.is_fast else None
        self._scratch: dict[tuple[int, int], WindowScratch] = {}

    def plan(
        self, steps: Many[SequenceStep], slots: Tensor, targets: Tensor | None = None
    ) -> Attend:
        """What attends in a step whose parts of one query come first in the packed row.

        Args:
            steps: its parts, in the order of the row.
            slots: int64 [T], on the device, of each token of the row.
            targets: int64 [T], on the device: where the queries of each token are kept, as
                `ObservedQueries` has it; `None`: none are.
        """
        singles = [step for step in steps if step.query_len == 1]
        longer = steps[len(singles) :]
        few = self._plan_decode(singles) if singles else None
        many = self._plan_prefill(longer) if longer else None
        pool, rope, num_singles = self._pool, self._rope, len(singles)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
            softmax = self._softmax[scale]
            observed = None
            if targets is not None:
                observed = gpu.Observed(q, targets, layer_stride(*q.shape[1:]))
            gpu.write_kv(pool, k, v, slots, layer, rope, observed=observed)
            if many is None:
                assert few is not None
                return gpu.decode(q, pool, layer, few.table, few.seen, rope, softmax)[0]
            if few is None:
                return self._prefill(q, layer, many, softmax)
            out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
            gpu.decode(
                q[:num_singles], pool, layer, few.table, few.seen, rope, softmax,
                out=out[:num_singles],
            )  # fmt: skip
            out[num_singles:] = self._prefill(q[num_singles:], layer, many, softmax)
            return out

        return attend

    def _prefill(
        self, q: Tensor, layer: int, many: _Tiles | _Squares, softmax: gpu.Softmax
    ) -> Tensor:
        pool, rope = self._pool, self._rope
        if isinstance(many, _Squares):
            assert self._squares is not None
            return window_prefill(
                q, pool, layer, many.plan, rope, softmax, self._squares, many.scratch
            )[0]
        table, starts = many.table, many.query_starts
        return gpu.prefill(q, pool, layer, table, starts, many.tiles, rope, softmax)[0]

    def _table(self, steps: Many[SequenceStep]) -> tuple[BatchTable, Tensor]:
        """Tables and first queries of the steps, on the host."""
        tables, windows, starts = [], [], []
        for step in steps:
            sequence, begin = step.sequence, step.start
            entries = sequence.table.entries(sequence.window, begin, begin + step.query_len)
            tables.append(build_table(entries))
            windows.append(sequence.window.window_size)
            starts.append(begin)
        capacity = max(table.num_entries for table in tables)
        # A few capacities, so that few tables differ in shape.
        capacity = -(-capacity // 16) * 16
        return batch_table(tables, windows, [self._pool], capacity, "cpu"), torch.tensor(starts)

    def _plan_decode(self, steps: Many[SequenceStep]) -> _Decode:
        host, starts = self._table(steps)
        table = host.to(self._pool.device)
        return _Decode(table, gpu.plan_decode(table, to_device(starts, self._pool.device), 1))

    def _plan_prefill(self, steps: Many[SequenceStep]) -> _Tiles | _Squares:
        host, starts = self._table(steps)
        device = self._pool.device
        squares = self._plan_squares(host, steps[0]) if len(steps) == 1 else None
        if squares is not None:
            return squares
        rows = gpu.prefill_launch(self._shape).rows
        counts = [step.query_len for step in steps]
        tiles = gpu.prefill_tiles(host, starts, counts, self._shape, rows)
        return _Tiles(host.to(device), to_device(starts, device), to_device(tiles, device))

    def _plan_squares(self, host: BatchTable, step: SequenceStep) -> _Squares | None:
        if self._squares is None:
            return None
        block_size, device = self._shape.block_size, self._pool.device
        window_size = step.sequence.window.window_size
        needed = num_positions(step.query_len, window_size, block_size)
        if needed > self._rope.num_positions:
            return None
        plan = window_plan(host, 0, step.start, step.query_len, block_size, device)
        if plan is None:
            return None
        size = (step.query_len, window_size)
        known = [
            scratch
            for made, scratch in self._scratch.items()
            if all(one >= other for one, other in zip(made, size, strict=True))
        ]
        if not known:
            # The largest chunk comes first in a stream; one size serves all that follow.
            self._scratch = {size: window_scratch(self._shape, *size, device)}
            known = list(self._scratch.values())
        return _Squares(plan, known[0])
