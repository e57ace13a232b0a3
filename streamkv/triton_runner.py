"""Runs a batch through the model on a GPU: the Triton kernels read blocks where they lie.

The packed row holds the sequences with one query first, so that one decode call serves them all;
the others attend by tiles. Tables are made on the host once per step and copied in one go. Nothing
waits for the GPU until a result is read. In Triton's interpreter all of this runs on a CPU.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from streamkv.batch import Batch, SequenceStep, StepResult, Wanted
from streamkv.kernels import gpu
from streamkv.kernels.batch_table import BatchTable, batch_table
from streamkv.kernels.rope import RopeTables
from streamkv.model import ModelAdapter
from streamkv.model_attention import Attend
from streamkv.runner import build_table

LOGIT_ROWS = 256
"""Rows of logits made at once when scoring."""


class _Prefill(NamedTuple):
    table: BatchTable
    query_starts: Tensor
    tiles: Tensor


class _Decode(NamedTuple):
    table: BatchTable
    seen: Tensor


class TritonRunner:
    """A model with its pool, both on one device.

    Args:
        model: the adapter.
        pool: [num_blocks + 1, num_layers, 2, num_kv_heads, block_size, head_dim].
        max_distance: largest distance between a query and a key in use.
    """

    def __init__(self, model: ModelAdapter, pool: Tensor, max_distance: int) -> None:
        self.model = model
        self._pool = pool
        self._device = pool.device
        # A tile and a block reach a little beyond the largest distance in use.
        self._rope = RopeTables(model.inv_freq.to(self._device), max_distance + 513)
        self._shape = gpu.Shape.of(pool, model.num_q_heads, self._rope)
        self._softmax = {scale: gpu.Softmax(scale) for scale in set(model.scales)}

    def wait_until_fast(self) -> bool:
        """Kernels are compiled at their first use, so there is nothing to wait for."""
        return True

    def close(self) -> None:
        """Nothing is left to end."""

    @torch.inference_mode()
    def run(self, batch: Batch) -> list[StepResult]:
        """Compute the batch; one result per sequence, in the batch's order."""
        singles = [step for step in batch.steps if step.query_len == 1]
        longer = [step for step in batch.steps if step.query_len > 1]
        ids: list[int] = []
        slots: list[int] = []
        begins: dict[int, int] = {}
        for step in (*singles, *longer):
            sequence = step.sequence
            start, end = sequence.num_computed, sequence.num_computed + step.query_len
            begins[id(step)] = len(ids)
            ids.extend(sequence.next_ids(step.query_len))
            slots.extend(sequence.table.slots(start, end))
        input_ids = torch.tensor([ids], device=self._device)
        attend = self._attention(torch.tensor(slots, device=self._device), singles, longer)
        hidden = self.model.hidden(input_ids, attend)
        return [
            self._result(step, hidden[begins[id(step)] : begins[id(step)] + step.query_len])
            for step in batch.steps
        ]

    def _table(self, steps: list[SequenceStep]) -> tuple[BatchTable, Tensor]:
        """Tables and first queries of the steps, on the host."""
        tables, windows, starts = [], [], []
        for step in steps:
            sequence, begin = step.sequence, step.sequence.num_computed
            entries = sequence.table.entries(sequence.window, begin, begin + step.query_len)
            tables.append(build_table(*entries))
            windows.append(sequence.window.window_size)
            starts.append(begin)
        capacity = max(table.num_entries for table in tables)
        # A few capacities, so that few tables differ in shape.
        capacity = -(-capacity // 16) * 16
        return batch_table(tables, windows, [self._pool], capacity, "cpu"), torch.tensor(starts)

    def _decode(self, steps: list[SequenceStep]) -> _Decode | None:
        if not steps:
            return None
        host, starts = self._table(steps)
        table = host.to(self._device)
        return _Decode(table, gpu.plan_decode(table, starts.to(self._device), 1))

    def _prefill(self, steps: list[SequenceStep]) -> _Prefill | None:
        if not steps:
            return None
        host, starts = self._table(steps)
        rows = gpu.prefill_launch(self._shape).rows
        counts = [step.query_len for step in steps]
        tiles = gpu.prefill_tiles(host, starts, counts, self._shape, rows)
        device = self._device
        return _Prefill(host.to(device), starts.to(device), tiles.to(device))

    def _attention(
        self, slots: Tensor, singles: list[SequenceStep], longer: list[SequenceStep]
    ) -> Attend:
        pool, rope, num_singles = self._pool, self._rope, len(singles)
        few, many = self._decode(singles), self._prefill(longer)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
            softmax = self._softmax[scale]
            gpu.write_kv(pool, k, v, slots, layer, rope)
            outs = []
            if few is not None:
                part = q[:num_singles]
                outs.append(gpu.decode(part, pool, layer, few.table, few.seen, rope, softmax)[0])
            if many is not None:
                part, table = q[num_singles:], many.table
                found = gpu.prefill(
                    part, pool, layer, table, many.query_starts, many.tiles, rope, softmax
                )
                outs.append(found[0])
            return outs[0] if len(outs) == 1 else torch.cat(outs)

        return attend

    def _result(self, step: SequenceStep, hidden: Tensor) -> StepResult:
        match step.wanted:
            case Wanted.NOTHING:
                return StepResult()
            case Wanted.LOGITS:
                return StepResult(logits=self.model.logits(hidden[-1:])[0].cpu())
            case Wanted.SCORES:
                return StepResult(scores=self._scores(step, hidden))

    def _scores(self, step: SequenceStep, hidden: Tensor) -> Tensor:
        available = min(step.query_len + 1, step.sequence.num_pending)
        targets = torch.tensor(step.sequence.next_ids(available)[1:], device=self._device)
        found = [
            self.model.logits(hidden[low : low + len(part)])
            .log_softmax(1)
            .gather(1, part[:, None])[:, 0]
            for low in range(0, len(targets), LOGIT_ROWS)
            if len(part := targets[low : low + LOGIT_ROWS].long())
        ]
        return torch.cat(found).cpu() if found else torch.empty(0)
