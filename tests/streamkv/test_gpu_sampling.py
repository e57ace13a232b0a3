"""The GPU's choice against the CPU's: on a GPU if there is one, else in Triton's interpreter."""

import math
import random
from typing import Any

import pytest
import torch
from torch import Tensor

from streamkv.errors import ConfigError, ModelError
from streamkv.gpu_sampling import Draw, GpuSampler, samples_on_gpu
from streamkv.sampling import sample
from streamkv.sampling_params import SamplingParams

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
UNTOUCHED = -7

pytestmark = pytest.mark.gpu if ON_GPU else []
needs_gpu = pytest.mark.skipif(not ON_GPU, reason="needs a CUDA device")


def random_params(rng: random.Random, **fixed: Any) -> SamplingParams:
    options = {
        "temperature": rng.choice([0.0, 0.2, 0.7, 1.0, 1.7, 100.0]),
        "top_k": rng.choice([0, 0, 0, 1, 2, 40, 5000]),
        "top_p": rng.choice([1.0, 1.0, 1.0, 1e-9, 0.5, 0.95, 1.0 - 1e-16]),
        "min_p": rng.choice([0.0, 0.0, 1e-6, 0.05, 1.0]),
        "seed": rng.choice([0, rng.getrandbits(53), rng.getrandbits(64), 2**64 - 1]),
    }
    return SamplingParams(**(options | fixed))


def random_draws(rng: random.Random, count: int, **fixed: Any) -> list[Draw]:
    indices = [0, rng.randrange(10_000), 2**32 - 1, 2**32 + rng.randrange(10_000), 2**45 + 1]
    return [Draw(random_params(rng, **fixed), rng.choice(indices)) for _ in range(count)]


def random_logits(rng: random.Random, num_rows: int, vocab_size: int) -> Tensor:
    """Some rows have few values, and so many ties, and some have tokens that cannot come."""
    generator = torch.Generator().manual_seed(rng.getrandbits(32))
    logits = torch.randn(num_rows, vocab_size, generator=generator)
    logits *= torch.tensor([rng.choice([0.1, 2.0, 8.0]) for _ in range(num_rows)])[:, None]
    for row in range(num_rows):
        if rng.random() < 0.5:
            logits[row] = logits[row].round()
        if rng.random() < 0.3:
            logits[row, rng.randrange(2) :: 3] = -math.inf
    logits[:, rng.randrange(vocab_size)] = 1.0
    return logits


class Chosen:
    """What a call of `sample` wrote."""

    def __init__(self, num_rows: int) -> None:
        self.ids = torch.full((num_rows,), UNTOUCHED, device=DEVICE)
        self.info = torch.full((num_rows, 2), float(UNTOUCHED), device=DEVICE)

    def check(self, logits: Tensor, draws: list[Draw]) -> None:
        for row, draw in enumerate(draws):
            expected = sample(logits[row], draw.params, draw.token_index)
            assert int(self.ids[row]) == expected.token_id, (row, draw)
            assert float(self.info[row, 0]) == pytest.approx(expected.margin, rel=1e-6)
            assert float(self.info[row, 1]) == float(logits[row].max())
        assert self.ids[len(draws) :].eq(UNTOUCHED).all()
        assert self.info[len(draws) :].eq(UNTOUCHED).all()


def choose(sampler: GpuSampler, logits: Tensor, draws: list[Draw]) -> Chosen:
    chosen = Chosen(len(logits))
    staged = sampler.stage(draws)
    sampler.sample(logits.to(DEVICE), staged, chosen.ids, chosen.info)
    return chosen


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("vocab_size", "steps"), [(1, 2), (2, 4), (50, 10), (401, 10), (2051, 3)])
def test_rows_of_every_kind_get_the_token_of_the_cpu(
    vocab_size: int, steps: int, dtype: torch.dtype
) -> None:
    """One sampler serves all steps: nothing of a step is left in the next."""
    rng = random.Random(vocab_size)
    sampler = GpuSampler(vocab_size, 9, DEVICE)
    for _ in range(steps * (10 if ON_GPU else 1)):
        logits = random_logits(rng, rng.randint(1, 9), vocab_size).to(dtype)
        draws = random_draws(rng, rng.randint(0, len(logits)))
        choose(sampler, logits, draws).check(logits, draws)


