"""How fast a linear layer of few rows reads its weights: eager ways, a compiled loop, huge pages.

    python benchmarks/cpu_linear.py [--quick]

Shapes are those of SmolLM2-135M with merged q/k/v and gate/up. Each way works through 1 GiB of
different weights, as a decode step does, so that no weight is found in a cache; the best of several
passes counts. GB/s are bytes of weights over seconds. Results are compared with float64 first.
"""

import sys
import time
from collections.abc import Callable

import numpy as np
import torch
from common import arguments, finish, require, restart_with_threads, say
from report import Report
from torch import Tensor

from streamkv.kernels.cpu_linear import linear
from streamkv.kernels.huge_pages import pack

NUM_THREADS = 2
SHAPES = {
    "qkv": (960, 576),
    "o": (576, 576),
    "gate_up": (3072, 576),
    "down": (576, 1536),
    "head": (49152, 576),
}
ROWS = (1, 2, 4, 8)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
TOLERANCES = {"float32": 1e-4, "bfloat16": 2e-2}
MAX_MATRICES = 200

Way = Callable[[Tensor, Tensor], object]


def multiply_and_sum(x: Tensor, weight: Tensor) -> Tensor:
    """One row as the loop that a compiler makes of it."""
    return (x.float() * weight.float()).sum(-1)


def ways(num_rows: int, dtype: torch.dtype) -> dict[str, Way]:
    """The candidates, each of x [num_rows, in] and weight [out, in]."""
    found: dict[str, Way] = {
        "chosen": linear,
        "torch_linear": torch.nn.functional.linear,
        "torch_mm": lambda x, weight: torch.mm(weight, x.t()),
    }
    if num_rows == 1:
        # Compiled anew for each shape, or the limit of recompilations ends in the eager function.
        torch.compiler.reset()
        found["torch_mv"] = lambda x, weight: torch.mv(weight, x[0])
        found["compiled"] = torch.compile(multiply_and_sum, dynamic=False)
    if dtype == torch.float32:
        found["numpy"] = lambda x, weight: np.dot(weight.numpy(), x.numpy().T)
    return found


def check(way: Way, x: Tensor, weight: Tensor, tolerance: float, name: str) -> None:
    """The way is right, whichever way round its result lies."""
    out = torch.as_tensor(way(x, weight)).double().flatten()
    expected = torch.nn.functional.linear(x.double(), weight.double())
    best = min(float((out - wanted.flatten()).abs().max()) for wanted in (expected, expected.t()))
    require(best <= tolerance * float(expected.abs().max()), f"{name} differs by {best:.2e}")


def gigabytes_per_s(way: Way, x: Tensor, weights: list[Tensor], num_passes: int) -> float:
    """Best of several passes over all weights, after one that is not counted."""
    seconds = []
    for _ in range(num_passes + 1):
        started = time.perf_counter()
        for weight in weights:
            way(x, weight)
        seconds.append(time.perf_counter() - started)
    num_bytes = sum(weight.numel() * weight.element_size() for weight in weights)
    return num_bytes / min(seconds[1:]) / 1e9


def matrices(memory: Tensor, shape: tuple[int, int]) -> list[Tensor]:
    """Different matrices of a shape, spread over the memory."""
    size = shape[0] * shape[1]
    count = memory.numel() // size
    places = range(0, count, -(-count // MAX_MATRICES))
    return [memory[place * size : (place + 1) * size].view(shape) for place in places]


def measure(report: Report, dtype_name: str, num_bytes: int, num_passes: int) -> None:
    """All shapes and rows of one type, in ordinary memory and in huge pages."""
    dtype = DTYPES[dtype_name]
    pattern = torch.randn(1 << 18, generator=torch.Generator().manual_seed(0)).mul_(0.05).to(dtype)
    memory = pattern.repeat(num_bytes // (pattern.numel() * dtype.itemsize))
    for pages in ("huge", "ordinary"):
        region = pack([memory])[0] if pages == "huge" else memory
        for name, shape in SHAPES.items():
            weights = matrices(region, shape)
            for num_rows in ROWS if pages == "huge" else ROWS[:1]:
                x = torch.randn(num_rows, shape[1]).to(dtype)
                rates = {}
                for way_name, way in ways(num_rows, dtype).items():
                    check(way, x, weights[-1], TOLERANCES[dtype_name], way_name)
                    rates[way_name] = round(gigabytes_per_s(way, x, weights, num_passes), 1)
                chosen = rates.pop("chosen")
                figure = f"{dtype_name}_{name}_rows{num_rows}_{pages}"
                say(f"{figure}: {chosen} {rates}")
                report.add(figure, chosen, "GB/s", better="higher", peers=rates)
        del region, weights


def main() -> int:
    """Measure and report."""
    options = arguments(__doc__).parse_args()
    restart_with_threads(NUM_THREADS)
    torch.set_num_threads(NUM_THREADS)
    torch.set_grad_enabled(False)
    report = Report("cpu_linear")
    for name in DTYPES:
        measure(report, name, (1 << 28) if options.quick else (1 << 30), 1 if options.quick else 3)
    return finish(report, quick=options.quick)


if __name__ == "__main__":
    sys.exit(main())
