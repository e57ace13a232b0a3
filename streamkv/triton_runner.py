"""Runs a batch through the model on a GPU: the Triton kernels read blocks where they lie.

A step of one query a sequence, or of such and a short chunk, replays a captured graph; any other is
run kernel by kernel, in one packed row, the sequences with one query first, so that one decode call
serves them all. Nothing
waits for the GPU until a result is read: tables, options and token ids travel from pinned memory,
tokens are chosen on the device, and the next step reads them there. In Triton's interpreter all of
this but the graphs runs on a CPU.
"""

import logging
from collections.abc import Sequence as Many
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from streamkv.batch import Batch, SequenceStep, StepResult, Wanted
from streamkv.decode_graphs import BUCKETS, DecodeGraphs, buckets_for
from streamkv.device_copies import Stopwatch, to_device
from streamkv.gpu_attention import GpuAttention
from streamkv.gpu_flight import GpuFlight, Outputs, is_drawn
from streamkv.gpu_model import GpuModel
from streamkv.gpu_plan import LOGIT_BYTES
from streamkv.gpu_sampling import Draw, GpuSampler
from streamkv.kernels import gpu
from streamkv.kernels.rope import RopeTables
from streamkv.kernels.rows import score
from streamkv.mixed_graphs import MixedGraphs, MixedStep, Parts, mixed_buckets_for
from streamkv.model import ModelAdapter
from streamkv.model_attention import Attend
from streamkv.observed_queries import ObservedQueries
from streamkv.sampling_params import SamplingParams

_log = logging.getLogger(__name__)

MARGIN = 513
"""How far a tile and a block reach beyond the largest distance in use."""

_NOT_DRAWN = Draw(SamplingParams(temperature=0.0), 0)
"""For a row whose token the host chooses: what the device chooses there is not read."""


def _draw(step: SequenceStep) -> Draw:
    if not is_drawn(step):
        return _NOT_DRAWN
    assert step.params is not None
    return Draw(step.params, step.start + step.query_len)


