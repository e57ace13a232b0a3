"""A transformers decoder behind one narrow interface: token ids to hidden states to logits.

The model's own code runs unchanged; only attention is ours (`model_attention`). The adapter owns
the weights and keeps no KV, no positions and no sessions. What it cannot run exactly it refuses at
load: by structure here, by number in `model_probe`.
"""

import copy
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.modeling_outputs import MoeModelOutputWithPast

from streamkv.errors import ConfigError, ModelError, UnsupportedModelError
from streamkv.model_attention import (
    IMPLEMENTATION,
    Attend,
    AttentionCall,
    register_attention,
    run_base,
    trace_attention,
)
from streamkv.model_files import OnProgress, brief, quiet_transformers, resolve_model
from streamkv.model_fingerprint import model_fingerprint
from streamkv.model_probe import probe_once
from streamkv.model_rope import find_rope, refuse_length_dependent
from streamkv.tiers.spec import DTYPE_BYTES, KVSpec

_LAYER_TYPES = {"full_attention", "sliding_attention"}
REMEDY = "Use a decoder of the Llama, Mistral, Qwen2 or Qwen3 type, such as 'smollm2-135m'."


class ModelAdapter:
    """A loaded model.

    Attributes:
        name: as given by the caller.
        tokenizer_dir: directory with the tokenizer's files.
        model, base: the transformers model, and its decoder without the head.
        architecture: class name of the model in transformers.
        spec: layout of its KV.
        num_q_heads, head_dim, hidden_size, vocab_size: sizes.
        trained_length: positions seen in training (`max_position_embeddings`).
        inv_freq: float64 [rotary_dim / 2], rotary frequencies, on the CPU.
        rotary_dim: elements of a head that rotate.
        rope_identity: bytes that differ for every other rotation.
        scales: factor of the attention scores, per layer.
        sliding_windows: tokens that a layer sees, the query's own included, or `None`; per layer.
        eos_ids: token ids that end a turn.
        fingerprint: 16 bytes that differ for other weights or another config.
    """

    def __init__(
        self, model: PreTrainedModel, *, name: str, directory: Path, fingerprint: bytes
    ) -> None:
        """Adapt a live transformers model whose attention implementation is `IMPLEMENTATION`.

        Raises:
            UnsupportedModelError: by structure: no rope, uneven layers, other kinds of attention.
        """
        self.name = name
        self.tokenizer_dir = directory
        self.architecture = type(model).__name__
        self.fingerprint = fingerprint
        self.model = model
        self.base = _base_model(model)
        self._head = _head_only(model)
        config = model.config.get_text_config(decoder=True)
        calls = _checked_calls(self.base, config.num_hidden_layers)
        rope = find_rope(self.base, calls[0].head_dim)
        self.num_q_heads = calls[0].num_q_heads
        self.head_dim = calls[0].head_dim
        self.hidden_size: int = config.hidden_size
        self.vocab_size: int = config.vocab_size
        self.trained_length = _trained_length(config)
        self.inv_freq = rope.inv_freq
        self.rotary_dim = rope.rotary_dim
        self.rope_identity = rope.identity
        self.scales = tuple(call.scale for call in calls)
        self.sliding_windows = tuple(call.sliding_window for call in calls)
        self.eos_ids = _eos_ids(model)
        dtype = str(model.dtype).removeprefix("torch.")
        self.spec = KVSpec(len(calls), calls[0].num_kv_heads, self.head_dim, dtype)

    @classmethod
    def load(
        cls,
        name: str,
        dtype: str = "float32",
        device: str = "cpu",
        trust_remote_code: bool = False,
        on_progress: OnProgress | None = None,
    ) -> "ModelAdapter":
        """Find, load and probe a model.

        Args:
            name: `smollm2-135m`, a directory, a `.gguf` file or a hub id.
            dtype: `float32`, `bfloat16` or `float16`.
            device: of torch, such as `cpu` or `cuda`.
            trust_remote_code: let the model's own Python code run.
            on_progress: called with a line for people before anything that takes seconds.

        Raises:
            ConfigError: a dtype that no KV has, or a device without room for the weights.
            ModelError: not found, or its files are damaged.
            UnsupportedModelError: attention here would differ from the model's own.
        """
        if dtype not in DTYPE_BYTES:
            known = ", ".join(repr(known) for known in DTYPE_BYTES)
            raise ConfigError("dtype", dtype, "not a type of weights", f"Use one of {known}.")
        directory = resolve_model(name, on_progress)
        try:
            return cls._load_directory(name, directory, dtype, device, trust_remote_code)
        except UnsupportedModelError as error:
            raise UnsupportedModelError(f"model={name!r} is refused: {error}. {REMEDY}") from error

    @classmethod
    def _load_directory(
        cls, name: str, directory: Path, dtype: str, device: str, trust_remote_code: bool
    ) -> "ModelAdapter":
        _refuse_config(_read_config(name, directory, trust_remote_code))
        model = _read_model(name, directory, getattr(torch, dtype), trust_remote_code)
        fingerprint = model_fingerprint(model, directory)
        _move(model, device)
        adapter = cls(model, name=name, directory=directory, fingerprint=fingerprint)
        probe_once(adapter)
        return adapter

    @torch.inference_mode()
    def hidden(self, input_ids: Tensor, attend: Attend) -> Tensor:
        """Hidden states after the last norm.

        Args:
            input_ids: int64 [1, T], one packed row; sequences may lie side by side.
            attend: called once per layer, in order, with un-rotated q and k.

        Returns:
            [T, hidden_size] in the model's type.
        """
        return run_base(self.base, {"input_ids": input_ids}, attend)[0]

    @torch.inference_mode()
    def head(self, hidden_rows: Tensor) -> Tensor:
        """Logits [R, vocab_size], in the head's type, of hidden states [R, hidden_size]."""
        output = self._head(inputs_embeds=hidden_rows[None], use_cache=False)
        logits: Tensor = output.logits[0]
        return logits

    def logits(self, hidden_rows: Tensor) -> Tensor:
        """Logits float32 [R, vocab_size] of hidden states [R, hidden_size], by the model's head."""
        return self.head(hidden_rows).float()


