"""Products of few rows against float64: what happens at their ends, and what stays untouched."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from gpu_cases import DEVICE, DTYPES, ON_GPU, TOLERANCES
from torch import Tensor
from torch.nn.functional import silu

from streamkv.errors import ConfigError
from streamkv.kernels.small_batch import (
    MAX_ROWS,
    Matrix,
    Norm,
    Product,
    Squares,
    Tile,
    fitting_tiles,
    padded_rows,
)

pytestmark = pytest.mark.gpu if ON_GPU else []
needs_gpu = pytest.mark.skipif(not ON_GPU, reason="needs a CUDA device")

EPS = 1e-3
NARROW = DTYPES[-1]
ROWS_TIMES_WEIGHTS = Tile(16, 64, 4, 3, False)
WEIGHTS_TIMES_ROWS = Tile(64, 64, 4, 3, True)


@dataclass(frozen=True)
class Case:
    """A product and what it is asked for; sizes are multiples of nothing but 16 bytes a row."""

    num_rows: int = 5
    width: int = 88
    num_out: int = 56
    tile: Tile = ROWS_TIMES_WEIGHTS
    dtype: torch.dtype = torch.float32
    has_bias: bool = False
    is_gated: bool = False
    has_added: bool = False
    has_norm: bool = False
    parts: int = 0
    max_rows: int | None = None
    pdl: bool = False


def random(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class Built:
    """The tensors of a case on the device; NaN wherever nothing may be read or must be written."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.padded = padded_rows(case.num_rows)
        self.max_rows = case.max_rows or self.padded
        self.x = self._rows(random(1, case.num_rows, case.width))
        num_weights = case.num_out * (2 if case.is_gated else 1)
        # Outputs of about 1.
        weight = random(2, num_weights, case.width) * case.width**-0.5
        bias = self._move(random(3, case.num_out)) if case.has_bias else None
        self.matrix = Matrix(self._move(weight), bias, case.is_gated)
        self.added = self._rows(random(4, case.num_rows, case.num_out)) if case.has_added else None
        self.out = self.nan(self.max_rows, case.num_out)
        self.product = Product(self.x, self.matrix, case.tile, case.pdl)
        self.norm: Norm | None = None
        if case.has_norm:
            squares = torch.full((self.product.num_programs, self.padded), torch.nan, device=DEVICE)
            weight = self._move(random(5, case.num_out))
            self.norm = Norm(weight, self.nan(self.max_rows, case.num_out), squares)
        self.squares: Squares | None = None
        if case.parts:
            sums = torch.full((case.parts, self.padded), torch.nan)
            sums[:, : case.num_rows] = random(6, case.parts, case.num_rows).square()
            self.squares = Squares(sums.to(DEVICE), case.parts, EPS)

    def nan(self, *shape: int) -> Tensor:
        return torch.full(shape, torch.nan, dtype=self.case.dtype, device=DEVICE)

    def _move(self, tensor: Tensor) -> Tensor:
        return tensor.to(DEVICE, self.case.dtype)

    def _rows(self, values: Tensor) -> Tensor:
        rows = self.nan(self.max_rows, values.shape[1])
        rows[: len(values)] = self._move(values)
        return rows

    def run(self, out: Tensor | None = None) -> None:
        out = self.out if out is None else out
        self.product.run(out, self.case.num_rows, self.squares, self.added, self.norm)

    def expected(self) -> Tensor:
        """Outputs float64 [num_rows, num_out]."""
        case, matrix = self.case, self.matrix
        value = self.x[: case.num_rows].double() @ matrix.weight.double().t()
        if self.squares is not None:
            mean = self.squares.sums[:, : case.num_rows].double().sum(0) / case.width
            value *= (mean + EPS).rsqrt()[:, None]
        if matrix.bias is not None:
            value += matrix.bias.double()
        if case.is_gated:
            value = silu(value[:, : case.num_out]) * value[:, case.num_out :]
        if self.added is not None:
            value += self.added[: case.num_rows].double()
        return value

    def check(self, expected: Tensor | None = None) -> None:
        case = self.case
        self.close(self.out[: case.num_rows], self.expected() if expected is None else expected)
        assert self.out[case.num_rows :].isnan().all()
        if self.norm is not None:
            rounded = self.out[: case.num_rows].double()
            self.close(self.norm.scaled[: case.num_rows], rounded * self.norm.weight.double())
            assert self.norm.scaled[case.num_rows :].isnan().all()
            # Each program writes the squares of its own outputs, and 0 for rows that pad.
            own = torch.zeros(self.padded, self.product.num_programs * case.tile.out)
            own[: case.num_rows, : case.num_out] = rounded.square()
            own = own.view(self.padded, self.product.num_programs, -1).sum(2).t()
            torch.testing.assert_close(self.norm.squares.cpu(), own, atol=1e-4, rtol=1e-4)

    def close(self, found: Tensor, expected: Tensor) -> None:
        tolerance = TOLERANCES[self.case.dtype]
        torch.testing.assert_close(found.double(), expected, atol=tolerance, rtol=tolerance)


