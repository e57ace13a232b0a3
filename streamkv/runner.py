"""Runs a batch through the model: packs the row, writes KV, attends, returns what was wanted.

The runner owns the model and reads and writes the gpu pool; it decides nothing. Blocks for the new
tokens must be live before `run`. Plans of attention are made once per step and serve all layers.
Where there is a native decode step, sequences with one token are its rows, and only longer parts
are packed.
"""

import itertools
from collections.abc import Sequence as Many
from typing import NamedTuple

import torch
from torch import Tensor

from streamkv.batch import Batch, Landed, SequenceStep, StepResult, Wanted
from streamkv.block_table import Entries
from streamkv.kernels import cpu
from streamkv.kernels.native import DecodeRow, NativeDecoder
from streamkv.kernels.rope import RopeTables
from streamkv.kernels.table import SequenceTable
from streamkv.model import ModelAdapter
from streamkv.model_attention import Attend
from streamkv.native_kernels import NativeKernels
from streamkv.observed_queries import ObservedQueries
from streamkv.row_padding import padded_rows

LOGIT_BYTES = 24 * 2**20
"""Bytes of logits made at once when scoring."""

MAX_SEQUENCES = 16
"""Sequences of one step, at most. On two cores a step of more than 8 takes longer in proportion;
with more cores arithmetic is cheaper, and reading the weights is not."""

KEPT_BYTES = 30 * 2**20
"""More than any buffer of a step has, and below the 32 MiB that glibc never keeps."""


def build_table(entries: Entries) -> SequenceTable:
    """Entries as tensors."""
    rows = [entry[1:] for entry in itertools.chain(*entries)]
    columns = torch.tensor(rows, dtype=torch.int64).view(-1, 5).t().contiguous()
    block_ids, starts, caps, first_valid, end_valid = columns.unbind(0)
    kinds = len(entries.sinks), len(entries.recalled)
    return SequenceTable(block_ids, starts, caps, first_valid, end_valid, *kinds)


class _Part(NamedTuple):
    """Rows of the packed row that belong to one sequence, and how they attend."""

    begin: int
    end: int
    plan: cpu.Plan
    observed: ObservedQueries | None
    places: list[int]