def _move(model: PreTrainedModel, device: str) -> None:
    try:
        model.to(device)  # type: ignore[arg-type]  # its signature hides behind a wrapper
    except torch.OutOfMemoryError as error:
        num_bytes = sum(each.numel() * each.element_size() for each in model.parameters())
        raise ConfigError(
            "device",
            device,
            f"it has no room for weights of {num_bytes} bytes ({brief(error)})",
            'Free memory of the GPU, or use a smaller model or device="cpu".',
        ) from error


class _GivenHidden(nn.Module):
    """Stands where the decoder was, and returns as hidden states what it is given."""

    def forward(self, *args: Any, inputs_embeds: Tensor, **kwargs: Any) -> MoeModelOutputWithPast:
        # The output of mixtures of experts has the fields of all others, too.
        return MoeModelOutputWithPast(last_hidden_state=inputs_embeds)


def _base_model(model: PreTrainedModel) -> PreTrainedModel:
    base = model.base_model
    if base is model or not isinstance(base, PreTrainedModel):
        raise UnsupportedModelError("its decoder and its head are not separate modules")
    return base


def _head_only(model: PreTrainedModel) -> PreTrainedModel:
    """The model with its decoder taken out: its own code still scales or caps the logits.

    Shares all weights with `model`, and changes nothing in it.
    """
    head = copy.copy(model)
    head._modules = dict(model._modules)
    head._modules[model.base_model_prefix] = _GivenHidden()
    return head