@pytest.mark.parametrize(
    "fixed",
    [
        {"temperature": 0.0},
        {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "temperature": 1.3},
        {"top_k": 0, "top_p": 1.0, "min_p": 0.01, "temperature": 0.8},
        {"temperature": 0.7, "top_p": 0.95, "top_k": 0, "min_p": 0.0},
        {"temperature": 1.1, "top_p": 1.0, "top_k": 64, "min_p": 0.02},
    ],
    ids=str,
)
def test_the_vocabulary_of_a_real_model_gets_the_tokens_of_the_cpu(fixed: dict[str, Any]) -> None:
    rng, vocab_size, count = random.Random(3), 49_152 + 3, 64 if ON_GPU else 2
    logits = random_logits(rng, count, vocab_size)
    draws = random_draws(rng, count, **fixed)
    choose(GpuSampler(vocab_size, count, DEVICE), logits, draws).check(logits, draws)


@pytest.mark.parametrize("top_k", [1, 2, 3, 4, 5, 6])
@pytest.mark.parametrize("top_p", [1.0, 0.25, 0.5, 0.75])
def test_ties_at_the_edge_go_to_the_lowest_ids(top_k: int, top_p: float) -> None:
    logits = torch.tensor([[-4.0, 1.0, 1.0, -math.inf, 1.0, 1.0, -9.0]]).repeat(18, 1)
    draws = [
        Draw(SamplingParams(temperature=0.5, top_k=top_k, top_p=top_p, seed=seed), seed)
        for seed in range(18)
    ]
    chosen = choose(GpuSampler(7, 18, DEVICE), logits, draws)
    chosen.check(logits, draws)
    if top_k <= 4 and top_p == 1.0:
        assert set(chosen.ids.tolist()) == set([1, 2, 4, 5][:top_k])


def test_the_cut_of_a_step_is_gone_in_the_next() -> None:
    sampler, logits = GpuSampler(50, 12, DEVICE), random_logits(random.Random(8), 12, 50)
    for options in [{"top_k": 2}, {}, {"min_p": 1.0}, {}, {"top_p": 0.1}, {}]:
        params = SamplingParams(**({"temperature": 100.0, "top_p": 1.0, "seed": 4} | options))
        draws = [Draw(params, index) for index in range(12)]
        choose(sampler, logits, draws).check(logits, draws)


@pytest.mark.filterwarnings("ignore:invalid value encountered")
@pytest.mark.parametrize("fixed", [{}, {"temperature": 0.0}, {"top_p": 0.9, "temperature": 1.0}])
def test_damaged_logits_raise_what_the_cpu_raises(fixed: dict[str, Any]) -> None:
    rng = random.Random(6)
    logits, draws = random_logits(rng, 5, 401), random_draws(rng, 5, **fixed)
    logits[1, 17] = math.nan
    logits[2, 300] = math.inf
    logits[3] = -math.inf
    chosen = choose(GpuSampler(401, 5, DEVICE), logits, draws)
    assert chosen.ids.ge(0).all() and chosen.ids.lt(401).all()
    for row, draw in enumerate(draws):
        if row in (0, 4):
            GpuSampler.check(float(chosen.info[row, 1]), draw.token_index)
            assert (
                int(chosen.ids[row]) == sample(logits[row], draw.params, draw.token_index).token_id
            )
            continue
        with pytest.raises(ModelError) as expected:
            sample(logits[row], draw.params, draw.token_index)
        with pytest.raises(ModelError) as found:
            GpuSampler.check(float(chosen.info[row, 1]), draw.token_index)
        assert str(found.value) == str(expected.value)


def test_a_draw_without_a_seed_is_refused_and_the_next_step_is_unharmed() -> None:
    rng, sampler = random.Random(1), GpuSampler(50, 4, DEVICE)
    logits, draws = random_logits(rng, 4, 50), random_draws(rng, 3)
    with pytest.raises(ConfigError, match="resolve_seed"):
        sampler.stage([*draws, Draw(SamplingParams(), 4)])
    choose(sampler, logits, draws).check(logits, draws)
    greedy = [Draw(SamplingParams(temperature=0.0), 4)]
    choose(sampler, logits, greedy).check(logits, greedy)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, True),
        ({"temperature": 0.0}, True),
        ({"top_k": 5, "top_p": 0.5, "min_p": 0.1}, True),
        ({"logprobs": 0}, False),
        ({"logprobs": 5, "temperature": 0.0}, False),
        ({"repetition_penalty": 1.1}, False),
        ({"repetition_penalty": 0.9}, False),
    ],
    ids=str,
)
def test_what_the_gpu_can_choose(options: dict[str, Any], expected: bool) -> None:
    assert samples_on_gpu(SamplingParams(**options)) is expected


