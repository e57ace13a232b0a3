"""A stream of millions of tokens scored on a GPU by the demo model, bf16, window 2,048 + 4 sinks.

    python benchmarks/gpu_stream.py --data DIR [--tokens N] [--tier-tokens N] [--quick]

DIR holds texts (*.md, *.txt, *.srt), read in the order of their names and again from the start when
they end. First `retain="none"`: time of each 100,000 tokens, device memory after each, perplexity.
The same without tiers token by token, by `score`, for what its objects cost. Then `retain="all"`
with a pinned cpu pool of 16 GiB and 20 GiB of ssd, with `wait` and `drop`.
"""

import itertools
import math
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import MODEL, arguments, finish, require, say
from report import Report, median

from streamkv import Engine, EngineConfig
from streamkv.tokenizer import Tokenizer

WINDOW_SIZE, NUM_SINKS, CHUNK = 2048, 4, 8192
ITEM = 16 * CHUNK
"""Tokens handed over at once: while a chunk of them is looked at, the next one is computed."""
PART = 100_000
"""Tokens between two looks at clock and memory."""


def config(**others: Any) -> EngineConfig:
    """The engine of every stream here."""
    options: dict[str, Any] = {
        "window_size": WINDOW_SIZE,
        "num_sink_tokens": NUM_SINKS,
        "device": "cuda",
        "dtype": "bfloat16",
        "max_sessions": 1,
        "prefill_chunk": CHUNK,
        "cpu_bytes": 0,
        "retain": "none",
    }
    return EngineConfig(**{**options, **others})


def text_ids(data: Path, tokenizer: Tokenizer) -> list[int]:
    """Ids of all texts, one after another."""
    found: list[int] = []
    for path in sorted(p for p in data.rglob("*") if p.suffix.lower() in (".md", ".txt", ".srt")):
        found.extend(tokenizer.encode(path.read_text(encoding="utf-8", errors="replace")))
    require(len(found) > 10_000, f"{data} holds only {len(found)} tokens")
    return found


def endless(ids: list[int], num_tokens: int) -> Iterator[list[int]]:
    """The ids again and again, in items."""
    stream = itertools.islice(itertools.cycle(ids), num_tokens)
    while piece := list(itertools.islice(stream, ITEM)):
        yield piece


def stream(engine: Engine, ids: list[int], num_tokens: int) -> tuple[list[float], list[int], float]:
    """Seconds of each part, bytes of device memory after it, and the mean log-probability."""
    ends, times, memory = [0], [time.perf_counter()], list[int]()
    total, said = 0.0, 0
    with engine.session("stream") as session:
        for chunk in session.score_chunks(endless(ids, num_tokens)):
            total += float(np.nansum(chunk.logprobs, dtype=np.float64))
            ends.append(ends[-1] + len(chunk.token_ids))
            times.append(time.perf_counter())
            while (len(memory) + 1) * PART <= ends[-1]:
                memory.append(torch.cuda.memory_allocated())
            if ends[-1] // (10 * PART) > said:
                said = ends[-1] // (10 * PART)
                rate = 10 * PART / sum(part_seconds(ends, times)[-10:])
                say(f"  {ends[-1]:,} tokens, {rate:,.0f} tokens/s")
    require(ends[-1] == num_tokens, f"{ends[-1]} of {num_tokens} tokens were scored")
    return part_seconds(ends, times), memory, total / max(1, num_tokens - 1)