def _checked_calls(base: PreTrainedModel, num_layers: int) -> list[AttentionCall]:
    """The attention calls of all layers, which must be alike and one per layer, in order."""
    try:
        with torch.inference_mode():
            ids = torch.zeros(1, 2, dtype=torch.int64, device=base.device)
            calls = trace_attention(base, {"input_ids": ids})
    except UnsupportedModelError:
        raise
    # Whatever a forward of unknown make does with our arguments, the answer is the same.
    except Exception as error:
        raise UnsupportedModelError(
            f"its forward does not work with our attention ({brief(error)})"
        ) from error
    seen = [call.layer for call in calls]
    if seen != list(range(num_layers)):
        raise UnsupportedModelError(
            f"attention was called for layers {seen}, not once for each of its {num_layers}"
        )
    for call in calls:
        _check_call(call, calls[0])
    return calls


def _check_call(call: AttentionCall, first: AttentionCall) -> None:
    if call.refused:
        raise UnsupportedModelError(f"layer {call.layer} uses {' and '.join(call.refused)}")
    shape = (call.num_q_heads, call.num_kv_heads, call.head_dim)
    expected = (first.num_q_heads, first.num_kv_heads, first.head_dim)
    if shape != expected or call.value_dim != call.head_dim:
        raise UnsupportedModelError(
            f"layer {call.layer} has (query heads, KV heads, head_dim) {shape} and values of "
            f"{call.value_dim}; every layer must have {expected} and values as wide as keys"
        )


def _trained_length(config: Any) -> int:
    length = getattr(config, "max_position_embeddings", None)
    if not isinstance(length, int):
        raise UnsupportedModelError("its config states no max_position_embeddings")
    return length


def _read_config(name: str, directory: Path, trust_remote_code: bool) -> Any:
    try:
        return AutoConfig.from_pretrained(directory, trust_remote_code=trust_remote_code)
    # A config of unknown make fails in as many ways as there are model types.
    except Exception as error:
        raise ModelError(
            f"model={name!r}: its config is not read by transformers {transformers.__version__} "
            f"({brief(error)}). Check {directory / 'config.json'}, or try a newer "
            "transformers; a model with its own code needs trust_remote_code."
        ) from error


def _refuse_config(config: Any) -> None:
    """Refuse what the config alone shows, before any weights are read."""
    text = config.get_text_config(decoder=True)
    if config.is_encoder_decoder:
        raise UnsupportedModelError("it has an encoder")
    refuse_length_dependent(text)
    other = set(getattr(text, "layer_types", None) or ()) - _LAYER_TYPES
    if other:
        raise UnsupportedModelError(f"it has layers of type {', '.join(sorted(other))}")


def _read_model(
    name: str, directory: Path, dtype: torch.dtype, trust_remote_code: bool
) -> PreTrainedModel:
    register_attention()
    try:
        with quiet_transformers():
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                directory,
                dtype=dtype,
                attn_implementation=IMPLEMENTATION,
                trust_remote_code=trust_remote_code,
                output_loading_info=True,
            )
    except Exception as error:  # as for the config
        if IMPLEMENTATION in str(error):
            raise UnsupportedModelError("its code does not let attention be replaced") from error
        raise ModelError(
            f"model={name!r}: not loaded from {directory} ({brief(error)}). "
            "If its files are damaged, delete that directory and load it again."
        ) from error
    model: PreTrainedModel = loaded[0]
    info = loaded[1]
    missing = [*info["missing_keys"], *info["mismatched_keys"]]
    if missing:
        raise ModelError(
            f"model={name!r}: {len(missing)} weights are missing or misshapen in {directory}, "
            f"{missing[0]} first. Fetch the model again."
        )
    model.requires_grad_(False)
    model.train(False)
    return model


def _eos_ids(model: PreTrainedModel) -> tuple[int, ...]:
    """End-of-turn ids of the generation config, else of the config."""
    generation = getattr(model, "generation_config", None)
    found = getattr(generation, "eos_token_id", None)
    if found is None:
        found = getattr(model.config, "eos_token_id", None)
    if found is None:
        return ()
    return tuple(found) if isinstance(found, list | tuple) else (int(found),)
