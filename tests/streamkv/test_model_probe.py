from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from streamkv.errors import UnsupportedModelError
from streamkv.model import ModelAdapter
from streamkv.model_probe import probe, probe_once, probe_positions, relative_difference

pytestmark = pytest.mark.usefixtures("own_cache")

MLA = {
    "num_key_value_heads": 6,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
    "first_k_dense_replace": 3,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 2,
}
SCALED_BY_POSITION = {
    "rope_type": "default",
    "rope_theta": 10000.0,
    "llama_4_scaling_beta": 0.1,
    "original_max_position_embeddings": 1024,
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 8,
    "long_factor": [2.0] * 8,
}
GEMMA3N = {
    "vocab_size_per_layer_input": 128,
    "hidden_size_per_layer_input": 16,
    "num_kv_shared_layers": 1,
    "laurel_rank": 8,
    "altup_num_inputs": 2,
    "activation_sparsity_pattern": [0.0] * 3,
    "layer_types": ["full_attention", "sliding_attention", "full_attention"],
}
GPT2 = {"n_embd": 48, "n_layer": 3, "n_head": 6, "n_positions": 512, "head_dim": None}
MAMBA = dict.fromkeys(
    ["intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim"]
)
REFUSED = [
    ("cohere", {}, r"layer 0 differs over blocks .* other rotary pairs"),
    ("glm", {}, r"layer 0 differs over blocks"),
    ("smollm3", {"num_hidden_layers": 4}, r"layer 3 differs over blocks .* without rope"),
    ("ministral3", {"rope_parameters": SCALED_BY_POSITION}, "layer 0 at position 4096 differs"),
    ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "'dynamic'"),
    ("phi3", {"rope_parameters": LONGROPE}, "'longrope'"),
    ("gpt2", GPT2, "no rotary position embedding"),
    ("gemma2", {"query_pre_attn_scalar": 16}, "layer 0 uses a soft cap on attention scores"),
    ("gemma3_text", {}, "layers use different rotary embeddings"),
    ("gemma3n_text", GEMMA3N, "layers use different rotary embeddings"),
    ("gpt_oss", {"num_local_experts": 4}, "layer 0 uses learned sink logits"),
    ("deepseek_v3", MLA, r"is refused"),
    ("mamba", MAMBA, "linear_attention"),
    ("stablelm", {}, "do not pass keyword arguments on to attention"),
    ("falcon", {"head_dim": None}, "does not let attention be replaced"),
]


@pytest.mark.parametrize(("model_type", "settings", "reason"), REFUSED)
def test_model_that_would_come_out_wrong_is_refused(
    model_type: str, settings: dict[str, Any], reason: str, random_model_dir: Callable[..., Path]
) -> None:
    directory = random_model_dir(model_type, **settings)
    with pytest.raises(UnsupportedModelError, match=reason) as caught:
        ModelAdapter.load(str(directory))
    assert str(caught.value).startswith(f"model={str(directory)!r} is refused: ")
    assert str(caught.value).endswith(
        "Use a decoder of the Llama, Mistral, Qwen2 or Qwen3 type, such as 'smollm2-135m'."
    )


@pytest.fixture
def adapter(random_model_dir: Callable[..., Path]) -> ModelAdapter:
    """A model with a sliding window that passed the probe."""
    return ModelAdapter.load(str(random_model_dir("mistral", sliding_window=48)))


def test_wrong_frequency_is_found(adapter: ModelAdapter) -> None:
    adapter.inv_freq[2] *= 1.001
    with pytest.raises(UnsupportedModelError, match="layer 0 differs over blocks"):
        probe(adapter)


def test_window_that_is_off_by_one_is_found(adapter: ModelAdapter) -> None:
    adapter.sliding_windows = (48, 49, 48)
    with pytest.raises(UnsupportedModelError, match="layer 1 differs over blocks"):
        probe(adapter)


def test_head_that_is_used_wrongly_is_found(random_model_dir: Callable[..., Path]) -> None:
    adapter = ModelAdapter.load(str(random_model_dir("granite", logits_scaling=4.0)))
    adapter.logits = adapter.model.lm_head  # type: ignore[method-assign]  # leaves out the scaling
    with pytest.raises(UnsupportedModelError, match="logits made from hidden states differ"):
        probe(adapter)


def test_weights_that_passed_are_not_probed_again(adapter: ModelAdapter) -> None:
    adapter.inv_freq *= 2
    probe_once(adapter)
    adapter.fingerprint = bytes(16)
    with pytest.raises(UnsupportedModelError, match="layer 0 differs over blocks"):
        probe_once(adapter)
    with pytest.raises(UnsupportedModelError, match="layer 0 differs over blocks"):
        probe_once(adapter)


def test_positions_reach_the_trained_length() -> None:
    assert probe_positions(8192) == [1, 64, 512, 4096, 8055]
    assert probe_positions(131072) == [1, 64, 512, 4096, 32768, 130935]
    assert probe_positions(138) == [1]
    assert probe_positions(100) == []


def test_difference_is_relative_and_nan_is_infinite() -> None:
    expected = torch.tensor([3.0, -3.0, 3.0])
    assert relative_difference(torch.tensor([3.0, -3.0, 4.5]), expected) == 0.5
    assert relative_difference(torch.tensor([3.0, torch.nan, 3.0]), expected) == torch.inf


@pytest.mark.model
def test_real_model_passes(model_dir: Path) -> None:
    probe(ModelAdapter.load(str(model_dir), dtype="bfloat16"))