def part_seconds(ends: list[int], times: list[float]) -> list[float]:
    """Seconds of each whole part: chunks do not end where parts do, so between their ends.

    Args:
        ends: tokens scored when each chunk was handed out, 0 first.
        times: when that was, in seconds.
    """
    marks = np.arange(ends[-1] // PART + 1) * PART
    return np.diff(np.interp(marks, ends, times)).tolist()


def rate_by_token(engine: Engine, ids: list[int], num_tokens: int) -> float:
    """Tokens per second of `score`, which hands out an object for each token."""
    seconds: list[float] = []
    with engine.session("by token") as session:
        began = time.perf_counter()
        for count, _ in enumerate(session.score(endless(ids, num_tokens)), 1):
            if count % PART == 0:
                now = time.perf_counter()
                seconds.append(now - began)
                began = now
    return PART / median(seconds)


def measure_endless(report: Report, data: Path, num_tokens: int) -> None:
    """Nothing is kept: time and memory must stay what they are."""
    with Engine(MODEL, config(), on_progress=say) as engine:
        ids = text_ids(data, engine.tokenizer)
        say(f"  {len(ids):,} tokens of text")
        seconds, memory, mean = stream(engine, ids, num_tokens)
        by_token = rate_by_token(engine, ids, min(num_tokens, 10 * PART))
    # The first part compiles kernels and makes buffers. Texts differ in what their characters cost,
    # so that the same parts of the texts are compared: in the first round and in the last.
    round_parts = max(2, round(len(ids) / PART))
    begin = (len(seconds) // round_parts - 1) * round_parts
    require(begin > 0, f"{num_tokens} tokens are less than two rounds of the texts")
    pairs = list(zip(seconds[1:round_parts], seconds[begin + 1 : begin + round_parts], strict=True))
    # Parts of a second on a shared host differ by a tenth and more: pair by pair, the median.
    ratio = median([last / first for first, last in pairs])
    sums = sum(last for _, last in pairs) / sum(first for first, _ in pairs)
    report.add("tokens", num_tokens, "tokens", better="higher")
    report.add("tokens_per_s", PART / median(seconds[1:]), "tokens/s", better="higher")
    report.add("score_tokens_per_s", by_token, "tokens/s", better="higher")
    report.add("end_over_start", ratio, "x", bound=1.03, seconds=[round(s, 4) for s in seconds])
    report.add("end_over_start_of_sums", sums, "x")
    growth = memory[-1] - memory[1]
    report.add("memory_growth", growth, "bytes of device memory", bound=0)
    report.add("memory", memory[-1], "bytes of device memory")
    report.add("perplexity", math.exp(-mean), "")
    say(f"  {PART / median(seconds[1:]):,.0f} tokens/s by chunks, {by_token:,.0f} by tokens")
    say(f"  end over start {ratio:.4f} ({sums:.4f} of sums), memory grew by {growth} bytes")


def measure_tiers(report: Report, data: Path, on_pressure: str, num_tokens: int) -> None:
    """Everything is kept: how fast, what is written, what is given up."""
    with tempfile.TemporaryDirectory() as store:
        options = {
            "retain": "all",
            "on_pressure": on_pressure,
            "cpu_bytes": "16GiB",
            "ssd_bytes": "20GiB",
            "store": store,
        }
        with Engine(MODEL, config(**options), on_progress=say) as engine:
            ids = text_ids(data, engine.tokenizer)
            began = time.perf_counter()
            stream(engine, ids, num_tokens)
            rate = num_tokens / (time.perf_counter() - began)
            counted = engine.counters()
            written = counted["writes"] * engine.model.spec.block_bytes / num_tokens
        on_disk = sum(p.stat().st_size for p in Path(store).rglob("*") if p.is_file())
    report.add(f"{on_pressure}_tokens_per_s", rate, "tokens/s", better="higher", tokens=num_tokens)
    report.add(f"{on_pressure}_block_bytes_written", written, "bytes of blocks per token")
    report.add(f"{on_pressure}_store_bytes", on_disk / num_tokens, "bytes of files per token")
    report.add(f"{on_pressure}_dropped", counted["dropped"], "blocks")
    shown = {name: counted[name] for name in ("demotions", "writes", "dropped", "waits", "wait_ms")}
    say(f"  {on_pressure}: {rate:,.0f} tokens/s, {shown}")


def main() -> int:
    """Measure; 0 if every bound is kept."""
    parser = arguments(__doc__, data=True)
    parser.add_argument("--tokens", type=int, default=4_000_000, help="without tiers (4,000,000)")
    parser.add_argument("--tier-tokens", type=int, default=1_000_000, help="with tiers (1,000,000)")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("this benchmark needs a GPU", file=sys.stderr)
        return 2
    report = Report("gpu_stream")
    num_tokens, tier_tokens = options.tokens, options.tier_tokens
    if options.quick:
        num_tokens, tier_tokens = 22 * PART, 2 * PART
    measure_endless(report, options.data, num_tokens)
    for on_pressure in ("drop", "wait"):
        measure_tiers(report, options.data, on_pressure, tier_tokens)
    return finish(report, quick=options.quick)


if __name__ == "__main__":
    sys.exit(main())
