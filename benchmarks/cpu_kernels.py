"""Speed of the CPU kernels alone, with the shapes of SmolLM2-135M, against torch's.

    python benchmarks/cpu_kernels.py [--quick]

- `attend`: one layer, 512 queries in mid-stream, 4 sinks and a window of 1,020: native, torch, and
  what transformers does for as many tokens of a dense piece of 2,052 (a quarter of causal SDPA).
- `decode`: bytes of weights and KV that a whole native step reads per second, window 2,048 full,
  against one row through torch's own linear over the same weights.

Both paths must agree before the clock starts.
"""

import sys
import time
from collections.abc import Callable

import torch
from common import MODEL, arguments, finish, require, restart_with_threads, say
from report import Report, median
from torch import Tensor

from streamkv.kernels import cpu
from streamkv.kernels.native import DecodeRow, NativeDecoder
from streamkv.kernels.native_attention import NativeAttention
from streamkv.kernels.native_build import build
from streamkv.kernels.rope import RopeTables
from streamkv.kernels.table import NO_CAP, SequenceTable
from streamkv.model import ModelAdapter
from streamkv.model_cache import cache_root
from streamkv.model_native import native_weights
from streamkv.tiers.gpu_pool import GpuPool

NUM_THREADS = 2
NUM_QUERIES = 512
WINDOW_SIZE = 1020
PIECE = 2052
DECODE_WINDOW = 2048
TOLERANCE = {"float32": 1e-5, "bfloat16": 0.03}


def stream_table(first: int, end: int) -> SequenceTable:
    """Sinks in block 0, then the blocks that hold tokens [first, end)."""
    rows = [(0, 0, WINDOW_SIZE, 0, 4)]
    for number, start in enumerate(range(first // 64 * 64, end, 64)):
        rows.append((1 + number, start, NO_CAP, 0, min(64, end - start)))
    block_ids, starts, caps, low, high = torch.tensor(rows).t().contiguous().unbind(0)
    return SequenceTable(block_ids, starts, caps, low, high, num_sink_entries=1)


def in_turns(ways: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Median seconds of each way; they take turns, so that noise hits all alike."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds + 1):
        for name, way in ways.items():
            started = time.perf_counter()
            way()
            seconds[name].append(time.perf_counter() - started)
    return {name: median(values[1:]) for name, values in seconds.items()}


def measure_attention(report: Report, adapter: ModelAdapter, dtype: str, rounds: int) -> None:
    """One layer of a 512-token step."""
    pool = GpuPool(adapter.spec, 40).data
    pool.normal_()
    rope = RopeTables(adapter.inv_freq, 4096)
    heads, dim, start = adapter.num_q_heads, adapter.head_dim, 3000
    native = NativeAttention(build(cache_root() / "native"), pool, rope, heads, NUM_THREADS)
    table = stream_table(start + 1 - WINDOW_SIZE, start + NUM_QUERIES)
    q = torch.randn(NUM_QUERIES, heads, dim).to(pool.dtype)
    plans = {
        name: cpu.plan_attention(table, start, NUM_QUERIES, WINDOW_SIZE, rope, pool, heads, how)
        for name, how in (("native", native), ("torch", None))
    }
    outs = [cpu.attend(q, pool, 1, plan, dim**-0.5).float() for plan in plans.values()]
    difference = (outs[0] - outs[1]).abs().max().item()
    require(difference <= TOLERANCE[dtype], f"{dtype}: the paths differ by {difference:g}")
    dense = torch.randn(1, heads, PIECE, dim).to(pool.dtype)
    key = torch.randn(1, adapter.spec.num_kv_heads, PIECE, dim).to(pool.dtype)
    sdpa = torch.nn.functional.scaled_dot_product_attention
    found = in_turns(
        {
            "native": lambda: cpu.attend(q, pool, 1, plans["native"], dim**-0.5),
            "torch": lambda: cpu.attend(q, pool, 1, plans["torch"], dim**-0.5),
            "sdpa": lambda: sdpa(dense, key, key, is_causal=True, enable_gqa=True),
        },
        rounds,
    )
    peers = {
        "torch_path": 1e3 * found["torch"],
        "sdpa_causal": 1e3 * found["sdpa"] * NUM_QUERIES / PIECE,
    }
    report.add(f"{dtype}_attend_512", 1e3 * found["native"], "ms", peers=peers)


def measure_decode(report: Report, adapter: ModelAdapter, dtype: str, rounds: int) -> None:
    """A whole step of one token, and one row through every projection by torch."""
    packed = native_weights(adapter)
    weights = [p.detach() for p in packed.packed]
    pool = GpuPool(adapter.spec, DECODE_WINDOW // 64 + 2).data
    pool.normal_()
    rope = RopeTables(adapter.inv_freq, 4096)
    library = build(cache_root() / "native")
    decoder = NativeDecoder(library, packed.decoder, pool, rope, NUM_THREADS)
    table, at = stream_table(0, DECODE_WINDOW), DECODE_WINDOW - 1
    num_bytes = sum(copy.nbytes for copy in packed.packed.values()) + pool[1:33].nbytes
    rows: dict[int, Tensor] = {w.shape[1]: torch.randn(1, w.shape[1]).to(w.dtype) for w in weights}

    def step() -> None:
        decoder.decode([DecodeRow(5, at, 64 * 32 + 63, table, DECODE_WINDOW)])

    def products() -> None:
        for weight in weights:
            torch.nn.functional.linear(rows[weight.shape[1]], weight)

    found = in_turns({"step": step, "torch": products}, rounds)
    own = sum(weight.nbytes for weight in weights)
    peers = {"torch_linear": own / found["torch"] / 1e9}
    report.add(
        f"{dtype}_decode_reads",
        num_bytes / found["step"] / 1e9,
        "GB/s",
        better="higher",
        peers=peers,
        step_ms=1e3 * found["step"],
        step_mib=num_bytes / 2**20,
    )


@torch.inference_mode()
def main() -> int:
    """Measure both element types."""
    parser = arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=40, help="calls of each way")
    options = parser.parse_args()
    restart_with_threads(NUM_THREADS)
    torch.set_num_threads(NUM_THREADS)
    rounds = 2 if options.quick else options.rounds
    report = Report("cpu_kernels")
    for dtype in ("float32", "bfloat16"):
        say(f"{dtype} ...")
        adapter = ModelAdapter.load(MODEL, dtype)
        measure_attention(report, adapter, dtype, rounds)
        measure_decode(report, adapter, dtype, rounds)
    return finish(report, quick=options.quick)


if __name__ == "__main__":
    sys.exit(main())
