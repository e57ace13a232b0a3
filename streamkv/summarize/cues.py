"""Lines of a transcript and what was wrong in the file that they came from.

A `Cue` is one utterance: the unit that is counted, placed in a segment and covered by the summary.
Times are seconds from the start of the recording, or `None` where the file gives none. This module
knows neither files nor formats.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

MAX_KEPT_WARNINGS = 200


@dataclass(frozen=True, slots=True)
class Cue:
    """One utterance of a transcript.

    Attributes:
        text: what was said, on one line, without markup. Empty only if there is a speaker.
        line_number: line of the file where it begins, from 1.
        start_s: when it begins, in seconds; `None` if not known.
        end_s: when it ends, in seconds; `None` if not known.
        speaker: who said it; `None` if not known.
    """

    text: str
    line_number: int
    start_s: float | None = None
    end_s: float | None = None
    speaker: str | None = None

    @property
    def rendered(self) -> str:
        """The cue as the model reads it: `Name: text`, without times and without a newline."""
        return f"{self.speaker}: {self.text}".rstrip() if self.speaker else self.text


@dataclass(frozen=True, slots=True)
class TimeRange:
    """From when to when, in seconds; both `None` where the transcript has no times."""

    start_s: float | None
    end_s: float | None

    def __str__(self) -> str:
        if self.start_s is None or self.end_s is None:
            return ""
        return f"{format_time(self.start_s)} – {format_time(self.end_s)}"


def time_range(cues: Iterable[Cue]) -> TimeRange:
    """The range that `cues` span. Cues out of order widen it, they never turn it round."""
    start_s, end_s = math.inf, -math.inf
    for cue in cues:
        for moment in (cue.start_s, cue.end_s):
            if moment is not None:
                start_s, end_s = min(start_s, moment), max(end_s, moment)
    return TimeRange(start_s, end_s) if start_s <= end_s else TimeRange(None, None)


def format_time(seconds: float) -> str:
    """`H:MM:SS`, with as many digits of hours as it takes; a leading minus before zero."""
    whole = abs(int(seconds))
    sign = "-" if seconds <= -1 else ""
    return f"{sign}{whole // 3600}:{whole // 60 % 60:02d}:{whole % 60:02d}"


@dataclass(frozen=True, slots=True)
class ReadWarning:
    """Something malformed that was read nevertheless."""

    file: str
    line_number: int
    problem: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line_number}: {self.problem}"


@dataclass(slots=True)
class ReadWarnings:
    """The warnings of one file: the first `MAX_KEPT_WARNINGS` of them, and how many there were."""

    file: str
    kept: list[ReadWarning] = field(default_factory=list)
    num_total: int = 0

    def add(self, line_number: int, problem: str) -> None:
        """Note a problem at a line of the file."""
        self.num_total += 1
        if len(self.kept) < MAX_KEPT_WARNINGS:
            self.kept.append(ReadWarning(self.file, line_number, problem))
