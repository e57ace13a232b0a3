"""Norms and gated SiLU of rows against torch, rounded where transformers rounds."""

from pathlib import Path

import pytest
import torch

from streamkv.kernels.native_build import NativeUnavailableError, build, find_compiler
from streamkv.kernels.native_rows import NativeRows

pytestmark = pytest.mark.skipif(find_compiler() is None, reason="there is no C compiler")
TOLERANCES = {torch.float32: 1e-6, torch.bfloat16: 8e-3}


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("native"))


def random(*shape: int, seed: int = 1) -> torch.Tensor:
    return 3.0 * torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("shape", [(1, 16), (7, 48), (5, 3, 64), (0, 32)], ids=str)
def test_rms_norm(library: Path, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x, weight = random(*shape).to(dtype), random(shape[-1], seed=2)
    found = NativeRows(library, dtype, 2).rms_norm(x, weight, 1e-5)
    scaled = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-5)
    expected = scaled.to(dtype).float() * weight
    tolerance = TOLERANCES[dtype]
    torch.testing.assert_close(found.float(), expected, atol=tolerance, rtol=tolerance)
    assert found.dtype == dtype and found.shape == x.shape


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_rows_may_be_parts_of_wider_ones(library: Path, dtype: torch.dtype) -> None:
    rows, wide = NativeRows(library, dtype, 1), random(6, 96).to(dtype)
    part, weight = wide[:, 32:64], random(32, seed=2)
    assert torch.equal(
        rows.rms_norm(part, weight, 1e-6), rows.rms_norm(part.contiguous(), weight, 1e-6)
    )
    gate, up = wide[:, :48], wide[:, 48:]
    expected = rows.gated_silu(gate.contiguous(), up.contiguous())
    assert torch.equal(rows.gated_silu(gate, up), expected)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_gated_silu(library: Path, dtype: torch.dtype) -> None:
    gate, up = random(9, 32).to(dtype), random(9, 32, seed=2).to(dtype)
    gate[0, :6] = torch.tensor([0.0, -0.0, 88.0, -88.0, 1e4, -1e4]).to(dtype)
    found = NativeRows(library, dtype, 2).gated_silu(gate, up)
    expected = torch.nn.functional.silu(gate.float()).to(dtype).float() * up.float()
    tolerance = TOLERANCES[dtype]
    torch.testing.assert_close(found.float(), expected, atol=tolerance, rtol=tolerance)


def test_a_type_that_it_does_not_know_is_refused(library: Path) -> None:
    with pytest.raises(NativeUnavailableError, match="float16"):
        NativeRows(library, torch.float16, 1)
