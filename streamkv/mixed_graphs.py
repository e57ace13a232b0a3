"""A chunk of a feed and tokens of sequences that decode, captured as one CUDA graph.

While others decode, a feed is read by chunks of at most `mixed_chunk` tokens. Both are rows of the
same step, so that the weights are read once for all of them, as in Sarathi-Serve (Agrawal et al.
2024); launched kernel by kernel, the host would take longer for it than the device does. A graph
reads what differs from step to step out of buffers on the device, as those of decode steps do
(`DecodeGraphs`).

Attention of the chunk has few tiles, so several programs share the entries of one, and it runs
beside the attention of the single tokens, which waits for memory while this one computes. What a
graph computes of a chunk is compared with the same kernels launched one by one before it is used;
a step that none fits is left to the caller's own way.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from streamkv.batch import SequenceStep, Wanted
from streamkv.chunk_table import Chunk, ChunkTable, num_tiles_of
from streamkv.decode_graphs import BUCKETS
from streamkv.kernels import gpu
from streamkv.kernels.rope import RopeTables
from streamkv.kernels.table import NO_CAP, SequenceTable
from streamkv.model_attention import Attend
from streamkv.observed_queries import layer_stride
from streamkv.runner import build_table
from streamkv.step_table import StepTable, most_entries

MIXED_BUCKETS = (8, 32, BUCKETS[-1])
"""Sequences that decode beside a chunk; the rows of a chunk are so many that few sizes do."""

TOLERANCE = 0.02
"""Most that a row may differ from the same kernels launched one by one, as a part of its length."""

OVERLAPS = True
"""Attention of the chunk beside that of single tokens, on a stream of its own."""


@dataclass(frozen=True, slots=True)
class Parts:
    """What a model does around attention.

    Attributes:
        hidden: (ids [1, T], attend) -> hidden states [T, hidden_size].
        head: hidden states -> logits.
        choose: chooses the token of each row of logits, into `chosen`.
        chosen: int64 [rows], the tokens that the step before chose.
    """

    hidden: Callable[[Tensor, Attend], Tensor]
    head: Callable[[Tensor], Tensor]
    choose: Callable[[Tensor], None]
    chosen: Tensor


@dataclass(frozen=True, slots=True)
class MixedStep:
    """A step's parts: who decodes, and one chunk.

    Attributes:
        singles: parts of one query, in the order of the step.
        chunk: the part of several.
        targets: where the queries of each single are kept; of none if empty.
        chunk_targets: the same of the chunk's.
    """

    singles: list[SequenceStep]
    chunk: SequenceStep
    targets: list[int]
    chunk_targets: list[int]

    @property
    def num_head_rows(self) -> int:
        """Rows whose logits are read: the chunk's last one is behind those that decode."""
        return len(self.singles) + (self.chunk.wanted is Wanted.LOGITS)


@dataclass(frozen=True, slots=True, eq=False)
class _Captured:
    """One bucket: what it reads, and what computes its logits from that."""

    rows: StepTable
    chunk: ChunkTable
    run: Callable[[], Tensor]


