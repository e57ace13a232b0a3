"""Products of few rows on a GPU against cuBLAS, at the shapes of Llama-3.1-8B, bf16.

    python benchmarks/gpu_products.py [--quick]

Each product is checked against float32 first. Calls go round over more than 2 GB of weights in one
CUDA graph, so that no weight is found in the cache. Ours does what the decoder does: gate and
residual are in it, for which cuBLAS would need further kernels that are not counted here.
"""

import sys

import torch
from common import arguments, finish, require, say
from gpu_timing import Call, graph_ms
from report import Report
from torch import Tensor
from torch.nn.functional import linear, silu

from streamkv.kernels.small_batch import Matrix, Product, Tile, fitting_tiles, padded_rows

PRODUCTS = {
    "qkv": (4096, 6144, False, False),
    "o": (4096, 4096, False, True),
    "gate_up": (4096, 14336, True, False),
    "down": (14336, 4096, False, True),
    "head": (4096, 128256, False, False),
}
"""Name: columns, outputs, gated, added to the residual stream."""

ROWS = (1, 16, 64)
WEIGHT_BYTES = 2.4e9


class Case:
    """One product: weights of as many layers as make calls miss the cache, and its rows."""

    def __init__(self, name: str, num_rows: int) -> None:
        width, num_out, gated, self.is_added = PRODUCTS[name]
        shape = (num_out * (2 if gated else 1), width)
        count = max(2, round(WEIGHT_BYTES / (2 * shape[0] * width)))
        self.num_rows = num_rows
        self.weight_bytes = 2 * shape[0] * width
        self.matrices = [Matrix(0.02 * self._random(*shape), gated=gated) for _ in range(count)]
        self.rows = self._random(padded_rows(num_rows), width)
        self.added = self._random(padded_rows(num_rows), num_out)
        self.out = torch.empty_like(self.added)

    @staticmethod
    def _random(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.bfloat16, device="cuda")

    def calls(self, tile: Tile) -> list[Call]:
        """One call of ours for each layer."""
        added = self.added if self.is_added else None
        pdl = torch.cuda.get_device_capability()[0] >= 9

        def call(product: Product) -> Call:
            return lambda: product.run(self.out, self.num_rows, added=added)

        return [call(Product(self.rows, matrix, tile, pdl)) for matrix in self.matrices]

    def peer_calls(self) -> list[Call]:
        """cuBLAS, the product alone."""

        def call(matrix: Matrix) -> Call:
            return lambda: linear(self.rows[: self.num_rows], matrix.weight)

        return [call(matrix) for matrix in self.matrices]

    def check(self, tile: Tile) -> None:
        """The last layer's output against float32."""
        self.calls(tile)[-1]()
        matrix, count = self.matrices[-1], self.num_rows
        expected = linear(self.rows[:count].float(), matrix.weight.float())
        if matrix.gated:
            gate, up = expected.chunk(2, dim=1)
            expected = silu(gate) * up
        if self.is_added:
            expected += self.added[:count].float()
        difference = float((self.out[:count].float() - expected).norm() / expected.norm())
        require(difference < 0.01, f"{tile} differs from float32 by {difference:g}")


def measure(report: Report, name: str, num_rows: int) -> None:
    """One product: the fastest tile, and cuBLAS."""
    case = Case(name, num_rows)
    tiles = fitting_tiles(case.matrices[0], num_rows)
    for tile in tiles:
        case.check(tile)
    best = min(tiles, key=lambda tile: graph_ms(case.calls(tile), repeats=5))
    own, peer = (1000 * graph_ms(calls) for calls in (case.calls(best), case.peer_calls()))
    label = f"{name}_{num_rows}_rows"
    rate = case.weight_bytes / own / 1e6
    report.add(f"{label}_us", own, "us", peers={"cublas": peer}, tb_per_s=rate, tile=str(best))
    report.add(f"{label}_ratio", own / peer, "x cuBLAS", bound=1.0)
    say(f"  {label}: {own:.2f} us, cuBLAS {peer:.2f}, {rate:.2f} TB/s, {best}")


def main() -> int:
    """Measure; 0 if ours is never slower."""
    options = arguments(__doc__).parse_args()
    if not torch.cuda.is_available():
        print("this benchmark needs a GPU", file=sys.stderr)
        return 2
    torch.manual_seed(1)
    report = Report("gpu_products")
    with torch.inference_mode():
        for name in list(PRODUCTS)[:2] if options.quick else PRODUCTS:
            for num_rows in ROWS:
                measure(report, name, num_rows)
                torch.cuda.empty_cache()
    return finish(report, quick=options.quick)


if __name__ == "__main__":
    sys.exit(main())
