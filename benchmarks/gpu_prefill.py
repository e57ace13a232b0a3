"""Window prefill on a GPU: attention of one chunk against peers in the same run, then the engine.

    python benchmarks/gpu_prefill.py [--tokenizer DIR] [--quick]

The heads are those of Llama-3.1-8B (32 query heads, 8 KV heads, head_dim 128, bf16): a chunk of
8,192 tokens deep in a stream, window 4,096 and 4 sink tokens. It is checked against the oracle
first. Calls go round over several layers, so that none finds its KV in the cache. Peers: Triton's
prefill kernel of this repository, torch's flex_attention with the same mask over contiguous keys;
the mark is cuDNN's causal attention of 8,192 tokens, which does as many products. The engine
then feeds 32,768 tokens through a model of that shape with random weights.
"""

import sys
import time
from pathlib import Path
from typing import NamedTuple

import torch
from common import arguments, finish, greedy, pieces, require, say
from gpu_timing import Call, round_ms
from random_model import LLAMA_8B, engine_config, ids, random_adapter, random_engine
from report import Report, median
from torch import Tensor

from streamkv import Engine
from streamkv.kernels import batch_reference, gpu, window_prefill
from streamkv.kernels.batch_table import BatchTable, batch_table
from streamkv.kernels.causal import Squares, choose_squares
from streamkv.kernels.rope import RopeTables
from streamkv.kernels.table import NO_CAP, SequenceTable
from streamkv.kernels.window_plan import WindowPlan, window_plan

Q_HEADS, KV_HEADS, DIM, BLOCK = 32, 8, 128, 64
SCALE = DIM**-0.5
CHUNK, WINDOW, SINKS, START = 8192, 4096, 4, 24576
LAYERS, MODEL_LAYERS = 6, 32
BOUND_US = 4.5
"""Attention of 32 layers for each token: what 36,000 tokens/s leave it beside the rest."""
ENGINE_TOKENS = 32768
BOUND_RATE = 36000
"""Tokens a second of the whole model."""
VLLM_RATE = 37900
"""vLLM 0.24.0 on an H200 with the same sliding window; measured apart, not in this run."""
SLICE = 32
FLOPS = 4 * CHUNK * WINDOW * DIM * Q_HEADS


class Chunk(NamedTuple):
    """A chunk in memory: random KV in blocks of one pool, random queries for each layer."""

    pool: Tensor
    table: BatchTable
    q: list[Tensor]
    rope: RopeTables
    plan: WindowPlan
    shape: gpu.Shape
    squares: Squares


def stream_table(num_blocks: int) -> SequenceTable:
    """Sink tokens in the first block, every block that the chunk sees, in random places."""
    first = (START - WINDOW + 1) // BLOCK * BLOCK
    starts = torch.tensor([0, *range(first, START + CHUNK, BLOCK)])
    caps = torch.full_like(starts, NO_CAP)
    caps[0] = SINKS + WINDOW - 1
    ends = torch.full_like(starts, BLOCK)
    ends[0] = SINKS
    ids = torch.randperm(num_blocks)[: len(starts)]
    return SequenceTable(ids, starts, caps, torch.zeros_like(starts), ends, num_sink_entries=1)


