"""What the benchmarks share: the model, texts as ids, greedy sampling, comparisons, command lines.

Invariant: a benchmark whose outputs are wrong ends before anything is timed or written. This module
does not know what any benchmark measures.
"""

import argparse
import itertools
import os
import pydoc_data.topics
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from report import Report

from streamkv import SamplingParams
from streamkv.tokenizer import Tokenizer

MODEL = "smollm2-135m"
BOOK = "books/Jane_Austen_-_Pride_and_Prejudice.md"
NEAR_TIE = {"float32": 1e-4, "bfloat16": 0.5}
"""Top two logits closer than this may change places. bf16 logits near 20 lie 0.125 apart."""


class Agreement(NamedTuple):
    """How far two greedy outputs agree.

    Attributes:
        num_equal: tokens until the first difference.
        near_ties: 1 if they part where the top two logits were close, else 0.
        ok: they are equal, or part at a near tie.
    """

    num_equal: int
    near_ties: int
    ok: bool


def agreement(
    found: Sequence[int], expected: Sequence[int], margins: Sequence[float], near_tie: float
) -> Agreement:
    """Compare greedy tokens; `margins` are those of the top two logits behind `expected`."""
    for place, (token, wanted) in enumerate(zip(found, expected, strict=True)):
        if token != wanted:
            close = margins[place] < near_tie
            return Agreement(place, int(close), close)
    return Agreement(len(expected), 0, True)


def require(condition: bool, what: str) -> None:
    """End the benchmark if an output is wrong."""
    if not condition:
        raise SystemExit(f"WRONG: {what}. Nothing was measured.")


def greedy(num_tokens: int | None) -> SamplingParams:
    """Always the likeliest token, and no early end."""
    return SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)


def topics_ids(tokenizer: Tokenizer, num_tokens: int) -> list[int]:
    """Ids of the Python language reference that every CPython carries, again from the start when it
    ends."""
    topics = pydoc_data.topics.topics
    ids = tokenizer.encode("\n".join(topics[name] for name in sorted(topics)))
    return list(itertools.islice(itertools.cycle(ids), num_tokens))


def book_ids(tokenizer: Tokenizer, data: Path, num_tokens: int) -> list[int]:
    """The first ids of Pride and Prejudice."""
    text = (data / BOOK).read_text(encoding="utf-8")
    ids = tokenizer.encode(text[: num_tokens * 8])[:num_tokens]
    require(len(ids) == num_tokens, f"{BOOK} has only {len(ids)} tokens")
    return ids


def pieces(ids: Sequence[int], size: int) -> Iterator[list[int]]:
    """`ids`, `size` at a time."""
    return (list(ids[start : start + size]) for start in range(0, len(ids), size))


def arguments(doc: str | None, *, data: bool = False) -> argparse.ArgumentParser:
    """A parser that knows `--quick`, and `--data` where a book is read."""
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="try it, small; writes no result")
    if data:
        parser.add_argument("--data", type=Path, required=True, help="folder with books/")
    return parser


def restart_with_threads(num_threads: int) -> None:
    """Start this script again if the libraries under numpy and torch would use more threads.

    They read these variables when they are loaded, so it is too late to set them from inside.
    """
    wanted = {
        name: str(num_threads)
        for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
    }
    if any(os.environ.get(name) != value for name, value in wanted.items()):
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **wanted})


def say(text: str) -> None:
    """A line of progress, apart from the results."""
    print(text, file=sys.stderr, flush=True)


def every(step: int) -> Callable[[int, float], None]:
    """Says how far a feed has come, once every `step` tokens; call it with tokens and rate."""
    said = 0

    def show(num_tokens: int, tokens_per_s: float) -> None:
        nonlocal said
        if num_tokens // step > said // step:
            say(f"  {num_tokens:,} tokens, {tokens_per_s:,.0f} tokens/s")
        said = num_tokens

    return show


def figure_lines(report: Report) -> list[str]:
    """One line for each figure, without verdicts: a small run proves nothing."""
    width = max((len(name) for name in report.figures), default=0)
    return [
        f"{name:<{width}}  {figure['value']:.6g} {figure['unit']}"
        for name, figure in report.figures.items()
    ]


def finish(report: Report, *, quick: bool) -> int:
    """Exit code of a run: 1 if a bound is missed. A quick run is only shown."""
    if not quick:
        return 0 if report.finish() else 1
    print("\n".join([*figure_lines(report), *(f"note: {note}" for note in report.notes)]))
    print("quick run: too small to judge, no result file")
    return 0
