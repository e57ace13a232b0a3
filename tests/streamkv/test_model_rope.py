from types import SimpleNamespace

import pytest
import torch
from torch import nn

from streamkv.errors import UnsupportedModelError
from streamkv.model_rope import find_rope, refuse_length_dependent


def rotary(values: list[float], name: str = "inv_freq", scaling: float = 1.0) -> nn.Module:
    """A rotary module as transformers makes them: frequencies in a buffer, a scaling beside."""
    module = nn.Module()
    module.register_buffer(name, torch.tensor(values), persistent=False)
    module.register_buffer(f"original_{name}", torch.tensor(values), persistent=False)
    module.attention_scaling = scaling
    return module


def decoder(*rotaries: nn.Module) -> nn.Module:
    module = nn.Module()
    module.parts = nn.ModuleList(rotaries)
    return module


def test_frequencies_are_widened_and_not_computed_anew() -> None:
    rope = find_rope(decoder(rotary([1.0, 0.1])), head_dim=8)
    assert rope.inv_freq.tolist() == [1.0, 0.10000000149011612]
    assert rope.rotary_dim == 4
    assert rope.attention_scaling == 1.0


def test_identity_changes_with_frequencies_and_scaling_alone() -> None:
    identities = [
        find_rope(decoder(rotary(values, scaling=scaling)), head_dim=8).identity
        for values, scaling in [([1.0, 0.1], 1.0), ([1.0, 0.2], 1.0), ([1.0, 0.1], 1.2)]
    ]
    assert len(set(identities)) == 3
    assert find_rope(decoder(rotary([1.0, 0.1])), head_dim=16).identity == identities[0]


def test_layers_with_equal_frequencies_of_their_own_are_one_rope() -> None:
    rope = find_rope(decoder(rotary([1.0, 0.1]), rotary([1.0, 0.1])), head_dim=4)
    assert rope.rotary_dim == 4


@pytest.mark.parametrize(
    ("base", "problem"),
    [
        (decoder(nn.Linear(2, 2)), "no rotary position embedding"),
        (decoder(rotary([1.0, 0.1]), rotary([1.0, 0.2])), "layers use different rotary"),
        (decoder(rotary([1.0], name="sliding_inv_freq")), "layers use different rotary"),
        (decoder(rotary([1.0, 0.1, 0.01])), r"wider than a head \(4\)"),
        (decoder(rotary([1.0, 0.1]).half()), "torch.float16"),
    ],
)
def test_what_tables_cannot_express_is_refused(base: nn.Module, problem: str) -> None:
    with pytest.raises(UnsupportedModelError, match=problem):
        find_rope(base, head_dim=4)


@pytest.mark.parametrize(
    "parameters",
    [
        {"rope_type": "dynamic", "rope_theta": 10000.0},
        {"rope_type": "longrope"},
        {"type": "dynamic"},
        {"full_attention": {"rope_type": "longrope"}, "sliding_attention": {}},
    ],
)
def test_frequencies_that_follow_the_length_are_refused(parameters: dict[str, object]) -> None:
    with pytest.raises(UnsupportedModelError, match="change with the length"):
        refuse_length_dependent(SimpleNamespace(rope_parameters=parameters))


def test_frequencies_that_stay_pass() -> None:
    refuse_length_dependent(SimpleNamespace(rope_parameters={"rope_type": "yarn", "factor": 4.0}))
    refuse_length_dependent(SimpleNamespace())
