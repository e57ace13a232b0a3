"""What the rotary embedding of a loaded model is, for tables and keys.

One set of frequencies for all layers and all lengths, or the model is refused: a block of KV would
otherwise mean something else in another layer, or once the stream is longer.
"""

import hashlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from streamkv.errors import UnsupportedModelError

LENGTH_DEPENDENT = ("dynamic", "longrope")
"""Rope types whose frequencies change with the length, which invalidates every stored K."""


@dataclass(frozen=True, slots=True, eq=False)
class Rope:
    """Rotary embedding of all layers.

    Attributes:
        inv_freq: float64 [rotary_dim / 2], radians per position.
        attention_scaling: factor that the model itself applies to cos and sin.
        identity: 16 bytes that differ for every other rotation; part of each BlockKey.
    """

    inv_freq: Tensor
    attention_scaling: float
    identity: bytes

    @property
    def rotary_dim(self) -> int:
        """Elements of a head that rotate."""
        return 2 * self.inv_freq.shape[0]


def find_rope(base: nn.Module, head_dim: int) -> Rope:
    """The rotary embedding of a decoder.

    Raises:
        UnsupportedModelError: none, several, or one that the tables cannot express.
    """
    modules = rotary_modules(base)
    if not modules:
        raise UnsupportedModelError("it has no rotary position embedding")
    frequencies = [_frequencies(module) for module in modules]
    scalings = {float(getattr(module, "attention_scaling", 1.0)) for module in modules}
    if len(scalings) > 1 or any(not torch.equal(frequencies[0], x) for x in frequencies[1:]):
        raise UnsupportedModelError("its layers use different rotary embeddings")
    if 2 * frequencies[0].shape[0] > head_dim:
        raise UnsupportedModelError(f"its rotary embedding is wider than a head ({head_dim})")
    scaling = scalings.pop()
    return Rope(frequencies[0], scaling, _identity(frequencies[0], scaling))


def rotary_modules(base: nn.Module) -> list[nn.Module]:
    """The modules of a decoder that hold rotary frequencies."""
    return [module for module in base.modules() if _has_frequencies(module)]


def refuse_length_dependent(config: object) -> None:
    """Refuse a config with a rope that changes with the length.

    Raises:
        UnsupportedModelError: names the rope type.
    """
    for parameters in _rope_parameters(config):
        rope_type = parameters.get("rope_type", parameters.get("type"))
        if rope_type in LENGTH_DEPENDENT:
            raise UnsupportedModelError(
                f"its rotary frequencies change with the length (rope type {rope_type!r}), which "
                "would make every stored K wrong"
            )


def _rope_parameters(config: object) -> list[dict[str, Any]]:
    """Rope settings of a config: one for all layers, or one per kind of layer."""
    given = getattr(config, "rope_parameters", None) or {}
    nested = [value for value in given.values() if isinstance(value, dict)]
    return [given, *nested]


def _has_frequencies(module: nn.Module) -> bool:
    return any(name.endswith("inv_freq") for name, _ in module.named_buffers(recurse=False))


def _frequencies(module: nn.Module) -> Tensor:
    """float64 frequencies of a rotary module, exactly as the model rounds them."""
    buffers = {
        name: buffer
        for name, buffer in module.named_buffers(recurse=False)
        if name.endswith("inv_freq") and not name.endswith("original_inv_freq")
    }
    if list(buffers) != ["inv_freq"]:
        raise UnsupportedModelError(f"its layers use different rotary embeddings {list(buffers)}")
    found = buffers["inv_freq"]
    if found.dim() != 1 or found.dtype != torch.float32:
        raise UnsupportedModelError(
            f"its rotary frequencies are {found.dtype} {list(found.shape)}, not a float32 vector"
        )
    return found.to("cpu", torch.float64)


def _identity(inv_freq: Tensor, scaling: float) -> bytes:
    digest = hashlib.blake2b(digest_size=16)
    digest.update(inv_freq.numpy().astype("<f8").tobytes())
    digest.update(repr(scaling).encode())
    return digest.digest()