class Runner:
    """A model with its pool.

    Args:
        model: the adapter.
        pool: [num_blocks + 1, num_layers, 2, num_kv_heads, block_size, head_dim].
        max_distance: largest distance between a query and a key in use.
        native_threads: threads of the native kernels; 0 does without them.
        max_sequences: of a step, at most.
        batch_invariant: what a sequence computes does not depend on who is beside it, to the bit.
    """

    def __init__(
        self,
        model: ModelAdapter,
        pool: Tensor,
        max_distance: int,
        native_threads: int = 0,
        max_sequences: int = MAX_SEQUENCES,
        batch_invariant: bool = False,
    ) -> None:
        self.model = model
        self.max_sequences = min(max_sequences, MAX_SEQUENCES)
        self._is_invariant = batch_invariant
        self._pool = pool
        self._rope = RopeTables(model.inv_freq, max_distance + 1)
        self._query_shape = (model.spec.num_layers, model.num_q_heads, model.head_dim)
        self._has_scored = False
        self._observers: dict[int, ObservedQueries] = {}
        self._native: NativeKernels | None = None
        if native_threads > 0:
            self._native = NativeKernels(model, pool, self._rope, native_threads)

    @property
    def native(self) -> NativeKernels | None:
        """The native kernels on their way, unless they were turned off."""
        return self._native

    def wait_until_fast(self) -> bool:
        """Wait until the native decode step is ready or given up; whether there is one."""
        return self._native is not None and self._native.wait()

    def observe(self, seq_id: int, queries: ObservedQueries | None) -> None:
        """Show the queries of a sequence to `queries` from now on; to nobody with `None`."""
        if queries is None:
            self._observers.pop(seq_id, None)
        else:
            self._observers[seq_id] = queries

    def close(self) -> None:
        """End what prepares the native kernels."""
        if self._native is not None:
            self._native.close()

    def launch(self, batch: Batch) -> Landed:
        """Compute the batch: here it is done when it was started."""
        return Landed(self.run(batch))

    @torch.inference_mode()
    def run(self, batch: Batch) -> list[StepResult]:
        """Compute the batch; one result per sequence, in the batch's order."""
        decoder = self._native.claim() if self._native is not None else None
        single = [step.query_len == 1 for step in batch.steps]
        if decoder is None or not any(single):
            if self._is_invariant:
                # Torch's products round by the number of rows; those of a native step do not.
                return [result for step in batch.steps for result in self._forward([step])]
            return self._forward(batch.steps)
        # A chunk reads the weights once more, which it is long enough to pay for: so what a decode
        # step says does not depend on whether there is one.
        decoded = iter(self._decode(list(itertools.compress(batch.steps, single)), decoder))
        longer = [step for step in batch.steps if step.query_len > 1]
        computed = iter(self._forward(longer) if longer else ())
        return [next(decoded if is_single else computed) for is_single in single]

    def _forward(self, steps: Many[SequenceStep]) -> list[StepResult]:
        """One packed row through the model, by torch's products."""
        ids: list[int] = []
        slots: list[int] = []
        parts: list[_Part] = []
        for step in steps:
            sequence, begin = step.sequence, len(ids)
            start, end = sequence.num_computed, sequence.num_computed + step.query_len
            ids.extend(sequence.next_ids(step.query_len))
            slots.extend(sequence.table.slots(start, end))
            observed = self._observers.get(sequence.seq_id)
            places = observed.take(start, step.query_len) if observed is not None else []
            parts.append(_Part(begin, len(ids), self._plan(step), observed, places))
        num_rows = padded_rows(len(ids), self.model.model.dtype)
        input_ids = torch.zeros(1, num_rows, dtype=torch.int64)
        input_ids[0, : len(ids)] = torch.tensor(ids)
        forward = self._native.forward if self._native is not None else None
        hidden = (forward or self.model).hidden(input_ids, self._attention(parts, slots))
        logits = iter(self._logits(steps, hidden, [part.end - 1 for part in parts]))
        return [
            StepResult(logits=next(logits))
            if step.wanted is Wanted.LOGITS
            else self._scored(step, hidden[part.begin : part.end])
            for step, part in zip(steps, parts, strict=True)
        ]

    def _logits(
        self, steps: Many[SequenceStep], hidden: Tensor, last_rows: list[int]
    ) -> Many[Tensor]:
        """Logits of those steps that want them, from one product with the head."""
        rows = [
            row for step, row in zip(steps, last_rows, strict=True) if step.wanted is Wanted.LOGITS
        ]
        if not rows:
            return ()
        num_rows = padded_rows(len(rows), hidden.dtype)
        wanted = hidden[rows + rows[:1] * (num_rows - len(rows))]
        return self.model.logits(wanted)[: len(rows)].unbind(0)

    def _decode(self, steps: list[SequenceStep], decoder: NativeDecoder) -> list[StepResult]:
        """One token of each sequence, by one native call."""
        rows, observed = [], []
        for step in steps:
            sequence, index = step.sequence, step.sequence.num_computed
            observed.append(self._observers.get(sequence.seq_id))
            rows.append(
                DecodeRow(
                    sequence.next_ids(1)[0],
                    index,
                    sequence.table.slot(index),
                    build_table(sequence.table.entries(sequence.window, index, index + 1)),
                    sequence.window.window_size,
                    want_logits=step.wanted is not Wanted.NOTHING,
                    queries=None if observed[-1] is None else torch.empty(self._query_shape),
                )
            )
        logits = decoder.decode(rows)
        for row, observer in zip(rows, observed, strict=True):
            if observer is not None and row.queries is not None:
                places = observer.take(row.query_index, 1)
                for layer, queries in enumerate(row.queries):
                    observer.keep(layer, queries[None], places)
        return [self._decoded(step, found) for step, found in zip(steps, logits, strict=True)]

    def _decoded(self, step: SequenceStep, logits: Tensor | None) -> StepResult:
        if logits is None:
            return StepResult()
        if step.wanted is Wanted.LOGITS:
            return StepResult(logits=logits)
        sequence = step.sequence
        targets = sequence.next_ids(min(2, sequence.num_pending))[1:]
        return StepResult(scores=logits[targets] - logits.logsumexp(0))

    def _plan(self, step: SequenceStep) -> cpu.Plan:
        sequence = step.sequence
        start = sequence.num_computed
        entries = sequence.table.entries(sequence.window, start, start + step.query_len)
        return cpu.plan_attention(
            build_table(entries),
            start,
            step.query_len,
            sequence.window.window_size,
            self._rope,
            self._pool,
            self.model.num_q_heads,
            self._native.attention if self._native is not None else None,
        )

    def _attention(self, parts: list["_Part"], slots: list[int]) -> Attend:
        pool, num_tokens = self._pool, len(slots)
        written = cpu.plan_write(torch.tensor(slots), self._rope, pool)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
            cpu.write_kv(pool, k[:num_tokens], v[:num_tokens], layer, written)
            for part in parts:
                if part.observed is not None:
                    part.observed.keep(layer, q[part.begin : part.end], part.places)
            outs = [
                cpu.attend(q[part.begin : part.end], pool, layer, part.plan, scale)
                for part in parts
            ]
            if num_tokens < q.shape[0]:
                outs.append(torch.zeros_like(q[num_tokens:]))
            return outs[0] if len(outs) == 1 else torch.cat(outs)

        return attend

    def _scored(self, step: SequenceStep, hidden: Tensor) -> StepResult:
        if step.wanted is Wanted.NOTHING:
            return StepResult()
        return StepResult(scores=self._scores(step, hidden))

    def _scores(self, step: SequenceStep, hidden: Tensor) -> Tensor:
        available = min(step.query_len + 1, step.sequence.num_pending)
        targets = torch.tensor(step.sequence.next_ids(available)[1:], dtype=torch.int64)
        rows = max(1, LOGIT_BYTES // (self.model.vocab_size * hidden.element_size()))
        if not self._has_scored:
            # glibc returns a buffer to the system, and pays for fresh pages the next time, unless a
            # larger one was freed before: a tenth of scoring in bfloat16. No page is touched.
            torch.empty(KEPT_BYTES, dtype=torch.uint8)
            self._has_scored = True
        scores = torch.empty(len(targets), dtype=torch.float32)
        for low in range(0, len(targets), rows):
            part = targets[low : low + rows]
            scores[low : low + rows] = self._score(hidden[low : low + len(part)], part)
        return scores

    def _score(self, hidden: Tensor, targets: Tensor) -> Tensor:
        num_rows = padded_rows(len(targets), hidden.dtype)
        hidden = torch.nn.functional.pad(hidden, (0, 0, 0, num_rows - len(targets)))
        logits = self.model.head(hidden)[: len(targets)]
        native = self._native.scores if self._native is not None else None
        if native is not None and native.knows(logits):
            return native.score(logits, targets)
        logits = logits.float()
        chosen = logits.gather(1, targets[:, None])[:, 0]
        # In place: logsumexp would make two more tensors of the size of the logits.
        highest = logits.amax(1, keepdim=True)
        total = logits.sub_(highest).exp_().sum(1)
        return chosen - highest[:, 0] - total.log_()
