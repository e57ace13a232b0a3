"""The tests that need a GPU, in parallel: compiling kernels takes most of their time.

    python benchmarks/gpu_tests.py [--workers N] [--quick] [pytest's arguments]

With pytest-xdist every worker is a process with a CUDA context of its own; without it there is one.
The package must be importable; nothing is installed. `--quick` writes no result.
"""

import argparse
import importlib.util
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

import torch
from report import Report

ROOT = Path(__file__).parent.parent
MOST_WORKERS = 8
"""More would not compile faster, and each holds a CUDA context of half a gigabyte."""

TESTS_FAILED = 1
"""pytest's exit code when it ran, and some test failed."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What pytest says of a run.

    Attributes:
        passed, skipped: number of tests.
        failed: names of those that failed or ended in an error.
    """

    passed: int
    skipped: int
    failed: list[str]

    @classmethod
    def of(cls, junit: ElementTree.Element) -> "Outcome":
        """Read pytest's JUnit file. A test that fails and whose fixture then fails counts once."""
        failed: list[str] = []
        skipped = passed = 0
        for case in junit.iter("testcase"):
            name = f"{case.get('classname')}::{case.get('name')}"
            if case.find("failure") is not None or case.find("error") is not None:
                failed.append(name)
            elif case.find("skipped") is not None:
                skipped += 1
            else:
                passed += 1
        return cls(passed, skipped, sorted(set(failed)))


def num_workers(wanted: int | None) -> int:
    """Processes that run tests; 1 without pytest-xdist."""
    if importlib.util.find_spec("xdist") is None:
        return 1
    return wanted or max(1, min(MOST_WORKERS, (os.cpu_count() or 1) // 2))


def command(workers: int, junit: Path, further: list[str]) -> list[str]:
    """How pytest is started. The current directory stays off the path: it has a `kernels/`."""
    run = [sys.executable, "-P", "-m", "pytest", "-m", "gpu", f"--junitxml={junit}"]
    parallel = ["-n", str(workers), "--dist", "worksteal"] if workers > 1 else []
    return [*run, *parallel, *further]


def main() -> int:
    """Run the tests; 0 if all of them pass."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workers", type=int, help="processes; by default half the cores, up to 8")
    parser.add_argument("--quick", action="store_true", help="write no result")
    options, further = parser.parse_known_args()
    if not torch.cuda.is_available():
        print("these tests need a GPU", file=sys.stderr)
        return 2
    workers = num_workers(options.workers)
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as directory:
        junit = Path(directory) / "tests.xml"
        # The workers share the cores; more threads in each would only wait for one another.
        environment = {"OMP_NUM_THREADS": "2", **os.environ}
        code = subprocess.call(command(workers, junit, further), cwd=ROOT, env=environment)
        seconds = time.monotonic() - began
        if code not in (0, TESTS_FAILED) or not junit.exists():
            print(f"pytest ended with exit code {code}: nothing is known", file=sys.stderr)
            return code or 2
        outcome = Outcome.of(ElementTree.parse(junit).getroot())
    if options.quick or further:
        print("not the whole suite as it is: no result file")
        return code
    return 0 if report(outcome, workers, seconds) and code == 0 else 1


def report(outcome: Outcome, workers: int, seconds: float) -> bool:
    """Write the result; whether nothing failed."""
    made = Report("gpu_tests")
    made.add("passed", outcome.passed, "tests", better="higher", bound=1)
    made.add("failed", len(outcome.failed), "tests", bound=0)
    made.add("skipped", outcome.skipped, "tests")
    made.add("seconds", seconds, "s")
    made.notes.append(f"{workers} worker{'s' if workers > 1 else ''}")
    made.notes.extend(f"failed: {name}" for name in outcome.failed)
    return made.finish()


if __name__ == "__main__":
    sys.exit(main())
