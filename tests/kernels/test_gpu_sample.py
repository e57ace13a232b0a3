"""The sampling kernels against plain Python: on a GPU if there is one, else in the interpreter."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from gpu_cases import DEVICE, ON_GPU
from torch import Tensor

from streamkv.errors import ConfigError
from streamkv.kernels import gpu_sample
from streamkv.kernels.gpu_sample import GREEDY, NOISY, PADDING, TILE, SampleRows
from streamkv.kernels.triton_sample import uniform
from streamkv.noise import gumbel, random_words

pytestmark = pytest.mark.gpu if ON_GPU else []

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
SIZES = [1, 2, 401, TILE - 1, TILE, TILE + 1, 2 * TILE + 3]
INF = math.inf

# The interpreter is numpy, which warns of what infinities make in damaged rows.
damaged = pytest.mark.filterwarnings("ignore:invalid value encountered")


def rows_of(kinds: list[int], seed: int = 5, token_index: int = 9) -> SampleRows:
    """Rows that keep every token at temperature 1."""

    def column(value: float, dtype: torch.dtype = torch.float64) -> Tensor:
        return torch.full((len(kinds),), value, dtype=dtype, device=DEVICE)

    seeds, token_indices = column(seed, torch.int64), column(token_index, torch.int64)
    edge_ids = column(2**31 - 1, torch.int64)
    return SampleRows(
        torch.tensor(kinds, dtype=torch.int64, device=DEVICE),
        seeds,
        token_indices,
        column(1.0),
        column(-INF),
        column(-INF),
        edge_ids,
    )


def choose(logits: Tensor, rows: SampleRows) -> tuple[list[int], list[list[float]]]:
    """Ids and (lead, highest) of each row; -7 where nothing was written."""
    num_rows, vocab_size = logits.shape
    scratch = gpu_sample.sample_scratch(vocab_size, num_rows, DEVICE)
    for part in (scratch.best, scratch.second, scratch.noisy):
        part.fill_(math.nan)
    out_ids = torch.full((num_rows,), -7, device=DEVICE)
    out_info = torch.full((num_rows, 2), -7.0, device=DEVICE)
    gpu_sample.find_highest(logits, rows, scratch, out_ids, out_info)
    gpu_sample.draw(logits, rows, scratch, out_ids, out_info)
    return out_ids.tolist(), out_info.tolist()


def random_logits(num_rows: int, vocab_size: int, *, rounded: bool = False) -> Tensor:
    generator = torch.Generator().manual_seed(vocab_size)
    logits = torch.randn(num_rows, vocab_size, generator=generator) * 2
    return logits.round() if rounded else logits


def ranked(row: Tensor) -> list[tuple[float, int]]:
    """(logit, id), likeliest first, of equal ones the lowest id first."""
    return sorted(
        ((x, i) for i, x in enumerate(row.tolist())), key=lambda each: (-each[0], each[1])
    )


@triton.jit
def uniform_kernel(seed, token_index, ids, out, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.arange(0, SIZE)
    found = uniform(tl.load(seed), tl.load(token_index), tl.load(ids + at))
    tl.store(out + at, found)


@pytest.mark.parametrize("seed", [0, 7, 2**31, 2**32 + 3, 2**63 - 1, 2**63, 2**64 - 1])
@pytest.mark.parametrize("token_index", [0, 2**31, 2**32 - 1, 2**32, 2**40 + 12345])
def test_the_noise_is_made_of_the_integers_of_the_cpu(seed: int, token_index: int) -> None:
    ids = np.random.default_rng(1).integers(0, 2**31, 64)
    ids[:3] = [0, 1, 2**31 - 1]
    signed = torch.tensor(np.array([seed], dtype=np.uint64).view(np.int64), device=DEVICE)
    out = torch.empty(64, dtype=torch.float64, device=DEVICE)
    index = torch.tensor([token_index], device=DEVICE)
    uniform_kernel[(1,)](signed, index, torch.tensor(ids, device=DEVICE).int(), out, SIZE=64)
    words = out.cpu().numpy() * 2.0**32 - 0.5
    assert np.array_equal(words.astype(np.uint64), random_words(seed, token_index, ids))
    assert np.array_equal(words, np.floor(words))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocab_size", SIZES)
@pytest.mark.parametrize("rounded", [False, True])
def test_the_highest_its_lead_and_the_lowest_id_of_a_tie(
    vocab_size: int, rounded: bool, dtype: torch.dtype
) -> None:
    logits = random_logits(3, vocab_size, rounded=rounded).to(dtype)
    ids, info = choose(logits.to(DEVICE), rows_of([GREEDY] * 3))
    for row, found, (lead, highest) in zip(logits.float(), ids, info, strict=True):
        first, second = [*ranked(row), (-INF, -1)][:2]
        assert (found, highest) == (first[1], first[0])
        assert lead == np.float32(first[0]) - np.float32(second[0])


@pytest.mark.parametrize("vocab_size", [1, 401, TILE + 1])
@pytest.mark.parametrize("rounded", [False, True])
def test_a_draw_is_the_argmax_of_logits_and_noise(vocab_size: int, rounded: bool) -> None:
    logits = random_logits(3, vocab_size, rounded=rounded)
    rows = rows_of([NOISY] * 3, token_index=2**33 + 1)
    rows.temperatures[:] = torch.tensor([0.25, 1.0, 3.0])
    ids, _ = choose(logits.to(DEVICE), rows)
    noise = gumbel(5, 2**33 + 1, np.arange(vocab_size))
    for row, found, temperature in zip(logits.double().numpy(), ids, [0.25, 1.0, 3.0], strict=True):
        assert found == int(np.argmax(row / temperature + noise))


def test_only_what_min_p_and_the_edge_keep_is_drawn() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0, 3.0, 3.0, -INF, 0.0]]).repeat(40, 1)
    drawn: dict[str, set[int]] = {}
    for name, columns in {
        "edge": {"edge_logits": 3.0, "edge_ids": 3},
        "edge of the second": {"edge_logits": 2.0, "edge_ids": 2},
        "min_p": {"log_min_ps": math.log(0.3)},
        "min_p of 1": {"log_min_ps": 0.0},
        "all": {},
    }.items():
        rows = rows_of([NOISY] * 40)
        rows.temperatures.fill_(20.0 if name != "min_p" else 1.0)
        rows.token_indices.copy_(torch.arange(40))
        for column, value in columns.items():
            getattr(rows, column).fill_(value)
        drawn[name] = set(choose(logits.to(DEVICE), rows)[0])
    assert drawn == {
        "edge": {1, 3},
        "edge of the second": {1, 2, 3, 4},
        "min_p": {1, 2, 3, 4},
        "min_p of 1": {1, 3, 4},
        "all": {0, 1, 2, 3, 4, 6},
    }


@pytest.mark.parametrize("kind", [GREEDY, NOISY])
def test_padding_is_neither_read_nor_written(kind: int) -> None:
    logits = random_logits(4, 401)
    expected = choose(logits.to(DEVICE), rows_of([kind] * 4))
    logits[1] = math.nan
    logits[3] = INF
    ids, info = choose(logits.to(DEVICE), rows_of([kind, PADDING, kind, PADDING]))
    assert (ids[1], ids[3], info[1], info[3]) == (-7, -7, [-7.0] * 2, [-7.0] * 2)
    assert ([ids[0], ids[2]], [info[0], info[2]]) == (expected[0][::2], expected[1][::2])


@damaged
@pytest.mark.parametrize("kind", [GREEDY, NOISY])
@pytest.mark.parametrize("place", [0, TILE - 1, TILE, 2 * TILE + 2])
def test_a_damaged_row_is_told_and_harms_no_other(place: int, kind: int) -> None:
    logits = random_logits(5, 2 * TILE + 3)
    expected = choose(logits.to(DEVICE), rows_of([kind] * 5))
    logits[1, place], logits[2, place] = math.nan, INF
    logits[3] = -INF
    ids, info = choose(logits.to(DEVICE), rows_of([kind] * 5))
    assert math.isnan(info[1][1]) and info[2][1] == INF and info[3][1] == -INF
    assert all(0 <= found < 2 * TILE + 3 for found in ids)
    assert (ids[0], ids[4], info[0], info[4]) == (
        *(expected[0][0], expected[0][4]),
        *(expected[1][0], expected[1][4]),
    )


def test_rows_may_lie_apart() -> None:
    wide = random_logits(4, 900).to(DEVICE)
    part = wide[::2, 30:431]
    rows = rows_of([NOISY, GREEDY])
    assert choose(part, rows) == choose(part.contiguous(), rows)


def test_no_rows() -> None:
    assert choose(torch.empty(0, 50, device=DEVICE), rows_of([])) == ([], [])


CUTS = [(1, 1.0), (3, 1.0), (7, 0.5), (10_000, 0.05), (10_000, 0.5), (10_000, 0.999), (5, 1.0)]


@pytest.mark.parametrize("vocab_size", [1, 2, 50, TILE + 1])
@pytest.mark.parametrize("rounded", [False, True])
def test_edges_are_those_of_a_walk_down_the_ranking(vocab_size: int, rounded: bool) -> None:
    logits = random_logits(len(CUTS) + 2, vocab_size, rounded=rounded)
    logits[:, 3::5] = -INF
    rows = rows_of([NOISY] * len(logits))
    rows.temperatures.copy_(torch.linspace(0.3, 2.0, len(logits)))
    cut_rows = [8, 0, 3, 1, 2, 5, 6]
    top_ks = torch.tensor([k for k, _ in CUTS], device=DEVICE)
    top_ps = torch.tensor([p for _, p in CUTS], dtype=torch.float64, device=DEVICE)
    chosen = torch.tensor(cut_rows, device=DEVICE)
    gpu_sample.find_edges(logits.to(DEVICE), rows, chosen, top_ks, top_ps)
    for row, (top_k, top_p) in zip(cut_rows, CUTS, strict=True):
        kept = [each for each in ranked(logits[row]) if each[0] > -INF][:top_k]
        temperature, highest = float(rows.temperatures[row]), kept[0][0]
        weights = [math.exp((logit - highest) / temperature) for logit, _ in kept]
        reached, count = 0.0, 0
        while top_p < 1.0 and reached < top_p:
            reached += weights[count] / math.fsum(weights)
            count += 1
        last = kept[(count or len(kept)) - 1]
        assert (float(rows.edge_logits[row]), int(rows.edge_ids[row])) == last
    for row in (4, 7):
        assert float(rows.edge_logits[row]) == -INF


def test_zeros_of_both_signs_are_a_tie() -> None:
    logits = torch.tensor([[-1.0, -0.0, 0.0, -0.0, 0.0]], device=DEVICE)
    rows, one = rows_of([NOISY]), torch.tensor([0], device=DEVICE)
    top_ps = torch.tensor([1.0], dtype=torch.float64, device=DEVICE)
    for top_k in (1, 2, 3, 4):
        gpu_sample.find_edges(logits, rows, one, one + top_k, top_ps)
        assert (float(rows.edge_logits[0]), int(rows.edge_ids[0])) == (0.0, top_k)


@damaged
@pytest.mark.parametrize("value", [math.nan, INF, -INF])
def test_edges_of_damaged_rows_do_no_harm(value: float) -> None:
    logits = random_logits(2, 50)
    logits[0, 4:] = value
    if value == -INF:
        logits[0] = value
    rows = rows_of([NOISY] * 2)
    top_ps = torch.tensor([0.5, 1e-9], dtype=torch.float64, device=DEVICE)
    top_ks = torch.tensor([9, 9], device=DEVICE)
    gpu_sample.find_edges(
        logits.to(DEVICE), rows, torch.tensor([0, 1], device=DEVICE), top_ks, top_ps
    )
    ids, _ = choose(logits.to(DEVICE), rows)
    assert 0 <= ids[0] < 50
    assert ids[1] == int(logits[1].argmax())


REFUSED = [
    (lambda a: {"logits": a["logits"].double()}, "float16, bfloat16 or float32"),
    (lambda a: {"logits": a["logits"][0]}, "vocab_size"),
    (lambda a: {"logits": a["logits"].t().contiguous().t()}, "last stride"),
    (lambda a: {"logits": torch.cat([a["logits"]] * 2)}, "at most 2 rows"),
    (lambda a: {"scratch": gpu_sample.sample_scratch(TILE + 1, 2, DEVICE)}, "scratch for it"),
    (lambda a: {"scratch": gpu_sample.sample_scratch(50, 1, DEVICE)}, "for 2 rows"),
    (lambda a: {"out_ids": a["out_ids"].int()}, "int64"),
    (lambda a: {"out_info": a["out_info"].t().contiguous().t()}, "float32"),
    (lambda a: {"out_info": a["out_info"][:1]}, "float32"),
]


@pytest.mark.parametrize(("change", "remedy"), REFUSED)
@pytest.mark.parametrize("call", [gpu_sample.find_highest, gpu_sample.draw])
def test_what_the_kernels_are_not_made_for_is_refused(call, change, remedy: str) -> None:  # type: ignore[no-untyped-def]
    arguments = {
        "logits": random_logits(2, 50).to(DEVICE),
        "rows": rows_of([GREEDY] * 2),
        "scratch": gpu_sample.sample_scratch(50, 2, DEVICE),
        "out_ids": torch.zeros(2, dtype=torch.int64, device=DEVICE),
        "out_info": torch.zeros(2, 2, device=DEVICE),
    }
    with pytest.raises(ConfigError, match=remedy):
        call(**(arguments | change(arguments)))


def test_columns_of_another_type_or_length_are_refused() -> None:
    rows = rows_of([NOISY] * 3)
    with pytest.raises(ConfigError, match=r"temperatures.*float64"):
        replace(rows, temperatures=rows.temperatures.float())
    with pytest.raises(ConfigError, match="one length"):
        replace(rows, seeds=rows.seeds[:2])
