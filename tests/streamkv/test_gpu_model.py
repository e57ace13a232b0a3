"""Our own steps of a GPU against the model's own code, and when they are left out."""

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from gpu_cases import DEVICE, ON_GPU
from torch import Tensor, nn

from streamkv.gpu_decoder import GpuDecoder
from streamkv.gpu_forward import GpuForward
from streamkv.gpu_model import CHECKED_ROWS, GpuModel, mix
from streamkv.gpu_weights import GpuWeights, gpu_weights
from streamkv.kernels.small_batch import Tile
from streamkv.kernels.tile_choice import TileChoice, Timing
from streamkv.model import ModelAdapter

pytestmark = [
    pytest.mark.usefixtures("own_cache"),
    pytest.mark.filterwarnings("ignore:overflow encountered"),
    *([pytest.mark.gpu] if ON_GPU else []),
]
needs_gpu = pytest.mark.skipif(not ON_GPU, reason="needs a CUDA device")

# Decode steps of our own are for bfloat16, which Triton's interpreter does not know.
DTYPE, LIMIT = ("bfloat16", 8e-2) if ON_GPU else ("float32", 1e-5)

MakeModel = Callable[..., Path]
SHAPES = [
    pytest.param("llama", {}, id="llama"),
    pytest.param("llama", {"attention_bias": True}, id="all-biases"),
    pytest.param("llama", {"tie_word_embeddings": True, "num_hidden_layers": 1}, id="one-layer"),
    pytest.param("mistral", {"head_dim": 24, "sliding_window": None}, id="mistral"),
    pytest.param("qwen2", {"num_key_value_heads": 1}, id="qwen2"),
    pytest.param("qwen3", {"hidden_size": 72, "head_dim": 32}, id="qwen3"),
]


def load(directory: Path, dtype: str = "float32") -> ModelAdapter:
    """A model whose norms and biases are random, too: a new model has ones and zeros.

    Weights are moved out of the mapped file, in which they do not lie as those of a GPU do.
    """
    adapter = ModelAdapter.load(str(directory), dtype, DEVICE)
    generator = torch.Generator().manual_seed(31)
    for name, parameter in adapter.model.named_parameters():
        parameter.data = parameter.data.clone()
        if parameter.dim() == 1:
            drawn = 0.5 * torch.randn(parameter.shape, generator=generator)
            parameter.data.copy_(drawn if name.endswith("bias") else 1.0 + drawn)
    return adapter


