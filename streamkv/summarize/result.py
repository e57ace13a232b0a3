"""What a summary consists of. Plain data, and its form in JSON. No I/O."""

import dataclasses
from dataclasses import dataclass
from typing import Any

from streamkv.summarize.cues import ReadWarning, TimeRange
from streamkv.summarize.segments import Coverage, Segment


@dataclass(frozen=True, slots=True)
class Place:
    """Where in the transcript something was said.

    Attributes:
        time_range: from when to when.
        speakers: who spoke there, in order of appearance.
        first_line: line of the file where it begins.
        last_line: line of the file where its last utterance begins.
    """

    time_range: TimeRange
    speakers: tuple[str, ...]
    first_line: int
    last_line: int


@dataclass(frozen=True, slots=True)
class Point:
    """A bullet point and the place that it was made from."""

    text: str
    place: Place


@dataclass(frozen=True, slots=True)
class Gap:
    """A place of which there is no usable summary, why, and how the place begins."""

    place: Place
    problem: str
    begins: str


@dataclass(frozen=True, slots=True)
class SegmentSummary:
    """What was made of one segment: points, gaps, or both. Together they cover the segment."""

    index: int
    place: Place
    coverage: Coverage
    points: tuple[Point, ...]
    gaps: tuple[Gap, ...]


@dataclass(frozen=True, slots=True)
class Overall:
    """The short summary of everything.

    Attributes:
        text: the summary; empty if the model gave none.
        problem: why there is none, or what it does not take into account; empty if nothing.
    """

    text: str
    problem: str


@dataclass(frozen=True, slots=True)
class SummaryResult:
    """A finished summary.

    Attributes:
        file: the transcript.
        key: name of this run: content, model and settings.
        session: name of the session that read the transcript and can be asked about it.
        model: the model.
        format: format that the transcript was read as.
        encoding: encoding that it was read as.
        overall: the short summary.
        segments: one for each segment, in order; together they cover every line.
        coverage: cues and characters of the transcript, all of them covered.
        warnings: what was malformed, the first of them.
        num_warnings: how many there were.
        num_resumed: segments taken over from an interrupted run.
    """

    file: str
    key: str
    session: str
    model: str
    format: str
    encoding: str
    overall: Overall
    segments: tuple[SegmentSummary, ...]
    coverage: Coverage
    warnings: tuple[ReadWarning, ...]
    num_warnings: int
    num_resumed: int

    @property
    def gaps(self) -> tuple[Gap, ...]:
        """Every place without a usable summary."""
        return tuple(gap for segment in self.segments for gap in segment.gaps)


def place_of(segment: Segment) -> Place:
    """Where a segment lies."""
    first, last = segment.cues[0], segment.cues[-1]
    return Place(segment.time_range, segment.speakers, first.line_number, last.line_number)


def segment_to_json(summary: SegmentSummary) -> dict[str, Any]:
    """The JSON object of a segment's summary; `segment_from_json` reads it."""
    return dataclasses.asdict(summary)


def segment_from_json(data: dict[str, Any]) -> SegmentSummary:
    """The inverse of `segment_to_json`. Raises KeyError or TypeError on anything else."""
    return SegmentSummary(
        index=int(data["index"]),
        place=_place(data["place"]),
        coverage=Coverage(**data["coverage"]),
        points=tuple(Point(str(item["text"]), _place(item["place"])) for item in data["points"]),
        gaps=tuple(
            Gap(_place(item["place"]), str(item["problem"]), str(item["begins"]))
            for item in data["gaps"]
        ),
    )


def _place(data: dict[str, Any]) -> Place:
    times = data["time_range"]
    return Place(
        TimeRange(times["start_s"], times["end_s"]),
        tuple(data["speakers"]),
        int(data["first_line"]),
        int(data["last_line"]),
    )
