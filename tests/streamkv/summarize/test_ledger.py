from pathlib import Path

import pytest

from streamkv.errors import StoreError
from streamkv.summarize.cues import TimeRange
from streamkv.summarize.ledger import Ledger
from streamkv.summarize.result import Gap, Overall, Place, Point, SegmentSummary
from streamkv.summarize.segments import Coverage

PLACE = Place(TimeRange(1.0, 2.5), ("Ada", "Grâce"), 3, 9)
SUMMARY = SegmentSummary(
    0,
    PLACE,
    Coverage(7, 210),
    (Point("They met.\u2028Once.", PLACE),),
    (Gap(Place(TimeRange(None, None), (), 8, 9), "no answer", "And so"),),
)


OTHER = SegmentSummary(1, PLACE, Coverage(1, 2), (), ())


def filled(path: Path) -> Ledger:
    ledger = Ledger.open(path)
    ledger.finish_segment(SUMMARY)
    ledger.finish_segment(OTHER)
    return ledger


def test_what_was_recorded_is_there_after_reopening(tmp_path: Path) -> None:
    path = tmp_path / "state" / "a.jsonl"
    assert Ledger.open(path) == Ledger(path)
    filled(path).finish(Overall("All met.", ""))
    again = Ledger.open(path)
    assert again.summaries == {0: SUMMARY, 1: OTHER}
    assert again.overall == Overall("All met.", "")
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_torn_last_line_is_cut_off_wherever_it_was_torn(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    filled(path)
    whole = path.read_bytes()
    first, second = whole.splitlines(keepends=True)
    for length in range(len(second)):
        path.write_bytes(first + second[:length])
        ledger = Ledger.open(path)
        assert ledger.summaries == {0: SUMMARY}
        ledger.finish_segment(OTHER)
        assert path.read_bytes() == whole


def test_nothing_after_an_unreadable_line_is_believed(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    filled(path)
    first, second = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(first + b'{"segment": {"index": 0}}\n' + second)
    assert Ledger.open(path).summaries == {0: SUMMARY}
    assert path.read_bytes() == first


def test_without_a_path_it_lives_in_memory() -> None:
    ledger = Ledger.open(None)
    ledger.finish_segment(SUMMARY)
    assert ledger.summaries == {0: SUMMARY}


def test_a_directory_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(StoreError, match=r"ledger .*file/a.jsonl"):
        Ledger.open(tmp_path / "file" / "a.jsonl")