def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """A row mixes the ones before it; differs by layer and scale."""
    before = torch.cumsum((k + 2.0 * v).float(), 0).repeat_interleave(q.shape[1] // k.shape[1], 1)
    return (q.float() * scale + before / (len(q) + layer)).to(q.dtype)


def some_ids(adapter: ModelAdapter, num_tokens: int, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(adapter.vocab_size, (num_tokens,), generator=generator).to(DEVICE)


def difference(found: Tensor, expected: Tensor) -> float:
    assert found.shape == expected.shape and found.dtype == expected.dtype
    return float((found.float() - expected.float()).norm() / expected.float().norm())


def own_logits(adapter: ModelAdapter, ids: Tensor) -> Tensor:
    return adapter.head(adapter.hidden(ids[None], attend))


class SmallestTile(TileChoice):
    """Measures nothing: every tile would have to be compiled."""

    def choose(self, name: str, tiles: Sequence[Tile], timing: Timing) -> Tile:
        return tiles[-1]


def decoder_of(weights: GpuWeights, max_rows: int) -> GpuDecoder:
    pdl = ON_GPU and torch.cuda.get_device_capability()[0] >= 9
    decoder = GpuDecoder(weights, max_rows, SmallestTile(None, "any"), pdl)
    for num_rows in {min(16, max_rows), max_rows}:
        decoder.prepare(num_rows)
    return decoder


def from_host(decoder: GpuDecoder, ids: Tensor) -> Tensor:
    return decoder.logits(ids, torch.full_like(ids, -1), torch.zeros_like(ids[:1]), attend)


@pytest.mark.parametrize(("model_type", "settings"), SHAPES)
def test_hidden_states_are_those_of_the_model(
    random_model_dir: MakeModel, model_type: str, settings: dict[str, object]
) -> None:
    adapter = load(random_model_dir(model_type, **settings), DTYPE)
    forward = GpuForward(gpu_weights(adapter))
    for num_tokens in (1, 2, 33):
        ids = some_ids(adapter, num_tokens)[None]
        assert difference(forward.hidden(ids, attend), adapter.hidden(ids, attend)) < LIMIT


@pytest.mark.parametrize(("model_type", "settings"), SHAPES)
def test_logits_of_a_decode_step_are_those_of_the_model(
    random_model_dir: MakeModel, model_type: str, settings: dict[str, object]
) -> None:
    """Small steps after large ones: rows that the large one left behind change nothing."""
    adapter = load(random_model_dir(model_type, **settings), DTYPE)
    decoder = decoder_of(gpu_weights(adapter), 17)
    for seed, num_rows in enumerate((17, 3, 1, 16)):
        ids = some_ids(adapter, num_rows, seed)
        assert difference(from_host(decoder, ids), own_logits(adapter, ids)) < LIMIT


def test_a_decode_step_reads_tokens_that_were_chosen_on_the_device(
    random_model_dir: MakeModel,
) -> None:
    adapter = load(random_model_dir("llama"), DTYPE)
    decoder = decoder_of(gpu_weights(adapter), 5)
    sampled = torch.tensor([90, 91, 92, 93, 94], device=DEVICE)
    ids, sources = torch.tensor([[7, 0, 8, 0], [-1, 4, -1, 0]], device=DEVICE)
    found = decoder.logits(ids, sources, sampled, attend)
    tokens = torch.tensor([7, 94, 8, 90], device=DEVICE)
    assert difference(found, own_logits(adapter, tokens)) < LIMIT


def test_attention_may_write_where_the_decode_step_reads(random_model_dir: MakeModel) -> None:
    adapter = load(random_model_dir("qwen2"), DTYPE)
    decoder = decoder_of(gpu_weights(adapter), 6)
    assert decoder.mixed.shape == (16, adapter.num_q_heads, adapter.head_dim)

    def attend_in_place(layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        return decoder.mixed[: len(q)].copy_(attend(layer, q, k, v, scale))

    ids = some_ids(adapter, 6)
    sources = torch.full_like(ids, -1)
    found = decoder.logits(ids, sources, ids, attend_in_place)
    assert difference(found, own_logits(adapter, ids)) < LIMIT


def bytes_held(*owners: Any) -> int:
    """Bytes of all storages that are reached, each counted once."""
    storages: dict[int, int] = {}

    def visit(value: Any) -> None:
        if isinstance(value, Tensor):
            storage = value.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
        elif isinstance(value, tuple):
            for each in value:
                visit(each)
        elif isinstance(value, nn.Module):
            visit(tuple(value.parameters()))
        elif hasattr(value, "__slots__"):
            visit(tuple(getattr(value, name) for name in value.__slots__))

    visit(owners)
    return sum(storages.values())


@pytest.mark.parametrize(("model_type", "settings"), SHAPES)
def test_merged_weights_are_held_once_and_the_model_runs_the_same(
    random_model_dir: MakeModel, model_type: str, settings: dict[str, object]
) -> None:
    adapter = load(random_model_dir(model_type, **settings), DTYPE)
    ids = some_ids(adapter, 20)
    before, expected = bytes_held(adapter.model), own_logits(adapter, ids)
    named = {name: weight.clone() for name, weight in adapter.model.named_parameters()}
    weights = gpu_weights(adapter)
    biases = [layer.qkv.bias for layer in weights.layers]
    merged = sum(bias.nbytes for bias in biases if bias is not None)
    assert bytes_held(adapter.model, weights) == before + merged
    found = own_logits(adapter, ids)
    # A GPU may multiply matrices another way where they lie differently.
    assert difference(found, expected) < LIMIT if ON_GPU else torch.equal(found, expected)
    for name, weight in adapter.model.named_parameters():
        assert torch.equal(weight, named[name])


def test_parameters_are_views_of_the_merged_weights(random_model_dir: MakeModel) -> None:
    """Rows in the order of q, k, v and of gate, up; a change of one is a change of both."""
    adapter = load(random_model_dir("qwen2"), DTYPE)
    weights = gpu_weights(adapter)
    for module, merged in zip(adapter.base.layers, weights.layers, strict=True):  # type: ignore[arg-type]
        attention, mlp = module.self_attn, module.mlp
        for number, part in enumerate((attention.q_proj, attention.k_proj, attention.v_proj)):
            part.weight.data.fill_(number)
        for number, part in enumerate((mlp.gate_proj, mlp.up_proj)):
            part.weight.data.fill_(number)
        assert merged.qkv.weight[:, 0].tolist() == [0.0] * 96 + [1.0] * 32 + [2.0] * 32
        assert merged.gate_up.weight[:, 0].tolist() == [0.0] * 64 + [1.0] * 64
        assert merged.gate_up.gated and merged.gate_up.num_out == 64


def test_a_projection_without_a_bias_among_others_gets_zeros(random_model_dir: MakeModel) -> None:
    adapter = load(random_model_dir("qwen2"), DTYPE)
    attention: Any = adapter.base.layers[1].self_attn  # type: ignore[index,union-attr]
    attention.k_proj.bias = None
    weights = gpu_weights(adapter)
    bias = weights.layers[1].qkv.bias
    assert bias is not None and not bias[96:128].any() and bias[128:].all()
    ids = some_ids(adapter, 9)[None]
    found = GpuForward(weights).hidden(ids, attend)
    assert difference(found, adapter.hidden(ids, attend)) < LIMIT


def test_every_element_of_the_stand_in_for_attention_counts() -> None:
    q, k, v = (torch.randn(3, heads, 4, requires_grad=True) for heads in (6, 2, 2))
    mix(0, q, k, v, 1.0).sum().backward()
    assert all(each.grad is not None and each.grad.all() for each in (q, k, v))


def shift_own_norms(adapter: ModelAdapter) -> None:
    """Change what the model's own code computes, and nothing that our steps read."""
    for module in adapter.model.modules():
        if hasattr(module, "variance_epsilon"):
            module.variance_epsilon = 0.5


def test_our_forward_is_used_where_it_agrees(
    random_model_dir: MakeModel, caplog: pytest.LogCaptureFixture
) -> None:
    adapter = load(random_model_dir("qwen3"))
    with caplog.at_level(logging.INFO, "streamkv.gpu_model"):
        model = GpuModel(adapter, 4, None, decodes=True)
    assert not caplog.records
    # Decode steps of our own are made for bfloat16 alone.
    assert model.decoder is None
    ids = some_ids(adapter, 12)[None]
    expected = adapter.hidden(ids, attend)
    shift_own_norms(adapter)
    assert difference(model.hidden(ids, attend), expected) < 1e-5
    assert difference(adapter.hidden(ids, attend), expected) > 1e-2


def is_left_to_the_model(model: GpuModel, adapter: ModelAdapter) -> bool:
    ids = some_ids(adapter, 12)[None]
    assert model.decoder is None
    return torch.equal(model.hidden(ids, attend), adapter.hidden(ids, attend))


@pytest.mark.parametrize(
    ("model_type", "settings", "reason"),
    [
        ("gpt_neox", {"num_key_value_heads": None, "head_dim": None}, "'gpt_neox'"),
        ("llama", {"hidden_act": "gelu"}, "'llama'"),
        ("llama", {"mlp_bias": True}, "its MLP has biases"),
    ],
)
def test_another_shape_runs_the_models_own_code_for_one_reason(
    random_model_dir: MakeModel,
    caplog: pytest.LogCaptureFixture,
    model_type: str,
    settings: dict[str, object],
    reason: str,
) -> None:
    adapter = load(random_model_dir(model_type, **settings))
    with caplog.at_level(logging.INFO, "streamkv.gpu_model"):
        model = GpuModel(adapter, 4, None, decodes=True)
    [record] = caplog.records
    assert record.levelno == logging.INFO and reason in record.getMessage()
    assert is_left_to_the_model(model, adapter)


def test_a_forward_that_differs_from_the_model_is_not_used(
    random_model_dir: MakeModel, caplog: pytest.LogCaptureFixture
) -> None:
    adapter = load(random_model_dir("llama"))
    shift_own_norms(adapter)
    with caplog.at_level(logging.INFO, "streamkv.gpu_model"):
        model = GpuModel(adapter, 4, None, decodes=True)
    [record] = caplog.records
    assert record.levelno == logging.WARNING
    assert "forward differs from the model by" in record.getMessage()
    assert is_left_to_the_model(model, adapter)


def test_a_small_difference_is_seen_too(
    random_model_dir: MakeModel, caplog: pytest.LogCaptureFixture
) -> None:
    """One head norm of one layer, read wrongly by a hundredth."""
    adapter = load(random_model_dir("qwen3", num_hidden_layers=1))
    norm: Any = adapter.base.layers[0].self_attn.k_norm  # type: ignore[index,union-attr]
    norm.register_forward_hook(lambda module, inputs, output: output * 1.01)
    GpuModel(adapter, 4, None, decodes=False)
    assert "is not used" in caplog.text


def test_a_token_that_rounding_moves_far_does_not_keep_our_forward_away() -> None:
    """A row counts by its median over several tokens; a row that is always wrong is seen."""
    adapter: Any = SimpleNamespace(
        vocab_size=100, model=SimpleNamespace(dtype=torch.float32, device="cpu")
    )
    model = GpuModel.__new__(GpuModel)
    model._adapter = adapter

    def few(ids: Tensor) -> Tensor:
        return (ids % 4 == 0).float()

    def always(ids: Tensor) -> Tensor:
        return (torch.arange(len(ids)) == 3).float()

    assert few(torch.arange(100)).mean() == 0.25
    assert model._agree("forward", CHECKED_ROWS, few)
    assert not model._agree("forward", CHECKED_ROWS, always)


def test_a_decode_step_that_cannot_be_made_is_left_out(
    random_model_dir: MakeModel, caplog: pytest.LogCaptureFixture
) -> None:
    """Rows of 90 numbers have no place in its kernels, and without a GPU nothing has."""
    adapter = load(random_model_dir("llama", hidden_size=90), "bfloat16")
    with caplog.at_level(logging.INFO, "streamkv.gpu_model"):
        model = GpuModel(adapter, 4, None, decodes=True)
    [record] = caplog.records
    assert record.levelno == logging.WARNING
    assert "decode step cannot be made" in record.getMessage()
    assert model.decoder is None
    ids = some_ids(adapter, 12)[None]
    assert difference(model.hidden(ids, attend), adapter.hidden(ids, attend)) < 8e-2


@pytest.mark.filterwarnings("ignore:invalid value encountered")
def test_a_model_of_damaged_weights_is_left_to_its_own_code(
    random_model_dir: MakeModel, caplog: pytest.LogCaptureFixture
) -> None:
    """NaN on both sides is no agreement."""
    adapter = load(random_model_dir("llama"))
    adapter.base.norm.weight.data.fill_(torch.nan)  # type: ignore[union-attr,operator]
    model = GpuModel(adapter, 4, None, decodes=False)
    assert "differs from the model by nan" in caplog.text
    shift_own_norms(adapter)
    adapter.base.norm.weight.data.fill_(1.0)  # type: ignore[union-attr,operator]
    assert is_left_to_the_model(model, adapter)


@needs_gpu
def test_a_decode_step_of_bfloat16_is_used_and_its_tiles_are_remembered(
    random_model_dir: MakeModel, tmp_path: Path
) -> None:
    adapter = load(random_model_dir("qwen3", hidden_size=64, head_dim=16), "bfloat16")
    model = GpuModel(adapter, 9, tmp_path / "tiles", decodes=True)
    assert model.decoder is not None
    file = tmp_path / "tiles" / "tiles.json"
    measured = file.read_bytes()
    for num_rows in (1, 5, 9):
        ids = some_ids(adapter, num_rows)
        assert difference(from_host(model.decoder, ids), own_logits(adapter, ids)) < LIMIT
    again = GpuModel(adapter, 9, tmp_path / "tiles", decodes=True)
    assert again.decoder is not None and file.read_bytes() == measured
