"""A turn costs the same in a young session and in an old one.

    python benchmarks/sessions.py [--tokens N] [--pairs 20] [--dtype bfloat16] [--quick]

Two sessions of one engine, 10,000 and 200,000 tokens old, decode turns of 100 greedy tokens, in
alternation and with the first place changing from pair to pair; the figure is the ratio of the
median times. The old session comes from `memory.py` if that has run (it works on a copy), else it
is fed here. First it must say what a fresh session says over its sink tokens and the last (layers x
window) tokens, on which alone its state may depend.
"""

import argparse
import shutil
import sys
import tempfile
import time
from pathlib import Path

from common import (
    MODEL,
    NEAR_TIE,
    agreement,
    arguments,
    every,
    finish,
    greedy,
    pieces,
    require,
    say,
    topics_ids,
)
from old_session import (
    ITEM,
    NAME,
    NUM_SINKS,
    WINDOW_SIZE,
    config,
    feed_old_session,
    keep_prepared,
    prepared_path,
)
from report import Report, median

from streamkv import Delta, Engine, Session

NUM_TOKENS = 200_000
YOUNG_TOKENS = 10_000
NUM_STEPS = 100
BOUND = 1.03


def bring_old_session(store: Path, num_tokens: int, dtype: str, *, keep: bool) -> None:
    """A store with the old session at `store`: a copy of the prepared one, else a new one."""
    prepared = prepared_path(num_tokens, dtype)
    if not prepared.is_dir():
        say(f"feeding {num_tokens:,} tokens")
        made = store.with_name("made")
        feed_old_session(made, dtype, "window", [num_tokens], lambda *_: None)
        prepared = keep_prepared(made, num_tokens, dtype) if keep else made
    shutil.copytree(prepared, store)


def turn(session: Session, num_steps: int) -> tuple[float, list[Delta]]:
    """Seconds of one turn, and what was said."""
    started = time.perf_counter()
    deltas = list(session.generate(greedy(num_steps)))
    elapsed = time.perf_counter() - started
    require(len(deltas) == num_steps, f"a turn of {len(deltas)} tokens")
    return elapsed, deltas


def feed(session: Session, ids: list[int]) -> None:
    """Feed, showing progress."""
    show = every(5_000)
    for progress in session.feed(pieces(ids, ITEM)):
        show(progress.token_index, progress.tokens_per_s)


def check(engine: Engine, old: Session, report: Report, dtype: str, num_tokens: int) -> None:
    """The old session says what a fresh one does that read only what it may depend on."""
    require(old.resumed, "the old session did not resume")
    require(old.num_tokens == num_tokens, f"the old session has {old.num_tokens} tokens")
    ids = topics_ids(engine.tokenizer, num_tokens)
    reach = engine.model.spec.num_layers * WINDOW_SIZE + 2 * WINDOW_SIZE
    fresh_ids = ids if num_tokens <= reach else ids[:NUM_SINKS] + ids[-reach:]
    fresh = engine.session("fresh")
    say(f"feeding {len(fresh_ids):,} tokens to check the old session")
    feed(fresh, fresh_ids)
    num_said = 20
    expected, found = turn(fresh, num_said)[1], turn(old, num_said)[1]
    fresh.delete()
    agreed = agreement(
        [delta.token_id or 0 for delta in found],
        [delta.token_id or 0 for delta in expected],
        [delta.margin for delta in expected],
        NEAR_TIE[dtype],
    )
    require(agreed.ok, f"token {agreed.num_equal} of the old session is not the fresh one's")
    report.add(
        "same_tokens",
        agreed.num_equal,
        f"of {num_said} tokens",
        better="higher",
        near_ties=agreed.near_ties,
    )


def alternate(
    young: Session, old: Session, num_pairs: int, num_steps: int
) -> dict[str, list[float]]:
    """Seconds of each turn of both."""
    sessions = {"young": young, "old": old}
    seconds: dict[str, list[float]] = {"young": [], "old": []}
    for session in sessions.values():
        turn(session, num_steps)
    for pair in range(num_pairs):
        order = list(sessions) if pair % 2 == 0 else list(reversed(sessions))
        for name in order:
            seconds[name].append(turn(sessions[name], num_steps)[0])
        say(f"  pair {pair}: young {seconds['young'][-1]:.3f} s, old {seconds['old'][-1]:.3f} s")
    return seconds


def measure(report: Report, store: Path, options: argparse.Namespace) -> None:
    """Open both sessions, check the old one, and let them take turns."""
    old_tokens, young_tokens = (2048, 512) if options.quick else (options.tokens, YOUNG_TOKENS)
    num_pairs, num_steps = (2, 8) if options.quick else (options.pairs, NUM_STEPS)
    bring_old_session(store, old_tokens, options.dtype, keep=not options.quick)
    with Engine(MODEL, config(store, options.dtype, "window"), on_progress=say) as engine:
        old = engine.session(NAME)
        check(engine, old, report, options.dtype, old_tokens)
        young = engine.session("young")
        feed(young, topics_ids(engine.tokenizer, young_tokens))
        seconds = alternate(young, old, num_pairs, num_steps)
    medians = {name: median(values) for name, values in seconds.items()}
    for name, values in seconds.items():
        report.add(f"{name}_ms_per_token", medians[name] / num_steps * 1e3, "ms", turns_s=values)
    report.add("old_over_young", medians["old"] / medians["young"], "x", bound=BOUND)


def main() -> int:
    """Measure; 0 if the bound is kept."""
    parser = arguments(__doc__)
    parser.add_argument("--tokens", type=int, default=NUM_TOKENS, help="age of the old session")
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16"])
    options = parser.parse_args()
    report = Report("sessions")
    report.notes.append(f"{options.dtype}, window {WINDOW_SIZE}, turns of {NUM_STEPS} tokens")
    with tempfile.TemporaryDirectory() as directory:
        measure(report, Path(directory) / "store", options)
    return finish(report, quick=options.quick)


if __name__ == "__main__":
    sys.exit(main())