def check(case: Case) -> None:
    built = Built(case)
    built.run()
    built.check()


both_orders = pytest.mark.parametrize(
    "tile", [ROWS_TIMES_WEIGHTS, WEIGHTS_TIMES_ROWS], ids=["rows-first", "weights-first"]
)
every_type = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@every_type
@both_orders
@pytest.mark.parametrize("num_rows", [1, 2, 15, 16, 17, 33, 64])
def test_any_number_of_rows(num_rows: int, tile: Tile, dtype: torch.dtype) -> None:
    check(Case(num_rows, tile=tile, dtype=dtype))


@both_orders
@pytest.mark.parametrize("width", [8, 56, 64, 72, 200])
@pytest.mark.parametrize("num_out", [1, 15, 16, 17, 64, 72])
def test_neither_columns_nor_outputs_need_be_whole_pieces(
    width: int, num_out: int, tile: Tile
) -> None:
    case = Case(3, width, num_out, tile, NARROW, is_gated=True, parts=2)
    check(replace(case, has_added=True, has_norm=True))


@every_type
@both_orders
@pytest.mark.parametrize(
    "wanted",
    [
        {"has_bias": True},
        {"is_gated": True},
        {"has_added": True},
        {"has_norm": True},
        {"parts": 1},
        {"parts": 3, "has_bias": True},
        {"parts": 2, "is_gated": True},
        {"has_bias": True, "has_added": True, "has_norm": True},
    ],
    ids=lambda wanted: "-".join(wanted),
)
def test_what_happens_at_the_ends_of_a_product(
    wanted: dict[str, int], tile: Tile, dtype: torch.dtype
) -> None:
    check(Case(tile=tile, dtype=dtype, **wanted))


@pytest.mark.parametrize("parts", [31, 32, 33, 70])
def test_squares_in_any_number_of_parts(parts: int) -> None:
    check(Case(parts=parts))


def test_a_buffer_may_have_fewer_or_more_rows_than_a_program() -> None:
    for max_rows in (5, 40):
        check(Case(5, max_rows=max_rows, has_added=True, has_norm=True))


@every_type
@both_orders
def test_outputs_may_be_added_in_place(tile: Tile, dtype: torch.dtype) -> None:
    built = Built(Case(tile=tile, dtype=dtype, has_added=True, has_norm=True))
    assert built.added is not None
    expected = built.expected()
    built.out = built.added
    built.run()
    built.check(expected)


@every_type
@both_orders
def test_the_next_product_reads_what_a_norm_prepared(tile: Tile, dtype: torch.dtype) -> None:
    """Two products that share the norm between them are RMSNorm between two plain ones."""
    first = Built(Case(width=72, num_out=88, tile=tile, dtype=dtype, has_norm=True))
    first.run()
    assert first.norm is not None and first.product.num_programs > 1
    second = Built(Case(width=88, tile=tile, dtype=dtype))
    second.product = Product(first.norm.scaled, second.matrix, tile, False)
    second.squares = Squares(first.norm.squares, first.product.num_programs, EPS)
    second.run()
    stream = first.out[:5].double()
    normed = torch.nn.functional.rms_norm(stream, (88,), first.norm.weight.double(), EPS)
    second.check(normed @ second.matrix.weight.double().t())


def test_a_bias_and_a_norm_of_another_type_are_read_as_they_are() -> None:
    built = Built(Case(dtype=torch.float16, has_bias=True, has_norm=True))
    assert built.norm is not None and built.matrix.bias is not None
    matrix = Matrix(built.matrix.weight, built.matrix.bias.float() + 1e-3)
    built.matrix, built.product = matrix, Product(built.x, matrix, built.case.tile, False)
    built.norm = Norm(built.norm.weight.float() + 1e-3, built.norm.scaled, built.norm.squares)
    built.run()
    built.check()


@pytest.mark.parametrize("is_gated", [False, True])
@pytest.mark.parametrize("num_rows", [16, 64])
def test_every_tile_that_fits_gives_the_same(num_rows: int, is_gated: bool) -> None:
    case = Case(num_rows, 136, 130, dtype=NARROW, is_gated=is_gated, has_norm=True, parts=2)
    tiles = fitting_tiles(Built(case).matrix, num_rows)
    assert len(tiles) > 1 and len(set(tiles)) == len(tiles)
    for tile in tiles:
        check(replace(case, tile=tile))


