"""A device that works by itself: steps are launched, and carried out later, in order.

A step is launched with all that it reads of the host written down, as tables travel to a GPU. KV
lies in the slots of a real pool, and the model is `fake_model`'s.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from fake_model import Ints, answer, attend, is_drawn, logprob, mix, visible

from streamkv.batch import Batch, SequenceStep, StepResult, Wanted
from streamkv.observed_queries import ObservedQueries
from streamkv.sampling import SampledToken
from streamkv.tiers.gpu_pool import GpuPool
from streamkv.tiers.host_memory import Bytes
from streamkv.tiers.transfer import Completion, Transfer

WAIT_S = 30


@dataclass(frozen=True, slots=True)
class _Part:
    """One sequence in a launched step: everything that it reads of the host.

    Attributes:
        step: for what is wanted of it.
        ids: of its tokens; of one that is on the device: none yet.
        following: ids after its queries, as far as there are any.
        index, slots: of its tokens [n].
        seen_index, seen_slots: of all tokens that its queries may see [m].
        mask, distance: which query sees which, and how far away [n, m].
    """

    step: SequenceStep
    ids: list[int]
    following: list[int]
    index: Ints
    slots: Ints
    seen_index: Ints
    seen_slots: Ints
    mask: npt.NDArray[np.bool_]
    distance: Ints

    @classmethod
    def of(cls, step: SequenceStep) -> "_Part":
        sequence, start, end = step.sequence, step.start, step.start + step.query_len
        sinks, recalled, recent = sequence.table.entries(sequence.window, start, end)
        near, old = (
            [
                (entry.start + slot, entry.block_id * sequence.block_size + slot, slot, entry.cap)
                for entry in entries
                for slot in range(entry.first_valid, entry.end_valid)
            ]
            for entries in ((*sinks, *recent), recalled)
        )
        seen_index, seen_slots, offsets, caps = np.array(near + old, dtype=np.int64).T
        ids, following = list[int](), list[int]()
        if step.source is None:
            available = min(step.query_len + 1, sequence.num_pending)
            ids = sequence.next_ids(step.query_len)
            following = sequence.next_ids(available)[1:]
            assert start == sequence.num_computed
        index = np.arange(start, end)
        mask = visible(sequence.window, index, seen_index)
        # What is recalled shows what the window does not.
        newest = index[:, None] - sequence.window.window_size
        mask[:, len(near) :] = seen_index[None, len(near) :] <= newest
        return cls(
            step,
            ids,
            following,
            index,
            np.array(sequence.table.slots(start, end), dtype=np.int64),
            seen_index,
            seen_slots,
            mask,
            np.minimum(index[:, None] - (seen_index - offsets), caps) - offsets,
        )


class FakeFlight:
    """A step that was launched.

    Args:
        device: that carries it out.
        batch: what was launched.
        parts: the same with what they read of the host.
    """

    def __init__(self, device: "Device", batch: Batch, parts: list[_Part]) -> None:
        self.batch = batch
        self.parts = parts
        self.is_executed = threading.Event()
        self.values: list[StepResult] = []
        self._device = device
        wanted = [part for part in parts if part.step.wanted is Wanted.LOGITS]
        self.rows = [wanted.index(part) if part in wanted else None for part in parts]

    @property
    def sources(self) -> list[int | None]:
        """Row of the token after each part, if the device chose it."""
        return [
            row if is_drawn(part.step.params) else None
            for row, part in zip(self.rows, self.parts, strict=True)
        ]

    def done(self) -> bool:
        """Whether it was carried out."""
        return self.is_executed.is_set()

    def results(self) -> list[StepResult]:
        """Wait until it was."""
        self._device.wait_for(self)
        self._device.before_results(self.batch)
        return self.values

    def device_s(self) -> float | None:
        """It keeps no time."""
        return None


class Device:
    """Carries out what was launched, one step for each `run_next`.

    Args:
        pool: where KV lies.
        max_sequences: of a step.
        vocab_size: of logits for the host.

    Attributes:
        launched: (seq_id, start, query_len) of each part of each step.
        before_launch: called with each batch; what it raises, `launch` raises, and the chosen
            tokens are damaged then, as by a launch that failed half way.
        before_results: called with each batch before its results are handed out; likewise.
        is_running: whether a thread carries steps out.
    """

    def __init__(self, pool: GpuPool, max_sequences: int, vocab_size: int = 512) -> None:
        self.max_sequences = max_sequences
        self.launched: list[list[tuple[int, int, int]]] = []
        self.before_launch: Callable[[Batch], None] = lambda batch: None
        self.before_results: Callable[[Batch], None] = lambda batch: None
        self.is_running = False
        self._vocab_size = vocab_size
        self._observers: dict[int, ObservedQueries] = {}
        self._kv = pool.data.numpy()
        self._chosen = [0] * max_sequences
        self._pending: deque[FakeFlight] = deque()
        self._arrived = threading.Condition()
        self._executing = threading.Lock()
        pool.fill_nan(*range(pool.num_blocks + 1))

    @property
    def last(self) -> FakeFlight | None:
        """The newest step that is not carried out yet."""
        with self._arrived:
            return self._pending[-1] if self._pending else None

    def launch(self, batch: Batch) -> FakeFlight:
        """Start a step."""
        assert 0 < len(batch.steps) <= self.max_sequences
        assert len({id(step.sequence) for step in batch.steps}) == len(batch.steps)
        try:
            self.before_launch(batch)
        except BaseException:
            self._begin(FakeFlight(self, batch, []))
            raise
        flight = FakeFlight(self, batch, [_Part.of(step) for step in batch.steps])
        for step in batch.steps:
            self._show(step)
        self.launched.append(
            [(step.sequence.seq_id, step.start, step.query_len) for step in batch.steps]
        )
        self._begin(flight)
        return flight

    def observe(self, seq_id: int, queries: ObservedQueries | None) -> None:
        """Show the queries of a sequence to `queries` from now on; to nobody with `None`."""
        if queries is None:
            self._observers.pop(seq_id, None)
        else:
            self._observers[seq_id] = queries

    def _show(self, step: SequenceStep) -> None:
        """Queries of the step's tokens: random ones, by token index and layer."""
        observed = self._observers.get(step.sequence.seq_id)
        if observed is None:
            return
        places, end = observed.take(step.start, step.query_len), step.start + step.query_len
        for layer, row in enumerate(observed._rows):
            tokens = range(end - len(places), end)
            generators = [torch.Generator().manual_seed(2 * token + layer) for token in tokens]
            rows = [torch.randn(row.shape[1:], generator=each) for each in generators]
            observed.keep(layer, torch.stack(rows), places)

    def _begin(self, flight: FakeFlight) -> None:
        with self._arrived:
            self._pending.append(flight)
            under_way = sum(bool(flight.parts) for flight in self._pending)
            assert under_way <= 2, "more than two steps under way"
            self._arrived.notify()

    def run_next(self) -> bool:
        """Carry out the oldest step; whether there was one."""
        with self._executing:
            with self._arrived:
                if not self._pending:
                    return False
                flight = self._pending[0]
            flight.values = self._execute(flight)
            with self._arrived:
                self._pending.popleft()
            flight.is_executed.set()
            return True

    def wait_for(self, flight: FakeFlight) -> None:
        """Return when a step was carried out."""
        while not self.is_running and not flight.done():
            self.run_next()
        assert flight.is_executed.wait(WAIT_S)

    @contextmanager
    def running(self, pause: Callable[[], None]) -> Iterator[None]:
        """Carry steps out on a thread, with a pause before each."""
        self.is_running, ending = True, False

        def work() -> None:
            while True:
                with self._arrived:
                    self._arrived.wait_for(lambda: self._pending or ending)
                    if not self._pending:
                        return
                pause()
                self.run_next()

        thread = threading.Thread(target=work, name="device")
        thread.start()
        try:
            yield
        finally:
            with self._arrived:
                ending = True
                self._arrived.notify()
            thread.join()

    def wait_until_fast(self) -> bool:
        """It is as fast as it gets."""
        return True

    def close(self) -> None:
        """Nothing is left to end."""

    def _execute(self, flight: FakeFlight) -> list[StepResult]:
        chosen = list(self._chosen) if flight.parts else [-1] * self.max_sequences
        results = []
        for part, row in zip(flight.parts, flight.rows, strict=True):
            seen = self._compute(part)
            result = self._result(part, seen)
            if row is not None:
                chosen[row] = answer(int(seen[-1]), part.step.params)
            results.append(result)
        self._chosen = chosen
        return results

    def _compute(self, part: _Part) -> Ints:
        """Write KV; what each query saw in the last layer [n]."""
        source = part.step.source
        ids = np.array(part.ids if source is None else [self._chosen[source]])
        self._write(0, part, mix(ids, part.index, 1))
        self._write(1, part, mix(self._seen(0, part), part.index, 3))
        return self._seen(1, part)

    def _write(self, layer: int, part: _Part, values: Ints) -> None:
        blocks, offsets = np.divmod(part.slots, self._kv.shape[-2])
        self._kv[blocks, layer, 0, 0, offsets, 0] = values
        self._kv[blocks, layer, 0, 0, offsets, 1] = part.index

    def _seen(self, layer: int, part: _Part) -> Ints:
        blocks, offsets = np.divmod(part.seen_slots, self._kv.shape[-2])
        values, index = (
            np.nan_to_num(self._kv[blocks, layer, 0, 0, offsets, column], nan=-1).astype(np.int64)
            for column in (0, 1)
        )
        return attend(layer, values, index, part.distance, part.mask)

    def _result(self, part: _Part, seen: Ints) -> StepResult:
        match part.step.wanted:
            case Wanted.SCORES:
                pairs = zip(seen.tolist(), part.following, strict=False)
                return StepResult(scores=torch.tensor([logprob(*pair) for pair in pairs]))
            case Wanted.LOGITS if is_drawn(part.step.params):
                return StepResult(token=SampledToken(answer(int(seen[-1]), part.step.params), 1.0))
            case Wanted.LOGITS:
                logits = torch.zeros(self._vocab_size)
                logits[answer(int(seen[-1]), part.step.params)] = 1000.0
                return StepResult(logits=logits)
        return StepResult()


class _Carried:
    """Done when the steps that were launched before it are."""

    def __init__(self, device: Device) -> None:
        self._device, self._flight = device, device.last

    def done(self) -> bool:
        return self._flight is None or self._flight.done()

    def wait(self) -> None:
        if self._flight is not None:
            self._device.wait_for(self._flight)


class DeviceTransfer(Transfer):
    """Copies that know of the device: what is copied into the pool comes after what reads it."""

    def __init__(self, pool: GpuPool, device: Device) -> None:
        super().__init__(pool)
        self._device = device

    def written(self) -> Completion:
        """Marks what was launched so far."""
        return _Carried(self._device)

    @contextmanager
    def filling(self, block_id: int) -> Iterator[Bytes]:
        """Room in a gpu block."""
        self.written().wait()
        with super().filling(block_id) as out:
            yield out

    def promote(self, source: Bytes, block_id: int) -> Completion:
        """Copy host memory into a gpu block."""
        self.written().wait()
        return super().promote(source, block_id)

    def copy(self, source_block_id: int, block_id: int) -> Completion:
        """Copy one gpu block into another."""
        self.written().wait()
        return super().copy(source_block_id, block_id)
