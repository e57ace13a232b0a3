"""What a step returns: whose token, logits or scores, until when, and tokens that stay behind."""

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from gpu_cases import DEVICE, ON_GPU
from torch import Tensor

from streamkv.batch import Batch, Landed, SequenceStep, StepResult, Wanted
from streamkv.device_copies import Stopwatch, to_device
from streamkv.errors import ModelError
from streamkv.gpu_flight import GpuFlight, Outputs, is_drawn
from streamkv.model import ModelAdapter
from streamkv.sampling import sample
from streamkv.sampling_params import SamplingParams
from streamkv.sequence import Sequence
from streamkv.tiers.gpu_pool import GpuPool
from streamkv.tiers.spec import BlockKey
from streamkv.triton_runner import TritonRunner
from streamkv.window import Window

pytestmark = pytest.mark.gpu if ON_GPU else []
needs_gpu = pytest.mark.skipif(not ON_GPU, reason="needs a CUDA device")

GREEDY = SamplingParams(temperature=0.0)
SEEDED = SamplingParams(temperature=1.0, top_p=0.9, seed=11)
WITH_LOGPROBS = SamplingParams(temperature=0.0, logprobs=2)
MAX_ROWS = 6


def step(
    wanted: Wanted = Wanted.LOGITS, params: SamplingParams | None = GREEDY, num_tokens: int = 1
) -> SequenceStep:
    sequence = Sequence(1, Window(64), 64, BlockKey(b"r" * 16))
    sequence.append([3] * num_tokens)
    return SequenceStep(sequence, num_tokens, wanted, params)


@pytest.mark.parametrize(
    ("wanted", "params", "expected"),
    [
        (Wanted.LOGITS, GREEDY, True),
        (Wanted.LOGITS, SEEDED, True),
        (Wanted.LOGITS, None, False),
        (Wanted.LOGITS, WITH_LOGPROBS, False),
        (Wanted.SCORES, GREEDY, False),
        (Wanted.NOTHING, GREEDY, False),
    ],
)
def test_whose_token_the_device_chooses(
    wanted: Wanted, params: SamplingParams | None, expected: bool
) -> None:
    assert is_drawn(step(wanted, params)) is expected


class Bench:
    """Outputs in which the device's part is played by hand."""

    def __init__(self) -> None:
        self.outputs = Outputs(MAX_ROWS, torch.device(DEVICE))

    def choose(self, *ids: int, margin: float = 0.5, highest: float = 2.0) -> None:
        self.outputs.ids[: len(ids)] = torch.tensor(ids)
        self.outputs.info[: len(ids)] = torch.tensor([margin, highest])

    def send(
        self,
        steps: list[SequenceStep],
        rows: list[int | None],
        logits: Tensor | None = None,
        scores: list[Tensor | None] | None = None,
    ) -> GpuFlight:
        scores = [None] * len(steps) if scores is None else scores
        return self.outputs.send(steps, rows, logits, scores)


def tokens(flight: GpuFlight) -> list[int | None]:
    return [None if each.token is None else each.token.token_id for each in flight.results()]


def test_each_part_gets_what_it_wanted() -> None:
    bench = Bench()
    bench.choose(40, 41, 42)
    steps = [
        step(),
        step(Wanted.NOTHING),
        step(params=None),
        step(Wanted.SCORES, None, 3),
        step(params=SEEDED),
        step(params=WITH_LOGPROBS),
    ]
    logits = torch.randn(4, 9, device=DEVICE, dtype=torch.float16)
    scores = torch.randn(3, device=DEVICE)
    # Rows of logits need not lie in the order of the parts, and a part may not want its own.
    flight = bench.send(
        steps, [2, 3, 1, None, 0, 3], logits, [None, None, None, scores, None, None]
    )
    assert list(flight.sources) == [2, None, None, None, 0, None]
    drawn, nothing, by_host, scored, seeded, with_logprobs = flight.results()
    assert drawn.token is not None and drawn.token.token_id == 42
    assert drawn.token.margin == 0.5 and drawn.logits is None
    assert nothing == StepResult()
    for result, row in ((by_host, 1), (with_logprobs, 3)):
        assert result.token is None and result.logits is not None
        assert result.logits.dtype == torch.float32 and not result.logits.is_cuda
        assert torch.equal(result.logits, logits[row].float().cpu())
    assert scored.scores is not None and torch.equal(scored.scores, scores.cpu())
    assert not scored.scores.is_cuda
    assert seeded.token is not None and seeded.token.token_id == 40
    assert flight.done()


