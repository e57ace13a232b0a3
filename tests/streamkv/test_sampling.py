import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from streamkv.errors import ConfigError, InputError, ModelError, StreamKVError
from streamkv.sampling import SamplingParams, sample

NO_TRUNCATION: dict[str, Any] = {"temperature": 1.0, "top_p": 1.0}


def logits_of(seed: int, vocab_size: int = 50, scale: float = 2.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(vocab_size, generator=generator) * scale


def exact_distribution(
    logits: Sequence[float], params: SamplingParams, recent_ids: Sequence[int] = ()
) -> dict[int, float]:
    """The distribution that `sample` draws from, one token at a time in plain Python."""
    values = dict(enumerate(logits))
    for token_id in set(recent_ids):
        value = values[token_id]
        penalty = params.repetition_penalty
        values[token_id] = value / penalty if value > 0 else value * penalty
    values = {i: v / params.temperature for i, v in values.items() if v != -math.inf}
    ranked = sorted(values, key=lambda i: (-values[i], i))
    if params.top_k:
        ranked = ranked[: params.top_k]
    ranked = nucleus(ranked, probabilities(ranked, values), params.top_p)
    shares = probabilities(ranked, values)
    ranked = [i for i in ranked if shares[i] >= params.min_p * shares[ranked[0]]]
    return probabilities(ranked, values)


def probabilities(ids: list[int], values: dict[int, float]) -> dict[int, float]:
    highest = max(values[i] for i in ids)
    total = math.fsum(math.exp(values[i] - highest) for i in ids)
    return {i: math.exp(values[i] - highest) / total for i in ids}


def nucleus(ranked: list[int], shares: dict[int, float], top_p: float) -> list[int]:
    kept: list[int] = []
    reached = 0.0
    for token_id in ranked:
        if reached >= top_p:
            break
        kept.append(token_id)
        reached += shares[token_id]
    return kept


def draw_counts(
    logits: torch.Tensor, params: SamplingParams, draws: int, recent: Sequence[int]
) -> npt.NDArray[np.int64]:
    ids = [sample(logits, params, index, recent).token_id for index in range(draws)]
    return np.bincount(ids, minlength=logits.numel())


@pytest.mark.parametrize("vocab_size", [1, 2, 50, 49_152])
def test_temperature_zero_takes_the_argmax(vocab_size: int) -> None:
    for seed in range(20):
        logits = logits_of(seed, vocab_size)
        chosen = sample(logits, SamplingParams(temperature=0.0), token_index=seed)
        assert chosen.token_id == int(logits.argmax())


def test_a_tie_goes_to_the_lowest_id() -> None:
    logits = torch.tensor([0.0, 3.0, 3.0, 1.0])
    assert sample(logits, SamplingParams(temperature=0.0), 0).token_id == 1
    assert sample(logits, SamplingParams(top_k=1, seed=0), 0).token_id == 1
    assert sample(logits, SamplingParams(top_p=1e-9, seed=0), 0).token_id == 1


def test_margin_is_the_gap_of_the_raw_logits() -> None:
    logits = torch.tensor([1.0, 4.5, 2.0, 3.0])
    params = SamplingParams(temperature=0.25, repetition_penalty=9.0, seed=3)
    assert sample(logits, params, 0, [1]).margin == 1.5
    assert sample(torch.tensor([2.0, 2.0]), SamplingParams(temperature=0.0), 0).margin == 0.0
    assert sample(torch.tensor([2.0]), SamplingParams(temperature=0.0), 0).margin == math.inf


@pytest.mark.parametrize(
    ("options", "recent"),
    [
        ({}, []),
        ({"temperature": 0.7}, []),
        ({"temperature": 1.6}, []),
        ({"top_k": 1}, []),
        ({"top_k": 7}, []),
        ({"top_k": 500}, []),
        ({"top_p": 0.05}, []),
        ({"top_p": 0.6}, []),
        ({"top_p": 0.999}, []),
        ({"min_p": 0.2}, []),
        ({"min_p": 1.0}, []),
        ({"repetition_penalty": 1.8}, [3, 9, 9, 31]),
        ({"repetition_penalty": 0.5}, [0, 49]),
        ({"temperature": 0.8, "top_k": 20, "top_p": 0.8, "min_p": 0.05}, []),
        (
            {
                "temperature": 1.3,
                "top_k": 30,
                "top_p": 0.9,
                "min_p": 0.03,
                "repetition_penalty": 1.2,
            },
            list(range(25)),
        ),
    ],
    ids=str,
)
def test_draws_follow_the_exact_distribution(options: dict[str, Any], recent: list[int]) -> None:
    params = SamplingParams(**{**NO_TRUNCATION, **options, "seed": 2024})
    logits = logits_of(8)
    exact = exact_distribution(logits.tolist(), params, recent)
    draws = 4000
    counts = draw_counts(logits, params, draws, recent)
    assert set(np.flatnonzero(counts)) <= set(exact)
    # Cells that expect fewer than 8 draws are pooled, as the chi-square law needs.
    common = [i for i in exact if exact[i] * draws >= 8]
    rest = draws - sum(counts[i] for i in common)
    expected_rest = draws - sum(exact[i] * draws for i in common)
    statistic = sum((counts[i] - exact[i] * draws) ** 2 / (exact[i] * draws) for i in common)
    cells = len(common)
    if expected_rest >= 8:
        statistic += (rest - expected_rest) ** 2 / expected_rest
        cells += 1
    freedom = cells - 1
    # Mean plus four standard deviations of the chi-square law.
    assert statistic <= freedom + 4 * math.sqrt(2 * freedom) + 1e-9


@pytest.mark.parametrize(
    "options",
    [{"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.9}, {"top_k": 4, "top_p": 0.7}],
    ids=str,
)
def test_every_surviving_token_is_drawn_and_no_other(options: dict[str, Any]) -> None:
    logits = torch.tensor([1.0, 1.0, 1.0, 1.0, 1.0, 0.0, -math.inf])
    params = SamplingParams(**{**NO_TRUNCATION, **options, "seed": 5})
    drawn = {sample(logits, params, index).token_id for index in range(400)}
    assert drawn == set(exact_distribution(logits.tolist(), params))


def test_truncation_agrees_with_the_reference_on_a_real_vocabulary() -> None:
    logits = logits_of(1, 49_152, scale=4.0)
    params = SamplingParams(top_k=400, top_p=0.9, min_p=0.001, seed=1)
    exact = exact_distribution(logits.tolist(), params)
    drawn = [sample(logits, params, index).token_id for index in range(300)]
    assert set(drawn) <= set(exact)
    assert drawn[:6] == [36095, 29060, 13260, 41331, 47244, 36095]


def test_the_same_seed_and_index_draw_the_same() -> None:
    logits = logits_of(3)
    params = SamplingParams(seed=77, temperature=1.5, top_p=1.0)
    run = [sample(logits, params, index).token_id for index in range(50)]
    again = [sample(logits, params, index).token_id for index in reversed(range(50))]
    other = [
        sample(logits, SamplingParams(seed=78, **NO_TRUNCATION), i).token_id for i in range(50)
    ]
    assert run == again[::-1]
    assert run != other


def test_a_small_error_in_the_logits_flips_only_near_ties() -> None:
    params = SamplingParams(seed=9, **NO_TRUNCATION)
    generator = torch.Generator().manual_seed(0)
    flips = 0
    for index in range(500):
        logits = logits_of(index, 1000)
        nudged = logits + 1e-5 * torch.randn(1000, generator=generator)
        flips += sample(logits, params, index).token_id != sample(nudged, params, index).token_id
    assert flips <= 1


def test_logprobs_are_of_the_raw_distribution() -> None:
    logits = torch.tensor([0.0, 1.0, 2.0, 2.0])
    params = SamplingParams(temperature=0.01, top_k=1, repetition_penalty=5.0, logprobs=3, seed=0)
    logprob = sample(logits, params, 0, [0]).logprob
    assert logprob is not None
    exact = torch.log_softmax(logits.double(), dim=0).tolist()
    assert logprob.token_id == 2
    assert logprob.logprob == pytest.approx(exact[2], abs=1e-12)
    assert [token_id for token_id, _ in logprob.top] == [2, 3, 1]
    assert [value for _, value in logprob.top] == pytest.approx([exact[2], exact[3], exact[1]])


def test_logprobs_zero_reports_only_the_chosen_token() -> None:
    chosen = sample(logits_of(0), SamplingParams(temperature=0.0, logprobs=0), 0)
    assert chosen.logprob is not None and chosen.logprob.top == ()
    assert sample(logits_of(0), SamplingParams(temperature=0.0), 0).logprob is None


def test_more_logprobs_than_tokens_reports_all() -> None:
    logits = torch.tensor([0.0, -math.inf, 1.0])
    chosen = sample(logits, SamplingParams(temperature=0.0, logprobs=20), 0)
    assert chosen.logprob is not None
    assert [token_id for token_id, _ in chosen.logprob.top] == [2, 0, 1]
    assert chosen.logprob.top[2][1] == -math.inf


@pytest.mark.parametrize(
    "values",
    [[0.0, math.nan, 1.0], [math.nan] * 3, [-math.inf] * 3, [0.0, math.inf, 1.0]],
    ids=str,
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_damaged_logits_are_an_error(values: list[float], temperature: float) -> None:
    params = SamplingParams(temperature=temperature, seed=1)
    with pytest.raises(ModelError, match="token_index=12") as caught:
        sample(torch.tensor(values), params, 12)
    assert isinstance(caught.value, StreamKVError)


def test_minus_infinity_is_never_drawn() -> None:
    logits = torch.tensor([-math.inf, 0.5, -math.inf, 0.0])
    params = SamplingParams(seed=4, temperature=100.0, top_p=1.0)
    assert {sample(logits, params, index).token_id for index in range(100)} == {1, 3}


def test_a_missing_seed_is_an_error_only_when_noise_takes_part() -> None:
    assert SamplingParams(temperature=0.0).seed is None
    sample(logits_of(0), SamplingParams(temperature=0.0), 0)
    with pytest.raises(ConfigError, match="resolve_seed"):
        sample(logits_of(0), SamplingParams(), 0)


@pytest.mark.parametrize("token_id", [-1, 50])
def test_a_recent_id_outside_the_vocabulary_is_refused(token_id: int) -> None:
    params = SamplingParams(repetition_penalty=1.1, temperature=0.0)
    with pytest.raises(InputError, match="Use 0 to 49"):
        sample(logits_of(0), params, 0, [3, token_id])


def test_the_penalty_divides_positive_and_multiplies_negative_logits() -> None:
    logits = torch.tensor([4.0, 3.0, -1.0, -1.5])
    params = SamplingParams(temperature=0.0, repetition_penalty=2.0)
    assert sample(logits, params, 0, [0]).token_id == 1
    assert sample(logits, params, 0, [0, 1]).token_id == 0
    logits = torch.tensor([-1.0, -1.5])
    assert sample(logits, params, 0, [0, 0, 0]).token_id == 1


def test_half_precision_logits_are_widened_and_left_alone() -> None:
    logits = logits_of(6).to(torch.bfloat16)
    before = logits.clone()
    params = SamplingParams(seed=2, repetition_penalty=2.0)
    chosen = sample(logits, params, 5, [int(logits.argmax())])
    assert torch.equal(logits, before)
    assert chosen == sample(logits.float(), params, 5, [int(logits.argmax())])
