"""Finds the weights of a Llama-shaped decoder in a transformers model, for the native decode step.

Llama, Mistral, Qwen2 and Qwen3 decoders have one shape: RMS norms, rotary attention with optional
biases and head norms, a gated SiLU. Anything else is left to transformers' own code. The caller
compares the native step with the model itself before it is used, so a mistake here costs speed,
never correctness.

Float32 weights whose values all fit in bfloat16 (most checkpoints are published so) are kept
narrow: widening is exact, so the arithmetic stays float32 while half the bytes are read.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from streamkv.kernels.huge_pages import pack
from streamkv.kernels.native import DecoderWeights, LayerWeights
from streamkv.kernels.native_build import NativeUnavailableError
from streamkv.model import ModelAdapter

MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")


@dataclass(frozen=True, slots=True, eq=False)
class NativeWeights:
    """Weights for the native step.

    Attributes:
        decoder: all of them; projections lie in huge pages, in the order of reading.
        packed: the projections by the model's parameter.
    """

    decoder: DecoderWeights
    packed: dict[Tensor, Tensor]

    def give_to_model(self) -> None:
        """Let the model use the packed memory where the types agree: nothing is held twice.

        Only while the model is not running.
        """
        for parameter, copy in self.packed.items():
            if parameter.dtype == copy.dtype:
                parameter.data = copy


def native_weights(adapter: ModelAdapter) -> NativeWeights:
    """Weights of the adapter's model, in the type and the memory that the native step reads best.

    Raises:
        NativeUnavailableError: another kind of model, or weights that cannot be read so.
    """
    require_llama_shape(adapter)
    model: Any = adapter.model
    base: Any = adapter.base
    head = model.get_output_embeddings()
    packed = _pack(base, head)
    decoder = DecoderWeights(
        layers=tuple(_layer(layer, packed) for layer in base.layers),
        embed=packed[base.embed_tokens.weight],
        head=packed[head.weight],
        norm=_norm(base.norm),
        num_q_heads=adapter.num_q_heads,
        num_kv_heads=adapter.spec.num_kv_heads,
        head_dim=adapter.head_dim,
        eps=model.config.rms_norm_eps,
        scale=adapter.scales[0],
    )
    return NativeWeights(decoder, packed)


def require_llama_shape(adapter: ModelAdapter) -> None:
    """Raise `NativeUnavailableError` for a model of another shape, or with parts it allows but
    that our own steps do not know.
    """
    config = adapter.model.config
    if config.model_type not in MODEL_TYPES or config.hidden_act != "silu":
        raise NativeUnavailableError(f"model type {config.model_type!r} has no native decode step")
    model: Any = adapter.model
    base: Any = adapter.base
    head = model.get_output_embeddings()
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


def _projections(layer: Any) -> list[Any]:
    """Linear modules of a layer, in the order in which a step reads them."""
    attention, mlp = layer.self_attn, layer.mlp
    first = [attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj]
    return [*first, mlp.gate_proj, mlp.up_proj, mlp.down_proj]


def _pack(base: Any, head: Any) -> dict[Tensor, Tensor]:
    """The packed form of every projection, by parameter."""
    ordered = [linear.weight for layer in base.layers for linear in _projections(layer)]
    parameters = list(dict.fromkeys([*ordered, head.weight, base.embed_tokens.weight]))
    if all(torch.equal(p, p.bfloat16().to(p.dtype)) for p in parameters):
        packed = pack([parameter.bfloat16() for parameter in parameters])
    else:
        packed = pack([parameter.float() for parameter in parameters])
    return dict(zip(parameters, packed, strict=True))


def _layer(layer: Any, packed: dict[Tensor, Tensor]) -> LayerWeights:
    attention = layer.self_attn
    q, k, v, o, gate, up, down = (packed[linear.weight] for linear in _projections(layer))
    return LayerWeights(
        input_norm=_norm(layer.input_layernorm),
        q=q,
        k=k,
        v=v,
        o=o,
        mlp_norm=_norm(layer.post_attention_layernorm),
        gate=gate,
        up=up,
        down=down,
        q_bias=_float(attention.q_proj.bias),
        k_bias=_float(attention.k_proj.bias),
        v_bias=_float(attention.v_proj.bias),
        o_bias=_float(attention.o_proj.bias),
        q_norm=_float(getattr(getattr(attention, "q_norm", None), "weight", None)),
        k_norm=_float(getattr(getattr(attention, "k_norm", None), "weight", None)),
    )


def float_of(tensor: Tensor) -> Tensor:
    """A parameter as contiguous float32."""
    return tensor.detach().float().contiguous()


def _float(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else float_of(tensor)


def _norm(module: Any) -> Tensor:
    return float_of(module.weight)
