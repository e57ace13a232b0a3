from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from streamkv.errors import UnsupportedModelError
from streamkv.model_attention import IMPLEMENTATION, register_attention
from streamkv.model_excerpt import choose_layers, make_excerpt


def load(directory: Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    register_attention()
    return AutoModelForCausalLM.from_pretrained(
        directory, dtype=dtype, attn_implementation=IMPLEMENTATION
    )


def test_first_two_of_each_kind_are_chosen() -> None:
    assert choose_layers(["a"] * 5) == [0, 1]
    assert choose_layers(["a", "b", "a", "a", "b", "c", "b"]) == [0, 1, 2, 4, 5]


@pytest.mark.parametrize(
    ("model_type", "settings", "expected"),
    [
        ("llama", {"num_hidden_layers": 5}, (0, 1)),
        ("qwen2", {"use_sliding_window": True, "max_window_layers": 3}, (0, 1, 3, 4)),
        ("smollm3", {"num_hidden_layers": 6}, (0, 1, 3)),
    ],
)
def test_layers_that_work_alike_are_one_kind(
    model_type: str,
    settings: dict[str, int],
    expected: tuple[int, ...],
    random_model_dir: Callable[..., Path],
) -> None:
    directory = random_model_dir(model_type, **{"num_hidden_layers": 5, **settings})
    assert make_excerpt(load(directory).base_model, num_tokens=4).layers == expected


def test_own_outputs_are_those_of_the_whole_model(random_model_dir: Callable[..., Path]) -> None:
    directory = random_model_dir("qwen3", num_hidden_layers=4)
    excerpt = make_excerpt(load(directory).base_model, num_tokens=20)
    whole = AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager").model
    found: list[torch.Tensor] = []
    for layer in whole.layers[:2]:
        layer.self_attn.register_forward_hook(lambda module, x, y: found.append(y[0]))
    with torch.no_grad():
        whole(inputs_embeds=excerpt.embeds)
        own = excerpt.own_outputs(0)
    assert len(own) == 2
    for ours, expected in zip(own, found, strict=True):
        torch.testing.assert_close(ours, expected, rtol=0, atol=1e-5)


def test_whole_model_is_left_as_it_was(random_model_dir: Callable[..., Path]) -> None:
    model = load(random_model_dir("llama"), torch.bfloat16)
    before = {name: value.clone() for name, value in model.named_parameters()}
    excerpt = make_excerpt(model.base_model, num_tokens=8)
    with torch.no_grad():
        excerpt.own_outputs(3)
    assert excerpt.embeds.dtype == torch.float32
    assert {parameter.dtype for parameter in excerpt.base.parameters()} == {torch.float32}
    assert model.config.num_hidden_layers == 3
    assert model.config._attn_implementation == IMPLEMENTATION
    assert [layer.self_attn.layer_idx for layer in model.model.layers] == [0, 1, 2]
    for name, value in model.named_parameters():
        assert value.dtype == torch.bfloat16
        assert torch.equal(value, before[name])


def test_decoder_without_a_list_of_layers_is_refused(tiny_model_dir: Path) -> None:
    base = load(tiny_model_dir).base_model
    base.layers = nn.Sequential(*base.layers)
    with pytest.raises(UnsupportedModelError, match="no list of its layers"):
        make_excerpt(base, num_tokens=4)