def test_results_do_not_change_with_the_buffers_that_they_came_from() -> None:
    """Logits and scores are copies, and tokens stay what they were when they were read."""
    bench = Bench()
    bench.choose(7)
    logits, scores = torch.ones(2, 5, device=DEVICE), torch.ones(4, device=DEVICE)
    steps = [step(), step(params=None), step(Wanted.SCORES, None, 5)]
    flight = bench.send(steps, [0, 1, None], logits, [None, None, scores])
    first = flight.results()
    logits.zero_()
    scores.zero_()
    for turn in range(8):
        bench.choose(turn)
        bench.send([step()], [0]).results()
    assert flight.results() is first and tokens(flight) == [7, None, None]
    assert first[1].logits is not None and first[1].logits.all()
    assert first[2].scores is not None and first[2].scores.all()


def test_steps_under_way_do_not_share_their_buffers() -> None:
    """As many as may be under way, and some more, before the first is read."""
    bench = Bench()
    for first in (10, 20, 30):
        flights = []
        for turn in range(3):
            bench.choose(first + turn, 99, margin=float(first + turn))
            flights.append(bench.send([step()], [0]))
        for turn, flight in enumerate(flights):
            [result] = flight.results()
            assert result.token is not None
            assert (result.token.token_id, result.token.margin) == (first + turn, first + turn)


@pytest.mark.parametrize("highest", [math.nan, math.inf, -math.inf])
def test_damaged_logits_fail_their_own_row_alone(highest: float) -> None:
    bench = Bench()
    bench.choose(5, 6, 7)
    bench.outputs.info[1, 1] = highest
    steps = [step(), step(num_tokens=4), step()]
    results = bench.send(steps, [0, 1, 2]).results()
    assert tokens(bench.send(steps, [0, 1, 2])) == [5, None, 7]
    assert isinstance(results[1].error, ModelError) and results[1].token is None
    assert results[0].error is None and results[2].error is None
    # The message names the place in the stream as the CPU's does.
    with pytest.raises(ModelError) as expected:
        sample(torch.full((3,), highest), GREEDY, 4)
    assert str(results[1].error) == str(expected.value)


def test_an_index_of_a_token_counts_from_the_start_of_its_step() -> None:
    """A step that was launched ahead starts beyond what its sequence has computed."""
    bench = Bench()
    bench.choose(5, highest=math.nan)
    ahead = SequenceStep(step().sequence, 1, Wanted.LOGITS, GREEDY, start=70, source=0)
    [result] = bench.send([ahead], [0]).results()
    with pytest.raises(ModelError) as expected:
        sample(torch.full((3,), math.nan), GREEDY, 71)
    assert str(result.error) == str(expected.value)


def test_copies_to_the_device_are_copies() -> None:
    for made in (torch.arange(6), torch.zeros(0), torch.arange(6).view(2, 3).t()):
        found = to_device(made, torch.device(DEVICE))
        assert found.device.type == DEVICE and torch.equal(found.cpu(), made)


@needs_gpu
def test_a_flight_is_done_when_the_device_is() -> None:
    bench = Bench()
    bench.choose(3)
    torch.cuda.synchronize()
    torch.cuda._sleep(200_000_000)
    bench.outputs.ids.fill_(4)
    flight = bench.send([step()], [0], torch.zeros(1, 5, device=DEVICE))
    assert not flight.done()
    assert tokens(flight) == [4]
    assert flight.done()


@pytest.fixture
def runner(random_model_dir: Callable[..., Path], own_cache: Path) -> TritonRunner:
    """Of one layer and one head, for the interpreter's sake."""
    heads = {"num_attention_heads": 1, "num_key_value_heads": 1}
    directory = random_model_dir("llama", num_hidden_layers=1, **heads)
    adapter = ModelAdapter.load(str(directory), device=DEVICE)
    return TritonRunner(adapter, GpuPool(adapter.spec, 24, DEVICE).data, 4096, max_sequences=6)


class Streams:
    """Sequences of a runner; blocks are handed out once."""

    def __init__(self, runner: TritonRunner) -> None:
        self.runner = runner
        self._next_block = 0

    def sequence(self, num_tokens: int, seed: int) -> Sequence:
        made = Sequence(seed, Window(64, ((0, 4),)), 64, BlockKey(b"r" * 16))
        made.append([(seed * 37 + 11 * index) % 120 for index in range(num_tokens)])
        return made

    def step(
        self,
        sequence: Sequence,
        query_len: int = 1,
        wanted: Wanted = Wanted.LOGITS,
        params: SamplingParams | None = GREEDY,
        start: int = -1,
        source: int | None = None,
    ) -> SequenceStep:
        made = SequenceStep(sequence, query_len, wanted, params, start, source)
        for index in sequence.table.missing(made.start, made.start + query_len):
            sequence.table.add(index, self._next_block)
            self._next_block += 1
        return made

    def launch(self, *steps: SequenceStep) -> GpuFlight:
        return self.runner.launch(Batch(steps))


