"""Speed of scoring a book through a window, against dense attention over independent pieces.

    python benchmarks/scoring.py --data DIR [--quick]

The engine scores one endless stream with 4 sink tokens and a window of 1,020, in chunks of 512.
Transformers scores independent pieces of 2,052 tokens with SDPA and no cache, all logits taken.
Same tokens, same element type, in turns; medians are compared. First the log-probabilities must
agree where the window covers everything.
"""

import argparse
import sys
import time
from collections.abc import Sequence

import torch
from common import MODEL, arguments, book_ids, finish, pieces, require, restart_with_threads, say
from peer import Peer
from report import Report, median

from streamkv import Engine, EngineConfig, Session

NUM_THREADS = 2
NUM_SINKS = 4
WINDOW_SIZE = 1020
CHUNK = 512
PIECE = 2052
PRELUDE = 1024
"""Tokens read before the clock starts, so that the window is full."""
BOUND = 0.9
MEAN_TOLERANCE = {"float32": 1e-4, "bfloat16": 0.06}
"""Mean absolute difference of log-probabilities that rounding explains, in nats: transformers' own
bfloat16 lies 0.030 from its float32, and here two such errors meet."""


def open_engine(dtype: str) -> Engine:
    """The engine with nothing stored."""
    config = EngineConfig(
        window_size=WINDOW_SIZE,
        num_sink_tokens=NUM_SINKS,
        dtype=dtype,  # type: ignore[arg-type]  # one of the two below
        prefill_chunk=CHUNK,
        cpu_bytes=0,
        retain="none",
        max_sessions=1,
        num_threads=NUM_THREADS,
    )
    return Engine(MODEL, config, on_progress=say)


def score(session: Session, ids: Sequence[int]) -> list[float]:
    """Log-probabilities of `ids`, which go on with the stream."""
    scores = session.score(pieces(ids, CHUNK))
    return [item.logprob for item in scores if item.logprob is not None]


def check(engine: Engine, peer: Peer, report: Report, dtype: str, ids: list[int]) -> None:
    """Window and dense attention are the same while the window covers everything."""
    with engine.session("check") as session:
        found = torch.tensor(score(session, ids))
    expected, _ = peer.score(ids)
    difference = (found - torch.tensor(expected)).abs().mean().item()
    limit = MEAN_TOLERANCE[dtype]
    require(difference <= limit, f"{dtype}: log-probabilities differ by {difference:g} on average")
    report.add(f"{dtype}_mean_difference", difference, "nats", bound=limit)


def compare(
    report: Report, dtype: str, engine: Engine, peer: Peer, book: list[int], num_tokens: int
) -> None:
    """One stream goes on through the book; each round both score the same tokens."""
    ours, theirs = [], []
    with engine.session("book") as session:
        session.feed([book[:PRELUDE]]).run()
        for turn, ids in enumerate(pieces(book[PRELUDE:], num_tokens)):
            started = time.perf_counter()
            num_scored = len(score(session, ids))
            own = len(ids) / (time.perf_counter() - started)
            require(num_scored == len(ids), f"{num_scored} scores for {len(ids)} tokens")
            other = len(ids) / sum(peer.score(piece)[1] for piece in pieces(ids, PIECE))
            say(f"  {dtype} round {turn}: {own:.0f} tokens/s, transformers {other:.0f}")
            ours.append(own)
            theirs.append(other)
    peers = {"transformers_sdpa_2052": median(theirs)}
    report.add(
        f"{dtype}_tokens_per_s", median(ours), "tokens/s", better="higher", peers=peers, rounds=ours
    )
    ratio = median(ours) / median(theirs)
    report.add(f"{dtype}_ratio", ratio, "x transformers", bound=BOUND, better="higher")


def measure(report: Report, dtype: str, options: argparse.Namespace) -> None:
    """One element type: correctness, then speed."""
    num_tokens, rounds = (CHUNK, 1) if options.quick else (4 * PIECE, options.rounds)
    with Peer(dtype) as peer, open_engine(dtype) as engine:
        book = book_ids(engine.tokenizer, options.data, PRELUDE + num_tokens * rounds)
        check(engine, peer, report, dtype, book[: CHUNK if options.quick else WINDOW_SIZE])
        compare(report, dtype, engine, peer, book, num_tokens)


def main() -> int:
    """Measure both element types; 0 if every bound is kept."""
    parser = arguments(__doc__, data=True)
    parser.add_argument("--rounds", type=int, default=5, help="turns of 8,208 tokens of each side")
    options = parser.parse_args()
    restart_with_threads(NUM_THREADS)
    torch.set_num_threads(NUM_THREADS)
    report = Report("scoring")
    for dtype in ("float32", "bfloat16"):
        measure(report, dtype, options)
    return finish(report, quick=options.quick)


if __name__ == "__main__":
    sys.exit(main())
