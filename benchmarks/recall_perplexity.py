"""Perplexity of a book with and without recall, token by token.

    python benchmarks/recall_perplexity.py --data DIR [--quick]

The first tokens of Pride and Prejudice are scored three times: through a window; through the same
window with k old blocks recalled; through a window of as many tokens as both attend to. Every token
is scored by all, so that differences are paired; their interval is by bootstrap over blocks of 512
tokens. As long as nothing has left the window all three must agree.
"""

import argparse
import math
import statistics
import sys
import time
from collections.abc import Sequence
from typing import NamedTuple

import torch
from common import MODEL, arguments, book_ids, every, finish, pieces, require, say
from report import Report

from streamkv import Engine, EngineConfig
from streamkv.config import choose_dtype
from streamkv.device import choose_device
from streamkv.recall_bench import modes
from streamkv.recall_bench.paired import mean_difference
from streamkv.recall_bench.run import ModelFacts

NUM_TOKENS = 65_536
WINDOW_SIZE = 1020
RECALL_BLOCKS = 16
BLOCK_TOKENS = 64
PIECE = 512
DRAWN_TOGETHER = 512
TOLERANCE = {"float32": 1e-3, "bfloat16": 0.5, "float16": 0.1}
"""Of one log-probability while all three see the same, in nats."""


class Scored(NamedTuple):
    """Negative log-likelihood of every token but the first, in nats, and tokens/s."""

    nll: list[float]
    tokens_per_s: float


def score(config: EngineConfig, ids: Sequence[int], what: str) -> Scored:
    """Score a text; the first piece is not timed."""
    show, nll, begun = every(4 * PIECE), list[float](), 0.0
    say(f"{what}:")
    with Engine(MODEL, config, on_progress=say) as engine, engine.session("book") as session:
        for item in session.score(pieces(ids, PIECE)):
            if item.logprob is None:
                continue
            nll.append(-item.logprob)
            begun = begun or (time.perf_counter() if len(nll) >= PIECE else 0.0)
            if begun and len(nll) > PIECE:
                show(len(nll), (len(nll) - PIECE) / max(time.perf_counter() - begun, 1e-9))
        seconds = max(time.perf_counter() - begun, 1e-9)
    return Scored(nll, (len(nll) - PIECE) / seconds)


def settings(options: argparse.Namespace, dtype: str) -> dict[str, EngineConfig]:
    """What is compared, by name."""
    base = EngineConfig(
        window_size=options.window_size,
        dtype=dtype,  # type: ignore[arg-type]  # checked by the class
        device=options.device,
    )
    wide_size = options.window_size + BLOCK_TOKENS * options.recall_blocks
    wide = EngineConfig(window_size=wide_size, dtype=base.dtype, device=base.device)
    spec = ModelFacts.read(MODEL, dtype, say).spec
    k = options.recall_blocks
    return {
        "window": modes.window_config(base, is_forking=False),
        "recall": modes.recall_config(base, spec, modes.RECALL, k, options.tokens),
        "equal_attended": modes.window_config(wide, is_forking=False),
    }


def compare(report: Report, scored: dict[str, Scored], first: str, second: str) -> float:
    """Add the paired difference of two; returns the low end of its interval."""
    found = mean_difference(scored[first].nll, scored[second].nll, DRAWN_TOGETHER)
    low, high = found.interval
    name = f"{first}_minus_{second}"
    report.add(name, found.mean, "nats", low=low, high=high, drawn_together=DRAWN_TOGETHER)
    say(f"{name}: {found.mean:+.5f} nats, 95 % interval {low:+.5f} to {high:+.5f}")
    return low


def main() -> int:
    """Score and compare; 0 if recall is not worse than the same window."""
    parser = arguments(__doc__, data=True)
    parser.add_argument("--tokens", type=int, default=NUM_TOKENS, help="first tokens of the book")
    parser.add_argument("--window-size", type=int, default=WINDOW_SIZE)
    parser.add_argument("--recall-blocks", type=int, default=RECALL_BLOCKS)
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    parser.add_argument("--dtype", default="auto")
    options = parser.parse_args()
    if options.quick:
        options.tokens = min(options.tokens, 4096)
    least = max(options.window_size, PIECE) + 2
    if options.tokens < least:
        parser.error(f"--tokens {options.tokens}: use at least {least}, or a smaller window")
    if options.device == "auto" and torch.cuda.is_available():
        options.device = "cuda"
    dtype = choose_dtype(options.dtype, choose_device(options.device))
    facts = ModelFacts.read(MODEL, dtype, say)
    ids = book_ids(facts.tokenizer, options.data, options.tokens)
    report = Report("recall_perplexity")
    report.notes.append(
        f"{MODEL}, {dtype}, {options.tokens} tokens, window {options.window_size}, "
        f"k {options.recall_blocks}"
    )
    scored: dict[str, Scored] = {}
    for name, config in settings(options, dtype).items():
        scored[name] = score(config, ids, name)
        seen = zip(scored[name].nll, scored["window"].nll, strict=True)
        worst = max(abs(a - b) for a, b in list(seen)[: options.window_size - 1])
        require(worst <= TOLERANCE[dtype], f"{name} differs by {worst:g} before the window is full")
    for name, (nll, rate) in scored.items():
        mean = statistics.fmean(nll)
        report.add(f"{name}_nll", mean, "nats", perplexity=math.exp(mean))
        report.add(f"{name}_tokens_per_s", rate, "tokens/s", better="higher")
    compare(report, scored, "equal_attended", "window")
    low = compare(report, scored, "recall", "window")
    report.add("recall_not_worse", low, "nats", bound=0.0)
    compare(report, scored, "recall", "equal_attended")
    return finish(report, quick=options.quick)


if __name__ == "__main__":
    sys.exit(main())
