"""Captured decode steps against the same steps run kernel by kernel."""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu_cases import DEVICE, ON_GPU
from torch import Tensor

from streamkv.batch import Batch, SequenceStep, StepResult, Wanted
from streamkv.decode_graphs import BUCKETS, buckets_for
from streamkv.mixed_graphs import mixed_buckets_for
from streamkv.model import ModelAdapter
from streamkv.sampling_params import SamplingParams
from streamkv.sequence import Sequence
from streamkv.tiers.gpu_pool import GpuPool
from streamkv.tiers.spec import BlockKey
from streamkv.triton_runner import TritonRunner
from streamkv.window import Window

pytestmark = pytest.mark.gpu if ON_GPU else []
needs_gpu = pytest.mark.skipif(not ON_GPU, reason="needs a CUDA device")

MOST = 9
CAPACITY = 16
WINDOWS = (Window(64, ((0, 4),)), Window(100), Window(65, ((0, 4), (70, 75))))
LENGTHS = (1, 2, 63, 64, 65, 127, 128, 200, 300)
GREEDY = SamplingParams(temperature=0.0)


@pytest.mark.parametrize(
    ("max_rows", "expected"),
    [
        (1, [1]),
        (2, [1, 2]),
        (3, [1, 2, 4]),
        (8, [1, 2, 4, 8]),
        (9, [1, 2, 4, 8, 16]),
        (17, [1, 2, 4, 8, 16, 24]),
        (63, list(BUCKETS)),
        (64, list(BUCKETS)),
        (65, list(BUCKETS)),
        (1000, list(BUCKETS)),
    ],
)
def test_buckets_serve_so_many_rows_and_few_more(max_rows: int, expected: list[int]) -> None:
    assert buckets_for(max_rows) == expected


@pytest.mark.parametrize("num_sequences", [1, 5, 9, 33, 64, 100])
def test_a_runner_has_room_for_the_rows_that_pad_its_largest_step(
    tiny_model_dir: Path, num_sequences: int
) -> None:
    adapter = ModelAdapter.load(str(tiny_model_dir), device=DEVICE)
    pool = GpuPool(adapter.spec, 1, DEVICE)
    runner = TritonRunner(adapter, pool.data, 4096, max_sequences=num_sequences)
    assert runner.max_sequences == min(num_sequences, 64)
    assert len(runner._outputs.ids) == buckets_for(num_sequences)[-1]
    mixing = TritonRunner(adapter, pool.data, 4096, max_sequences=num_sequences, mixed_chunk=64)
    assert len(mixing._outputs.ids) >= mixed_buckets_for(num_sequences)[-1]


