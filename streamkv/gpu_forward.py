"""A Llama-shaped decoder on a GPU, any number of rows: merged products, norms and gates of our own.

Products are cuBLAS's. The rotation by position 0 that the model would carry out is left out. The
result is compared with the model's own before it is used (`gpu_check`).
"""

import torch
from torch import Tensor
from torch.nn.functional import embedding, linear

from streamkv.gpu_weights import GpuLayer, GpuWeights
from streamkv.kernels.rows import gated_silu, rms_norm
from streamkv.model_attention import Attend


class GpuForward:
    """The decoder without its head.

    Args:
        weights: on the GPU.
    """

    def __init__(self, weights: GpuWeights) -> None:
        self._weights = weights

    @torch.inference_mode()
    def hidden(self, input_ids: Tensor, attend: Attend) -> Tensor:
        """Hidden states [T, hidden_size] after the last norm; as `ModelAdapter.hidden`."""
        weights = self._weights
        x = embedding(input_ids[0], weights.embed)
        for index, layer in enumerate(weights.layers):
            normed = rms_norm(x, layer.input_norm, weights.eps)
            q, k, v = split_heads(linear(normed, layer.qkv.weight, layer.qkv.bias), weights)
            q, k = norm_heads(q, k, layer, weights.eps)
            mixed = attend(index, q, k, v, weights.scale).reshape(len(x), -1)
            if layer.o.bias is not None:
                x += layer.o.bias
            x.addmm_(mixed, layer.o.weight.t())
            normed = rms_norm(x, layer.mlp_norm, weights.eps)
            x.addmm_(gated_silu(linear(normed, layer.gate_up.weight)), layer.down.weight.t())
        return rms_norm(x, weights.norm, weights.eps)


def split_heads(qkv: Tensor, weights: GpuWeights) -> tuple[Tensor, Tensor, Tensor]:
    """Views [T, heads, head_dim] of rows that hold q, k and v side by side."""
    heads = (weights.num_q_heads, weights.num_kv_heads, weights.num_kv_heads)
    every = qkv.view(len(qkv), sum(heads), weights.head_dim)
    q, k, v = torch.split(every, list(heads), dim=1)
    return q, k, v


def norm_heads(q: Tensor, k: Tensor, layer: GpuLayer, eps: float) -> tuple[Tensor, Tensor]:
    """q and k after the layer's head norms, if it has any."""
    if layer.q_norm is not None:
        q = rms_norm(q, layer.q_norm, eps)
    if layer.k_norm is not None:
        k = rms_norm(k, layer.k_norm, eps)
    return q, k
