"""A step of many tokens through a Llama-shaped decoder, without the small operations in between.

The products are torch's, on the model's own weights; q, k and v, and gate and up, are one product
each where their weights lie side by side. Norms and the gated SiLU are native, and the rotation by
position 0 that the model would carry out is left out. The result is compared with the model's own
before it is used (`native_kernels`).
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from streamkv.kernels.native_rows import NativeRows
from streamkv.model_attention import Attend
from streamkv.model_native import float_of


@dataclass(frozen=True, slots=True, eq=False)
class _Layer:
    """One layer: its modules, and float32 copies of its norms."""

    attention: Any
    mlp: Any
    input_norm: Tensor
    mlp_norm: Tensor
    q_norm: Tensor | None
    k_norm: Tensor | None


class NativeForward:
    """The decoder without its head.

    Args:
        base: of a model that `model_native` knows.
        rows: of the model's type.
        num_q_heads, num_kv_heads, head_dim: of attention.
        eps: of the norms.
        scale: of the scores.
    """

    def __init__(
        self,
        base: Any,
        rows: NativeRows,
        num_q_heads: int,
        num_kv_heads: int,
        head_dim: int,
        eps: float,
        scale: float,
    ) -> None:
        self._base = base
        self._rows = rows
        self._num_q_heads = num_q_heads
        self._num_kv_heads = num_kv_heads
        self._head_dim = head_dim
        self._eps = eps
        self._scale = scale
        self._norm = float_of(base.norm.weight)
        self._layers = [_layer(layer) for layer in base.layers]

    @torch.inference_mode()
    def hidden(self, input_ids: Tensor, attend: Attend) -> Tensor:
        """Hidden states [T, hidden_size] after the last norm; as `ModelAdapter.hidden`."""
        x: Tensor = self._base.embed_tokens(input_ids[0])
        for index, layer in enumerate(self._layers):
            normed = self._rows.rms_norm(x, layer.input_norm, self._eps)
            q, k, v = self._qkv(layer, normed)
            mixed = attend(index, q, k, v, self._scale).reshape(len(x), -1)
            x = _add_product(x, mixed, layer.attention.o_proj)
            normed = self._rows.rms_norm(x, layer.mlp_norm, self._eps)
            gate, up = _products(normed, layer.mlp.gate_proj, layer.mlp.up_proj)
            x = _add_product(x, self._rows.gated_silu(gate, up), layer.mlp.down_proj)
        return self._rows.rms_norm(x, self._norm, self._eps)

    def _qkv(self, layer: _Layer, normed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        attention, dim = layer.attention, self._head_dim
        parts = _products(normed, attention.q_proj, attention.k_proj, attention.v_proj)
        heads = (self._num_q_heads, self._num_kv_heads, self._num_kv_heads)
        q, k, v = (
            part.view(len(part), count, dim) for part, count in zip(parts, heads, strict=True)
        )
        if layer.q_norm is not None and layer.k_norm is not None:
            q = self._rows.rms_norm(q.contiguous(), layer.q_norm, self._eps)
            k = self._rows.rms_norm(k.contiguous(), layer.k_norm, self._eps)
        return q, k, v


def _layer(layer: Any) -> _Layer:
    attention = layer.self_attn
    return _Layer(
        attention=attention,
        mlp=layer.mlp,
        input_norm=float_of(layer.input_layernorm.weight),
        mlp_norm=float_of(layer.post_attention_layernorm.weight),
        q_norm=_norm_of(attention, "q_norm"),
        k_norm=_norm_of(attention, "k_norm"),
    )


def _norm_of(attention: Any, name: str) -> Tensor | None:
    module = getattr(attention, name, None)
    return None if module is None else float_of(module.weight)


def _products(x: Tensor, *modules: Any) -> tuple[Tensor, ...]:
    """x through linear modules that share it: in one product if their weights are neighbours."""
    weights = [module.weight.data for module in modules]
    whole = side_by_side(weights)
    if whole is None:
        return tuple(linear(x, module.weight, module.bias) for module in modules)
    parts = torch.split(linear(x, whole), [len(weight) for weight in weights], dim=1)
    return tuple(
        part if module.bias is None else part + module.bias
        for part, module in zip(parts, modules, strict=True)
    )


def side_by_side(weights: list[Tensor]) -> Tensor | None:
    """Weights [out, in] that lie one after another in memory, as one, without a copy."""
    end, first = weights[0].data_ptr(), weights[0]
    for weight in weights:
        same = weight.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        if not same or weight.data_ptr() != end or not weight.is_contiguous():
            return None
        end += weight.nbytes
    num_rows, width = sum(len(weight) for weight in weights), first.shape[1]
    return torch.as_strided(first, (num_rows, width), (width, 1), first.storage_offset())


def _add_product(x: Tensor, y: Tensor, module: Any) -> Tensor:
    """x + module(y); rounded once."""
    if module.bias is not None:
        x = x + module.bias
    return torch.addmm(x, y, module.weight.t())
