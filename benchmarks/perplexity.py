"""Perplexity of a book through sinks and window, and that it does not depend on how input is cut.

    python benchmarks/perplexity.py --data DIR [--quick]

DIR holds `books/Jane_Austen_-_Pride_and_Prejudice.md` (Project Gutenberg's text). The first 16,385
tokens are scored, no BOS; the mean is over the predictions made at token indices 4,096 to 16,383.
The first 2,000 tokens are also compared with a dense computation that has one position per (query,
key) pair.
"""

import argparse
import math
import statistics
import sys
from pathlib import Path

from report import Report

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "streamkv"))
from dense_oracle import dense_logits, target_logprobs  # the tests' own oracle

from streamkv import Engine, EngineConfig

BOOK = "books/Jane_Austen_-_Pride_and_Prejudice.md"
NUM_TOKENS = 16_385
FIRST = 4_096
SETTINGS = [  # sink tokens, window, mean NLL, tolerance
    (4, 1020, 3.2051, 0.002),
    (4, 2044, 3.1855, 0.004),
    (4, 508, 3.2332, 0.004),
    (0, 1024, 3.6951, 0.004),
]


def score(engine: Engine, name: str, ids: list[int], piece: int) -> list[float]:
    """Log-probability of every token but the first, fed `piece` tokens at a time."""
    with engine.session(name) as session:
        items = (ids[start : start + piece] for start in range(0, len(ids), piece))
        return [item.logprob for item in session.score(items) if item.logprob is not None]


def open_engine(num_sinks: int, window_size: int) -> Engine:
    """SmolLM2 in float32 with nothing stored."""
    config = EngineConfig(
        window_size=window_size,
        num_sink_tokens=num_sinks,
        dtype="float32",
        cpu_bytes=0,
        retain="none",
        max_sessions=1,
    )
    return Engine("smollm2-135m", config, on_progress=print)


def means(report: Report, ids: list[int]) -> None:
    """Mean NLL for each setting."""
    for num_sinks, window_size, expected, tolerance in SETTINGS:
        with open_engine(num_sinks, window_size) as engine:
            logprobs = score(engine, "book", ids, 512)
        nll = -statistics.fmean(logprobs[FIRST:])
        name = f"nll_{num_sinks}_sinks_window_{window_size}"
        report.add(name, nll, "nats", bound=expected, tolerance=tolerance, perplexity=math.exp(nll))
        print(f"{name}: {nll:.4f} nats, perplexity {math.exp(nll):.2f}", flush=True)


def cuts(report: Report, ids: list[int]) -> None:
    """The same text fed 1, 7, 64 and 1,000 tokens at a time."""
    with open_engine(4, 1020) as engine:
        found = {piece: score(engine, f"cut-{piece}", ids, piece) for piece in (1, 7, 64, 1000)}
    reference = found[1000]
    for piece in (1, 7, 64):
        differences = [a - b for a, b in zip(found[piece], reference, strict=True)]
        worst = max(abs(d) for d in differences)
        mean = abs(statistics.fmean(differences))
        report.add(f"cut_{piece}_worst", worst, "nats", bound=1e-4)
        report.add(f"cut_{piece}_mean", mean, "nats", bound=1e-6)


def brute_force(report: Report, ids: list[int]) -> None:
    """The first 2,000 tokens against one position per pair."""
    with open_engine(4, 508) as engine:
        expected = target_logprobs(dense_logits(engine.model, ids, 4, 508), ids)
        found = score(engine, "brute", ids, 1000)
    worst = max(abs(a - b) for a, b in zip(found, expected, strict=True))
    report.add("brute_force_worst", worst, "nats", bound=2e-4)


def main() -> int:
    """Run all parts; 0 if every bound is kept."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="folder with books/")
    parser.add_argument("--cut-tokens", type=int, default=4000, help="tokens fed in several cuts")
    options = parser.parse_args()
    report = Report("perplexity")
    with open_engine(4, 508) as engine:
        text = (options.data / BOOK).read_text(encoding="utf-8")[:120_000]
        ids = engine.tokenizer.encode(text)[:NUM_TOKENS]
    assert len(ids) == NUM_TOKENS
    brute_force(report, ids[:2000])
    cuts(report, ids[: options.cut_tokens])
    means(report, ids)
    return 0 if report.finish() else 1


if __name__ == "__main__":
    sys.exit(main())
