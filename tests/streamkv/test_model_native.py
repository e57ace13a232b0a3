"""Which models get a native step, and how their weights are laid out for it."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from streamkv.kernels.native_build import NativeUnavailableError
from streamkv.model import ModelAdapter
from streamkv.model_native import native_weights

MakeModel = Callable[..., Path]


def load(path: Path) -> ModelAdapter:
    return ModelAdapter.load(str(path))


def round_to_bfloat16(adapter: ModelAdapter) -> None:
    for parameter in adapter.model.parameters():
        parameter.data = parameter.data.bfloat16().float()


@pytest.mark.usefixtures("own_cache")
@pytest.mark.parametrize(
    ("model_type", "settings", "why"),
    [
        ("gpt_neox", {"num_key_value_heads": None, "head_dim": None}, "'gpt_neox'"),
        ("llama", {"hidden_act": "gelu"}, "no native decode step"),
        ("llama", {"mlp_bias": True}, "MLP has biases"),
    ],
)
def test_what_the_native_step_does_not_know_is_left_to_the_model(
    random_model_dir: MakeModel, model_type: str, settings: dict[str, object], why: str
) -> None:
    adapter = load(random_model_dir(model_type, **settings))
    with pytest.raises(NativeUnavailableError, match=why):
        native_weights(adapter)


@pytest.fixture
def adapter(tiny_model_dir: Path) -> ModelAdapter:
    return load(tiny_model_dir)


def test_weights_that_fit_are_kept_narrow_and_others_whole(adapter: ModelAdapter) -> None:
    layer = adapter.base.layers[1]  # type: ignore[index,union-attr]
    whole = native_weights(adapter).decoder
    assert whole.layers[1].q.dtype == torch.float32
    assert torch.equal(whole.layers[1].q, layer.self_attn.q_proj.weight)
    round_to_bfloat16(adapter)
    narrow = native_weights(adapter).decoder
    assert narrow.layers[1].q.dtype == narrow.head.dtype == torch.bfloat16
    for found, linear in (
        (narrow.layers[1].q, layer.self_attn.q_proj),
        (narrow.layers[1].o, layer.self_attn.o_proj),
        (narrow.layers[1].down, layer.mlp.down_proj),
    ):
        assert torch.equal(found.float(), linear.weight)


def test_one_number_that_does_not_fit_keeps_all_weights_whole(adapter: ModelAdapter) -> None:
    round_to_bfloat16(adapter)
    with torch.no_grad():
        adapter.base.layers[0].mlp.up_proj.weight[3, 5] = 1 + 2**-20  # type: ignore[index,union-attr]
    decoder = native_weights(adapter).decoder
    assert decoder.layers[0].q.dtype == decoder.layers[1].up.dtype == torch.float32
    assert decoder.layers[0].up[3, 5] == 1 + 2**-20


def test_tied_weights_are_packed_once(adapter: ModelAdapter) -> None:
    weights = native_weights(adapter)
    assert weights.decoder.embed is weights.decoder.head


def test_the_model_computes_the_same_from_the_packed_memory(adapter: ModelAdapter) -> None:
    """float32 stays: the memory is shared. Narrow copies would change the model's arithmetic."""
    rows = torch.randn(3, adapter.hidden_size, generator=torch.Generator().manual_seed(1))
    before = adapter.logits(rows)
    weights = native_weights(adapter)
    weights.give_to_model()
    assert adapter.model.lm_head.weight.data_ptr() == weights.decoder.head.data_ptr()  # type: ignore[union-attr]
    assert torch.equal(adapter.logits(rows), before)
    round_to_bfloat16(adapter)
    native_weights(adapter).give_to_model()
    assert {parameter.dtype for parameter in adapter.model.parameters()} == {torch.float32}
