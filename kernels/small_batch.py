"""Products of up to 64 rows with a weight matrix: sizes, tiles and launches of `product_kernel`.

A `Product` binds a weight matrix to the buffer whose rows it multiplies, so that a captured graph
finds both where they were. How its work is cut (a `Tile`) is measured by `tile_choice`.
"""

from dataclasses import dataclass, replace

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from streamkv.kernels.gpu_shape import require, shared_bytes
from streamkv.kernels.triton_small_batch import product_kernel

MAX_ROWS = 64
_KEPT_BYTES = 27 * 1024
"""Shared memory left for what a program holds besides its tiles."""

_AHEAD_BYTES = 8 * 2**20
"""A sixth of the L2 cache of an H100: more pushed out what was being read."""


@dataclass(frozen=True, slots=True)
class Tile:
    """How a product is cut and run.

    Attributes:
        out: outputs of a program.
        chunk: columns in one step.
        num_warps, num_stages: of a program.
        swap: multiply weights by rows instead of rows by weights.
    """

    out: int
    chunk: int
    num_warps: int
    num_stages: int
    swap: bool


# The best of some hundred on an H200, at the shapes of an 8B and a 135M model.
_TILES = (
    Tile(32, 256, 4, 6, False),
    Tile(32, 128, 4, 6, False),
    Tile(32, 128, 4, 3, False),
    Tile(64, 128, 4, 6, True),
    Tile(64, 256, 4, 4, True),
    Tile(64, 128, 4, 4, True),
    Tile(64, 128, 4, 3, True),
    Tile(128, 128, 4, 4, True),
    Tile(128, 128, 8, 3, True),
    Tile(16, 64, 4, 3, False),
)


@dataclass(frozen=True, slots=True, eq=False)
class Matrix:
    """Weights of one or of several products that share their rows.

    Attributes:
        weight: [num_out, K], or [2 * num_out, K], gate first, if gated; contiguous.
        bias: [num_out] or None; none if gated.
        gated: outputs are silu(gate) * up.
    """

    weight: Tensor
    bias: Tensor | None = None
    gated: bool = False

    @property
    def num_out(self) -> int:
        """Outputs of a row."""
        return self.weight.shape[0] // (2 if self.gated else 1)

    @property
    def width(self) -> int:
        """Columns: elements of a row that is multiplied."""
        return self.weight.shape[1]


@dataclass(frozen=True, slots=True, eq=False)
class Norm:
    """The norm that follows a product: what the next one reads.

    Attributes:
        weight: [num_out].
        scaled: [max rows, num_out] to write the outputs times the weight to.
        squares: float32 [programs, padded rows] for the sums of squares.
    """

    weight: Tensor
    scaled: Tensor
    squares: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Squares:
    """Sums of squares of the rows that are multiplied, in `parts` parts."""

    sums: Tensor
    parts: int
    eps: float


def padded_rows(num_rows: int) -> int:
    """Rows of a program for so many rows: a power of two that matrix units take."""
    padded: int = triton.next_power_of_2(num_rows)
    return max(16, padded)


def tile_bytes(matrix: Matrix, num_rows: int, tile: Tile) -> int:
    """Shared memory of a program's rows and weights."""
    rows, element = padded_rows(num_rows), matrix.weight.element_size()
    per_out = 2 if matrix.gated else 1
    return (tile.out * per_out + rows) * tile.chunk * element * tile.num_stages


def fitting_tiles(matrix: Matrix, num_rows: int, limit: int | None = None) -> list[Tile]:
    """The tiles that fit a product into the shared memory of a program, best guess first.

    Where none of those that were measured does, the smallest with fewer stages.

    Args:
        matrix: what is multiplied.
        num_rows: of a step.
        limit: bytes of shared memory; `None`: of the device that the weights are on.
    """
    limit = (shared_bytes(matrix.weight.device) if limit is None else limit) - _KEPT_BYTES
    smallest = _TILES[-1]
    fewer = tuple(
        replace(smallest, num_stages=stages) for stages in reversed(range(1, smallest.num_stages))
    )
    for tiles in (_TILES, *((tile,) for tile in fewer)):
        found = [
            tile
            for tile in tiles
            if tile_bytes(matrix, num_rows, tile) <= limit and tile.out <= max(16, matrix.num_out)
        ]
        if found:
            return found
    return [fewer[-1]]


