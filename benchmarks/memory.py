"""Memory of a process whose one session grows to 200,000 tokens.

    python benchmarks/memory.py [--tokens N] [--dtype bfloat16] [--retain all] [--quick]

Resident anonymous and shared memory (RssAnon + RssShmem of /proc/self/status; pages of files, such
as weights and store, are not counted) is read after garbage collection, at 20,000 tokens and every
20,000 from there; the cpu pool has 256 MiB, and blocks that leave it go to a store of 1 GiB. The
store is kept for `sessions.py`.
"""

import gc
import sys
import tempfile
from pathlib import Path

from common import arguments, finish, require, say
from old_session import feed_old_session, keep_prepared
from report import Report

from streamkv import Engine, Session

NUM_TOKENS = 200_000
STEP = 20_000
BOUND = 1.02


def resident_bytes() -> int:
    """RssAnon + RssShmem of this process."""
    gc.collect()
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return sum(int(fields[name].split()[0]) * 1024 for name in ("RssAnon", "RssShmem"))


def check(engine: Engine, session: Session, at: int, *, cpu_is_full: bool) -> None:
    """The session is as old as it should be, and its tiers hold what left the window."""
    require(session.num_tokens == at, f"{session.num_tokens} tokens instead of {at}")
    cpu, counters = engine.usage()["cpu"], engine.counters()
    require(counters["dropped"] == 0, f"{counters['dropped']} blocks were dropped")
    require(counters["ssd_disabled"] == 0, "writing to the store was given up")
    if cpu_is_full:
        share = cpu.num_bytes / cpu.limit_bytes
        require(share > 0.5, f"the cpu pool is only {share:.0%} full, so this would prove little")


def add_figures(report: Report, series: dict[int, int]) -> None:
    """The series, and last over first."""
    first, last = min(series), max(series)
    shown = {str(at): round(size / 2**20, 1) for at, size in series.items()}
    report.add(f"mib_at_{last}", series[last] / 2**20, "MiB", series_mib=shown)
    name = f"tokens_{last}_over_{first}"
    report.add(name, series[last] / series[first], "x", bound=BOUND)
    for at, size in shown.items():
        print(f"{int(at):>9,} tokens  {size:>8.1f} MiB")


def main() -> int:
    """Feed and measure; 0 if the bound is kept."""
    parser = arguments(__doc__)
    parser.add_argument("--tokens", type=int, default=NUM_TOKENS, help="age of the session")
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16"])
    parser.add_argument("--retain", default="all", choices=["all", "window", "none"])
    options = parser.parse_args()
    num_tokens, step = (1536, 512) if options.quick else (options.tokens, STEP)
    series: dict[int, int] = {}

    def on_stop(engine: Engine, session: Session, at: int) -> None:
        cpu_is_full = options.retain == "all" and not options.quick
        check(engine, session, at, cpu_is_full=cpu_is_full)
        series[at] = resident_bytes()
        say(f"{at:,} tokens: {series[at] / 2**20:.1f} MiB")

    with tempfile.TemporaryDirectory() as directory:
        store = Path(directory) / "store"
        stops = sorted({*range(step, num_tokens, step), num_tokens})
        feed_old_session(store, options.dtype, options.retain, stops, on_stop)
        if not options.quick:
            say(f"kept for sessions.py: {keep_prepared(store, num_tokens, options.dtype)}")
    report = Report("memory")
    report.notes.append(f"{options.dtype}, retain={options.retain}, window 508, cpu pool 256 MiB")
    add_figures(report, series)
    return finish(report, quick=options.quick)


if __name__ == "__main__":
    sys.exit(main())
