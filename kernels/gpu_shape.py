"""Sizes that the GPU kernels are specialised for, checked once, and how a kernel is run."""

from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from streamkv.errors import ConfigError
from streamkv.kernels.rope import RopeTables

MAX_GROUP = 16
MAX_HEAD_DIM = 256
_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a pool and of the heads that read it, checked once.

    Attributes:
        num_layers, num_kv_heads, block_size, head_dim: of the pool.
        num_q_heads: a multiple of num_kv_heads.
        half: half the rotary dimension.
        dtype: of pool and queries.
    """

    num_layers: int
    num_kv_heads: int
    block_size: int
    head_dim: int
    num_q_heads: int
    half: int
    dtype: torch.dtype

    @classmethod
    def of(cls, pool: Tensor, num_q_heads: int, rope: RopeTables) -> "Shape":
        """Sizes of a pool.

        Raises:
            ConfigError: a shape, stride or type that the kernels are not made for.
        """
        require("pool", list(pool.shape), pool.dim() == 6, "Pass six dimensions.")
        num_layers, two, num_kv_heads, block_size, head_dim = pool.shape[1:]
        require("pool", list(pool.shape), two == 2, "The third dimension holds K and V.")
        require("pool", pool.stride(), pool.is_contiguous(), "Pass a contiguous pool.")
        require("dtype", pool.dtype, pool.dtype in _DTYPES, "Use float16, bfloat16 or float32.")
        fits = block_size >= 16 and block_size & (block_size - 1) == 0
        require("block_size", block_size, fits, "Use a power of two of at least 16.")
        require("head_dim", head_dim, head_dim <= MAX_HEAD_DIM, f"Use at most {MAX_HEAD_DIM}.")
        whole = num_q_heads % num_kv_heads == 0
        require("num_q_heads", num_q_heads, whole, f"Use a multiple of {num_kv_heads}.")
        group = num_q_heads // num_kv_heads
        require("group", group, group <= MAX_GROUP, f"Use at most {MAX_GROUP}.")
        fits = rope.rotary_dim <= head_dim
        require("rotary_dim", rope.rotary_dim, fits, f"Use at most head_dim {head_dim}.")
        half = rope.inv_freq.shape[0]
        return cls(num_layers, num_kv_heads, block_size, head_dim, num_q_heads, half, pool.dtype)

    @property
    def group(self) -> int:
        """Query heads of one KV head."""
        return self.num_q_heads // self.num_kv_heads

    @property
    def value_offset(self) -> int:
        """Elements from a layer's K to its V."""
        return self.num_kv_heads * self.block_size * self.head_dim

    @property
    def layer_bytes(self) -> int:
        """Bytes of a layer's slice of a block."""
        return 2 * self.value_offset * self.dtype.itemsize

    def constants(self) -> dict[str, Any]:
        """What the attention kernels are specialised for."""
        return {
            "NUM_KV_HEADS": self.num_kv_heads,
            "GROUP": self.group,
            "DIM": self.head_dim,
            "DIM_PAD": max(16, triton.next_power_of_2(self.head_dim)),
            "HALF": self.half,
            "BLOCK": self.block_size,
            "EXACT": self.dtype == torch.float32,
        }


@dataclass(frozen=True, slots=True)
class Launch:
    """How a kernel is run.

    Attributes:
        num_warps: of a program.
        num_stages: loads in flight.
        rows: (query, query head) of a program.
    """

    num_warps: int
    num_stages: int
    rows: int


def check_layer(shape: Shape, layer: int) -> None:
    """Raise `ConfigError` unless the pool has the layer."""
    fits = 0 <= layer < shape.num_layers
    require("layer", layer, fits, f"Use 0 to {shape.num_layers - 1}.")


def require(name: str, value: object, fits: bool, remedy: str) -> None:
    """Raise `ConfigError` with name, value and remedy unless the value fits."""
    if not fits:
        raise ConfigError(name, value, "not what the kernels are made for", remedy)
