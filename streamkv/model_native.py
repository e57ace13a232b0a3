"""Finds the weights of a Llama-shaped decoder in a transformers model, for the native decode step.

Llama, Mistral, Qwen2 and Qwen3 decoders have one shape: RMS norms, rotary attention with optional
biases and head norms, a gated SiLU. Anything else is left to transformers' own code. The caller
compares the native step with the model itself before it is used, so a mistake here costs speed,
never correctness.

Float32 weights whose values all fit in bfloat16 (most checkpoints are published so) are kept
narrow: widening is exact, so the arithmetic stays float32 while half the bytes are read.
"""

from typing import Any

import torch
from torch import Tensor

from streamkv.kernels.native import DecoderWeights, LayerWeights, NativeUnavailableError
from streamkv.model import ModelAdapter

MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")


def decoder_weights(adapter: ModelAdapter) -> DecoderWeights:
    """Weights of the adapter's model, in the type that the native step reads.

    Raises:
        NativeUnavailableError: another kind of model, or weights that cannot be read so.
    """
    config = adapter.model.config
    if config.model_type not in MODEL_TYPES or config.hidden_act != "silu":
        raise NativeUnavailableError(f"model type {config.model_type!r} has no native decode step")
    base: Any = adapter.base
    head: Any = adapter.model.get_output_embeddings()
    _require_plain(adapter, base, head)
    narrow = _Narrowing(adapter.model.parameters())
    embed = narrow(base.embed_tokens.weight)
    tied = head.weight.data_ptr() == base.embed_tokens.weight.data_ptr()
    return DecoderWeights(
        layers=tuple(_layer(layer, narrow) for layer in base.layers),
        embed=embed,
        head=embed if tied else narrow(head.weight),
        norm=_norm(base.norm),
        num_q_heads=adapter.num_q_heads,
        num_kv_heads=adapter.spec.num_kv_heads,
        head_dim=adapter.head_dim,
        eps=config.rms_norm_eps,
        scale=adapter.scales[0],
    )


def _require_plain(adapter: ModelAdapter, base: Any, head: Any) -> None:
    """Raise for what the shape allows and the native step does not know."""
    if getattr(head, "bias", None) is not None:
        raise NativeUnavailableError("the head has a bias")
    if getattr(base.rotary_emb, "attention_scaling", 1.0) != 1.0:
        raise NativeUnavailableError("its rotary embedding scales q and k")
    if len(set(adapter.scales)) != 1:
        raise NativeUnavailableError("its layers scale scores differently")
    for layer in base.layers:
        parts = (layer.mlp.gate_proj, layer.mlp.up_proj, layer.mlp.down_proj)
        if any(part.bias is not None for part in parts):
            raise NativeUnavailableError("its MLP has biases")


class _Narrowing:
    """Weights as bfloat16 if that is exact for all of them, else as they are."""

    def __init__(self, parameters: Any) -> None:
        matrices = [parameter for parameter in parameters if parameter.dim() == 2]
        self._narrow = all(torch.equal(p, p.bfloat16().to(p.dtype)) for p in matrices)

    def __call__(self, weight: Tensor) -> Tensor:
        weight = weight.detach()
        return (weight.bfloat16() if self._narrow else weight.float()).contiguous()


def _float(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach().float().contiguous()


def _layer(layer: Any, narrow: _Narrowing) -> LayerWeights:
    attention, mlp = layer.self_attn, layer.mlp
    return LayerWeights(
        input_norm=_norm(layer.input_layernorm),
        q=narrow(attention.q_proj.weight),
        k=narrow(attention.k_proj.weight),
        v=narrow(attention.v_proj.weight),
        o=narrow(attention.o_proj.weight),
        mlp_norm=_norm(layer.post_attention_layernorm),
        gate=narrow(mlp.gate_proj.weight),
        up=narrow(mlp.up_proj.weight),
        down=narrow(mlp.down_proj.weight),
        q_bias=_float(attention.q_proj.bias),
        k_bias=_float(attention.k_proj.bias),
        v_bias=_float(attention.v_proj.bias),
        o_bias=_float(attention.o_proj.bias),
        q_norm=_float(getattr(getattr(attention, "q_norm", None), "weight", None)),
        k_norm=_float(getattr(getattr(attention, "k_norm", None), "weight", None)),
    )


def _norm(module: Any) -> Tensor:
    weight = _float(module.weight)
    assert weight is not None
    return weight
