"""Sizes that the GPU kernels are specialised for, checked once, and how a kernel is run.

Queries, pool and rope tables are checked here for all of them, by shape, stride and type; values on
the device are not looked at.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
from torch import Tensor

from streamkv.errors import ConfigError
from streamkv.kernels.rope import RopeTables

MAX_GROUP = 16
MAX_HEAD_DIM = 256
MIN_ROWS = 16
"""What `tl.dot` takes."""

H100_SHARED_BYTES = 227 * 1024
"""Shared memory of a program on an H100 or H200; stands for it where there is no GPU."""

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_WARP_GROUP_ROWS = 64
"""Rows from which Hopper's matrix units read both sides from shared memory, one load longer."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a pool and of the heads that read it, checked once.

    Attributes:
        num_layers, num_kv_heads, block_size, head_dim: of the pool.
        num_q_heads: a multiple of num_kv_heads.
        half: half the rotary dimension.
        dtype: of pool and queries.
        shared_bytes: shared memory that a program may have on the pool's device.
    """

    num_layers: int
    num_kv_heads: int
    block_size: int
    head_dim: int
    num_q_heads: int
    half: int
    dtype: torch.dtype
    shared_bytes: int = H100_SHARED_BYTES

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
        require("dtype", pool.dtype, pool.dtype in DTYPES, "Use float16, bfloat16 or float32.")
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
        return cls(
            num_layers,
            num_kv_heads,
            block_size,
            head_dim,
            num_q_heads,
            half,
            pool.dtype,
            shared_bytes(pool.device),
        )

    @property
    def group(self) -> int:
        """Query heads of one KV head."""
        return self.num_q_heads // self.num_kv_heads

    @property
    def padded_dim(self) -> int:
        """head_dim as the kernels hold it."""
        padded: int = triton.next_power_of_2(self.head_dim)
        return max(16, padded)

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
            "DIM_PAD": self.padded_dim,
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


def shared_bytes(device: torch.device) -> int:
    """Shared memory that a program may have on a device."""
    if device.type != "cuda":
        return H100_SHARED_BYTES
    # torch's stubs do not know the field.
    properties: Any = torch.cuda.get_device_properties(device)
    limit: int = properties.shared_memory_per_block_optin
    return limit


def decode_bytes(shape: Shape, launch: Launch, num_queries: int) -> int:
    """Shared memory of a decode program, as Triton lays it out; at most a little less.

    Keys and values of each stage, the turned queries, and what the loop loads ahead of them: one
    row of the rope tables, or one for each (query, query head) where queries are several.
    """
    tile, rows = _tile_bytes(shape), _rows_bytes(shape, launch.rows)
    if launch.num_stages == 1:
        # Keys and values take turns, unless both are at hand for the matrix units or for float32.
        takes_turns = launch.rows < _WARP_GROUP_ROWS and shape.dtype != torch.float32
        return rows + (tile if takes_turns else 2 * tile)
    tiles = 2 * (launch.num_stages - 1) + (2 if launch.rows >= _WARP_GROUP_ROWS else 0)
    angles = launch.rows if num_queries > 1 else 1
    ahead = (launch.num_stages - 1) * angles * (8 * shape.padded_dim + 32)
    return rows + tiles * tile + ahead


def prefill_bytes(shape: Shape, launch: Launch) -> int:
    """Shared memory of a prefill program, as Triton lays it out; at most a little less.

    Each stage loads keys, their rotary partners and values; the turned keys come on top.
    """
    tile, rows = _tile_bytes(shape), _rows_bytes(shape, launch.rows)
    least = 2 * rows + 2 * tile
    if launch.num_stages == 1:
        return least
    ahead = launch.num_stages - 1
    tiles = 3 * ahead + (2 if launch.rows >= _WARP_GROUP_ROWS else 1)
    return max(least, rows + tiles * tile + ahead * 8 * shape.padded_dim)


def fitting_launch(
    shape: Shape, wanted: Launch, num_bytes: Callable[[Launch], int], min_rows: int
) -> Launch:
    """The launch nearest to the wanted one that fits into shared memory: fewer stages, then rows.

    Args:
        shape: names the limit.
        wanted: what is best where memory is no matter.
        num_bytes: shared memory of a launch.
        min_rows: rows that a program needs; powers of two.

    Raises:
        ConfigError: not even the smallest fits.
    """
    launch = wanted
    while num_bytes(launch) > shape.shared_bytes:
        if launch.num_stages > 1:
            launch = replace(launch, num_stages=launch.num_stages - 1)
            continue
        wants = f"A program of {launch.rows} rows takes {num_bytes(launch)} bytes: use a smaller "
        wants += "head_dim, a type of 16 bits, or fewer queries at once."
        require("shared memory", shape.shared_bytes, launch.rows > min_rows, wants)
        launch = replace(launch, rows=launch.rows // 2)
    return launch


def _tile_bytes(shape: Shape) -> int:
    """Bytes of the keys of one block and head."""
    return shape.block_size * shape.padded_dim * shape.dtype.itemsize


def _rows_bytes(shape: Shape, rows: int) -> int:
    """Bytes of so many queries of one head."""
    return rows * shape.padded_dim * shape.dtype.itemsize


@dataclass(frozen=True, slots=True, eq=False)
class Softmax:
    """How scores become weights.

    Attributes:
        scale: factor of the scores.
        softcap: scores become softcap * tanh(score / softcap); `None` leaves them.
        sink_logits: float [num_q_heads], a logit that takes weight and gives no value.
    """

    scale: float
    softcap: float | None = None
    sink_logits: Tensor | None = None


def check_layer(shape: Shape, layer: int) -> None:
    """Raise `ConfigError` unless the pool has the layer."""
    fits = 0 <= layer < shape.num_layers
    require("layer", layer, fits, f"Use 0 to {shape.num_layers - 1}.")


def check_queries(q: Tensor, pool: Tensor, layer: int, rope: RopeTables) -> Shape:
    """The shape of queries [T, num_q_heads, head_dim] and pool; raises `ConfigError` if unfit."""
    require("q", list(q.shape), q.dim() == 3, "Pass [T, num_q_heads, head_dim].")
    shape = Shape.of(pool, q.shape[1], rope)
    check_layer(shape, layer)
    require("q", list(q.shape), q.shape[2] == shape.head_dim, f"Its head_dim is {shape.head_dim}.")
    require("q", q.dtype, q.dtype == shape.dtype, f"Pass {shape.dtype}, as the pool has.")
    require("q", q.stride(), q.stride(2) == 1, "Its last stride must be 1.")
    return shape


def require(name: str, value: object, fits: bool, remedy: str) -> None:
    """Raise `ConfigError` with name, value and remedy unless the value fits."""
    if not fits:
        raise ConfigError(name, value, "not what the kernels are made for", remedy)


def pdl_option(pdl: bool) -> dict[str, bool]:
    """Launch option to overlap with the kernel before (Hopper and later)."""
    # The interpreter does not know the option.
    return {"launch_pdl": True} if pdl else {}
