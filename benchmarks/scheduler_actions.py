"""Random actions on scheduler, admission and sleepers: no block is lost, no job forgotten.

    python benchmarks/scheduler_actions.py [--actions N] [--seed N] [--quick]

A pool of 24 blocks, up to 30 sessions that need 1 to 8 of them each, a model that computes nothing
and a clock that is moved by hand (`scheduler_world.py`). After every action all invariants are
checked; every 10,000 actions everything is let go on to its end, closed, and nothing may be left.
"""

import sys
import time

from common import arguments, finish, say
from report import Report
from scheduler_world import Counts, random_actions

NUM_ACTIONS = 1_000_000
PER_WORLD = 10_000


def main() -> int:
    """Act; 0 if nothing was lost. A violated invariant is an AssertionError."""
    parser = arguments(__doc__)
    parser.add_argument("--actions", type=int, default=NUM_ACTIONS)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    num_left = min(options.actions, 20_000) if options.quick else options.actions
    total, num_done, num_slept, began = Counts(), 0, 0, time.perf_counter()
    while num_left > 0:
        num_actions = min(num_left, PER_WORLD)
        world = random_actions(num_actions, options.seed + num_done)
        world.check_end()
        num_left -= num_actions
        num_done += num_actions
        num_slept += world.sleepers.num_slept
        total.done += world.counts.done
        total.failed += world.counts.failed
        total.cancelled += world.counts.cancelled
        if num_done % 100_000 == 0:
            say(f"  {num_done:,} actions, {time.perf_counter() - began:.0f} s")
    report = Report("scheduler_actions")
    report.add("actions", num_done, "actions", better="higher", bound=NUM_ACTIONS)
    report.add("violations", 0, "violations", bound=0)
    report.add("jobs_done", total.done, "jobs", better="higher")
    report.add("jobs_failed", total.failed, "jobs")
    report.add("jobs_cancelled", total.cancelled, "jobs")
    report.add("fell_asleep", num_slept, "times", better="higher")
    return finish(report, quick=options.quick)


if __name__ == "__main__":
    sys.exit(main())
