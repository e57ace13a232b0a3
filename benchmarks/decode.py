"""Decode speed on two threads, against transformers in the same run.

    python benchmarks/decode.py [--quick]

The engine decodes 128 greedy tokens with its window of 2,048 full (and, for reference, after 512
tokens); transformers' `generate` (greedy, DynamicCache, SDPA) decodes 128 at the same length: its
growing context is centred on what the engine attends to. Contexts are fed before the clock starts.
Both take turns; medians are compared. First both must say the same after a text that the window
covers whole.
"""

import argparse
import sys
import time

import torch
from common import (
    MODEL,
    NEAR_TIE,
    agreement,
    arguments,
    finish,
    greedy,
    require,
    restart_with_threads,
    say,
    topics_ids,
)
from peer import Peer
from report import Report, median

from streamkv import Engine, EngineConfig

NUM_THREADS = 2
NUM_SINKS = 4
WINDOW_SIZE = 2048
NUM_TOKENS = 128
BOUND = 2.5
NUM_CHECKED = 48


def open_engine(dtype: str) -> Engine:
    """The engine with nothing stored, for one session."""
    config = EngineConfig(
        window_size=WINDOW_SIZE,
        num_sink_tokens=NUM_SINKS,
        dtype=dtype,  # type: ignore[arg-type]  # one of DTYPES
        cpu_bytes=0,
        retain="none",
        max_sessions=1,
        num_threads=NUM_THREADS,
    )
    return Engine(MODEL, config, on_progress=say)


def check(engine: Engine, peer: Peer, report: Report, dtype: str, num_tokens: int) -> None:
    """The same first tokens where the window covers everything."""
    ids = topics_ids(engine.tokenizer, 512)
    with engine.session("check") as session:
        session.feed([ids]).run()
        deltas = list(session.generate(greedy(num_tokens)))
    found = [delta.token_id for delta in deltas if delta.token_id is not None]
    expected, _ = peer.generate(ids, num_tokens)
    agreed = agreement(expected, found, [delta.margin for delta in deltas], NEAR_TIE[dtype])
    require(agreed.ok, f"{dtype}: token {agreed.num_equal} of {num_tokens} is not transformers'")
    report.add(
        f"{dtype}_same_tokens",
        agreed.num_equal,
        f"of {num_tokens} tokens",
        better="higher",
        near_ties=agreed.near_ties,
    )


def engine_seconds(engine: Engine, ids: list[int], num_tokens: int) -> float:
    """Seconds to decode after `ids` in a fresh session."""
    session = engine.session("timed")
    try:
        session.feed([ids]).run()
        started = time.perf_counter()
        num_made = sum(1 for _ in session.generate(greedy(num_tokens)))
        elapsed = time.perf_counter() - started
    finally:
        session.delete()
    require(num_made == num_tokens, f"{num_made} tokens instead of {num_tokens}")
    return elapsed


def peer_seconds(peer: Peer, ids: list[int], num_tokens: int) -> float:
    """Seconds for transformers to decode after `ids`."""
    tokens, seconds = peer.generate(ids, num_tokens)
    require(len(tokens) == num_tokens, f"transformers made {len(tokens)} tokens")
    return seconds


def take_turns(
    engine: Engine, peer: Peer, lengths: tuple[int, int], num_tokens: int, rounds: int
) -> tuple[list[float], list[float]]:
    """Tokens/s of the engine and of transformers, after contexts of the given lengths.

    The round before the first is not counted: it warms both up.
    """
    ids = topics_ids(engine.tokenizer, max(lengths))
    ours, theirs = [], []
    for turn in range(rounds + 1):
        own = num_tokens / engine_seconds(engine, ids[: lengths[0]], num_tokens)
        other = num_tokens / peer_seconds(peer, ids[: lengths[1]], num_tokens)
        say(f"  round {turn}: {own:.1f} tokens/s, transformers {other:.1f}")
        ours.append(own)
        theirs.append(other)
    return ours[1:], theirs[1:]


def add(
    report: Report, name: str, ours: list[float], theirs: list[float], bound: float | None
) -> None:
    """Medians of both, and their ratio."""
    rate, other = median(ours), median(theirs)
    report.add(
        f"{name}_tokens_per_s",
        rate,
        "tokens/s",
        better="higher",
        peers={"transformers_generate": other},
        rounds=ours,
    )
    report.add(f"{name}_ratio", rate / other, "x transformers", bound=bound, better="higher")


def measure(report: Report, dtype: str, options: argparse.Namespace) -> None:
    """One element type: correctness, then both lengths."""
    full = WINDOW_SIZE + NUM_SINKS
    with Peer(dtype) as peer, open_engine(dtype) as engine:
        check(engine, peer, report, dtype, 8 if options.quick else NUM_CHECKED)
        if options.quick:
            add(report, f"{dtype}_256", *take_turns(engine, peer, (256, 256), 8, 1), None)
            return
        say(f"{dtype}, 512 tokens")
        ours, theirs = take_turns(engine, peer, (512, 512), NUM_TOKENS, options.rounds)
        add(report, f"{dtype}_512", ours, theirs, None)
        say(f"{dtype}, window of {WINDOW_SIZE}")
        lengths = (full + 64, full - NUM_TOKENS // 2)
        ours, theirs = take_turns(engine, peer, lengths, NUM_TOKENS, options.rounds)
        add(report, f"{dtype}_2048", ours, theirs, BOUND)


def main() -> int:
    """Measure both element types; 0 if every bound is kept."""
    parser = arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="timed turns of each side")
    options = parser.parse_args()
    restart_with_threads(NUM_THREADS)
    torch.set_num_threads(NUM_THREADS)
    report = Report("decode")
    report.notes.append(
        "Not of this run: llama.cpp was once measured on 2 Zen 5 cores at 512 tokens with "
        "77 tokens/s f32 and 111 bf16."
    )
    for dtype in ("float32", "bfloat16"):
        measure(report, dtype, options)
    return finish(report, quick=options.quick)


if __name__ == "__main__":
    sys.exit(main())
