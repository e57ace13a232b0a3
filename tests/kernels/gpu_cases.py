"""Streams in paged blocks for the tests of the GPU kernels: random sizes, NaN wherever nothing is.

Runs on a GPU if there is one, else in Triton's interpreter (see tests/conftest.py), which wants
smaller blocks and does not know bfloat16.
"""

import itertools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from streamkv.kernels import batch_reference, reference
from streamkv.kernels.batch_table import BatchTable, batch_table
from streamkv.kernels.rope import RopeTables
from streamkv.kernels.table import NO_CAP, SequenceTable

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
BLOCK_SIZE = 64 if ON_GPU else 16
DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if ON_GPU else [])]
TOLERANCES = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
NUM_LAYERS = 2
LAYER = 1


@dataclass(frozen=True)
class Stream:
    """One sequence: its last `num_queries` tokens attend."""

    num_tokens: int
    num_queries: int = 1
    window_size: int = 40
    num_sinks: int = 4


@dataclass(frozen=True)
class Batch:
    """Sequences that share a step, their KV scattered over a gpu pool and a cpu pool."""

    streams: tuple[Stream, ...]
    num_kv_heads: int = 2
    group: int = 2
    head_dim: int = 16
    rotary_dim: int = 16
    dtype: torch.dtype = torch.float32
    softcap: float | None = None
    has_sink_logits: bool = False
    pinned: bool = False

    @property
    def num_q_heads(self) -> int:
        return self.num_kv_heads * self.group

    @property
    def scale(self) -> float:
        return self.head_dim**-0.5

    def rope(self, device: str = DEVICE) -> RopeTables:
        half = self.rotary_dim // 2
        longest = max(stream.num_tokens for stream in self.streams)
        inv_freq = 10000.0 ** -(torch.arange(half, dtype=torch.float64) / half)
        return RopeTables(inv_freq.to(device), longest + 2 * BLOCK_SIZE + 256)

    def random(self, *shape: int, seed: int) -> Tensor:
        return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def table_of(stream: Stream, block_ids: list[int]) -> SequenceTable:
    """Entries as a block table makes them: sinks apart, only blocks that a query sees."""
    sinks, window = [], []
    first_query = stream.num_tokens - stream.num_queries
    for index, block_id in enumerate(block_ids):
        start = index * BLOCK_SIZE
        size = min(BLOCK_SIZE, stream.num_tokens - start)
        edge = min(max(stream.num_sinks - start, 0), size)
        if edge:
            cap = stream.num_sinks + stream.window_size - 1
            sinks.append((block_id, start, cap, 0, edge))
        if edge < size and start + size > first_query - stream.window_size + 1:
            window.append((block_id, start, NO_CAP, edge, size))
    columns = torch.tensor([*sinks, *window], dtype=torch.int64).view(-1, 5).t().contiguous()
    return SequenceTable(*columns.unbind(0), num_sink_entries=len(sinks))


@dataclass(frozen=True, eq=False)
class Built:
    """A batch in memory, on the device but for the cpu pool."""

    batch: Batch
    pools: list[Tensor]
    table: BatchTable
    query_starts: Tensor
    q: Tensor
    sink_logits: Tensor | None

    @property
    def num_queries(self) -> list[int]:
        return [stream.num_queries for stream in self.batch.streams]

    def expected(self) -> tuple[Tensor, Tensor]:
        """By the oracle, on the CPU, in float32."""
        host = [pool.cpu().float() for pool in self.pools]
        table = BatchTable(*(getattr(self.table, name).cpu() for name in BatchTable.__slots__))
        return batch_reference.attend(
            self.q.cpu().float(),
            host,
            LAYER,
            table,
            self.query_starts.cpu(),
            self.num_queries,
            self.batch.rope("cpu"),
            self.batch.scale,
            softcap=self.batch.softcap,
            sink_logits=None if self.sink_logits is None else self.sink_logits.cpu(),
        )

    def check(self, found: tuple[Tensor, Tensor]) -> None:
        tolerance = TOLERANCES[self.batch.dtype]
        for one, other in zip(found, self.expected(), strict=True):
            torch.testing.assert_close(
                one.float().cpu(), other.float(), atol=tolerance, rtol=tolerance
            )


def build(batch: Batch) -> Built:
    """Write every stream by the oracle into scattered blocks of one or two pools."""
    counts = [-(-stream.num_tokens // BLOCK_SIZE) for stream in batch.streams]
    total = sum(counts)
    num_cpu = total // 3 if batch.pinned else 0
    shape = (NUM_LAYERS, 2, batch.num_kv_heads, BLOCK_SIZE, batch.head_dim)
    gpu = torch.full((total - num_cpu + 3, *shape), math.nan, dtype=batch.dtype)
    cpu = torch.full((num_cpu, *shape), math.nan, dtype=batch.dtype)
    # The guard block is the last of the first pool, so ids leave it out.
    places = [i for i in range(gpu.shape[0] + num_cpu) if i != gpu.shape[0] - 1]
    order = torch.randperm(len(places), generator=torch.Generator().manual_seed(5)).tolist()
    both, used, tables = torch.cat([gpu, cpu]), itertools.count(), []
    for index, (stream, count) in enumerate(zip(batch.streams, counts, strict=True)):
        ids = [places[order[next(used)]] for _ in range(count)]
        tables.append(table_of(stream, ids))
        tokens = torch.arange(stream.num_tokens)
        slots = torch.tensor(ids or [0])[tokens // BLOCK_SIZE] * BLOCK_SIZE + tokens % BLOCK_SIZE
        rows = (stream.num_tokens, batch.num_kv_heads, batch.head_dim)
        k, v = batch.random(*rows, seed=3 * index), batch.random(*rows, seed=3 * index + 1)
        reference.write_kv(both, k.to(batch.dtype), v, slots, LAYER, batch.rope("cpu"))
    gpu.copy_(both[: gpu.shape[0]])
    cpu.copy_(both[gpu.shape[0] :])
    if ON_GPU:
        cpu = cpu.pin_memory()
    pools = [gpu.to(DEVICE), cpu] if num_cpu else [gpu.to(DEVICE)]
    num_q = sum(stream.num_queries for stream in batch.streams)
    windows = [stream.window_size for stream in batch.streams]
    starts = [stream.num_tokens - stream.num_queries for stream in batch.streams]
    capacity = max(table.num_entries for table in tables) + 3
    logits = batch.random(batch.num_q_heads, seed=99) if batch.has_sink_logits else None
    return Built(
        batch,
        pools,
        batch_table(tables, windows, pools, capacity, DEVICE),
        torch.tensor(starts, device=DEVICE),
        batch.random(num_q, batch.num_q_heads, batch.head_dim, seed=7).to(DEVICE, batch.dtype),
        None if logits is None else logits.to(DEVICE),
    )
