"""Streams of which old blocks are recalled layer by layer, laid out in memory.

Old blocks lie as lone slices in a staging buffer, or as slices of a block in a gpu pool or a cpu
pool; all else is NaN. What is expected comes from `recall_oracle`.
"""

import itertools
import math
from dataclasses import dataclass

import torch
from gpu_cases import BLOCK_SIZE, DEVICE, NUM_LAYERS, ON_GPU, TOLERANCES, Batch, table_of
from recall_oracle import Case, Policy, Recalling, Result, cap_of
from torch import Tensor

from streamkv.kernels import batch_reference, gpu
from streamkv.kernels.batch_table import BatchTable, batch_table
from streamkv.kernels.gpu import Softmax
from streamkv.kernels.recall_table import RecallTable, recall_table
from streamkv.kernels.table import SequenceTable

B = BLOCK_SIZE


@dataclass(frozen=True, eq=False)
class Built:
    """A case in memory: shared entries in two pools, old slices there and in a staging buffer."""

    case: Case
    pools: list[Tensor]
    staging: Tensor
    table: BatchTable
    recall: RecallTable
    query_starts: Tensor

    @property
    def softmax(self) -> Softmax:
        heads, logits = self.case.heads, self.case.sink_logits
        return Softmax(heads.scale, heads.softcap, None if logits is None else logits.to(DEVICE))

    def decode(self, layer: int, splits: int | None = None, has_recall: bool = True) -> Result:
        """By the kernel, in room that holds NaN and plans that hold nonsense."""
        q, rope = self.case.q.to(DEVICE), self.case.heads.rope()
        num_sequences = len(self.case.sequences)
        num_queries, scratch = len(q) // num_sequences, None
        if splits is not None:
            shape = gpu.Shape.of(self.pools[0], q.shape[1], rope)
            scratch = gpu.decode_scratch(shape, num_sequences, num_queries, splits, DEVICE)
            scratch.out.fill_(math.nan)
            scratch.lse.fill_(math.nan)
        seen = gpu.plan_decode(self.table, self.query_starts, num_queries)
        room = torch.full((len(q), *self.recall.addresses.shape[1:], 4), 3, dtype=torch.int32)
        planned = gpu.plan_recall(
            self.recall, self.table, self.query_starts, num_queries, room.to(DEVICE)
        )
        return gpu.decode(
            q,
            self.pools[0],
            layer,
            self.table,
            seen,
            rope,
            self.softmax,
            scratch,
            torch.full_like(q, math.nan),
            recall=self.recall if has_recall else None,
            recall_seen=planned if has_recall else None,
        )

    def twin(self, layer: int) -> Result:
        """By the torch twin, on the CPU, in float32."""
        heads = self.case.heads
        host = BatchTable(*(getattr(self.table, name).cpu() for name in BatchTable.__slots__))
        pools = [pool.cpu().float() for pool in self.pools]
        return batch_reference.attend(
            self.case.q.float(),
            pools,
            layer,
            host,
            self.query_starts.cpu(),
            [stream.num_queries for stream, _ in self.case.sequences],
            heads.rope("cpu"),
            heads.scale,
            softcap=heads.softcap,
            sink_logits=self.case.sink_logits,
            recall=self.recall.to("cpu"),
            recall_pools=[*pools, self.staging.cpu().float()],
        )

    def check(self, *splits: int | None) -> None:
        """Twin and kernel give what is expected, in every layer."""
        for layer in range(NUM_LAYERS):
            expected = self.case.expected(layer)
            assert_near(self.twin(layer), expected, TOLERANCES[torch.float32])
            for number in splits or (None,):
                found = self.decode(layer, number)
                assert_near(found, expected, TOLERANCES[self.case.heads.dtype])


def assert_near(found: Result, expected: Result, tolerance: float) -> None:
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(
            one.double().cpu(), other.double(), atol=tolerance, rtol=tolerance
        )