class Bench:
    """Two runners over one pool, which is NaN where nothing was written; one has graphs."""

    def __init__(self, adapter: ModelAdapter, cache: Path) -> None:
        self.pool = GpuPool(adapter.spec, 60, "cuda")
        self.pool.fill_nan(*range(61))
        self._free = list(range(60))
        random.Random(5).shuffle(self._free)
        self._vocab_size = adapter.vocab_size
        self._num_opened = 0
        longest = adapter.trained_length
        self.plain = TritonRunner(adapter, self.pool.data, longest)
        self.captured = TritonRunner(adapter, self.pool.data, longest, CAPACITY, MOST, cache=cache)
        assert self.captured.has_graphs and not self.plain.has_graphs
        # What was captured ran once, on rows that are all unused.
        assert not self.pool.data.isfinite().any()

    def sequence(self, num_tokens: int, window: Window | None = None) -> Sequence:
        """A stream whose last token is pending."""
        window = window or WINDOWS[self._num_opened % len(WINDOWS)]
        self._num_opened += 1
        made = Sequence(self._num_opened, window, 64, BlockKey(b"r" * 16))
        rng = random.Random(self._num_opened)
        made.append([rng.randrange(self._vocab_size) for _ in range(num_tokens)])
        if num_tokens > 1:
            self._make_live(made, num_tokens - 1)
            self.plain.run(Batch((SequenceStep(made, num_tokens - 1),)))
            self.advance(made, num_tokens - 1)
        return made

    def _make_live(self, sequence: Sequence, count: int, start: int | None = None) -> None:
        start = sequence.num_computed if start is None else start
        for index in sequence.table.missing(start, start + count):
            sequence.table.add(index, self._free.pop())

    def advance(self, sequence: Sequence, count: int = 1) -> None:
        sequence.advance(count)
        for block_id, _ in sequence.take_expired():
            self.pool.fill_nan(block_id)
            self._free.append(block_id)

    def close(self, sequence: Sequence) -> None:
        for block in sequence.table.take_all():
            self.pool.fill_nan(block.block_id)
            self._free.append(block.block_id)

    def step(self, sequence: Sequence, params: SamplingParams | None = None) -> SequenceStep:
        self._make_live(sequence, 1)
        return SequenceStep(sequence, 1, Wanted.LOGITS, params)

    def step_after(self, step: SequenceStep, source: int | None) -> SequenceStep:
        """Of the token that is chosen after a step, and known to the device alone."""
        assert source is not None
        self._make_live(step.sequence, 1, step.start + 1)
        return SequenceStep(step.sequence, 1, Wanted.LOGITS, step.params, step.start + 1, source)

    def run_plain(self, *steps: SequenceStep) -> list[StepResult]:
        return self.plain.run(Batch(steps))

    def run_captured(self, *steps: SequenceStep) -> list[StepResult]:
        with CapturedOnly(self.captured):
            return self.captured.run(Batch(steps))


class CapturedOnly:
    """While it holds, the runner cannot run a step kernel by kernel."""

    def __init__(self, runner: TritonRunner) -> None:
        self._runner: Any = runner

    def __enter__(self) -> None:
        def refuse(*arguments: object) -> Tensor:
            raise AssertionError("the step was not captured")

        self._runner._hidden = refuse

    def __exit__(self, *error: object) -> None:
        del self._runner._hidden


