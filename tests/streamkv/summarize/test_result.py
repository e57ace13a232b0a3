"""A segment's summary survives its JSON; places say where a segment lies."""

import json
from typing import Any

import pytest

from streamkv.summarize.cues import Cue, ReadWarning, TimeRange
from streamkv.summarize.result import (
    Gap,
    Overall,
    Place,
    Point,
    SegmentSummary,
    SummaryResult,
    place_of,
    segment_from_json,
    segment_to_json,
)
from streamkv.summarize.segments import Coverage, Segment

PLACE = Place(TimeRange(1.5, 90.0), ("Ada", "Grâce"), 2, 40)
TIMELESS = Place(TimeRange(None, None), (), 41, 41)
SUMMARY = SegmentSummary(
    3,
    PLACE,
    Coverage(12, 345),
    (Point("They speak.", PLACE), Point("They stop.", TIMELESS)),
    (Gap(TIMELESS, "the model gave no answer", "And then …"),),
)


def test_a_segments_summary_survives_its_json() -> None:
    assert segment_from_json(json.loads(json.dumps(segment_to_json(SUMMARY)))) == SUMMARY
    empty = SegmentSummary(0, TIMELESS, Coverage(), (), ())
    assert segment_from_json(json.loads(json.dumps(segment_to_json(empty)))) == empty


def damaged(change: Any) -> dict[str, Any]:
    data: dict[str, Any] = json.loads(json.dumps(segment_to_json(SUMMARY)))
    change(data)
    return data


@pytest.mark.parametrize(
    "change",
    [
        lambda data: data.pop("points"),
        lambda data: data["place"].pop("first_line"),
        lambda data: data["coverage"].update(num_words=3),
        lambda data: data["points"].append({"text": "no place"}),
        lambda data: data.update(gaps=None),
        lambda data: data.update(place="page 3"),
    ],
)
def test_anything_else_is_an_error_that_a_reader_expects(change: Any) -> None:
    with pytest.raises((KeyError, TypeError)):
        segment_from_json(damaged(change))


def test_a_place_spans_its_cues() -> None:
    cues = (
        Cue("a", 5, 10.0, 12.0, "Ada"),
        Cue("b", 9, 8.0, 9.0, "Grace"),
        Cue("c", 14, 12.0, None, "Ada"),
    )
    place = place_of(Segment(0, cues, 3))
    assert place == Place(TimeRange(8.0, 12.0), ("Ada", "Grace"), 5, 14)


def test_a_result_lists_the_gaps_of_all_segments_in_order() -> None:
    gaps = tuple(Gap(PLACE, problem, "") for problem in ("one", "two", "three"))
    segments = (
        SegmentSummary(0, PLACE, Coverage(), (), gaps[:2]),
        SegmentSummary(1, PLACE, Coverage(), (), ()),
        SegmentSummary(2, PLACE, Coverage(), (), gaps[2:]),
    )
    warnings = (ReadWarning("a.srt", 1, "odd"),)
    result = SummaryResult(
        "a.srt",
        "k",
        "s",
        "m",
        "srt",
        "utf-8",
        Overall("", ""),
        segments,
        Coverage(),
        warnings,
        1,
        0,
    )
    assert result.gaps == gaps
