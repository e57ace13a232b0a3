"""Run all benchmarks in order, print what they found, and bring the README's figures up to date.

    python benchmarks/run_all.py --data DIR             everything, about half an hour on 2 cores
    python benchmarks/run_all.py --data DIR --only decode store
    python benchmarks/run_all.py --only gpu_restore gpu_recall_feed --limit 300 --total 570
    python benchmarks/run_all.py --summary              only the table and the README, from results/

The table is made from `results/*.json`; the README's lies between the lines `<!-- figures -->` and
`<!-- /figures -->`. A benchmark that fails does not keep the others from running, nor does one that
is ended because its time is up: what it had written by then stays, and says that it is incomplete.
`--only` also says in which order. BENCHMARK_RESULTS is another folder for results.
"""

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
from report import RESULTS

HERE = Path(__file__).parent
README = HERE.parent / "README.md"
BEGIN, END = "<!-- figures -->", "<!-- /figures -->"


class Benchmark(NamedTuple):
    """A script here.

    Attributes:
        name: without `.py`; also of its result.
        reads_book: whether it takes `--data`.
        has_quick: whether it takes `--quick`.
        needs_gpu: whether it is left out on a machine without one.
        script: whose script it is, if not its own.
        further: more arguments.
        takes_seconds: whether it is told how long it may take.
    """

    name: str
    reads_book: bool = False
    has_quick: bool = True
    needs_gpu: bool = False
    script: str = ""
    further: tuple[str, ...] = ()
    takes_seconds: bool = False


BENCHMARKS = (  # `sessions` uses the old session that `memory` leaves
    Benchmark("cpu_kernels"),
    Benchmark("perplexity", reads_book=True, has_quick=False),
    Benchmark("scoring", reads_book=True),
    Benchmark("decode"),
    Benchmark("cpu_sessions"),
    Benchmark("scheduler_actions"),
    Benchmark("serving"),
    Benchmark("store"),
    Benchmark("cold_recall"),
    Benchmark("resume"),
    Benchmark("memory"),
    Benchmark("sessions"),
    Benchmark("history_bytes"),
    # Runs on a CPU, too, in an hour and more.
    Benchmark("digests", reads_book=True, needs_gpu=True),
    Benchmark("gpu_attention", needs_gpu=True),
    Benchmark("gpu_products", needs_gpu=True),
    Benchmark("gpu_decode", needs_gpu=True),
    Benchmark("gpu_prefill", needs_gpu=True),
    Benchmark("gpu_stream", reads_book=True, needs_gpu=True),
    *(
        Benchmark(
            f"gpu_sessions_{name}",
            needs_gpu=True,
            script="gpu_sessions",
            further=("--parts", *parts, "--name", f"gpu_sessions_{name}"),
            takes_seconds=True,
        )
        for name, parts in (
            ("decode", ("decode", "feed")),
            ("sleep_8b", ("sleep_8b",)),
            ("sleep_smollm2", ("sleep_smollm2", "prompt")),
        )
    ),
    Benchmark("gpu_restore", needs_gpu=True, takes_seconds=True),
    Benchmark(
        "gpu_recall_steps_8b",
        needs_gpu=True,
        script="gpu_recall_steps",
        further=("--case", "8b"),
        takes_seconds=True,
    ),
    Benchmark(
        "gpu_recall_steps_smollm2",
        needs_gpu=True,
        script="gpu_recall_steps",
        further=("--case", "smollm2"),
        takes_seconds=True,
    ),
    Benchmark("gpu_recall_feed", needs_gpu=True, takes_seconds=True),
)

LEAST_S = 20.0
"""With less time than that none is begun."""

TO_END_S = 30.0
"""Seconds that one which is told its time may take for what it has begun."""


def command_of(
    benchmark: Benchmark, data: Path | None, quick: bool, limit_s: float | None
) -> list[str]:
    """How one is started."""
    command = [sys.executable, str(HERE / f"{benchmark.script or benchmark.name}.py")]
    command += benchmark.further
    if benchmark.reads_book:
        command += ["--data", str(data)]
    if benchmark.takes_seconds and limit_s is not None:
        command += ["--seconds", f"{max(limit_s - TO_END_S, LEAST_S / 2):.0f}"]
    return [*command, "--quick"] if quick else command


