import json
import os
from pathlib import Path

import pytest

from streamkv.errors import InputError
from streamkv.summarize.cues import ReadWarning, TimeRange
from streamkv.summarize.result import Gap, Overall, Place, Point, SegmentSummary, SummaryResult
from streamkv.summarize.segments import Coverage
from streamkv.summarize.writer import output_path, to_json, to_markdown, write_summary

WHOLE = Place(TimeRange(0.0, 65.0), ("Ada", "Grace"), 1, 20)
HALF = Place(TimeRange(30.0, 65.0), ("Grace",), 11, 20)
RESULT = SummaryResult(
    file="/x/meeting.srt",
    key="0123",
    session="summary-0123",
    model="tiny",
    format="srt",
    encoding="utf-8",
    overall=Overall("They met.", "Places without a summary of their own: 1"),
    segments=(
        SegmentSummary(
            0, WHOLE, Coverage(12, 300), (Point("A <b>plan</b>\nwas made.", WHOLE),), ()
        ),
        SegmentSummary(
            1,
            WHOLE,
            Coverage(8, 90),
            (Point("It rained.", HALF),),
            (Gap(HALF, "no answer", "And"),),
        ),
    ),
    coverage=Coverage(20, 390),
    warnings=(ReadWarning("meeting.srt", 4, "odd"),),
    num_warnings=3,
    num_resumed=0,
)
MARKDOWN = """# Summary of meeting.srt

They met.

*Places without a summary of their own: 1*

## 1. 0:00:00 – 0:01:05 · Ada, Grace · lines 1–20

- A &lt;b>plan&lt;/b> was made.

## 2. 0:00:00 – 0:01:05 · Ada, Grace · lines 1–20

- It rained. *(0:00:30 – 0:01:05 · Grace · lines 11–20)*
- **No summary** of 0:00:30 – 0:01:05 · Grace · lines 11–20: no answer. It begins: “And”

---

20 lines read as srt (utf-8), all covered, in 2 parts, 1 place without a summary. Written by tiny: \
a language model, which may be wrong. Session: `summary-0123`.

Malformed in the file (3):

- meeting.srt:4: odd
- and 2 more
"""


def test_the_markdown_has_places_gaps_and_warnings() -> None:
    assert to_markdown(RESULT) == MARKDOWN


def test_the_json_holds_everything() -> None:
    data = json.loads(to_json(RESULT))
    assert data["coverage"] == {"num_lines": 20, "num_chars": 390}
    assert data["segments"][1]["gaps"][0]["place"]["first_line"] == 11
    assert data["segments"][1]["points"][0]["place"]["speakers"] == ["Grace"]
    assert data["warnings"] == ["meeting.srt:4: odd"]


def test_the_output_goes_beside_the_source_or_where_it_is_told(tmp_path: Path) -> None:
    source = tmp_path / "m.srt"
    source.write_text("x")
    assert output_path(source, None, "markdown") == tmp_path / "m.srt.summary.md"
    (tmp_path / "out").mkdir()
    assert output_path(source, tmp_path / "out", "json") == tmp_path / "out/m.srt.summary.json"
    assert output_path(source, tmp_path / "s.md", "markdown") == tmp_path / "s.md"


def test_the_transcript_is_never_overwritten_and_a_missing_directory_named(tmp_path: Path) -> None:
    source = tmp_path / "m.srt"
    source.write_text("x")
    with pytest.raises(InputError, match="that is the transcript"):
        output_path(source, source, "markdown")
    with pytest.raises(InputError, match="not there or not writable"):
        output_path(source, tmp_path / "none" / "s.md", "markdown")


def test_a_failed_write_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "s.md"
    path.write_text("old")

    def full_disk(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full_disk)
        with pytest.raises(InputError, match="No space left on device"):
            write_summary(RESULT, path, "markdown")
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["s.md"]
    write_summary(RESULT, path, "markdown")
    assert path.read_text() == MARKDOWN
    assert os.listdir(tmp_path) == ["s.md"]