def test_tiles_that_fit_leave_room_for_what_is_read_together() -> None:
    """Shared memory of a multiprocessor of an H100 that a program can have: 227 KiB."""
    for num_out, width in ((3, 8), (576, 576), (4096, 14336)):
        for is_gated in (False, True):
            for dtype in (torch.float16, torch.float32):
                weight = torch.empty(num_out * (2 if is_gated else 1), width, dtype=dtype)
                for num_rows in (1, 16, 17, 64):
                    tiles = fitting_tiles(Matrix(weight, gated=is_gated), num_rows)
                    assert tiles
                    for tile in tiles:
                        lines = tile.out * (2 if is_gated else 1) + padded_rows(num_rows)
                        held = lines * tile.chunk * dtype.itemsize * tile.num_stages
                        assert held <= 227 * 1024


def test_rows_are_padded_to_what_matrix_units_take() -> None:
    found = {rows: padded_rows(rows) for rows in (1, 16, 17, 32, 33, 64)}
    assert found == {1: 16, 16: 16, 17: 32, 32: 32, 33: 64, 64: 64}


Change = Callable[[Built], object]


@pytest.mark.parametrize(
    ("change", "remedy"),
    [
        (lambda b: Product(b.x[0], b.matrix, b.case.tile, False), r"contiguous \[rows, 88\]"),
        (lambda b: Product(b.x[:, :80], b.matrix, b.case.tile, False), r"contiguous \[rows, 88\]"),
        (
            lambda b: Product(b.nan(88, 16).t(), b.matrix, b.case.tile, False),
            r"contiguous \[rows, 88\]",
        ),
        (
            lambda b: Product(b.x, Matrix(b.nan(88, 56).t()), b.case.tile, False),
            "weight=.* Pass contiguous",
        ),
        (lambda b: Product(b.x.half(), b.matrix, b.case.tile, False), "torch.float32, as the wei"),
        (
            lambda b: Product(b.nan(16, 90), Matrix(b.nan(56, 90)), b.case.tile, False),
            "K=90.* multiple of 16 bytes",
        ),
        (lambda b: b.product.run(b.out, 0), "num_rows=0.* Use 1 to 64"),
        (lambda b: b.product.run(b.out, MAX_ROWS + 1), "num_rows=65.* Use 1 to 64"),
        (lambda b: b.product.run(b.out, len(b.x) + 1), "num_rows=17.* The buffer has 16 rows"),
        (lambda b: b.product.run(b.nan(3, 56), 4), "out=.*float32 .4 or more, 56"),
        (lambda b: b.product.run(b.nan(16, 55), 4), "out=.*float32 .4 or more, 56"),
        (lambda b: b.product.run(b.out, 4, added=b.nan(56, 16).t()), "added=.* Pass contiguous"),
    ],
)
def test_what_the_kernel_is_not_made_for_is_refused(change: Change, remedy: str) -> None:
    built = Built(Case())
    with pytest.raises(ConfigError, match=remedy):
        change(built)
    assert built.out.isnan().all()


@needs_gpu
@pytest.mark.parametrize("num_rows", [1, 16, 40])
@pytest.mark.parametrize("is_gated", [False, True])
def test_overlapped_products_wait_for_what_they_read(num_rows: int, is_gated: bool) -> None:
    """A chain that adds into its own rows again and again: a read too early would show.

    The weights are wide enough for some of them to be asked for ahead.
    """
    if torch.cuda.get_device_capability()[0] < 9:
        pytest.skip("needs Hopper or later")
    case = Case(
        num_rows,
        1024,
        1024,
        dtype=torch.bfloat16,
        is_gated=is_gated,
        has_added=True,
        has_norm=True,
    )
    for tile in fitting_tiles(Built(case).matrix, num_rows):
        plain, overlapped = (chain(replace(case, tile=tile, pdl=pdl)) for pdl in (False, True))
        assert plain.isfinite().all()
        assert torch.equal(plain, overlapped), tile


def chain(case: Case) -> Tensor:
    """Rows after 50 products, each of what the one before prepared, all added into one stream."""
    built = Built(case)
    assert built.added is not None and built.norm is not None
    stream, norm = built.added, built.norm
    other = Norm(norm.weight, torch.empty_like(norm.scaled), torch.empty_like(norm.squares))
    norms = (norm, other)
    products = [Product(each.scaled, built.matrix, case.tile, case.pdl) for each in norms]
    built.run(stream)
    for turn in range(50):
        read, written = norms[turn % 2], norms[1 - turn % 2]
        product = products[turn % 2]
        squares = Squares(read.squares, product.num_programs, EPS)
        product.run(stream, case.num_rows, squares, stream, written)
    return stream[: case.num_rows].clone()