class Product:
    """A matrix, the rows that it multiplies, and how.

    Args:
        rows: [max rows, K], contiguous; a multiple of 16 bytes a row.
        matrix: the weights, of the same type.
        tile: how the work is cut.
        pdl: overlap with the kernel before (Hopper and later).
    """

    def __init__(self, rows: Tensor, matrix: Matrix, tile: Tile, pdl: bool) -> None:
        fits = rows.dim() == 2 and rows.is_contiguous() and rows.shape[1] == matrix.width
        require("rows", list(rows.shape), fits, f"Pass contiguous [rows, {matrix.width}].")
        require("weight", matrix.weight.stride(), matrix.weight.is_contiguous(), "Pass contiguous.")
        same = rows.dtype == matrix.weight.dtype
        require("dtype", rows.dtype, same, f"Pass {matrix.weight.dtype}, as the weights have.")
        whole = matrix.width * rows.element_size() % 16 == 0
        require("K", matrix.width, whole, "Rows must be a multiple of 16 bytes.")
        self.matrix = matrix
        self.tile = tile
        self._rows = rows
        self._pdl = pdl
        self._w = TensorDescriptor.from_tensor(matrix.weight, [tile.out, tile.chunk])

    @property
    def num_programs(self) -> int:
        """Programs of a launch: parts of the squares that it writes."""
        count: int = triton.cdiv(self.matrix.num_out, self.tile.out)
        return count

    def run(
        self,
        out: Tensor,
        num_rows: int,
        squares: Squares | None = None,
        added: Tensor | None = None,
        norm: Norm | None = None,
    ) -> None:
        """Multiply the first `num_rows` rows into `out` [max rows, num_out].

        Args:
            out: contiguous; may be `added`.
            num_rows: 1 to 64.
            squares: scale each row by the root mean square that they give.
            added: [max rows, num_out] added to the outputs.
            norm: prepare the outputs for the next product.
        """
        require("num_rows", num_rows, 1 <= num_rows <= MAX_ROWS, f"Use 1 to {MAX_ROWS}.")
        most = len(self._rows)
        require("num_rows", num_rows, num_rows <= most, f"The buffer has {most} rows.")
        self._check("out", out, num_rows)
        if added is not None:
            self._check("added", added, num_rows)
        if norm is not None:
            self._check("scaled", norm.scaled, num_rows)
        matrix, tile, num_padded = self.matrix, self.tile, padded_rows(num_rows)
        # On the device the descriptor of the rows is made for this number of them.
        rows = TensorDescriptor.from_tensor(self._rows, [num_padded, tile.chunk])
        product_kernel[(self.num_programs,)](
            rows,
            self._w,
            matrix.weight,
            out,
            out if added is None else added,
            out if matrix.bias is None else matrix.bias,
            out if squares is None else squares.sums,
            out if norm is None else norm.scaled,
            out if norm is None else norm.weight,
            out if norm is None else norm.squares,
            num_rows,
            matrix.num_out,
            0.0 if squares is None else squares.eps,
            K=matrix.width,
            ROWS=num_padded,
            OUT=tile.out,
            CHUNK=tile.chunk,
            PARTS=0 if squares is None else squares.parts,
            HAS_BIAS=matrix.bias is not None,
            HAS_ADDED=added is not None,
            HAS_NORM=norm is not None,
            GATED=matrix.gated,
            SWAP=tile.swap,
            EXACT=out.dtype == torch.float32,
            PDL=self._pdl,
            AHEAD=self._ahead() if self._pdl else 0,
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
            **({"launch_pdl": True} if self._pdl else {}),
        )

    def _check(self, name: str, rows: Tensor, num_rows: int) -> None:
        num_out = self.matrix.num_out
        fits = rows.dim() == 2 and rows.shape[1] == num_out and len(rows) >= num_rows
        fits = fits and rows.is_contiguous() and rows.dtype == self._rows.dtype
        wanted = f"Pass contiguous {self._rows.dtype} [{num_rows} or more, {num_out}]."
        require(name, list(rows.shape), fits, wanted)

    def _ahead(self) -> int:
        """Columns to ask for ahead: a power of two times 64, as `tl.arange` wants it."""
        weight = self.matrix.weight
        columns = _AHEAD_BYTES // (weight.shape[0] * weight.element_size())
        columns = min(columns, self.matrix.width) // 64
        return 64 << (columns.bit_length() - 1) if columns else 0