@needs_gpu
def test_options_are_not_rewritten_while_their_copy_is_pending() -> None:
    """The device is kept busy, so that every copy is pending when the next step is staged."""
    rng, sampler = random.Random(2), GpuSampler(401, 8, DEVICE)
    steps = [(random_logits(rng, 8, 401), random_draws(rng, 8)) for _ in range(6)]
    choose(sampler, *steps[0])  # compiles
    on_device = [logits.to(DEVICE) for logits, _ in steps]
    results = [Chosen(8) for _ in steps]
    torch.cuda.synchronize()
    for logits, (_, draws), chosen in zip(on_device, steps, results, strict=True):
        torch.cuda._sleep(50_000_000)
        sampler.sample(logits, sampler.stage(draws), chosen.ids, chosen.info)
    for (logits, draws), chosen in zip(steps, results, strict=True):
        chosen.check(logits, draws)


@needs_gpu
def test_nothing_waits_for_the_device() -> None:
    rng, sampler = random.Random(4), GpuSampler(2051, 8, DEVICE)
    logits = random_logits(rng, 8, 2051)
    draws = random_draws(rng, 8, temperature=1.0, top_p=0.9)
    choose(sampler, logits, draws)
    on_device, chosen = logits.to(DEVICE), Chosen(8)
    torch.cuda.set_sync_debug_mode("error")
    try:
        sampler.sample(on_device, sampler.stage(draws), chosen.ids, chosen.info)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    chosen.check(logits, draws)


@needs_gpu
def test_a_captured_graph_samples_what_is_staged_before_each_replay() -> None:
    rng, sampler = random.Random(5), GpuSampler(2051, 8, DEVICE)
    logits = random_logits(rng, 8, 2051)
    uncut = {"top_k": 0, "top_p": 1.0}
    choose(sampler, logits, random_draws(rng, 8, **uncut))
    fixed, chosen, graph = logits.to(DEVICE), Chosen(8), torch.cuda.CUDAGraph()
    staged = sampler.stage(random_draws(rng, 8, **uncut))
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        sampler.sample(fixed, staged, chosen.ids, chosen.info)
    for count in (8, 3, 5):
        draws = random_draws(rng, count, **uncut)
        sampler.stage(draws)
        chosen.ids.fill_(UNTOUCHED)
        chosen.info.fill_(UNTOUCHED)
        graph.replay()
        chosen.check(logits, draws)


def staged_columns(sampler: GpuSampler, draws: list[Draw]) -> list[list[int]]:
    """What is on the device after a `stage`: of rows that are read, and where padding is."""
    staged = sampler.stage(draws)
    rows = sampler._columns.cpu()
    cut = [column[: staged.num_cut].tolist() for column in rows[7:]]
    kept = [column[: len(draws)].tolist() for column in rows[1:7]]
    return [rows[0].tolist(), *kept, *cut, [staged.num_draws, staged.num_cut]]


@pytest.mark.parametrize("seed", range(8))
def test_what_is_staged_does_not_depend_on_what_was_staged_before(seed: int) -> None:
    """Options that stay are not written anew; which step they were written for plays no part."""
    rng = random.Random(seed)
    options = [
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=0.8, seed=3, top_k=5),
        SamplingParams(temperature=0.8, seed=3, min_p=0.1),
        SamplingParams(temperature=0.8, seed=4, top_p=0.5),
    ]
    sampler = GpuSampler(100, 6, DEVICE)
    params: list[SamplingParams] = []
    for turn in range(40):
        if rng.random() < 0.4:
            params = rng.choices(options, k=rng.randint(0, 6))
        draws = [Draw(each, rng.randrange(1000)) for each in params]
        expected = staged_columns(GpuSampler(100, 6, DEVICE), draws)
        assert staged_columns(sampler, draws) == expected, turn
