"""A native step of many tokens against the model's own code."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from test_native_kernels import SHAPES

from streamkv.kernels.native_build import NativeUnavailableError, build, find_compiler
from streamkv.kernels.native_rows import NativeRows
from streamkv.kernels.rope import RopeTables
from streamkv.model import ModelAdapter
from streamkv.model_native import native_weights
from streamkv.native_forward import NativeForward, side_by_side
from streamkv.native_kernels import check_forward

pytestmark = [
    pytest.mark.usefixtures("own_cache"),
    pytest.mark.skipif(find_compiler() is None, reason="there is no C compiler"),
]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("native"))


def forward_of(adapter: ModelAdapter, library: Path, eps: float | None = None) -> NativeForward:
    decoder = native_weights(adapter).decoder
    return NativeForward(
        adapter.base,
        NativeRows(library, adapter.model.dtype, 2),
        decoder.num_q_heads,
        decoder.num_kv_heads,
        decoder.head_dim,
        decoder.eps if eps is None else eps,
        decoder.scale,
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("model_type", "settings"), SHAPES)
@pytest.mark.parametrize("packed", [False, True])
def test_hidden_states_are_those_of_the_model(
    random_model_dir: Callable[..., Path],
    library: Path,
    model_type: str,
    settings: dict[str, object],
    dtype: str,
    packed: bool,
) -> None:
    adapter = ModelAdapter.load(str(random_model_dir(model_type, **settings)), dtype)
    if packed:
        native_weights(adapter).give_to_model()
    ids = torch.tensor([[5 + 7 * index % 90 for index in range(33)]])

    def attend(
        layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
    ) -> torch.Tensor:
        group = q.shape[1] // k.shape[1]
        mixed = torch.cumsum((k + v).float(), 0).repeat_interleave(group, 1)
        return (q.float() * scale + mixed / (1 + layer)).to(q.dtype)

    found = forward_of(adapter, library).hidden(ids, attend)
    expected = adapter.hidden(ids, attend)
    difference = (found.float() - expected.float()).norm() / expected.float().norm()
    assert difference < (1e-5 if dtype == "float32" else 2e-2)


def test_neighbours_in_memory_are_one_matrix() -> None:
    run = torch.arange(60.0).view(10, 6)
    parts = [run[:4], run[4:5], run[5:10]]
    whole = side_by_side(parts)
    assert whole is not None and torch.equal(whole, run)
    assert whole.data_ptr() == run.data_ptr()
    assert side_by_side([run[:4], run[5:10]]) is None
    assert side_by_side([run[4:5], run[:4]]) is None
    assert side_by_side([run[:4], run[4:5].clone()]) is None


def test_a_forward_that_differs_from_the_model_is_not_used(
    tiny_model_dir: Path, library: Path
) -> None:
    adapter = ModelAdapter.load(str(tiny_model_dir))
    rope = RopeTables(adapter.inv_freq, 128)
    check_forward(adapter, forward_of(adapter, library), rope)
    with pytest.raises(NativeUnavailableError, match="differs"):
        check_forward(adapter, forward_of(adapter, library, eps=0.5), rope)
