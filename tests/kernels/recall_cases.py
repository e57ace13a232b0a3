"""Streams that recall old blocks, laid out in memory.

Old blocks lie in a gpu pool or in a cpu pool, those that are leaving the window once more or where
its entry has them; all else is NaN. What is expected comes from `recall_oracle`.
"""

import itertools
import math
from dataclasses import dataclass

import torch
from gpu_cases import BLOCK_SIZE, DEVICE, LAYER, NUM_LAYERS, ON_GPU, TOLERANCES, Batch, table_of
from recall_oracle import Case, Policy, Recalling, Result, cap_of
from torch import Tensor

from streamkv.kernels import batch_reference, gpu
from streamkv.kernels.batch_table import BatchTable, batch_table
from streamkv.kernels.gpu import Softmax
from streamkv.kernels.table import SequenceTable

B = BLOCK_SIZE


@dataclass(frozen=True, eq=False)
class Built:
    """A case in memory, in two pools."""

    case: Case
    pools: list[Tensor]
    table: BatchTable
    query_starts: Tensor

    @property
    def softmax(self) -> Softmax:
        heads, logits = self.case.heads, self.case.sink_logits
        return Softmax(heads.scale, heads.softcap, None if logits is None else logits.to(DEVICE))

    def decode(self, layer: int, splits: int | None = None) -> Result:
        """By the kernel, in room that holds NaN and plans that hold nonsense."""
        q, rope = self.case.q.to(DEVICE), self.case.heads.rope()
        num_sequences = len(self.case.sequences)
        num_queries, scratch = len(q) // num_sequences, None
        if splits is not None:
            shape = gpu.Shape.of(self.pools[0], q.shape[1], rope)
            scratch = gpu.decode_scratch(shape, num_sequences, num_queries, splits, DEVICE)
            scratch.out.fill_(math.nan)
            scratch.lse.fill_(math.nan)
        room = torch.full((len(q), self.table.capacity, 4), 3, dtype=torch.int32, device=DEVICE)
        seen = gpu.plan_decode(self.table, self.query_starts, num_queries, room)
        out = torch.full_like(q, math.nan)
        pool, softmax = self.pools[0], self.softmax
        return gpu.decode(q, pool, layer, self.table, seen, rope, softmax, scratch, out)

    def prefill(self, layer: int) -> Result:
        """By the kernel that takes chunks."""
        q, rope, pool = self.case.q.to(DEVICE), self.case.heads.rope(), self.pools[0]
        shape = gpu.Shape.of(pool, q.shape[1], rope)
        counts = [stream.num_queries for stream, _ in self.case.sequences]
        host = BatchTable(*(getattr(self.table, name).cpu() for name in BatchTable.__slots__))
        starts, rows = self.query_starts.cpu(), gpu.prefill_launch(shape).rows
        tiles = gpu.prefill_tiles(host, starts, counts, shape, rows).to(DEVICE)
        starts, softmax = self.query_starts, self.softmax
        return gpu.prefill(q, pool, layer, self.table, starts, tiles, rope, softmax)

    def twin(self, layer: int) -> Result:
        """By the torch twin, on the CPU, in float32."""
        heads = self.case.heads
        host = BatchTable(*(getattr(self.table, name).cpu() for name in BatchTable.__slots__))
        return batch_reference.attend(
            self.case.q.float(),
            [pool.cpu().float() for pool in self.pools],
            layer,
            host,
            self.query_starts.cpu(),
            [stream.num_queries for stream, _ in self.case.sequences],
            heads.rope("cpu"),
            heads.scale,
            softcap=heads.softcap,
            sink_logits=self.case.sink_logits,
        )

    def check(self, *splits: int | None) -> None:
        """Twin and kernels give what is expected, the decode kernel in every layer."""
        tolerance = TOLERANCES[self.case.heads.dtype]
        for layer in range(NUM_LAYERS):
            expected = self.case.expected(layer)
            assert_near(self.twin(layer), expected, TOLERANCES[torch.float32])
            for number in splits or (None,):
                assert_near(self.decode(layer, number), expected, tolerance)
            if layer == LAYER:
                assert_near(self.prefill(layer), expected, tolerance)


