"""What every benchmark reports: a table for people, one JSON line, and a file in `results/`.

A figure has a value, a unit, the bound that was asked for, and which direction is better; a missed
bound stays in the file as `ok: false`. Machine, versions and commit are part of the report. The
file may be written before all is found; it then says that it is not `complete`.
BENCHMARK_RESULTS is another folder for these files.
"""

import contextlib
import datetime
import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(os.environ.get("BENCHMARK_RESULTS") or Path(__file__).parent / "results")
PACKAGES = ("torch", "transformers", "numpy", "lmdb", "zstandard")
WRITTEN = ("benchmarks/results", "README.md")
"""What benchmarks themselves change."""

GPU_PACKAGES = ("triton", "flashinfer-python", "vllm")


def machine() -> str:
    """Processor, cores and memory, in words."""
    model = "unknown processor"
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.split(":", 1)[1].strip()
            break
    memory_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    gpu = f", {torch.cuda.get_device_name()}" if torch.cuda.is_available() else ""
    return f"{model}, {os.cpu_count()} cores, {memory_gib:.0f} GiB, {platform.system()}{gpu}"


def versions() -> dict[str, str]:
    """Python and the packages that matter."""
    found = {}
    for name in PACKAGES + (GPU_PACKAGES if torch.cuda.is_available() else ()):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return {"python": platform.python_version(), **found}


def commit() -> str:
    """`COMMIT` where it is set, else the checkout's, with a plus sign if files differ from it."""
    if "COMMIT" in os.environ:
        return os.environ["COMMIT"]
    root = Path(__file__).parent.parent
    try:
        run = ["git", "-C", str(root)]
        name = subprocess.check_output([*run, "rev-parse", "--short", "HEAD"], text=True).strip()
        status = ["status", "--porcelain", "-uno", "--", ".", *(f":!{path}" for path in WRITTEN)]
        changed = subprocess.check_output([*run, *status], text=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return name + ("+" if changed.strip() else "")


@dataclass(slots=True)
class Report:
    """Figures of one benchmark.

    Attributes:
        benchmark: name, also of the file in `results/`.
        figures: by name, as `add` makes them.
        notes: sentences about the run.
        is_whole: nothing that was to be found is missing.
    """

    benchmark: str
    figures: dict[str, dict[str, Any]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    is_whole: bool = True

    def add(
        self,
        name: str,
        value: float,
        unit: str,
        *,
        bound: float | None = None,
        better: str = "lower",
        tolerance: float | None = None,
        peers: dict[str, float] | None = None,
        **extra: Any,
    ) -> bool:
        """Add a figure; returns whether it keeps its bound.

        Args:
            bound: asked for; with `tolerance` the value must lie within it of the bound.
            better: `lower` or `higher`.
            peers: what others reached in the same run.
        """
        ok = True
        if bound is not None and tolerance is not None:
            ok = abs(value - bound) <= tolerance
        elif bound is not None:
            ok = value <= bound if better == "lower" else value >= bound
        figure: dict[str, Any] = {"value": value, "unit": unit, "better": better, "ok": ok, **extra}
        if bound is not None:
            figure["bound"] = bound
        if tolerance is not None:
            figure["tolerance"] = tolerance
        if peers:
            figure["peers"] = peers
        self.figures[name] = figure
        return ok

    def save(self, *, at_end: bool = False) -> str:
        """Write the file as far as it is; returns its content in one line."""
        report = {
            "benchmark": self.benchmark,
            "commit": commit(),
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "machine": machine(),
            "versions": versions(),
            "complete": at_end and self.is_whole,
            "figures": self.figures,
            "notes": self.notes,
        }
        RESULTS.mkdir(exist_ok=True)
        path = RESULTS / f"{self.benchmark}.json"
        # In one step: who is killed here leaves the one before.
        written = path.with_suffix(".part")
        written.write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n")
        written.replace(path)
        return json.dumps(report, ensure_ascii=False)

    def finish(self) -> bool:
        """Print table and JSON line, write the file; returns whether every bound is kept."""
        width = max((len(name) for name in self.figures), default=0)
        for name, figure in self.figures.items():
            bound = f"  bound {figure['bound']:g}" if "bound" in figure else ""
            verdict = "" if "bound" not in figure else ("  ok" if figure["ok"] else "  MISSED")
            print(f"{name:<{width}}  {figure['value']:.6g} {figure['unit']}{bound}{verdict}")
        for note in self.notes:
            print("note:", note)
        print(self.save(at_end=True))
        return all(figure["ok"] for figure in self.figures.values())


def median(values: Sequence[float]) -> float:
    """Median of some timings."""
    return statistics.median(values)
