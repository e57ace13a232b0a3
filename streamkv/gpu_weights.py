"""A Llama-shaped decoder's weights as the GPU's kernels read them.

q, k and v are one matrix, and so are gate and up.

The model's own parameters become views of the merged ones, layer by layer, so that nothing is held
twice and the model still runs. Which models have this shape is `model_native`'s knowledge.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from streamkv.kernels.small_batch import Matrix
from streamkv.model import ModelAdapter
from streamkv.model_native import require_llama_shape


@dataclass(frozen=True, slots=True, eq=False)
class GpuLayer:
    """One layer.

    Attributes:
        input_norm, mlp_norm: [hidden_size].
        qkv: q's rows, then k's, then v's.
        o: from attention to the residual stream.
        gate_up: gated.
        down: from the MLP to the residual stream.
        q_norm, k_norm: [head_dim], or `None`.
    """

    input_norm: Tensor
    mlp_norm: Tensor
    qkv: Matrix
    o: Matrix
    gate_up: Matrix
    down: Matrix
    q_norm: Tensor | None
    k_norm: Tensor | None


@dataclass(frozen=True, slots=True, eq=False)
class GpuWeights:
    """All of a decoder.

    Attributes:
        layers: in order.
        embed: [vocab_size, hidden_size].
        norm: [hidden_size], before the head.
        head: to the logits.
        num_q_heads, num_kv_heads, head_dim: of attention.
        eps: of the norms.
        scale: of the scores.
    """

    layers: tuple[GpuLayer, ...]
    embed: Tensor
    norm: Tensor
    head: Matrix
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    eps: float
    scale: float


def gpu_weights(adapter: ModelAdapter) -> GpuWeights:
    """Merge the weights of the adapter's model.

    Raises:
        NativeUnavailableError: another kind of model.
    """
    require_llama_shape(adapter)
    model: Any = adapter.model
    base: Any = adapter.base
    return GpuWeights(
        layers=tuple(_layer(layer) for layer in base.layers),
        embed=base.embed_tokens.weight.detach(),
        norm=base.norm.weight.detach(),
        head=Matrix(model.get_output_embeddings().weight.detach()),
        num_q_heads=adapter.num_q_heads,
        num_kv_heads=adapter.spec.num_kv_heads,
        head_dim=adapter.head_dim,
        eps=model.config.rms_norm_eps,
        scale=adapter.scales[0],
    )


def _layer(layer: Any) -> GpuLayer:
    attention, mlp = layer.self_attn, layer.mlp
    q, k, v = attention.q_proj, attention.k_proj, attention.v_proj
    return GpuLayer(
        input_norm=layer.input_layernorm.weight.detach(),
        mlp_norm=layer.post_attention_layernorm.weight.detach(),
        qkv=Matrix(_merge(q, k, v), _merged_bias(q, k, v)),
        o=Matrix(_own(attention.o_proj), _bias(attention.o_proj)),
        gate_up=Matrix(_merge(mlp.gate_proj, mlp.up_proj), gated=True),
        down=Matrix(_own(mlp.down_proj)),
        q_norm=_norm_of(attention, "q_norm"),
        k_norm=_norm_of(attention, "k_norm"),
    )


def _merge(*modules: Any) -> Tensor:
    """The weights one after another; the modules' own become views of them."""
    merged = torch.cat([module.weight.detach() for module in modules])
    begin = 0
    for module in modules:
        end = begin + module.weight.shape[0]
        module.weight.data = merged[begin:end]
        begin = end
    return merged


def _merged_bias(*modules: Any) -> Tensor | None:
    biases = [module.bias for module in modules]
    if all(bias is None for bias in biases):
        return None
    rows = [
        torch.zeros_like(module.weight[:, 0]) if module.bias is None else module.bias.detach()
        for module in modules
    ]
    return torch.cat(rows)


def _own(module: Any) -> Tensor:
    weight: Tensor = module.weight.detach().contiguous()
    return weight


def _bias(module: Any) -> Tensor | None:
    return None if module.bias is None else module.bias.detach()


def _norm_of(attention: Any, name: str) -> Tensor | None:
    module = getattr(attention, name, None)
    return None if module is None else module.weight.detach()