class TritonRunner:
    """A model with its pool, both on one device.

    Args:
        model: the adapter.
        pool: [num_blocks + 1, num_layers, 2, num_kv_heads, block_size, head_dim].
        max_distance: largest distance between a query and a key in use.
        capacity: entries of a sequence in a captured step; 0 captures none.
        max_sequences: of a step.
        max_chunk: queries of one sequence in a step; more attend in a slower way.
        cache: directory for what was measured on this device.
        observes: captured steps keep queries of sequences that are observed; others always do.
        batch_invariant: what a sequence computes does not depend on who is beside it, to the bit.
        mixed_chunk: tokens of the longest chunk that has a graph with those who decode; 0: none.
    """

    def __init__(
        self,
        model: ModelAdapter,
        pool: Tensor,
        max_distance: int,
        capacity: int = 0,
        max_sequences: int = BUCKETS[-1],
        max_chunk: int = 8192,
        cache: Path | None = None,
        observes: bool = False,
        batch_invariant: bool = False,
        mixed_chunk: int = 0,
    ) -> None:
        self._is_invariant = batch_invariant
        self.model = model
        self._observes = observes
        self._observers: dict[int, ObservedQueries] = {}
        self.max_sequences = min(max_sequences, BUCKETS[-1])
        mixes = mixed_chunk > 0 and not batch_invariant
        mixed = mixed_buckets_for(self.max_sequences) if mixes else []
        num_rows = max(buckets_for(self.max_sequences) + mixed)
        self._pool = pool
        self._device = pool.device
        num_positions = max(max_distance, max_chunk) + MARGIN
        self._rope = RopeTables(model.inv_freq.to(self._device), num_positions)
        self._shape = gpu.Shape.of(pool, model.num_q_heads, self._rope)
        self._softmax = {scale: gpu.Softmax(scale) for scale in set(model.scales)}
        self._attention = GpuAttention(pool, self._rope, self._shape, self._softmax)
        self._sampler = GpuSampler(model.vocab_size, num_rows, self._device)
        self._outputs = Outputs(num_rows, self._device)
        captures = capacity > 0 and self._device.type == "cuda"
        self._gpu_model = GpuModel(model, num_rows, cache, captures)
        self._graphs = self._capture(capacity) if captures else None
        self._mixed = self._capture_mixed(mixed_chunk, capacity or 64) if mixes else None

    @property
    def has_graphs(self) -> bool:
        """Whether decode steps are captured."""
        return self._graphs is not None

    def wait_until_fast(self) -> bool:
        """Graphs are captured when the runner is made, so there is nothing to wait for."""
        return self.has_graphs

    def observe(self, seq_id: int, queries: ObservedQueries | None) -> None:
        """Show the queries of a sequence to `queries` from now on; to nobody with `None`."""
        if queries is None:
            self._observers.pop(seq_id, None)
            return
        assert queries.dtype == self._pool.dtype, "kernels keep queries as they are"
        self._observers[seq_id] = queries

    def close(self) -> None:
        """Nothing is left to end."""

    def run(self, batch: Batch) -> list[StepResult]:
        """Compute the batch; one result per sequence, in the batch's order."""
        return self.launch(batch).results()

    @torch.inference_mode()
    def launch(self, batch: Batch) -> GpuFlight:
        """Start the batch."""
        steps = batch.steps
        if all(step.query_len == 1 and step.wanted is not Wanted.SCORES for step in steps):
            captured = self._launch_graph(steps)
            if captured is not None:
                return captured
        if (flight := self._launch_mixed(steps)) is not None:
            return flight
        watch = Stopwatch(self._device)
        # A packed row has the parts of one query first, whatever the batch's order.
        order = sorted(range(len(steps)), key=lambda index: steps[index].query_len > 1)
        parts = self._parts(steps, order)
        wanted = [i for i, step in enumerate(steps) if step.wanted is Wanted.LOGITS]
        rows: list[int | None] = [None] * len(steps)
        for row, index in enumerate(wanted):
            rows[index] = row
        logits = None
        if wanted:
            last = [parts[index][-1:] for index in wanted]
            if self._is_invariant:
                logits = torch.cat([self.model.head(row) for row in last])
            else:
                logits = self.model.head(torch.cat(last))
            ids, info = self._chosen(len(wanted))
            staged = self._sampler.stage([_draw(steps[index]) for index in wanted])
            self._sampler.sample(logits, staged, ids, info)
        scores = [
            self._scores(step, parts[index]) if step.wanted is Wanted.SCORES else None
            for index, step in enumerate(steps)
        ]
        return self._outputs.send(steps, rows, logits, scores, watch)

    def _parts(self, steps: Many[SequenceStep], order: list[int]) -> dict[int, Tensor]:
        """Hidden states of each part: of one packed row, or each of a row of its own."""
        rows = [[index] for index in order] if self._is_invariant else [order]
        parts = {}
        for row in rows:
            hidden, begins = self._hidden([steps[index] for index in row])
            for index, begin in zip(row, begins, strict=True):
                parts[index] = hidden[begin : begin + steps[index].query_len]
        return parts

    def _launch_graph(self, steps: Many[SequenceStep]) -> GpuFlight | None:
        if self._graphs is None or not self._graphs.fits(steps):
            return None
        staged = self._sampler.stage([_draw(step) for step in steps])
        logits = self._graphs.launch(steps, self._targets(steps))
        self._sampler.choose_cut(logits, staged, *self._chosen(len(logits)))
        return self._outputs.send(steps, list(range(len(steps))), logits, [None] * len(steps))

    def _launch_mixed(self, steps: Many[SequenceStep]) -> GpuFlight | None:
        """Tokens of sequences that decode, if any, and a chunk, by one graph."""
        longer = [step for step in steps if step.query_len > 1]
        if self._mixed is None or len(longer) != 1:
            return None
        singles = [step for step in steps if step.query_len == 1]
        mixed = MixedStep(singles, longer[0], self._targets(singles), self._targets(longer))
        if not self._mixed.fits(mixed):
            return None
        watch = Stopwatch(self._device)
        with_logits = [*singles, longer[0]][: mixed.num_head_rows]
        staged = self._sampler.stage([_draw(step) for step in with_logits])
        logits = self._mixed.launch(mixed)
        self._sampler.choose_cut(logits, staged, *self._chosen(len(logits)))
        rows = iter(range(len(singles)))
        last = len(singles) if mixed.num_head_rows > len(singles) else None
        places = [next(rows) if step.query_len == 1 else last for step in steps]
        return self._outputs.send(steps, places, logits, [None] * len(steps), watch)

    def _targets(self, steps: Many[SequenceStep]) -> list[int]:
        """Where the queries of each token of a packed row are kept; nothing if none are."""
        if not any(step.sequence.seq_id in self._observers for step in steps):
            return []
        targets: list[int] = []
        for step in steps:
            observed = self._observers.get(step.sequence.seq_id)
            count = step.query_len
            targets += [0] * count if observed is None else observed.addresses(step.start, count)
        return targets

    def _chosen(self, num_rows: int) -> tuple[Tensor, Tensor]:
        """Where the tokens of so many rows are chosen."""
        return self._outputs.ids[:num_rows], self._outputs.info[:num_rows]

    def _hidden(self, steps: list[SequenceStep]) -> tuple[Tensor, list[int]]:
        """Hidden states of the packed row, and where each part begins."""
        ids: list[int] = []
        sources: list[int] = []
        slots: list[int] = []
        begins: list[int] = []
        for step in steps:
            begins.append(len(ids))
            is_ahead = step.source is not None
            ids.extend([0] if is_ahead else step.sequence.next_ids(step.query_len))
            sources.extend([-1 if step.source is None else step.source] * step.query_len)
            slots.extend(step.sequence.table.slots(step.start, step.start + step.query_len))
        targets = self._targets(steps)
        columns = [ids, sources, slots, *([targets] if targets else [])]
        # numpy reads a list of lists eight times as fast as torch, which matters in a long chunk.
        packed = torch.from_numpy(np.array(columns, dtype=np.int64))
        input_ids, where, slot_mapping, *observed = to_device(packed, self._device).unbind(0)
        if max(sources) >= 0:
            chosen = self._outputs.ids[where.clamp(min=0)]
            input_ids = torch.where(where >= 0, chosen, input_ids)
        attend = self._attention.plan(steps, slot_mapping, *observed)
        return self._gpu_model.hidden(input_ids[None], attend), begins

    def _scores(self, step: SequenceStep, hidden: Tensor) -> Tensor:
        available = min(step.query_len + 1, step.sequence.num_pending)
        ids = torch.tensor(step.sequence.next_ids(available)[1:], dtype=torch.int64)
        targets = to_device(ids, self._device)
        rows = max(1, LOGIT_BYTES // (self.model.vocab_size * hidden.element_size()))
        found = [
            score(self.model.head(hidden[low : low + len(part)]), part)
            for low in range(0, len(targets), rows)
            if len(part := targets[low : low + rows])
        ]
        return torch.cat(found) if found else torch.empty(0, device=self._device)

    def _capture_mixed(self, size: int, capacity: int) -> MixedGraphs | None:
        captures = self._graphs is not None
        if self._device.type == "cuda" and not captures:
            return None
        model = Parts(
            self._gpu_model.hidden,
            self.model.head,
            lambda logits: self._sampler.choose(logits, *self._chosen(len(logits))),
            self._outputs.ids,
        )
        try:
            return MixedGraphs(
                model,
                self._pool,
                self._rope,
                self._softmax,
                self._shape,
                size,
                self.max_sequences,
                capacity,
                captures,
                self._observes,
            )
        # Whatever keeps it from being captured, chunks are computed in the way of all others.
        except Exception as error:
            _log.warning("chunks beside decode steps run without a graph: %s", error)
            return None

    def _capture(self, capacity: int) -> DecodeGraphs | None:
        decoder = self._gpu_model.decoder
        try:
            return DecodeGraphs(
                self._forward,
                lambda logits: self._sampler.choose(logits, *self._chosen(len(logits))),
                self._pool,
                self._rope,
                self._shape,
                self._softmax,
                self.max_sequences,
                capacity,
                None if decoder is None else decoder.mixed,
                pdl=decoder is not None and decoder.pdl,
                observes=self._observes,
                one_size=self._is_invariant,
            )
        # Whatever a model of unknown make does while it is captured, the answer is the same.
        except Exception as error:
            _log.warning("decode steps run without graphs: %s", error)
            return None

    @torch.inference_mode()
    def _forward(self, ids: Tensor, sources: Tensor, attend: Attend) -> Tensor:
        decoder = self._gpu_model.decoder
        if decoder is not None:
            return decoder.logits(ids, sources, self._outputs.ids, attend)
        chosen = self._outputs.ids[sources.clamp(min=0)]
        ids = torch.where(sources >= 0, chosen, ids)
        return self.model.head(self._gpu_model.hidden(ids[None], attend))
