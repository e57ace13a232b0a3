"""Parts of a benchmark, one after another; what one has found is on disk before the next begins.

A part that fails is reported and does not keep the others from running. For benchmarks that run
where time is short: they are told how many seconds they have, and may be killed at any moment.
"""

import gc
import time
import traceback
from collections.abc import Callable

import torch
from common import finish, say
from report import Report


class Parts:
    """Runs parts.

    Args:
        report: where they put what they find.
        quick: write no result.
        seconds: how long all of them may take.
    """

    def __init__(self, report: Report, *, quick: bool, seconds: float) -> None:
        self.report = report
        self._quick = quick
        self._ends_s = time.monotonic() + seconds
        self._failed: list[str] = []

    @property
    def left_s(self) -> float:
        """Seconds that are left."""
        return self._ends_s - time.monotonic()

    def save(self) -> None:
        """Put what was found so far on disk."""
        if not self._quick:
            self.report.save()

    def run(self, name: str, part: Callable[[], None]) -> bool:
        """Run a part, unless no time is left; whether it came to its end."""
        if self.left_s <= 0:
            self._fail(name, "no time was left for it")
            return False
        say(f"== {name} ({self.left_s:.0f} s left)")
        begun_s, problem = time.monotonic(), ""
        try:
            part()
        except (Exception, SystemExit) as error:
            traceback.print_exc()
            problem = f"{type(error).__name__}: {error}".splitlines()[0]
        # Not before the error is gone, whose frames hold what the part had allocated.
        release_memory()
        say(f"== {name} took {time.monotonic() - begun_s:.0f} s")
        if problem:
            self._fail(name, problem)
        self.save()
        return not problem

    def finish(self) -> int:
        """Print and write the result; 0 if every part ended and every bound is kept."""
        code = finish(self.report, quick=self._quick)
        return 1 if self._failed else code

    def _fail(self, name: str, problem: str) -> None:
        self._failed.append(name)
        self.report.is_whole = False
        self.report.notes.append(f"part {name} failed: {problem}")
        say(f"== {name} FAILED: {problem}")


def release_memory() -> None:
    """Give what nothing refers to any more back to the device."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def synchronize() -> None:
    """Wait for the device, if there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
