from pathlib import Path

import pytest
import torch
from transformers import AttentionInterface, AutoModelForCausalLM, PreTrainedModel

from streamkv.errors import UnsupportedModelError
from streamkv.model_attention import (
    IMPLEMENTATION,
    attend_nothing,
    register_attention,
    run_base,
    trace_attention,
)

IDS = torch.tensor([[5, 6, 7]])


@pytest.fixture
def base(tiny_model_dir: Path) -> PreTrainedModel:
    """The decoder of the tiny model, with our attention."""
    register_attention()
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir, attn_implementation=IMPLEMENTATION)
    return model.model


def test_registering_again_changes_nothing() -> None:
    register_attention()
    known = AttentionInterface()[IMPLEMENTATION]
    register_attention()
    assert AttentionInterface()[IMPLEMENTATION] is known


def test_trace_tells_how_each_layer_attends(base: PreTrainedModel) -> None:
    calls = trace_attention(base, {"input_ids": IDS})
    assert [call.layer for call in calls] == [0, 1]
    assert [call.module for call in calls] == [layer.self_attn for layer in base.layers]
    call = calls[1]
    assert (call.num_q_heads, call.num_kv_heads) == (6, 2)
    assert (call.head_dim, call.value_dim, call.scale) == (16, 16, 0.25)
    assert call.sliding_window is None
    assert call.refused == ()


def test_function_gets_unrotated_heads_of_each_token(base: PreTrainedModel) -> None:
    seen: list[tuple[int, torch.Tensor, torch.Tensor]] = []

    def attend(
        layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
    ) -> torch.Tensor:
        assert (q.shape, k.shape, v.shape) == ((3, 6, 16), (3, 2, 16), (3, 2, 16))
        seen.append((layer, q, k))
        return attend_nothing(layer, q, k, v, scale)

    with torch.no_grad():
        hidden = run_base(base, {"input_ids": IDS}, attend)
        first = base.layers[0]
        normed = first.input_layernorm(base.embed_tokens(IDS))
        expected = first.self_attn.k_proj(normed).view(3, 2, 16)
    assert hidden.shape == (1, 3, 96)
    assert [layer for layer, _, _ in seen] == [0, 1]
    torch.testing.assert_close(seen[0][2], expected, rtol=0, atol=0)


def test_embeddings_may_stand_for_ids(base: PreTrainedModel) -> None:
    with torch.no_grad():
        by_ids = run_base(base, {"input_ids": IDS}, attend_nothing)
        embeds = base.get_input_embeddings()(IDS)
        by_embeds = run_base(base, {"inputs_embeds": embeds}, attend_nothing)
    assert torch.equal(by_ids, by_embeds)


def test_layer_that_gets_no_function_is_refused(base: PreTrainedModel) -> None:
    with pytest.raises(UnsupportedModelError, match="do not pass keyword arguments on"):
        base(input_ids=IDS, use_cache=False)
