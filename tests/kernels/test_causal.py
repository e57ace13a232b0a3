"""Dense attention with its log-sum-exp: `plain` by definition, the other operators by `plain`."""

import math

import pytest
import torch
from gpu_cases import DEVICE, DTYPES, ON_GPU

from streamkv.kernels.causal import choose_squares, plain, plain_squares, repeated
from streamkv.kernels.gpu_shape import Shape

pytestmark = pytest.mark.gpu if ON_GPU else []


def rows(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """[N, heads, T, dim], laid out token by token."""
    count, heads, length, dim = shape
    generator = torch.Generator().manual_seed(seed)
    made = torch.randn(count, length, heads, dim, generator=generator)
    return made.to(DEVICE, dtype).transpose(1, 2)


def shape_of(dtype: torch.dtype, group: int, head_dim: int) -> Shape:
    return Shape(1, 2, 16, head_dim, 2 * group, head_dim // 2, dtype)


@pytest.mark.parametrize("is_causal", [True, False])
def test_plain_by_definition(is_causal: bool) -> None:
    q, k, v = rows(2, 4, 5, 8), rows(2, 2, 5, 8, seed=1), rows(2, 2, 5, 8, seed=2)
    out, lse = plain(q, k, v, 0.3, is_causal)
    assert out.shape == (2, 5, 4, 8) and lse.shape == (2, 4, 5)
    for n, head, i in [(0, 0, 0), (1, 1, 2), (0, 2, 4), (1, 3, 3)]:
        seen = range(i + 1) if is_causal else range(5)
        scores = [0.3 * float(q[n, head, i].double() @ k[n, head // 2, j].double()) for j in seen]
        total = sum(math.exp(score) for score in scores)
        mixed = sum(
            math.exp(score) / total * v[n, head // 2, j].double().cpu()
            for score, j in zip(scores, seen, strict=True)
        )
        assert float(lse[n, head, i]) == pytest.approx(math.log(total), abs=1e-5)
        torch.testing.assert_close(out[n, i, head].double().cpu(), mixed, atol=1e-5, rtol=1e-5)


def test_plain_of_more_keys_than_queries() -> None:
    q, k, v = rows(1, 2, 3, 8), rows(1, 2, 7, 8, seed=1), rows(1, 2, 7, 8, seed=2)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, scale=0.25)
    torch.testing.assert_close(plain(q, k, v, 0.25, False)[0], expected.transpose(1, 2))


def test_repeated_keys_are_those_of_each_query_head() -> None:
    q, k, v = rows(1, 6, 9, 8), rows(1, 2, 9, 8, seed=1), rows(1, 2, 9, 8, seed=2)
    for one, other in zip(
        repeated(plain)(q, k, v, 0.5, True), plain(q, k, v, 0.5, True), strict=True
    ):
        torch.testing.assert_close(one, other)


def test_outputs_are_contiguous_whatever_the_strides() -> None:
    q = rows(1, 4, 9, 16)[:, :, 2:7]
    for attend in (plain, repeated(plain)):
        out, lse = attend(q, q[:, :2], q[:, :2], 0.25, True)
        assert out.is_contiguous() and lse.is_contiguous() and lse.dtype == torch.float32


@pytest.mark.skipif(ON_GPU, reason="of a machine without a GPU")
def test_without_a_gpu_it_is_plain_and_not_called_fast() -> None:
    found = choose_squares(shape_of(torch.float32, 2, 16), "cpu")
    assert found == plain_squares() and not found.is_fast


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("group", [1, 4])
def test_what_is_chosen_is_right(dtype: torch.dtype, head_dim: int, group: int) -> None:
    squares = choose_squares(shape_of(dtype, group, head_dim), DEVICE)
    q = rows(2, 2 * group, 130, head_dim, dtype=dtype)
    k, v = (rows(2, 2, 130, head_dim, dtype=dtype, seed=seed) for seed in (1, 2))
    scale = head_dim**-0.5
    for recurring in (True, False):
        for is_causal in (True, False):
            found = squares.attend(q, k, v, scale, is_causal=is_causal, recurring=recurring)
            expected = plain(q, k, v, scale, is_causal)
            for one, other in zip(found, expected, strict=True):
                torch.testing.assert_close(one, other, atol=2e-2, rtol=2e-2)


@pytest.mark.skipif(not ON_GPU, reason="needs a GPU")
def test_half_precision_has_a_fast_operator() -> None:
    assert choose_squares(shape_of(torch.bfloat16, 4, 128), DEVICE).is_fast