def test_a_token_that_the_host_has_not_seen_is_computed_as_one_that_it_has(
    runner: TritonRunner,
) -> None:
    """Two steps at once, in which rows change places and a chunk of another stream lies between."""
    streams = Streams(runner)
    one, two, other = (streams.sequence(count, seed) for count, seed in ((17, 1), (9, 2), (11, 3)))
    flight = streams.launch(
        streams.step(one, 17),
        streams.step(other, 4, Wanted.NOTHING),
        streams.step(two, 9, params=SEEDED),
    )
    other.advance(4)
    assert list(flight.sources) == [0, None, 1]
    following = streams.launch(
        streams.step(two, params=SEEDED, start=9, source=1),
        streams.step(other, 7, Wanted.SCORES),
        streams.step(one, start=17, source=0),
    )
    assert list(following.sources) == [0, None, 1]
    scores = following.results()[1].scores
    assert scores is not None and scores.shape == (6,)
    for sequence, params, place, next_place in ((one, GREEDY, 0, 2), (two, SEEDED, 2, 0)):
        first, second = tokens(flight)[place], tokens(following)[next_place]
        assert first is not None
        sequence.advance(sequence.num_tokens)
        sequence.append([first])
        assert tokens(streams.launch(streams.step(sequence, params=params))) == [second]


def test_a_stream_goes_on_from_its_only_row(runner: TritonRunner) -> None:
    streams = Streams(runner)
    sequence = streams.sequence(4, 2)
    first = streams.launch(streams.step(sequence, 4))
    second = streams.launch(streams.step(sequence, start=4, source=0))
    sequence.advance(4)
    [token] = tokens(first)
    # 0 stands in the packed row for a token that the host does not know.
    assert token
    sequence.append([token])
    assert tokens(streams.launch(streams.step(sequence))) == tokens(second)


def test_a_batch_comes_back_in_its_own_order(runner: TritonRunner) -> None:
    """Parts of one token are computed first, wherever they stand."""
    streams = Streams(runner)
    lengths = (5, 1, 12, 1, 3)
    made = [streams.sequence(length, seed) for seed, length in enumerate(lengths)]
    batch = [
        streams.step(sequence, length, params=None)
        for sequence, length in zip(made, lengths, strict=True)
    ]
    results = streams.launch(*batch).results()
    for sequence, result in zip(made, results, strict=True):
        alone = streams.sequence(sequence.num_tokens, sequence.seq_id)
        part = streams.step(alone, alone.num_tokens, params=None)
        [expected] = streams.launch(part).results()
        assert result.logits is not None and expected.logits is not None
        torch.testing.assert_close(result.logits, expected.logits, atol=1e-4, rtol=0)


def test_tokens_on_both_sides_in_one_step(runner: TritonRunner) -> None:
    streams = Streams(runner)
    given = (GREEDY, None, WITH_LOGPROBS, SEEDED)
    made = [streams.sequence(6, 5) for _ in given]
    results = streams.launch(
        *(streams.step(each, 6, params=params) for each, params in zip(made, given, strict=True))
    ).results()
    logits = results[1].logits
    assert logits is not None and results[2].logits is not None
    torch.testing.assert_close(results[2].logits, logits, atol=1e-4, rtol=0)
    for result, params in ((results[0], GREEDY), (results[3], SEEDED)):
        assert result.token is not None and result.logits is None
        assert result.token.token_id == sample(logits, params, 6).token_id


@needs_gpu
def test_the_device_says_how_long_it_was_at_a_step() -> None:
    """Also if it is asked long after: what the host did meanwhile is not in it."""
    device = torch.device(DEVICE)
    outputs, watch = Outputs(MAX_ROWS, device), Stopwatch(device)
    torch.cuda._sleep(20_000_000)  # cycles, some ten milliseconds
    flight = outputs.send([step()], [0], None, [None], watch)
    flight.results()
    first = flight.device_s()
    torch.cuda._sleep(200_000_000)
    torch.cuda.synchronize()
    assert first is not None and 0.002 < first < 0.1
    assert flight.device_s() == first


def test_without_a_watch_nothing_is_told_of_the_device() -> None:
    outputs = Outputs(MAX_ROWS, torch.device(DEVICE))
    flight = outputs.send([step()], [0], None, [None])
    flight.results()
    assert flight.device_s() is None
    assert Landed([StepResult()]).device_s() is None
    if not ON_GPU:
        watch = Stopwatch(torch.device(DEVICE))
        flight = outputs.send([step()], [0], None, [None], watch)
        flight.results()
        assert flight.device_s() is None