LIMITS = {"float32": 1e-4, "bfloat16": 8e-2}


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def dtype(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def bench(dtype: str, tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Bench:
    adapter = ModelAdapter.load(str(tiny_model_dir), dtype, "cuda")
    return Bench(adapter, tmp_path_factory.mktemp("tiles"))


@pytest.fixture
def sequences(bench: Bench) -> Iterator[list[Sequence]]:
    """Streams of many lengths; whatever a test leaves of them is given back."""
    made = [bench.sequence(length) for length in LENGTHS]
    yield made
    for sequence in made:
        bench.close(sequence)


def check(found: list[StepResult], expected: list[StepResult], dtype: str) -> None:
    for one, other in zip(found, expected, strict=True):
        assert one.logits is not None and other.logits is not None
        assert one.logits.isfinite().all()
        difference = (one.logits - other.logits).norm() / other.logits.norm()
        assert float(difference) < LIMITS[dtype]


@needs_gpu
def test_batches_of_any_size_get_the_logits_of_steps_without_graphs(
    bench: Bench, sequences: list[Sequence], dtype: str
) -> None:
    """Sequences leave and join, change their rows, cross blocks and lose some."""
    rng = random.Random(1)
    sizes = [*range(1, MOST + 1), *range(MOST, 0, -1), *(rng.randint(1, MOST) for _ in range(60))]
    for size in sizes:
        chosen = rng.sample(sequences, size)
        steps = [bench.step(sequence) for sequence in chosen]
        found = bench.run_captured(*steps)
        check(found, bench.run_plain(*steps), dtype)
        for sequence in chosen:
            sequence.append([rng.randrange(100)])
            bench.advance(sequence)


@needs_gpu
def test_only_the_slots_of_the_step_are_written(bench: Bench, sequences: list[Sequence]) -> None:
    """Rows that pad a step write nothing; every layer of a row's slot is written."""
    steps = [bench.step(sequence) for sequence in sequences[2:7]]
    slots = {step.sequence.table.slot(step.start) for step in steps}
    before = bench.pool.data.isfinite()
    assert not any(before[slot // 64, :, :, :, slot % 64].any() for slot in slots)
    bench.run_captured(*steps)
    written = bench.pool.data.isfinite() ^ before
    by_slot = written.permute(0, 4, 1, 2, 3, 5).flatten(2)
    assert torch.equal(by_slot.all(2), by_slot.any(2))
    found = {block * 64 + offset for block, offset in by_slot.any(2).nonzero().tolist()}
    assert found == slots


@needs_gpu
def test_tokens_go_from_step_to_step_without_the_host(
    bench: Bench, sequences: list[Sequence]
) -> None:
    """Steps in the air, in other orders, while sequences leave and the buckets change.

    They are run again with the tokens that came out, each as one that the host knows.
    """
    params = (
        GREEDY,
        SamplingParams(temperature=1.0, top_p=1.0, seed=3),
        SamplingParams(temperature=0.9, top_k=5, seed=4),
        SamplingParams(temperature=1.3, top_p=1.0, min_p=0.01, seed=5),
        GREEDY,
    )
    chosen = zip(sequences[3:8], params, strict=True)
    groups = [[bench.step(sequence, each) for sequence, each in chosen]]
    with CapturedOnly(bench.captured):
        flights = [bench.captured.launch(Batch(tuple(groups[0])))]
        for order in ([4, 0, 2, 1, 3], [1, 3, 0], [2, 1, 0]):
            sources = flights[-1].sources
            assert list(sources) == list(range(len(groups[-1])))
            groups.append([bench.step_after(groups[-1][row], sources[row]) for row in order])
            flights.append(bench.captured.launch(Batch(tuple(groups[-1]))))
    landed = [flight.results() for flight in flights]
    for group, results in zip(groups, landed, strict=True):
        again = [bench.step(step.sequence, step.params) for step in group]
        assert [step.start for step in again] == [step.start for step in group]
        expected = bench.run_captured(*again)
        for step, found, other in zip(group, results, expected, strict=True):
            assert found.token is not None and found == other
            step.sequence.append([found.token.token_id])
            bench.advance(step.sequence)


@needs_gpu
def test_rows_that_the_host_and_the_device_choose_for_lie_side_by_side(
    bench: Bench, sequences: list[Sequence], dtype: str
) -> None:
    penalised = SamplingParams(temperature=0.0, repetition_penalty=1.2)
    wanted = (GREEDY, None, penalised)
    steps = [
        bench.step(sequence, params)
        for sequence, params in zip(sequences[5:8], wanted, strict=True)
    ]
    found = bench.run_captured(*steps)
    expected = bench.run_plain(*(bench.step(step.sequence) for step in steps))
    assert found[0].logits is None and found[0].token is not None
    logits = expected[0].logits
    assert logits is not None
    best = float(logits.max() - logits[found[0].token.token_id])
    assert best < (1e-2 if dtype == "float32" else 1.0)
    check(found[1:], expected[1:], dtype)
    assert found[1].token is None and found[2].token is None


@needs_gpu
def test_a_sequence_without_room_in_the_tables_runs_without_a_graph(
    bench: Bench, sequences: list[Sequence], dtype: str
) -> None:
    long = bench.sequence(64 * CAPACITY + 1, Window(64 * CAPACITY + 1))
    steps = (bench.step(sequences[0]), bench.step(long))
    with pytest.raises(AssertionError, match="not captured"):
        bench.run_captured(*steps)
    check(bench.captured.run(Batch(steps)), bench.run_plain(*steps), dtype)
    bench.close(long)


@needs_gpu
def test_nothing_waits_for_the_device(bench: Bench, sequences: list[Sequence]) -> None:
    steps = tuple(bench.step(sequence, GREEDY) for sequence in sequences[:6])
    bench.captured.run(Batch(steps))
    torch.cuda.set_sync_debug_mode("error")
    try:
        flight = bench.captured.launch(Batch(steps))
        following = tuple(
            bench.step_after(step, source)
            for step, source in zip(steps, flight.sources, strict=True)
        )
        later = bench.captured.launch(Batch(following))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for result in (*flight.results(), *later.results()):
        assert result.token is not None