class MixedGraphs:
    """Steps of a chunk and up to as many single tokens as the largest bucket has.

    Args:
        model: around attention.
        pool: the gpu pool.
        rope: tables on the device.
        softmax: by scale of the scores.
        shape: of pool and heads.
        size: most tokens of a chunk.
        max_rows: sequences of the largest step.
        capacity: entries that a sequence may have.
        captures: capture graphs; else kernels are launched one by one.
        observes: keep the queries of rows that have a place for them.

    Raises:
        RuntimeError: what was captured does not compute what it should.
    """

    def __init__(
        self,
        model: Parts,
        pool: Tensor,
        rope: RopeTables,
        softmax: dict[float, gpu.Softmax],
        shape: gpu.Shape,
        size: int,
        max_rows: int,
        capacity: int,
        captures: bool,
        observes: bool = False,
    ) -> None:
        self._model = model
        self._pool, self._rope, self._softmax, self._shape = pool, rope, softmax, shape
        self._size, self._capacity = size, capacity
        self._observes = observes
        self._memory: Any = None
        self._aside: Any = None
        if captures and OVERLAPS:
            self._aside = torch.cuda.Stream(pool.device)  # type: ignore[no-untyped-call]  # torch's
        self._steps: dict[int, _Captured] = {}
        # The largest first: the others then fit into its memory.
        for bucket in sorted(mixed_buckets_for(max_rows), reverse=True):
            self._steps[bucket] = self._made(bucket, captures)

    def fits(self, step: MixedStep) -> bool:
        """Whether there is a graph for a step."""
        bucket = self._bucket(step.num_head_rows)
        chunk = step.chunk
        return (
            bucket is not None
            and chunk.query_len <= self._size
            and chunk.wanted is not Wanted.SCORES
            and chunk.source is None
            and all(single.wanted is not Wanted.SCORES for single in step.singles)
            and most_entries(chunk.sequence) <= self._capacity
            and (not step.singles or self._steps[bucket].rows.fits(step.singles))
            and (self._observes or not (any(step.targets) or any(step.chunk_targets)))
        )

    def launch(self, step: MixedStep) -> Tensor:
        """Start a step that fits; its logits [at least `num_head_rows`, vocab_size].

        Those of the singles come first, in their order, then those of the chunk's last token if
        they are wanted. The next step overwrites them.
        """
        bucket = self._bucket(step.num_head_rows)
        assert bucket is not None, step.num_head_rows
        captured, part = self._steps[bucket], step.chunk
        sequence, start, end = part.sequence, part.start, part.start + part.query_len
        entries = sequence.table.entries(sequence.window, start, end)
        chunk = Chunk(
            sequence.next_ids(part.query_len),
            sequence.table.slots(start, end),
            build_table(entries),
            start,
            sequence.window.window_size,
            step.chunk_targets,
        )
        head_rows = list(range(len(step.singles)))
        if part.wanted is Wanted.LOGITS:
            head_rows.append(bucket + part.query_len - 1)
        captured.rows.write(step.singles, step.targets)
        captured.chunk.write(chunk, head_rows)
        return captured.run()

    def _bucket(self, num_rows: int) -> int | None:
        return min((size for size in self._steps if size >= num_rows), default=None)

    def _made(self, bucket: int, captures: bool) -> _Captured:
        device, shape = self._pool.device, self._shape
        processors = gpu.processors(device)
        tiles = num_tiles_of(shape, self._size, gpu.prefill_launch(shape).rows)
        parts = max(1, min(self._capacity, processors // (tiles * shape.num_kv_heads)))
        rows = StepTable(bucket, self._capacity, self._pool)
        chunk = ChunkTable(self._size, bucket, self._capacity, self._pool, shape, parts)
        seen = torch.zeros(bucket, self._capacity, 4, dtype=torch.int32, device=device)
        splits = gpu.decode_splits(shape, bucket, self._capacity, processors)
        few = gpu.decode_scratch(shape, bucket, 1, splits, device)
        many = gpu.prefill_scratch(shape, self._size, parts, device) if parts > 1 else None

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
            pool, rope, softmax = self._pool, self._rope, self._softmax[scale]
            observed = None
            if self._observes:
                targets = torch.cat([rows.targets, chunk.targets])
                observed = gpu.Observed(q, targets, layer_stride(*q.shape[1:]))
            slots = torch.cat([rows.slots, chunk.slots])
            gpu.write_kv(pool, k, v, slots, layer, rope, observed=observed)
            out = torch.empty(q.shape, dtype=q.dtype, device=q.device)

            def of_chunk() -> None:
                gpu.prefill(
                    q[bucket:], pool, layer, chunk.table, chunk.query_starts, chunk.tiles, rope,
                    softmax, scratch=many, out=out[bucket:],
                )  # fmt: skip

            def of_rows() -> None:
                gpu.decode(
                    q[:bucket], pool, layer, rows.table, seen, rope, softmax, few, out[:bucket]
                )

            self._beside(of_chunk, of_rows)
            return out

        def body() -> tuple[Tensor, Tensor]:
            gpu.plan_decode(rows.table, rows.query_starts, 1, seen)
            before = self._model.chosen[rows.sources.clamp(min=0)]
            ids = torch.where(rows.sources >= 0, before, rows.ids)
            hidden = self._model.hidden(torch.cat([ids, chunk.ids])[None], attend)
            logits = self._model.head(hidden[chunk.head_rows])
            self._model.choose(logits)
            return hidden[bucket:], logits

        rows.write([])
        run = self._captured(chunk, body) if captures else lambda: body()[1]
        return _Captured(rows, chunk, run)

    def _beside(self, one: Callable[[], None], other: Callable[[], None]) -> None:
        """Both, at the same time if there is a second stream."""
        if self._aside is None:
            one()
            other()
            return
        current = torch.cuda.current_stream(self._pool.device)
        self._aside.wait_stream(current)
        with torch.cuda.stream(self._aside):
            one()
        other()
        current.wait_stream(self._aside)

    def _captured(
        self, chunk: ChunkTable, body: Callable[[], tuple[Tensor, Tensor]]
    ) -> Callable[[], Tensor]:
        """What replays a graph of the body, once that was seen to compute the same.

        It keeps `body`, and with it the memory that was made outside the capture.
        """
        device, num_blocks = self._pool.device, 2 + -(-chunk.size // self._pool.shape[4])
        if len(self._pool) <= num_blocks:
            raise RuntimeError(f"a gpu pool of {len(self._pool) - 1} blocks is too small for one")
        blocks = self._pool[:num_blocks]
        generator = torch.Generator(device).manual_seed(5)
        before = torch.randn(blocks.shape, device=device, generator=generator).to(blocks.dtype)
        blocks.copy_(before)
        _describe_a_chunk(chunk, blocks)
        stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch's
        stream.wait_stream(torch.cuda.current_stream(device))
        # Kernels compile and libraries allocate in the first run, which a capture forbids.
        with torch.cuda.stream(stream):
            expected = body()[0].float().clone()
        torch.cuda.current_stream(device).wait_stream(stream)
        written = blocks.clone()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._memory, capture_error_mode="thread_local"):
            found, logits = body()
        self._memory = self._memory or graph.pool()
        blocks.copy_(before)
        graph.replay()
        _check(found.float(), expected)
        _check(blocks.flatten(1).float(), written.flatten(1).float())
        blocks.zero_()

        def replay(_: object = body) -> Tensor:
            graph.replay()
            return logits

        return replay


def mixed_buckets_for(max_rows: int) -> list[int]:
    """The buckets that serve up to `max_rows` sequences."""
    largest = min(bucket for bucket in MIXED_BUCKETS if bucket >= min(max_rows, MIXED_BUCKETS[-1]))
    return [bucket for bucket in MIXED_BUCKETS if bucket <= largest]


def _describe_a_chunk(chunk: ChunkTable, blocks: Tensor) -> None:
    """A made-up chunk behind two blocks."""
    count, block = blocks.shape[0], blocks.shape[4]
    numbers = torch.arange(count)
    first, end = torch.zeros_like(numbers), torch.full_like(numbers, block)
    cap = torch.full_like(numbers, NO_CAP)
    entries = SequenceTable(numbers, numbers * block, cap, first, end, 0)
    start = 2 * block
    slots = list(range(start, start + chunk.size))
    ids = [7 + index % 100 for index in range(chunk.size)]
    chunk.write(Chunk(ids, slots, entries, start, start + chunk.size), [])


def _check(found: Tensor, expected: Tensor) -> None:
    lengths = expected.norm(dim=1).clamp_min(1e-9)
    worst = float(((found - expected).norm(dim=1) / lengths).max())
    if not worst <= TOLERANCE:
        raise RuntimeError(f"a captured step differs from its kernels by {worst:g}")
