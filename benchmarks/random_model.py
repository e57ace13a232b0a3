"""An engine over a model of a given shape with random weights: for timing, where none is on disk.

The weights are made on the device; the engine, from its scheduler down, is the real one.
"""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from streamkv import Engine, EngineConfig
from streamkv.model import ModelAdapter
from streamkv.model_attention import IMPLEMENTATION, register_attention
from streamkv.model_files import resolve_model

LLAMA_8B = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
}
"""The shape of Llama-3.1-8B."""

TINY = {
    **LLAMA_8B,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 49152,
}
"""Small enough for every path of a benchmark to be tried on a CPU."""


def random_adapter(
    shape: dict[str, Any], tokenizer: Path | None = None, device: str = "cuda"
) -> ModelAdapter:
    """A model of that shape in bfloat16.

    Args:
        shape: of `LlamaConfig`.
        tokenizer: directory of one; the demo model's if not given.
        device: where.
    """
    register_attention()
    config = LlamaConfig(**shape, attn_implementation=IMPLEMENTATION)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            model = LlamaForCausalLM(config)
    finally:
        torch.set_default_dtype(before)
    model.requires_grad_(False)
    model.train(False)
    directory = tokenizer if tokenizer is not None else resolve_model("smollm2-135m")
    return ModelAdapter(model, name="random", directory=directory, fingerprint=b"random weights  ")


@contextmanager
def random_engine(adapter: ModelAdapter, config: EngineConfig) -> Iterator[Engine]:
    """An engine that runs this adapter instead of loading one."""
    with mock.patch.object(ModelAdapter, "load", lambda *args, **kwargs: adapter):
        engine = Engine("random", config)
    with engine:
        yield engine


def ids(seed: int, num_tokens: int) -> list[int]:
    """Random token ids that the tokenizer knows."""
    return random.Random(seed).choices(range(100, 40000), k=num_tokens)


def engine_config(window_size: int, max_sessions: int, **others: object) -> EngineConfig:
    """An engine that keeps nothing below the gpu pool unless told otherwise."""
    options: dict[str, object] = {
        "window_size": window_size,
        "num_sink_tokens": 4,
        "device": "cuda",
        "dtype": "bfloat16",
        "max_sessions": max_sessions,
        "prefill_chunk": min(4096, window_size),
        "retain": "none",
        "cpu_bytes": 0,
    }
    return EngineConfig(**{**options, **others})  # type: ignore[arg-type]