def build(sequences: tuple[Recalling, ...], policy: Policy = "absolute", **heads: object) -> Built:
    """Lay a case out in memory."""
    case = Case(sequences, Batch((), **heads), policy)  # type: ignore[arg-type]
    layout = _Layout(case)
    tables, old = [], []
    for index, (stream, blocks) in enumerate(sequences):
        total = -(-stream.num_tokens // B)
        # What the table does not name stays unwritten, so that only a recalled slice can serve.
        named = table_of(stream, list(range(total))).block_ids.tolist()
        ids = [layout.place(index, block) if block in named else -1 for block in range(total)]
        tables.append(table_of(stream, ids))
        old.append([layout.recalled(index, layer, ids) for layer in range(len(blocks))])
    windows = [stream.window_size for stream, _ in sequences]
    pools, staging = layout.on_device()
    capacity = max(table.num_entries for table in tables) + 1
    most = max(entries.num_entries for layers in old for entries in layers) + 2
    recall = recall_table(old, [*pools, staging], most, DEVICE)
    unused = torch.arange(most, device=DEVICE) >= recall.counts[..., None]
    recall.end_valid.masked_fill_(unused, B)
    starts = [stream.num_tokens - stream.num_queries for stream, _ in sequences]
    return Built(
        case,
        pools,
        staging,
        batch_table(tables, windows, pools, capacity, DEVICE),
        recall,
        torch.tensor(starts, device=DEVICE),
    )


class _Layout:
    """Hands out scattered places in a gpu pool, a cpu pool and a staging buffer of lone slices."""

    def __init__(self, case: Case) -> None:
        self._case, heads = case, case.heads
        blocks = sum(-(-stream.num_tokens // B) for stream, _ in case.sequences)
        slices = sum(len(blocks) for _, layers in case.sequences for blocks in layers)
        tail = (2, heads.num_kv_heads, B, heads.head_dim)
        self._num_gpu, num_cpu = blocks + 3, blocks + slices + 2
        self._both = torch.full(
            (self._num_gpu + num_cpu, NUM_LAYERS, *tail), math.nan, dtype=heads.dtype
        )
        self._staging = torch.full((slices + 2, 1, *tail), math.nan, dtype=heads.dtype)
        generator = torch.Generator().manual_seed(5)
        order = torch.randperm(len(self._both), generator=generator).tolist()
        # The guard block is the last of the gpu pool.
        self._free = iter([place for place in order if place != self._num_gpu - 1])
        self._slices = iter(torch.randperm(slices + 2, generator=generator).tolist())
        self._turn = itertools.count()

    def place(self, index: int, block: int) -> int:
        """Write all layers of a block somewhere."""
        place = next(self._free)
        for layer in range(NUM_LAYERS):
            self._write(self._both[place, layer], index, layer, block)
        return place

    def recalled(self, index: int, layer: int, ids: list[int]) -> SequenceTable:
        """What one layer recalls, as a host makes it: the sink tokens are cut out."""
        stream, blocks = self._case.sequences[index]
        count, rows = len(blocks[layer]), []
        for place, block in enumerate(blocks[layer]):
            start = block * B
            first, end = min(max(stream.num_sinks - start, 0), B), min(stream.num_tokens - start, B)
            cap = cap_of(self._case.policy, stream.window_size, place, count)
            rows.append((self._slice(index, layer, block, ids[block]), start, cap, first, end))
        columns = torch.tensor(rows, dtype=torch.int64).view(-1, 5).t().contiguous()
        return SequenceTable(*columns.unbind(0), num_sink_entries=0)

    def on_device(self) -> tuple[list[Tensor], Tensor]:
        """The two pools and the staging buffer, where a GPU reads them."""
        cpu = self._both[self._num_gpu :].clone()
        gpu_pool = self._both[: self._num_gpu].clone().to(DEVICE)
        return [gpu_pool, cpu.pin_memory() if ON_GPU else cpu], self._staging.to(DEVICE)

    def _slice(self, index: int, layer: int, block: int, block_id: int) -> int:
        """Id of the slice, in turn where it is shared, alone in a block, and in the staging."""
        turn = next(self._turn) % 3
        if turn == 0 and block_id >= 0:
            return block_id * NUM_LAYERS + layer
        if turn == 1:
            place = next(self._free)
            self._write(self._both[place, layer], index, layer, block)
            return place * NUM_LAYERS + layer
        place = next(self._slices)
        self._write(self._staging[place, 0], index, layer, block)
        return len(self._both) * NUM_LAYERS + place

    def _write(self, target: Tensor, index: int, layer: int, block: int) -> None:
        kv = self._case.stored[index][layer, :, block * B : (block + 1) * B]
        target[:, :, : kv.shape[1]] = kv.transpose(1, 2)
