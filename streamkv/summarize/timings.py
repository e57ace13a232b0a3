"""Times in subtitles and in plain transcripts, read tolerantly. Pure functions over strings."""

import re
from dataclasses import dataclass

_CLOCK = r"(?:(\d+):)?(\d{1,2}):(\d{2}|\d(?![\w:]))(?:[.,:](\d{1,3})\d*|[.,])?"
_ARROW = r"(?:[-–—]{1,3}\s?>|,)"
_TIMING = re.compile(rf"\s*{_CLOCK}\s*{_ARROW}\s*{_CLOCK}(?!\d)")
_START = re.compile(rf"\s*{_CLOCK}(?!\d)")
_BROKEN_TIMING = re.compile(
    rf"\s*[\d:.,;]*\d\S*\s*-{{2,3}}>|\s*-{{2,3}}>\s*\d|\s*{_CLOCK}\s+{_CLOCK}\s*$"
)
# Plain transcripts: [D:H:M:S], [H:M:S], [M:S], or H:M:S without brackets.
_BRACKETED = re.compile(
    r"\s*[\[(](-?)(?:(\d+):)?(?:(\d+):)?(\d{1,3}):(\d{2})(?:[.,]\d+)?[\])]\s*[-–:]?\s*"
)
_BARE = re.compile(r"\s*(-?)(?:(\d+):)?(\d+):(\d{2}):(\d{2})(?:[.,]\d+)?(?:\s+[-–]?\s*|$)")
_ALONE = re.compile(r"\s*(-?)()()(\d{1,3}):(\d{2})\s*$")


@dataclass(frozen=True, slots=True)
class Timing:
    """The timing line of a cue.

    Attributes:
        start_s: seconds; `None` if it cannot be read.
        end_s: seconds; `None` if it cannot be read.
        problem: what is wrong with the line, for a warning; empty if nothing.
    """

    start_s: float | None
    end_s: float | None
    problem: str = ""


def parse_timing(line: str) -> Timing | None:
    """The timing in a line such as `00:01:02,500 --> 00:01:04,000`, or `None` if there is none.

    Hours may have any number of digits or be absent; fractions follow a point, comma or colon; the
    arrow may be `->`, `--->` or a comma (SBV). What follows the end time is ignored.
    """
    match = _TIMING.match(line)
    if match is not None:
        start = _seconds(*match.groups()[:4])
        end = _seconds(*match.groups()[4:])
        return Timing(start, end, _problem(match, start, end))
    if _BROKEN_TIMING.match(line) is None:
        return None
    begins = _START.match(line)
    start_s = _seconds(*begins.groups()) if begins else None
    return Timing(start_s, None, "malformed timing; the text is kept")


def split_leading_time(line: str) -> tuple[float | None, str]:
    """The time at the start of a line of a plain transcript, in seconds, and the rest of it."""
    match = _BRACKETED.match(line) or _BARE.match(line) or _ALONE.match(line)
    if match is None:
        return None, line
    sign, days_or_hours, hours, minutes, seconds = match.groups()
    if not hours:
        days_or_hours, hours = None, days_or_hours
    total = int(days_or_hours or 0) * 86400 + int(hours or 0) * 3600
    total += int(minutes) * 60 + int(seconds)
    return float(-total if sign else total), line[match.end() :]


def _seconds(hours: str | None, minutes: str, seconds: str, fraction: str | None) -> float:
    whole = int(hours or 0) * 3600 + int(minutes) * 60 + int(seconds)
    return whole + int((fraction or "0").ljust(3, "0")) / 1000


def _problem(match: re.Match[str], start_s: float, end_s: float) -> str:
    _, start_minutes, start_seconds, _, _, end_minutes, end_seconds, _ = match.groups()
    if max(map(int, (start_minutes, start_seconds, end_minutes, end_seconds))) > 59:
        return "minutes or seconds above 59 in a timing"
    return "a cue ends before it begins" if end_s < start_s else ""
