"""The first act: a process reads, its session is copied, it reads on and is killed.

Invariant: the process was killed by SIGKILL between two progress reports of one feed, after the
copy was taken. The pace is measured all along, and the plan is made anew until the copy is taken.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from streamkv.cli.console import Output
from streamkv.cli.demo_checks import CheckFailed
from streamkv.cli.demo_child import Child
from streamkv.cli.demo_display import ReadingDisplay
from streamkv.cli.demo_follow import Follower, Speed
from streamkv.cli.demo_job import SESSION, Event, Read, Reading, Ready
from streamkv.cli.demo_plan import Pace, Plan, make_plan
from streamkv.cli.demo_settings import COPY_STORE, READER_STORE, DemoSettings
from streamkv.journal import Journal
from streamkv.session_copy import SessionCopy, copy_session

MEASURED_S = 4.0
MAX_LEAD_S = 20.0
"""A machine that became slow after the copy was taken does not have to read all of the lead."""

IMPORTS_S = 5.0
"""Of a process that is started, about; besides opening its engine."""

MEASURED_FRACTION = 1 / 16
"""Part of the text after which a pace is taken for measured, if that comes sooner."""


@dataclass(frozen=True, slots=True)
class Killed:
    """The first process, after its end.

    Attributes:
        process_id: its id.
        ready: what it began with.
        acknowledged: the last that it said.
        copied: the copy that was taken while it was reading.
        pace: at which it read.
    """

    process_id: int
    ready: Ready
    acknowledged: Reading
    copied: SessionCopy
    pace: Pace


class FirstAct:
    """Reads, copies and kills.

    Args:
        settings: of the demo.
        output: of the command.
        began: when the demo began.
        clock: seconds.
    """

    def __init__(
        self,
        settings: DemoSettings,
        output: Output,
        began: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings = settings
        self._output = output
        self._began = began
        self._clock = clock
        self._plan: Plan | None = None
        self._is_measured = False
        self._copied_at = 0.0
        self._copied: SessionCopy | None = None

    def run(self) -> Killed:
        """Play it.

        Raises:
            CheckFailed: the text ended before the kill.
            ChildError: the process failed.
            StoreError, JournalError: the session cannot be copied.
        """
        job = self._settings.job(READER_STORE, Read(self._settings.text.num_chars))
        with Child(job) as child:
            self._output.line(f"1. A process (id {child.process_id}) reads.", "bold")
            events = child.events()
            ready = Follower(events, self._output, self._clock).ready()
            with ReadingDisplay(self._output, "reading", self._clock) as display:
                for reading, pace in self._paced(events, ready):
                    display.update(reading, self._end_chars, pace.tokens_per_s)
                    if self._is_over(reading):
                        last = _newest(child.kill(), reading)
                        display.end(last, self._end_chars, pace.tokens_per_s)
                        assert self._copied is not None
                        return Killed(child.process_id, ready, last, self._copied, pace)
        raise CheckFailed("the text ended before the reading process was killed")

    @property
    def _end_chars(self) -> int:
        return self._plan.end_chars if self._plan else self._settings.text.num_chars

    def _paced(self, events: Iterator[Event], ready: Ready) -> Iterator[tuple[Reading, Pace]]:
        """Progress reports, each with the pace up to it."""
        speed, start_s = Speed(self._clock), IMPORTS_S + ready.engine_s
        for event in events:
            if isinstance(event, Reading):
                rate = speed.tokens_per_s(event)
                elapsed_s = self._clock() - self._began
                pace = Pace(elapsed_s, start_s, event.token_index, event.text_chars, rate)
                if self._copied is None:
                    self._make_plan(pace, speed.elapsed_s)
                yield event, pace

    def _make_plan(self, pace: Pace, measured_s: float) -> None:
        num_chars = self._settings.text.num_chars
        window_size, limit_s = self._settings.window_size, self._settings.limit_s
        self._plan = make_plan(pace, num_chars, window_size, limit_s)
        self._is_measured = (
            measured_s >= MEASURED_S or pace.text_chars >= num_chars * MEASURED_FRACTION
        )

    def _is_over(self, reading: Reading) -> bool:
        """Take the copy when it is time; whether it is time to kill."""
        if self._plan is None or not self._is_measured:
            return False
        if reading.token_index < self._plan.copy_at:
            return False
        if self._copied is None:
            source, target = self._settings.store(READER_STORE), self._settings.store(COPY_STORE)
            # Without one the copy would hold no blocks, and nothing would come back from the tier.
            if not _has_checkpoint(self._settings.journal(READER_STORE)):
                return False
            self._copied = copy_session(source, target, SESSION)
            self._copied_at = self._clock()
        is_late = self._clock() - self._copied_at > MAX_LEAD_S
        return is_late or reading.token_index >= self._copied.num_tokens + self._plan.lead


def _has_checkpoint(path: Path) -> bool:
    with Journal.read_beside(path) as journal:
        return journal.state.last_checkpoint is not None


def _newest(unread: list[Event], reading: Reading) -> Reading:
    """The last report: all that was said before the kill counts, read or not."""
    return [event for event in [reading, *unread] if isinstance(event, Reading)][-1]
