"""Joining parts of one attention: the kernel and its twin against the softmax over all keys."""

import math

import pytest
import torch
from gpu_cases import DEVICE, DTYPES, ON_GPU, TOLERANCES
from torch import Tensor

from streamkv.errors import ConfigError
from streamkv.kernels import batch_reference, gpu

pytestmark = pytest.mark.gpu if ON_GPU else []

Result = tuple[Tensor, Tensor]
MERGES = [pytest.param(gpu.merge, id="kernel"), pytest.param(batch_reference.merge, id="twin")]


def parts_of(
    sizes: list[int], num_tokens: int, num_heads: int, head_dim: int, shift: float = 0.0
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Scores and values of all keys, and of each part its attention: out (NaN if empty) and lse."""
    generator = torch.Generator().manual_seed(3)
    rows = (num_tokens, num_heads)
    scores = 3 * torch.randn(*rows, sum(sizes), generator=generator).double() + shift
    values = torch.randn(*rows, sum(sizes), head_dim, generator=generator).double()
    outs, lses = [], []
    for score, value in zip(scores.split(sizes, 2), values.split(sizes, 2), strict=True):
        outs.append(
            attention(score, value)[0]
            if score.shape[2]
            else values.new_full((*rows, head_dim), math.nan)
        )
        lses.append(score.logsumexp(2))
    return scores, values, torch.stack(outs), torch.stack(lses)


def attention(scores: Tensor, values: Tensor) -> Result:
    return (scores.softmax(2)[..., None] * values).sum(2), scores.logsumexp(2)


def assert_near(found: Result, expected: Result, tolerance: float) -> None:
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(
            one.double().cpu(), other.double(), atol=tolerance, rtol=tolerance
        )


@pytest.mark.parametrize("merge", MERGES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [1, 16, 33, 80, 96, 256])
@pytest.mark.parametrize("num_heads", [1, 7])
def test_parts_give_the_softmax_over_all_keys(merge, dtype, head_dim: int, num_heads: int) -> None:  # type: ignore[no-untyped-def]
    scores, values, outs, lses = parts_of([5, 1, 0, 9], 11, num_heads, head_dim)
    found = merge(outs.to(DEVICE, dtype), lses.float().to(DEVICE))
    assert found[0].dtype == dtype and found[1].dtype == torch.float32
    assert_near(found, attention(scores, values), TOLERANCES[dtype])


@pytest.mark.parametrize("merge", MERGES)
@pytest.mark.parametrize("num_parts", [1, 2, 16, 37])
def test_any_number_of_parts(merge, num_parts: int) -> None:  # type: ignore[no-untyped-def]
    scores, values, outs, lses = parts_of([2] * num_parts, 3, 2, 16)
    found = merge(outs.float().to(DEVICE), lses.float().to(DEVICE))
    assert_near(found, attention(scores, values), TOLERANCES[torch.float32])


@pytest.mark.parametrize("merge", MERGES)
@pytest.mark.parametrize("num_parts", [0, 1, 2, 5])
@pytest.mark.parametrize("held", [math.nan, math.inf, 7.0])
def test_empty_parts_give_zeros_and_minus_infinity(merge, num_parts: int, held: float) -> None:  # type: ignore[no-untyped-def]
    outs = torch.full((num_parts, 3, 2, 16), held, device=DEVICE)
    lses = torch.full((num_parts, 3, 2), -math.inf, device=DEVICE)
    out, lse = merge(outs, lses)
    assert torch.equal(out, torch.zeros_like(out)) and lse.eq(-math.inf).all()
    out, lse = merge(outs, lses, torch.tensor([0.5, -40.0], device=DEVICE))
    assert torch.equal(out, torch.zeros_like(out))
    assert_near((out, lse), (out.cpu(), torch.tensor([0.5, -40.0]).expand(3, 2)), 1e-6)


@pytest.mark.parametrize("merge", MERGES)
def test_rows_are_empty_each_for_itself(merge) -> None:  # type: ignore[no-untyped-def]
    """One row has no part at all, one has the first only, one has the second only, one both."""
    scores, values, outs, lses = parts_of([3, 4], 4, 1, 16)
    scores[0], scores[1, :, 3:], scores[2, :, :3] = -math.inf, -math.inf, -math.inf
    lses[:, 0], lses[1, 1], lses[0, 2] = -math.inf, -math.inf, -math.inf
    outs[:, 0], outs[1, 1], outs[0, 2] = math.nan, math.nan, math.nan
    out, lse = (part.cpu() for part in merge(outs.float().to(DEVICE), lses.float().to(DEVICE)))
    assert not out[0].any() and lse[0].eq(-math.inf).all()
    expected = attention(scores[1:], values[1:])
    assert_near((out[1:], lse[1:]), expected, TOLERANCES[torch.float32])


@pytest.mark.parametrize("merge", MERGES)
@pytest.mark.parametrize("shift", [-3e4, -500.0, 500.0, 3e4])
def test_large_log_sum_exps_neither_overflow_nor_vanish(merge, shift: float) -> None:  # type: ignore[no-untyped-def]
    """What is right for the log-sum-exps as float32 holds them, not for rounded scores."""
    *_, outs, lses = parts_of([4, 4, 4], 5, 2, 16, shift)
    lses = lses.float().double()
    weights = lses.softmax(0)
    expected = (outs * weights[..., None]).sum(0), lses.logsumexp(0)
    out, lse = merge(outs.float().to(DEVICE), lses.float().to(DEVICE))
    assert_near((out, lse), expected, TOLERANCES[torch.float32])


@pytest.mark.parametrize("merge", MERGES)
@pytest.mark.parametrize("far_below", [-1e30, -200.0])
@pytest.mark.parametrize("order", [[0, 1, 1], [1, 0, 1], [1, 1, 0]])
def test_parts_far_below_another_leave_it_as_it_is(
    merge, far_below: float, order: list[int]
) -> None:  # type: ignore[no-untyped-def]
    outs = torch.stack([torch.ones(1, 1, 16), torch.full((1, 1, 16), 1e30)])[order]
    lses = torch.tensor([[[100.0]], [[far_below]]])[order]
    out, lse = merge(outs.to(DEVICE), lses.to(DEVICE))
    assert torch.equal(out, torch.ones_like(out)) and lse.eq(100.0).all()


@pytest.mark.parametrize("merge", MERGES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_sink_logit_takes_weight_once(merge, dtype: torch.dtype) -> None:  # type: ignore[no-untyped-def]
    scores, values, outs, lses = parts_of([3, 3, 3], 4, 3, 16)
    logits = torch.tensor([0.5, 6.0, -9.0])
    with_logit = torch.cat([scores, logits.double()[None, :, None].expand(4, 3, 1)], 2)
    with_nothing = torch.cat([values, torch.zeros(4, 3, 1, 16)], 2)
    found = merge(outs.to(DEVICE, dtype), lses.float().to(DEVICE), logits.to(DEVICE))
    assert_near(found, attention(with_logit, with_nothing), TOLERANCES[dtype])


@pytest.mark.parametrize("merge", MERGES)
def test_what_is_not_a_number_stays_to_be_seen(merge) -> None:  # type: ignore[no-untyped-def]
    outs = torch.ones(2, 1, 3, 16, device=DEVICE)
    lses = torch.zeros(2, 1, 3, device=DEVICE)
    outs[0, 0, 0, 5] = math.nan
    lses[1, 0, 1] = math.nan
    out, lse = merge(outs, lses)
    assert out[0, 0, 5].isnan() and lse[0, 0].isfinite()
    assert out[0, 1].isnan().all() and lse[0, 1].isnan()
    assert out[0, 2].eq(1.0).all() and lse[0, 2].isfinite()


@pytest.mark.parametrize("order", [(0, 1, 2), (1, 0, 2), (2, 1, 0)])
def test_parts_may_lie_in_any_order_of_dimensions(order: tuple[int, int, int]) -> None:
    scores, values, outs, lses = parts_of([3, 2], 5, 4, 24)
    back = sorted(range(3), key=lambda axis: order[axis])
    laid_outs = outs.float().permute(*order, 3).contiguous().permute(*back, 3).to(DEVICE)
    laid_lses = lses.float().permute(*order).contiguous().permute(*back).to(DEVICE)
    assert_near(gpu.merge(laid_outs, laid_lses), attention(scores, values), 1e-5)


def test_no_rows() -> None:
    out, lse = gpu.merge(
        torch.zeros(2, 0, 4, 16, device=DEVICE), torch.zeros(2, 0, 4, device=DEVICE)
    )
    assert out.shape == (0, 4, 16) and lse.shape == (0, 4)


REFUSED = [
    (torch.zeros(2, 3, 16), torch.zeros(2, 3), None, "num_q_heads, head_dim"),
    (torch.zeros(2, 3, 4, 16).double(), torch.zeros(2, 3, 4), None, "float16, bfloat16 or float32"),
    (torch.zeros(2, 3, 16, 4).mT, torch.zeros(2, 3, 4), None, "last stride"),
    (torch.zeros(2, 3, 4, 257), torch.zeros(2, 3, 4), None, "1 to 256"),
    (torch.zeros(2, 3, 4, 16), torch.zeros(2, 4, 3), None, r"float32 .2, 3, 4"),
    (torch.zeros(2, 3, 4, 16), torch.zeros(2, 3, 4).half(), None, "float32"),
    (torch.zeros(2, 3, 4, 16), torch.zeros(2, 3, 4), torch.zeros(3), r"contiguous .4"),
]


@pytest.mark.parametrize(("outs", "lses", "sink_logits", "remedy"), REFUSED)
def test_what_the_kernel_is_not_made_for_is_refused(
    outs: Tensor, lses: Tensor, sink_logits: Tensor | None, remedy: str
) -> None:
    with pytest.raises(ConfigError, match=remedy):
        gpu.merge(outs, lses, sink_logits)