def run(benchmark: Benchmark, data: Path | None, quick: bool, limit_s: float | None) -> bool:
    """Run one in a process of its own; returns whether it kept its bounds, and its time."""
    print(f"\n== {benchmark.name}", flush=True)
    if limit_s is not None and limit_s < LEAST_S:
        print(f"== {benchmark.name}: no time is left for it", flush=True)
        return False
    # Its children end with it: they are in one group.
    process = subprocess.Popen(command_of(benchmark, data, quick, limit_s), process_group=0)
    try:
        return process.wait(limit_s) == 0
    except subprocess.TimeoutExpired:
        print(f"== {benchmark.name}: ended after {limit_s:.0f} s", flush=True)
        return False
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def run_each(options: argparse.Namespace) -> bool:
    """Run what was chosen, each within its limit and what is left of all; whether all were kept."""
    ends_s = time.monotonic() + options.total if options.total is not None else None
    kept = True
    for benchmark in options.chosen:
        limits = [options.limit] if options.limit is not None else []
        if ends_s is not None:
            limits.append(ends_s - time.monotonic())
        kept &= run(benchmark, options.data, options.quick, min(limits, default=None))
    return kept


def results() -> list[dict[str, Any]]:
    """The result of every benchmark that has one, in order."""
    paths = [RESULTS / f"{benchmark.name}.json" for benchmark in BENCHMARKS]
    return [json.loads(path.read_text()) for path in paths if path.is_file()]


def bound_of(figure: dict[str, Any]) -> str:
    """What was asked for, in words; empty if nothing was."""
    if "bound" not in figure:
        return ""
    if "tolerance" in figure:
        return f"{figure['bound']:g} ± {figure['tolerance']:g}"
    return f"{'≤' if figure['better'] == 'lower' else '≥'} {figure['bound']:g}"


def peers_of(figure: dict[str, Any]) -> str:
    """What others reached, in words."""
    return ", ".join(f"{name} {value:.4g}" for name, value in figure.get("peers", {}).items())


def table(reports: list[dict[str, Any]]) -> list[str]:
    """Markdown table of all figures; a missed bound is in bold."""
    rows = ["| benchmark | figure | value | asked for | peers |", "|---|---|---|---|---|"]
    for report in reports:
        for name, figure in report["figures"].items():
            value = f"{figure['value']:.5g} {figure['unit']}"
            shown = value if figure["ok"] else f"**{value} (missed)**"
            cells = [report["benchmark"], name, shown, bound_of(figure), peers_of(figure)]
            rows.append(f"| {' | '.join(cells)} |")
    return rows


def sources(reports: list[dict[str, Any]]) -> list[str]:
    """On which machine, with which versions, at which commits."""
    made: dict[str, list[str]] = {}
    for report in reports:
        versions = ", ".join(f"{name} {version}" for name, version in report["versions"].items())
        made.setdefault(f"{report['machine']}; {versions}", []).append(
            f"{report['benchmark']} at {report['commit']}{incomplete(report)}"
        )
    return [f"{where} ({', '.join(names)})." for where, names in made.items()]


def incomplete(report: dict[str, Any]) -> str:
    """Words for a result that does not have all; those of older runs do not say."""
    return "" if report.get("complete", True) else ", incomplete"


def rewrite_readme(lines: list[str]) -> bool:
    """Put `lines` between the README's markers; False if it has none."""
    text = README.read_text(encoding="utf-8")
    before, begin, rest = text.partition(BEGIN + "\n")
    _, end, after = rest.partition(END)
    if not begin or not end:
        return False
    body = "\n".join(lines)
    README.write_text(f"{before}{begin}\n{body}\n\n{end}{after}", encoding="utf-8")
    return True


def summarize() -> None:
    """Print the table and bring the README up to date."""
    reports = results()
    lines = [*table(reports), "", *sources(reports)]
    print("\n".join(lines))
    if not rewrite_readme(lines):
        print(f"note: {README} has no lines {BEGIN} and {END}, so it was left as it is")


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [benchmark.name for benchmark in BENCHMARKS]
    parser.add_argument("--data", type=Path, help="folder with books/")
    parser.add_argument("--only", nargs="+", choices=names, default=names)
    parser.add_argument("--limit", type=float, help="seconds that each may take")
    parser.add_argument("--total", type=float, help="seconds that all may take")
    parser.add_argument("--quick", action="store_true", help="try them, small; writes nothing")
    parser.add_argument("--summary", action="store_true", help="run nothing")
    options = parser.parse_args()
    by_name = {benchmark.name: benchmark for benchmark in BENCHMARKS}
    chosen = [by_name[name] for name in options.only]
    if any(b.reads_book for b in chosen) and options.data is None and not options.summary:
        parser.error("some of these read a book: give its folder with --data")
    has_gpu = torch.cuda.is_available()
    chosen = [b for b in chosen if has_gpu or not b.needs_gpu]
    options.chosen = [b for b in chosen if b.has_quick or not options.quick]
    return options


def main() -> int:
    """Run what was chosen; 0 if every bound is kept."""
    options = parse()
    kept = True
    if not options.summary:
        kept = run_each(options)
    if not options.quick:
        summarize()
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(main())
