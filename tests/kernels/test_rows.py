"""Norms, gates, embeddings and scores of rows against torch in float64."""

from collections.abc import Callable

import pytest
import torch
from gpu_cases import DEVICE, DTYPES, ON_GPU, TOLERANCES
from torch import Tensor
from torch.nn import functional

from streamkv.errors import ConfigError
from streamkv.kernels import rows

pytestmark = pytest.mark.gpu if ON_GPU else []
needs_gpu = pytest.mark.skipif(not ON_GPU, reason="needs a CUDA device")
every_type = pytest.mark.parametrize("dtype", DTYPES, ids=str)

EPS = 1e-3
PIECE = 1024  # of a gate and of scores


def random(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return values.to(DEVICE, dtype)


def close(found: Tensor, expected: Tensor) -> None:
    tolerance = TOLERANCES[found.dtype]
    torch.testing.assert_close(found.double(), expected, atol=tolerance, rtol=tolerance)


def normed(x: Tensor, weight: Tensor) -> Tensor:
    return functional.rms_norm(x.double(), x.shape[-1:], weight.double(), EPS)


@every_type
@pytest.mark.parametrize("width", [1, 16, 80, 96, 576, 2049])
def test_a_norm_of_rows_of_any_width(width: int, dtype: torch.dtype) -> None:
    x, weight = random(1, 3, width, dtype=dtype), random(2, width)
    out = rows.rms_norm(x, weight, EPS)
    assert out.dtype == dtype and out.is_contiguous()
    close(out, normed(x, weight))


@every_type
@pytest.mark.parametrize("width", [16, 80])
def test_a_norm_of_pieces_that_lie_inside_wider_rows(width: int, dtype: torch.dtype) -> None:
    """As heads do in rows of q, k and v: what lies beside them must not count."""
    whole = random(3, 4, 5, width, dtype=dtype)
    weight = random(4, width, dtype=dtype)
    expected = normed(whole, weight)
    whole[:, [0, 4]] = torch.nan
    for part in (slice(1, 4), slice(2, 3)):
        x = whole[:, part]
        assert not x.is_contiguous()
        out = rows.rms_norm(x, weight, EPS)
        assert out.shape == x.shape and out.is_contiguous()
        close(out, expected[:, part])


def test_a_norm_of_rows_with_a_stride() -> None:
    whole, weight = random(5, 6, 40), random(6, 24)
    for x in (whole[:, :24], whole[::2, 16:]):
        out = torch.full((len(x) + 1, 24), torch.nan, device=DEVICE)
        assert rows.rms_norm(x, weight, EPS, out[: len(x)]).data_ptr() == out.data_ptr()
        close(out[: len(x)], normed(x, weight))
        assert out[len(x) :].isnan().all()


def test_a_row_of_zeros_stays_one() -> None:
    out = rows.rms_norm(torch.zeros(2, 48, device=DEVICE), random(1, 48), EPS)
    assert not out.any()


@every_type
@pytest.mark.parametrize("width", [1, 64, PIECE - 1, PIECE, PIECE + 1, 2 * PIECE + 3])
def test_gates_of_any_width(width: int, dtype: torch.dtype) -> None:
    both = random(7, 3, 2 * width, dtype=dtype) * 3
    expected = functional.silu(both[:, :width].double()) * both[:, width:].double()
    close(rows.gated_silu(both), expected)


@pytest.mark.filterwarnings("ignore:overflow encountered")
def test_gates_far_from_zero_are_closed_or_open() -> None:
    gates = torch.tensor([[-1e4, -200.0, 0.0, 200.0, 1e4]], device=DEVICE)
    both = torch.cat([gates, torch.ones_like(gates)], 1)
    close(rows.gated_silu(both), torch.tensor([[0.0, 0.0, 0.0, 200.0, 1e4]]).double().to(DEVICE))


class Embedded:
    """Buffers with more rows than tokens; NaN until written."""

    def __init__(self, width: int, dtype: torch.dtype, num_rows: int, pdl: bool = False) -> None:
        self.table, self.norm = random(8, 40, width, dtype=dtype), random(9, width)
        shape = (num_rows + 2, width)
        self.out, self.scaled = torch.full((2, *shape), torch.nan, device=DEVICE).to(dtype)
        self.squares = torch.full((num_rows + 2,), torch.nan, device=DEVICE)
        self._pdl = pdl

    def run(self, ids: list[int], sources: list[int], sampled: list[int]) -> None:
        columns = [torch.tensor(each, device=DEVICE) for each in (ids, sources, sampled)]
        rows.embed(*columns, self.table, self.norm, self.out, self.scaled, self.squares, self._pdl)

    def check(self, tokens: list[int]) -> None:
        count, expected = len(tokens), self.table[tokens]
        assert torch.equal(self.out[:count], expected)
        close(self.scaled[:count], expected.double() * self.norm.double())
        close(self.squares[:count], expected.double().square().sum(1))
        for written in (self.out, self.scaled, self.squares):
            assert written[count:].isnan().all()


@every_type
@pytest.mark.parametrize("width", [16, 96, 576])
def test_tokens_come_from_the_host_or_from_the_step_before(width: int, dtype: torch.dtype) -> None:
    embedded = Embedded(width, dtype, 5)
    embedded.run([7, 0, 39, 0, 0], [-1, 2, -1, 0, 3], [11, 12, 13, 39])
    embedded.check([7, 13, 39, 11, 39])


def test_a_step_of_one_row_writes_one_row() -> None:
    embedded = Embedded(96, torch.float32, 1)
    embedded.run([3], [-1], [5])
    embedded.check([3])
    embedded.run([3], [0], [5])
    embedded.check([5])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("vocab_size", [1, 50, PIECE - 1, PIECE, PIECE + 1, 3 * PIECE + 17])
def test_scores_of_a_vocabulary_of_any_size(vocab_size: int, dtype: torch.dtype) -> None:
    logits = (random(10, 4, vocab_size) * 5).to(dtype)
    targets = torch.tensor([0, vocab_size - 1, vocab_size // 2, vocab_size // 3], device=DEVICE)
    found = rows.score(logits, targets)
    assert found.dtype == torch.float32
    expected = logits.double().log_softmax(1).gather(1, targets[:, None])[:, 0]
    torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=1e-5)


def test_tokens_that_cannot_come_have_no_share() -> None:
    """Whole pieces, and whole lanes of pieces, without any; one row has a single token left."""
    logits = random(11, 4, 2 * PIECE + 9)
    logits[0, :PIECE] = -torch.inf
    logits[1, PIECE:] = -torch.inf
    logits[2, ::2] = -torch.inf
    logits[3] = -torch.inf
    logits[3, 7] = -3.0
    targets = torch.tensor([PIECE, PIECE, 4, 7], device=DEVICE)
    found = rows.score(logits, targets)
    expected = logits.double().log_softmax(1).gather(1, targets[:, None])[:, 0]
    assert expected[1:].tolist() == [-torch.inf, -torch.inf, 0.0]
    torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("shift", [-3e4, 3e4])
def test_scores_do_not_overflow(shift: float) -> None:
    logits = random(12, 2, 1500) * 50
    targets = torch.tensor([1499, 2], device=DEVICE)
    expected = (logits + shift).double().log_softmax(1).gather(1, targets[:, None])[:, 0]
    found = rows.score(logits + shift, targets)
    torch.testing.assert_close(found.double(), expected, atol=1e-3, rtol=1e-6)


@pytest.mark.filterwarnings("ignore:invalid value encountered")
def test_damaged_logits_have_no_score() -> None:
    logits = random(13, 3, 70)
    logits[0, 3], logits[1] = torch.nan, -torch.inf
    found = rows.score(logits, torch.tensor([5, 5, 5], device=DEVICE))
    assert found.isnan().tolist() == [True, True, False]


def test_scores_of_rows_with_a_stride() -> None:
    whole = random(14, 3, 80)
    logits, targets = whole[:, :50], torch.tensor([49, 0, 7], device=DEVICE)
    expected = logits.double().log_softmax(1).gather(1, targets[:, None])[:, 0]
    close(rows.score(logits, targets), expected)


def test_no_rows() -> None:
    empty = torch.empty(0, 8, device=DEVICE)
    assert rows.rms_norm(empty, random(1, 8), EPS).shape == (0, 8)
    assert rows.rms_norm(empty.view(0, 2, 4), random(1, 4), EPS).shape == (0, 2, 4)
    assert rows.gated_silu(empty).shape == (0, 4)
    assert rows.score(empty, torch.empty(0, dtype=torch.int64, device=DEVICE)).shape == (0,)


X, WEIGHT, IDS = torch.zeros(4, 8), torch.zeros(8), torch.zeros(4, dtype=torch.int64)


def embed(**change: Tensor) -> None:
    given = {"ids": IDS, "sources": IDS, "sampled": IDS} | change
    table, squares = torch.zeros(9, 8), torch.zeros(4)
    rows.embed(**given, table=table, norm=WEIGHT, out=X, scaled=X, squares=squares, pdl=False)


@pytest.mark.parametrize(
    ("call", "remedy"),
    [
        (lambda: rows.rms_norm(WEIGHT, WEIGHT, EPS), r"x=\[8\].*\[rows, width\] or"),
        (lambda: rows.rms_norm(X[None, None], WEIGHT, EPS), r"x=\[1, 1, 4, 8\]"),
        (lambda: rows.rms_norm(X.t(), X[:, 0], EPS), r"x=\(1, 8\).* contiguous"),
        (lambda: rows.rms_norm(X.view(2, 4, 4)[:, ::2], X[0, :4], EPS), r"x=\(16, 8, 1\)"),
        (lambda: rows.rms_norm(X, WEIGHT[:7], EPS), r"weight=\[7\].* \[8\]"),
        (lambda: rows.rms_norm(X, X, EPS), r"weight=\[4, 8\]"),
        (lambda: rows.gated_silu(X[:, :7].contiguous()), r"both=\[4, 7\]"),
        (lambda: rows.gated_silu(X[:, :6]), r"both=\[4, 6\].* contiguous"),
        (lambda: rows.gated_silu(WEIGHT), r"both=\[8\]"),
        (lambda: embed(ids=IDS.int()), "ids=torch.int32.* int64"),
        (lambda: embed(sources=IDS.int()), "sources=torch.int32.* int64"),
        (lambda: embed(sampled=IDS.int()), "sampled=torch.int32.* int64"),
        (lambda: rows.score(X.t(), torch.zeros(8, dtype=torch.int64)), r"logits=\[8, 4\]"),
        (lambda: rows.score(WEIGHT, IDS), r"logits=\[8\]"),
        (lambda: rows.score(X, IDS[:3]), r"targets=\[3\].* int64 \[4\]"),
        (lambda: rows.score(X, IDS.int()), r"targets=\[4\].* int64 \[4\]"),
    ],
)
def test_what_the_kernels_are_not_made_for_is_refused(
    call: Callable[[], object], remedy: str
) -> None:
    with pytest.raises(ConfigError, match=remedy):
        call()


@needs_gpu
def test_an_overlapped_embedding_waits_for_the_token_before() -> None:
    """Tokens are written again and again just before they are read, by kernels in a row."""
    if torch.cuda.get_device_capability()[0] < 9:
        pytest.skip("needs Hopper or later")
    embedded = Embedded(576, torch.bfloat16, 5, pdl=True)
    ids, sources = torch.zeros(5, dtype=torch.int64, device=DEVICE), torch.arange(5, device=DEVICE)
    sampled, every = torch.zeros(5, dtype=torch.int64, device=DEVICE), []
    for turn in range(40):
        sampled.fill_(turn)
        rows.embed(
            ids, sources, sampled, embedded.table, embedded.norm, embedded.out, embedded.scaled,
            embedded.squares, True,
        )  # fmt: skip
        every.append(embedded.out[:5].clone())
    for turn, found in enumerate(every):
        assert torch.equal(found, embedded.table[turn].expand(5, -1))
