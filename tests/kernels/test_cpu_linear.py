"""Every way that `linear` takes, against torch's own in float64."""

import pytest
import torch

from streamkv.kernels.cpu_linear import FEW_ROWS, MIN_NUMPY_ELEMENTS, linear

TOLERANCES = {torch.float32: (1e-5, 1e-5), torch.bfloat16: (2e-2, 2e-2)}
SHAPES = [(960, 576), (33, 17), (1, 5), (5, 1)]


@pytest.mark.parametrize("dtype", TOLERANCES.keys(), ids=str)
@pytest.mark.parametrize("num_rows", [1, 2, FEW_ROWS, FEW_ROWS + 1])
@pytest.mark.parametrize(("num_out", "num_in"), SHAPES)
@pytest.mark.parametrize("with_bias", [False, True])
def test_equals_torch(
    num_out: int, num_in: int, num_rows: int, dtype: torch.dtype, with_bias: bool
) -> None:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(num_rows, num_in, generator=generator).to(dtype)
    weight = (torch.randn(num_out, num_in, generator=generator) / num_in**0.5).to(dtype)
    bias = torch.randn(num_out, generator=generator).to(dtype) if with_bias else None
    out = linear(x, weight, bias)
    wide_bias = bias.double() if bias is not None else None
    expected = torch.nn.functional.linear(x.double(), weight.double(), wide_bias)
    atol, rtol = TOLERANCES[dtype]
    torch.testing.assert_close(out.double(), expected, atol=atol, rtol=rtol)
    assert out.dtype == dtype


def test_shapes_cover_both_sides_of_the_numpy_limit() -> None:
    sizes = [num_out * num_in for num_out, num_in in SHAPES]
    assert min(sizes) < MIN_NUMPY_ELEMENTS < max(sizes)


@pytest.mark.parametrize("dtype", TOLERANCES.keys(), ids=str)
def test_leading_dimensions_are_kept(dtype: torch.dtype) -> None:
    weight = torch.eye(4, 6).to(dtype)
    x = torch.arange(12.0).view(2, 1, 6).to(dtype)
    assert linear(x, weight).tolist() == [[[0, 1, 2, 3]], [[6, 7, 8, 9]]]
    assert linear(x[0, 0], weight).tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("num_rows", [1, 3])
@pytest.mark.parametrize("dtype", TOLERANCES.keys(), ids=str)
def test_strided_weights_and_rows(dtype: torch.dtype, num_rows: int) -> None:
    weight = torch.randn(1024, 1024).to(dtype).t()
    x = torch.randn(num_rows, 2048).to(dtype)[:, ::2]
    atol, rtol = TOLERANCES[dtype]
    expected = torch.nn.functional.linear(x.double(), weight.double())
    torch.testing.assert_close(linear(x, weight).double(), expected, atol=40 * atol, rtol=rtol)


def test_parameters_are_taken() -> None:
    layer = torch.nn.Linear(1024, 1024)
    x = torch.randn(1, 1024)
    with torch.no_grad():
        out = linear(x, layer.weight, layer.bias)
        torch.testing.assert_close(out, layer(x), atol=1e-5, rtol=1e-5)
    with torch.inference_mode():
        torch.testing.assert_close(linear(x, layer.weight, layer.bias), out, rtol=0, atol=0)