def assert_near(found: Result, expected: Result, tolerance: float) -> None:
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(
            one.double().cpu(), other.double(), atol=tolerance, rtol=tolerance
        )


def build(sequences: tuple[Recalling, ...], policy: Policy = "absolute", **heads: object) -> Built:
    """Lay a case out in memory."""
    case = Case(sequences, Batch((), **heads), policy)  # type: ignore[arg-type]
    layout, tables = _Layout(case), []
    for index, (stream, _) in enumerate(sequences):
        total = -(-stream.num_tokens // B)
        # What the table does not name stays unwritten, so that only a recalled block can serve.
        named = table_of(stream, list(range(total))).block_ids.tolist()
        ids = [layout.place(index, block) if block in named else -1 for block in range(total)]
        tables.append(layout.with_recalled(table_of(stream, ids), index, ids))
    windows = [stream.window_size for stream, _ in sequences]
    pools = layout.on_device()
    capacity = max(table.num_entries for table in tables) + 1
    starts = [stream.num_tokens - stream.num_queries for stream, _ in sequences]
    return Built(
        case,
        pools,
        batch_table(tables, windows, pools, capacity, DEVICE),
        torch.tensor(starts, device=DEVICE),
    )


class _Layout:
    """Hands out scattered places in a gpu pool and a cpu pool."""

    def __init__(self, case: Case) -> None:
        self._case, heads = case, case.heads
        blocks = sum(-(-stream.num_tokens // B) for stream, _ in case.sequences)
        recalled = sum(len(blocks) for _, blocks in case.sequences)
        tail = (2, heads.num_kv_heads, B, heads.head_dim)
        self._num_gpu, num_cpu = blocks + 3, blocks + recalled + 2
        self._both = torch.full(
            (self._num_gpu + num_cpu, NUM_LAYERS, *tail), math.nan, dtype=heads.dtype
        )
        generator = torch.Generator().manual_seed(5)
        order = torch.randperm(len(self._both), generator=generator).tolist()
        # The guard block is the last of the gpu pool.
        self._free = iter([place for place in order if place != self._num_gpu - 1])
        self._turn = itertools.count()

    def place(self, index: int, block: int) -> int:
        """Write all layers of a block somewhere."""
        place = next(self._free)
        kv = self._case.stored[index][:, :, block * B : (block + 1) * B]
        self._both[place, :, :, :, : kv.shape[2]] = kv.transpose(2, 3)
        return place

    def with_recalled(self, table: SequenceTable, index: int, ids: list[int]) -> SequenceTable:
        """A table with recalled entries, as a host makes them: the sink tokens are cut out."""
        stream, blocks = self._case.sequences[index]
        rows = []
        for place, block in enumerate(blocks):
            start = block * B
            first, end = min(max(stream.num_sinks - start, 0), B), min(stream.num_tokens - start, B)
            cap = cap_of(self._case.policy, stream.window_size, place, len(blocks))
            is_shared = ids[block] >= 0 and next(self._turn) % 2
            block_id = ids[block] if is_shared else self.place(index, block)
            rows.append((block_id, start, cap, first, end))
        recalled = torch.tensor(rows, dtype=torch.int64).view(-1, 5).t()
        columns = (table.block_ids, table.starts, table.caps, table.first_valid, table.end_valid)
        sinks = table.num_sink_entries
        joined = [
            torch.cat([column[:sinks], more, column[sinks:]])
            for column, more in zip(columns, recalled, strict=True)
        ]
        return SequenceTable(*joined, sinks, len(rows))

    def on_device(self) -> list[Tensor]:
        """The two pools, where a GPU reads them."""
        cpu = self._both[self._num_gpu :].clone()
        gpu_pool = self._both[: self._num_gpu].clone().to(DEVICE)
        return [gpu_pool, cpu.pin_memory() if ON_GPU else cpu]
