"""Tokens/s of eight sessions that decode at once on two threads, over those of one.

    python benchmarks/cpu_sessions.py [--rounds 5] [--quick]

Eight sessions, each with text of its own, decode 128 greedy tokens after 512 tokens, then with
their windows of 2,048 full: all at once, as tasks of one event loop, and one of them by itself, in
turns. The figure is the median of the rounds' ratios: the two runs of a round stand next to each
other. Contexts are read before the clock starts, and every run begins with forks of the same
sessions. First eight at once must say what each of them says alone.
"""

import argparse
import asyncio
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
from report import Report, median

from streamkv import Delta, Engine, EngineConfig, Session

NUM_THREADS = 2
NUM_SESSIONS = 8
NUM_SINKS = 4
WINDOW_SIZE = 2048
NUM_TOKENS = 128
NUM_CHECKED = 48
BOUND = 3.0


def open_engine(dtype: str) -> Engine:
    """The engine with nothing stored, with room for the sessions and a fork of each."""
    config = EngineConfig(
        window_size=WINDOW_SIZE,
        num_sink_tokens=NUM_SINKS,
        dtype=dtype,  # type: ignore[arg-type]  # one of two
        cpu_bytes=0,
        retain="none",
        max_sessions=2 * NUM_SESSIONS,
        num_threads=NUM_THREADS,
    )
    return Engine(MODEL, config, on_progress=say)


def read_contexts(engine: Engine, num_tokens: int) -> list[Session]:
    """Sessions that have read so many tokens, each from another place of the text."""
    ids = topics_ids(engine.tokenizer, (NUM_SESSIONS + 1) * num_tokens)
    sessions = []
    for index in range(NUM_SESSIONS):
        sessions.append(engine.session(f"context {index}"))
        start = (index + 1) * num_tokens
        sessions[-1].feed([ids[start - num_tokens : start]]).run()
    return sessions


async def all_say(sessions: list[Session], num_tokens: int) -> list[list[Delta]]:
    """What sessions say at once."""
    return await asyncio.gather(
        *(session.agenerate(greedy(num_tokens)).run() for session in sessions)
    )


def timed(contexts: list[Session], num_tokens: int) -> tuple[float, list[list[Delta]]]:
    """Tokens/s of all at once, and what they said; the contexts stay as they are."""
    forks = [session.fork(f"fork {index}") for index, session in enumerate(contexts)]
    try:
        started = time.perf_counter()
        said = asyncio.run(all_say(forks, num_tokens))
        elapsed = time.perf_counter() - started
    finally:
        for fork in forks:
            fork.delete()
    require(all(len(deltas) == num_tokens for deltas in said), "a session ended early")
    return len(forks) * num_tokens / elapsed, said


def check(contexts: list[Session], report: Report, dtype: str, name: str, num_tokens: int) -> None:
    """The tokens of eight sessions at once are those of each alone."""
    together = timed(contexts, num_tokens)[1]
    num_equal = near_ties = 0
    for index, found in enumerate(together):
        [alone] = timed([contexts[index]], num_tokens)[1]
        agreed = agreement(
            [delta.token_id or 0 for delta in found],
            [delta.token_id or 0 for delta in alone],
            [delta.margin for delta in alone],
            NEAR_TIE[dtype],
        )
        require(agreed.ok, f"{dtype}: token {agreed.num_equal} of session {index} differs")
        num_equal += agreed.num_equal
        near_ties += agreed.near_ties
    report.add(
        f"{name}_same_tokens",
        num_equal,
        f"of {NUM_SESSIONS * num_tokens} tokens",
        better="higher",
        near_ties=near_ties,
    )


def take_turns(
    contexts: list[Session], num_tokens: int, rounds: int
) -> tuple[list[float], list[float]]:
    """Tokens/s of one session and of all, in each round; the first round only warms up."""
    ones, alls = [], []
    for turn in range(rounds + 1):
        one = timed([contexts[turn % NUM_SESSIONS]], num_tokens)[0]
        every = timed(contexts, num_tokens)[0]
        say(f"  round {turn}: one {one:.1f} tokens/s, {NUM_SESSIONS} {every:.1f}")
        ones.append(one)
        alls.append(every)
    return ones[1:], alls[1:]


def measure_length(
    engine: Engine,
    report: Report,
    name: str,
    num_tokens: int,
    options: argparse.Namespace,
    bound: float | None,
) -> None:
    """One element type at one length: correctness, then turns."""
    dtype = name.partition("_")[0]
    say(f"{name}: reading")
    contexts = read_contexts(engine, num_tokens)
    num_said, rounds = (8, 1) if options.quick else (NUM_TOKENS, options.rounds)
    check(contexts, report, dtype, name, min(num_said, NUM_CHECKED))
    ones, alls = take_turns(contexts, num_said, rounds)
    for session in contexts:
        session.delete()
    report.add(f"{name}_one", median(ones), "tokens/s", better="higher", rounds=ones)
    report.add(f"{name}_eight", median(alls), "tokens/s", better="higher", rounds=alls)
    ratios = [every / one for one, every in zip(ones, alls, strict=True)]
    report.add(
        f"{name}_ratio",
        median(ratios),
        "x one session",
        bound=bound,
        better="higher",
        rounds=ratios,
    )


def measure(report: Report, dtype: str, options: argparse.Namespace) -> None:
    """One element type at both lengths."""
    with open_engine(dtype) as engine:
        if not engine.wait_until_fast():
            report.notes.append(f"{dtype}: there was no native decode step")
        if options.quick:
            measure_length(engine, report, f"{dtype}_64", 64, options, None)
            return
        measure_length(engine, report, f"{dtype}_512", 512, options, BOUND)
        full = WINDOW_SIZE + NUM_SINKS + 64
        measure_length(engine, report, f"{dtype}_{WINDOW_SIZE}", full, options, None)


def main() -> int:
    """Measure both element types; 0 if every bound is kept."""
    parser = arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="timed turns of each side")
    options = parser.parse_args()
    restart_with_threads(NUM_THREADS)
    torch.set_num_threads(NUM_THREADS)
    report = Report("cpu_sessions")
    for dtype in ("float32", "bfloat16"):
        measure(report, dtype, options)
    return finish(report, quick=options.quick)


if __name__ == "__main__":
    sys.exit(main())