def make_chunk(layers: int) -> Chunk:
    """The chunk, its plan, and the operators of this GPU."""
    num_blocks = (WINDOW + CHUNK) // BLOCK + 2
    size = (num_blocks + 1, layers, 2, KV_HEADS, BLOCK, DIM)
    pool = torch.randn(size, dtype=torch.bfloat16, device="cuda")
    table = stream_table(num_blocks)
    host = batch_table([table], [WINDOW], [pool], table.num_entries, "cpu")
    plan = window_plan(host, 0, START, CHUNK, BLOCK, "cuda")
    assert plan is not None
    inv_freq = 500000.0 ** -(torch.arange(DIM // 2, dtype=torch.float64, device="cuda") * 2 / DIM)
    needed = window_prefill.num_positions(CHUNK, WINDOW, BLOCK)
    rope = RopeTables(inv_freq, max(needed, WINDOW + SINKS + 512))
    rows = (CHUNK, Q_HEADS, DIM)
    q = [torch.randn(rows, dtype=torch.bfloat16, device="cuda") for _ in range(layers)]
    shape = gpu.Shape.of(pool, Q_HEADS, rope)
    return Chunk(pool, host.to("cuda"), q, rope, plan, shape, choose_squares(shape, "cuda"))


def own(chunk: Chunk) -> list[Call]:
    """Window attention by causal squares, the copies and the join included."""
    scratch = window_prefill.window_scratch(chunk.shape, CHUNK, WINDOW, "cuda")
    softmax = gpu.Softmax(SCALE)

    def call(layer: int) -> Call:
        return lambda: window_prefill.window_prefill(
            chunk.q[layer],
            chunk.pool,
            layer,
            chunk.plan,
            chunk.rope,
            softmax,
            chunk.squares,
            scratch,
        )

    return [call(layer) for layer in range(len(chunk.q))]


def by_step(chunk: Chunk) -> dict[str, list[Call]]:
    """The steps of `own`, each alone."""
    scratch = window_prefill.window_scratch(chunk.shape, CHUNK, WINDOW, "cuda")
    softmax, plan, shape, rope = gpu.Softmax(SCALE), chunk.plan, chunk.shape, chunk.rope
    (segment,) = plan.cut.segments
    window_prefill.turn_queries(chunk.q[0], plan, shape, rope, scratch)
    window_prefill.gather(0, plan, shape, rope, scratch)
    attended = window_prefill.attend_parts(plan, segment, SCALE, chunk.squares, scratch)
    out, lse = torch.empty_like(chunk.q[0]), torch.empty(CHUNK, Q_HEADS, device="cuda")
    launch = window_prefill.join_launch(shape)

    def turn(layer: int) -> Call:
        return lambda: window_prefill.turn_queries(chunk.q[layer], plan, shape, rope, scratch)

    def gather(layer: int) -> Call:
        return lambda: window_prefill.gather(layer, plan, shape, rope, scratch)

    def squares(_: int) -> Call:
        return lambda: window_prefill.attend_parts(plan, segment, SCALE, chunk.squares, scratch)

    def join(layer: int) -> Call:
        return lambda: window_prefill.join(
            chunk.q[layer], layer, plan, segment, shape, rope, softmax, attended, out, lse, launch
        )

    steps = {"turn": turn, "gather": gather, "squares": squares, "join": join}
    layers = range(len(chunk.q))
    return {name: [make(layer) for layer in layers] for name, make in steps.items()}


def triton_kernel(chunk: Chunk) -> list[Call]:
    """The prefill kernel that takes any table."""
    starts = torch.tensor([START])
    rows = gpu.prefill_launch(chunk.shape).rows
    tiles = gpu.prefill_tiles(chunk.table.to("cpu"), starts, [CHUNK], chunk.shape, rows).cuda()
    begin, softmax = starts.cuda(), gpu.Softmax(SCALE)

    def call(layer: int) -> Call:
        return lambda: gpu.prefill(
            chunk.q[layer], chunk.pool, layer, chunk.table, begin, tiles, chunk.rope, softmax
        )

    return [call(layer) for layer in range(len(chunk.q))]


def heads(rows: Tensor) -> Tensor:
    """[T, heads, dim] as [1, heads, T, dim]."""
    return rows[None].transpose(1, 2)


def contiguous(chunk: Chunk, num_keys: int) -> list[tuple[Tensor, Tensor, Tensor]]:
    """q, k, v of each layer with random contiguous keys."""
    rows = (2, num_keys, KV_HEADS, DIM)
    kv = [torch.randn(rows, dtype=torch.bfloat16, device="cuda") for _ in chunk.q]
    return [(heads(q), heads(k), heads(v)) for q, (k, v) in zip(chunk.q, kv, strict=True)]


def flex(chunk: Chunk) -> list[Call]:
    """torch's flex_attention, compiled, over the sinks and then the window's keys."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    before = SINKS + WINDOW - 1

    def mask(_b: Tensor, _h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        age = query - (key - before)
        return (key < SINKS) | ((age >= 0) & (age < WINDOW))

    num_keys = before + CHUNK
    blocks = create_block_mask(mask, None, None, CHUNK, num_keys, device="cuda")
    compiled = torch.compile(flex_attention, dynamic=False)

    def call(q: Tensor, k: Tensor, v: Tensor) -> Call:
        return lambda: compiled(q, k, v, block_mask=blocks, scale=SCALE, enable_gqa=True)

    return [call(*layer) for layer in contiguous(chunk, num_keys)]


def causal_mark(chunk: Chunk) -> list[Call]:
    """The operator that attends to the squares, over one causal square of the chunk."""

    def call(q: Tensor, k: Tensor, v: Tensor) -> Call:
        return lambda: chunk.squares.recurring(q, k, v, SCALE, True)

    return [call(*layer) for layer in contiguous(chunk, CHUNK)]


def check(chunk: Chunk, found: tuple[Tensor, Tensor], what: str) -> None:
    """Some rows of layer 0 against the oracle, in float32: at both ends and where pieces meet."""
    pool = chunk.pool[:, :1].float()
    for first in (0, WINDOW - SLICE // 2, CHUNK - SLICE):
        rows = slice(first, first + SLICE)
        begin = torch.tensor([START + first], device="cuda")
        expected = batch_reference.attend(
            chunk.q[0][rows].float(), [pool], 0, chunk.table, begin, [SLICE], chunk.rope, SCALE
        )
        for one, other in zip(found, expected, strict=True):
            difference = float((one[rows].float() - other).norm() / other.norm())
            require(difference < 0.01, f"{what} differs from the oracle by {difference:g}")


def measure_attention(report: Report, *, quick: bool) -> None:
    """Time of the chunk's attention in one layer: ours, by step, and the peers."""
    chunk = make_chunk(2 if quick else LAYERS)
    report.notes.append(f"squares: {chunk.squares.name}")
    say(f"  squares: {chunk.squares.name}")
    calls, kernel = own(chunk), triton_kernel(chunk)
    check(chunk, calls[0](), "window_prefill")  # type: ignore[arg-type]
    check(chunk, kernel[0](), "Triton's prefill")  # type: ignore[arg-type]
    ms = round_ms(calls)
    peers = {"triton_prefill": round_ms(kernel), "causal_8192": round_ms(causal_mark(chunk))}
    if not quick:
        peers["flex_attention"] = round_ms(flex(chunk))
    per_token = 1e3 * MODEL_LAYERS / CHUNK
    report.add(
        "window_us_per_token",
        ms * per_token,
        "us for 32 layers",
        bound=BOUND_US,
        peers={name: value * per_token for name, value in peers.items()},
    )
    rates = {name: FLOPS / value / 1e9 for name, value in peers.items()}
    report.add("window_tflops", FLOPS / ms / 1e9, "TFLOP/s", better="higher", peers=rates)
    for name, step in by_step(chunk).items():
        report.add(f"window_{name}_ms", round_ms(step), "ms")
    shown = ", ".join(f"{name} {value:.4f}" for name, value in peers.items())
    say(f"  one layer: {ms:.4f} ms; {shown}")


def measure_engine(report: Report, tokenizer: Path | None, *, quick: bool) -> None:
    """Tokens a second of a feed through the whole engine, until its last token is computed."""
    adapter = random_adapter(LLAMA_8B, tokenizer)
    for chunk in (8192,) if quick else (8192, 16384):
        config = engine_config(WINDOW, 2, prefill_chunk=chunk)
        with random_engine(adapter, config) as engine:
            rates = [feed_rate(engine, turn) for turn in range(2 if quick else 5)]
        # The first one compiles.
        rate = median(rates[1:])
        report.add(
            f"engine_{chunk}_tokens_per_s",
            rate,
            "tokens/s",
            bound=BOUND_RATE if chunk == 8192 else None,
            better="higher",
            peers={"vllm_0.24.0_other_run": VLLM_RATE},
        )
        say(f"  chunk {chunk}: {rate:,.0f} tokens/s of {[round(rate) for rate in rates]}")


def feed_rate(engine: Engine, turn: int) -> float:
    """Tokens a second from an empty session to the token after its last one."""
    tokens = ids(turn, ENGINE_TOKENS)
    with engine.session(f"feed {turn}") as session:
        began = time.perf_counter()
        session.feed(pieces(tokens, engine.config.prefill_chunk)).run()
        session.generate(greedy(1)).run()
        return ENGINE_TOKENS / (time.perf_counter() - began)


def main() -> int:
    """Measure; 0 if every bound is kept."""
    parser = arguments(__doc__)
    parser.add_argument("--tokenizer", type=Path, help="directory of a tokenizer")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("this benchmark needs a GPU", file=sys.stderr)
        return 2
    torch.manual_seed(1)
    report = Report("gpu_prefill")
    with torch.inference_mode():
        measure_attention(report, quick=options.quick)
    torch.cuda.empty_cache()
    measure_engine(report, options.tokenizer, quick=options.quick)
    return finish(report, quick=options.quick)


if __name__ == "__main__":
    sys.exit(main())
