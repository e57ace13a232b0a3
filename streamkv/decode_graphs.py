"""Decode steps captured as CUDA graphs, one for each bucket of batch sizes.

A graph reads everything that differs from step to step out of buffers on the device (`StepTable`),
so that one graph serves sequences as they grow and nothing waits for the host. Graphs are captured
once, at the start; a step that none fits is run without one by the caller.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from streamkv.batch import SequenceStep
from streamkv.kernels import gpu
from streamkv.kernels.rope import RopeTables
from streamkv.model_attention import Attend
from streamkv.observed_queries import layer_stride
from streamkv.step_table import StepTable

BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64)
"""Batch sizes that have a graph."""

Forward = Callable[[Tensor, Tensor, Attend], Tensor]
"""(ids, sources, attend) -> logits [rows, vocab_size]; runs on static buffers."""

Choose = Callable[[Tensor], None]
"""Chooses the token of each row of logits, into a static buffer."""


@dataclass(frozen=True, slots=True, eq=False)
class _Step:
    """One bucket.

    Attributes:
        table: what it reads of its sequences.
        graph: the captured step.
        logits: what it writes.
        kept: memory made outside the capture, which the graph uses for as long as it lives.
    """

    table: StepTable
    graph: Any
    logits: Tensor
    kept: tuple[object, ...]


class DecodeGraphs:
    """Captured steps of one query a sequence.

    Args:
        forward: the model.
        choose: what chooses tokens.
        pool: the gpu pool.
        rope: tables on the device.
        shape: of pool and heads.
        softmax: by scale of the scores.
        max_rows: sequences of the largest step.
        capacity: entries that a sequence may have.
        mixed: [max_rows, num_q_heads, head_dim] where the model reads what attention wrote, if it
            does so in one place.
        pdl: overlap kernels of attention with those before.
        observes: keep the queries of rows that have a place for them.
        one_size: every step is as large as the largest, so that a row is computed in the same way
            however many there are.
    """

    def __init__(
        self,
        forward: Forward,
        choose: Choose,
        pool: Tensor,
        rope: RopeTables,
        shape: gpu.Shape,
        softmax: dict[float, gpu.Softmax],
        max_rows: int,
        capacity: int,
        mixed: Tensor | None,
        pdl: bool,
        observes: bool = False,
        one_size: bool = False,
    ) -> None:
        self._forward = forward
        self._choose = choose
        self._pool = pool
        self._rope = rope
        self._shape = shape
        self._softmax = softmax
        self._capacity = capacity
        self._mixed = mixed
        self._pdl = pdl
        self._observes = observes
        self._memory: Any = None
        self._steps: dict[int, _Step] = {}
        # The largest first: the others then fit into its memory.
        buckets = sorted(buckets_for(max_rows), reverse=True)
        for bucket in buckets[:1] if one_size else buckets:
            self._steps[bucket] = self._capture(bucket)

    def fits(self, steps: Sequence[SequenceStep]) -> bool:
        """Whether there is a graph for these parts of one query each."""
        bucket = self._bucket(len(steps))
        return bucket is not None and self._steps[bucket].table.fits(steps)

    def launch(self, steps: Sequence[SequenceStep], targets: Sequence[int] = ()) -> Tensor:
        """Start a step that fits; its logits [at least so many rows, vocab_size].

        The next step overwrites the logits.

        Args:
            steps: its parts.
            targets: where the queries of each are kept, as `StepTable.write` takes them.
        """
        assert self._observes or not any(targets)
        bucket = self._bucket(len(steps))
        assert bucket is not None, len(steps)
        step = self._steps[bucket]
        step.table.write(steps, targets)
        step.graph.replay()
        return step.logits

    def _bucket(self, num_rows: int) -> int | None:
        return min((size for size in self._steps if size >= num_rows), default=None)

    def _capture(self, bucket: int) -> _Step:
        table = StepTable(bucket, self._capacity, self._pool)
        device = self._pool.device
        seen = torch.zeros(bucket, self._capacity, 4, dtype=torch.int32, device=device)
        splits = gpu.decode_splits(self._shape, bucket, self._capacity, gpu.processors(device))
        scratch = gpu.decode_scratch(self._shape, bucket, 1, splits, device)
        table.write([])

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
            observed = None
            if self._observes:
                observed = gpu.Observed(q, table.targets, layer_stride(*q.shape[1:]))
            gpu.write_kv(self._pool, k, v, table.slots, layer, self._rope, self._pdl, observed)
            out = None if self._mixed is None else self._mixed[:bucket]
            return gpu.decode(
                q, self._pool, layer, table.table, seen, self._rope, self._softmax[scale], scratch,
                out, pdl=self._pdl,
            )[0]  # fmt: skip

        def body() -> Tensor:
            gpu.plan_decode(table.table, table.query_starts, 1, seen)
            logits = self._forward(table.ids, table.sources, attend)
            self._choose(logits)
            return logits

        stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch's
        stream.wait_stream(torch.cuda.current_stream(device))
        # Kernels compile and libraries allocate in the first run, which a capture forbids.
        with torch.cuda.stream(stream):
            body()
        torch.cuda.current_stream(device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # Other threads may go on with copies meanwhile.
        with torch.cuda.graph(graph, pool=self._memory, capture_error_mode="thread_local"):
            logits = body()
        self._memory = self._memory or graph.pool()
        return _Step(table, graph, logits, (seen, scratch))


def buckets_for(max_rows: int) -> list[int]:
    """The buckets that serve up to `max_rows` sequences."""
    largest = min(bucket for bucket in BUCKETS if bucket >= min(max_rows, BUCKETS[-1]))
    return [bucket for bucket in BUCKETS if bucket <= largest]
