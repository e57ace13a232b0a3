"""A chunk of a feed beside decode steps, captured as one CUDA graph.

While others decode, a feed is read by chunks of one size (`mixed_chunk`). Launched kernel by kernel
such a chunk takes the host longer than the device: 32 layers of some 25 kernels each, 20 to 30 ms
for 8 ms of work. A graph reads what differs from chunk to chunk out of buffers on the device, as
those of decode steps do (`DecodeGraphs`), and is one launch.

Attention goes by tiles, whose number depends on the size of the chunk alone. What the graph
computes is compared with the same kernels launched one by one before it is used; a chunk that does
not fit, or is to be scored or observed, is left to the caller's own way.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from streamkv.batch import SequenceStep, Wanted
from streamkv.kernels import gpu
from streamkv.kernels.batch_table import BatchTable, batch_table
from streamkv.kernels.rope import RopeTables
from streamkv.kernels.table import NO_CAP, SequenceTable
from streamkv.model_attention import Attend
from streamkv.runner import build_table
from streamkv.staged_words import StagedWords
from streamkv.step_table import most_entries

Hidden = Callable[[Tensor, Attend], Tensor]
"""(ids [1, T], attend) -> hidden states [T, hidden_size]."""

TOLERANCE = 0.02
"""Most that a row may differ from the same kernels launched one by one, as a part of its length."""


class ChunkTable:
    """What a chunk reads of its sequence.

    Args:
        size: tokens of a chunk.
        capacity: entries that a sequence may have.
        pool: the gpu pool.
        shape: of pool and heads.

    Attributes:
        ids, slots: int64 [size] on the device.
        query_starts: int64 [1] on the device.
        tiles: int32 [num_tiles, 6] on the device, see `gpu.prefill_tiles`.
        table: entries on the device.
    """

    def __init__(self, size: int, capacity: int, pool: Tensor, shape: gpu.Shape) -> None:
        self.size, self.capacity = size, capacity
        self._pool, self._shape = pool, shape
        self._rows = gpu.prefill_launch(shape).rows
        num_tiles = -(-size // max(1, self._rows // shape.group))
        wide = {"ids": size, "slots": size, "query_starts": 1, "window_sizes": 1}
        wide |= dict.fromkeys(("addresses", "starts", "caps"), capacity)
        narrow = dict.fromkeys(("first_valid", "end_valid"), capacity)
        narrow |= dict.fromkeys(("num_entries", "num_sink_entries", "num_recalled_entries"), 1)
        narrow |= {"tiles": 6 * num_tiles}
        num_narrow = sum(narrow.values())
        num_wide = sum(wide.values())
        self._words = StagedWords(num_wide + -(-num_narrow // 2), pool.device)
        host, device = self._words.host, self._words.device
        self._host = _parts(host[:num_wide], wide)
        self._host |= _parts(host[num_wide:].view(np.int32), narrow)
        found = _parts(device[:num_wide], wide)
        found |= _parts(device[num_wide:].view(torch.int32), narrow)
        self.ids, self.slots = found["ids"], found["slots"]
        self.query_starts, self.tiles = found["query_starts"], found["tiles"].view(num_tiles, 6)
        entries = {name: found[name][None] for name in ("addresses", "starts", "caps")}
        valid = {name: found[name][None] for name in ("first_valid", "end_valid")}
        self.table = BatchTable(
            # The kernels read addresses; ids are for the twins.
            block_ids=entries["addresses"],
            num_entries=found["num_entries"],
            num_sink_entries=found["num_sink_entries"],
            num_recalled_entries=found["num_recalled_entries"],
            window_sizes=found["window_sizes"],
            **entries,
            **valid,
        )

    def write(
        self, ids: list[int], slots: list[int], table: SequenceTable, start: int, window_size: int
    ) -> None:
        """Describe a chunk; the copy is on the current stream."""
        host, starts = self._host, torch.tensor([start])
        made = batch_table([table], [window_size], [self._pool], self.capacity, "cpu")
        tiles = gpu.prefill_tiles(made, starts, [self.size], self._shape, self._rows)
        host["ids"][:], host["slots"][:] = ids, slots
        host["query_starts"][0] = start
        for name in ("addresses", "starts", "caps", "first_valid", "end_valid"):
            host[name][:] = getattr(made, name)[0].numpy()
        for name in ("num_entries", "num_sink_entries", "num_recalled_entries", "window_sizes"):
            host[name][:] = getattr(made, name).numpy()
        host["tiles"][:] = tiles.flatten().numpy()
        self._words.upload()


class ChunkGraph:
    """Chunks of one size.

    Args:
        hidden: the model.
        pool: the gpu pool.
        rope: tables on the device.
        softmax: by scale of the scores.
        shape: of pool and heads.
        size: tokens of a chunk.
        capacity: entries that a sequence may have.
        captures: capture a graph; else kernels are launched one by one.

    Raises:
        RuntimeError: what was captured does not compute what it should.
    """

    def __init__(
        self,
        hidden: Hidden,
        pool: Tensor,
        rope: RopeTables,
        softmax: dict[float, gpu.Softmax],
        shape: gpu.Shape,
        size: int,
        capacity: int,
        captures: bool,
    ) -> None:
        self._hidden = hidden
        self._pool, self._rope, self._softmax = pool, rope, softmax
        self._table = ChunkTable(size, capacity, pool, shape)
        self._graph: Any = None
        if captures:
            self._capture()

    def fits(self, step: SequenceStep) -> bool:
        """Whether a part of a step can be computed here: whole, and nothing is wanted from it."""
        table = self._table
        return (
            step.query_len == table.size
            and step.wanted is Wanted.NOTHING
            and step.source is None
            and most_entries(step.sequence) <= table.capacity
        )

    def launch(self, step: SequenceStep) -> None:
        """Start a part that fits."""
        sequence, start, end = step.sequence, step.start, step.start + step.query_len
        entries = sequence.table.entries(sequence.window, start, end)
        self._table.write(
            sequence.next_ids(step.query_len),
            sequence.table.slots(start, end),
            build_table(entries),
            start,
            sequence.window.window_size,
        )
        self._run()

    def _run(self) -> None:
        if self._graph is not None:
            self._graph.replay()
        else:
            self._body()

    def _body(self) -> Tensor:
        table = self._table

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
            gpu.write_kv(self._pool, k, v, table.slots, layer, self._rope)
            return gpu.prefill(
                q, self._pool, layer, table.table, table.query_starts, table.tiles, self._rope,
                self._softmax[scale],
            )[0]  # fmt: skip

        return self._hidden(table.ids[None], attend)

    def _capture(self) -> None:
        device = self._pool.device
        before = self._describe_a_chunk()
        stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch's
        stream.wait_stream(torch.cuda.current_stream(device))
        # Kernels compile and libraries allocate in the first run, which a capture forbids.
        with torch.cuda.stream(stream):
            expected = self._body().float().clone()
        torch.cuda.current_stream(device).wait_stream(stream)
        written = self._pool[: len(before)].clone()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            found = self._body()
        self._pool[: len(before)] = before
        graph.replay()
        self._check(found.float(), expected, self._pool[: len(before)], written)
        self._pool[: len(before)] = 0
        self._graph = graph

    def _describe_a_chunk(self) -> Tensor:
        """A made-up chunk behind two blocks of random KV; the blocks that it needs [n, ...]."""
        table, block = self._table, self._pool.shape[4]
        count = 2 + -(-table.size // block)
        generator = torch.Generator(self._pool.device).manual_seed(5)
        before = torch.randn(
            (count, *self._pool.shape[1:]), device=self._pool.device, generator=generator
        ).to(self._pool.dtype)
        self._pool[:count] = before
        rows = torch.arange(count)
        first, end = torch.zeros_like(rows), torch.full_like(rows, block)
        cap = torch.full_like(rows, NO_CAP)
        entries = SequenceTable(rows, rows * block, cap, first, end, 0)
        start = 2 * block
        slots = list(range(start, start + table.size))
        ids = [7 + index % 100 for index in range(table.size)]
        table.write(ids, slots, entries, start, start + table.size)
        return before

    @staticmethod
    def _check(found: Tensor, expected: Tensor, blocks: Tensor, written: Tensor) -> None:
        pairs = ((found, expected), (blocks.flatten(1).float(), written.flatten(1).float()))
        for one, other in pairs:
            worst = float(((one - other).norm(dim=1) / other.norm(dim=1).clamp_min(1e-9)).max())
            if not worst <= TOLERANCE:
                raise RuntimeError(f"a captured chunk differs from its kernels by {worst:g}")


def _parts(words: Any, sizes: dict[str, int]) -> dict[str, Any]:
    """Views by name of an array or a tensor, one behind the other."""
    found, at = {}, 0
    for name, size in sizes.items():
        found[name] = words[at : at + size]
        at += size
    return found
