"""Physical lines to raw cues: every line of text once, whatever is malformed around it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamkv.summarize.cues import Cue, ReadWarnings
from streamkv.summarize.raw_cues import RawCue, read_raw_cues
from streamkv.summarize.source import PhysicalLine
from streamkv.summarize.speakers import Turn
from streamkv.summarize.timings import Timing

ONE, TWO = "00:00:01.000 --> 00:00:02.000", "00:00:02.000 --> 00:00:03.000"


def read(text: str, named: bool = False) -> tuple[list[RawCue], list[str]]:
    lines = [PhysicalLine(i, line) for i, line in enumerate(text.split("\n"), start=1)]
    warnings = ReadWarnings("a")
    cues = list(read_raw_cues(lines, warnings, named=named))
    return cues, [f"{warning.line_number}: {warning.problem}" for warning in warnings.kept]


def test_a_cue_has_its_place_its_times_and_its_lines() -> None:
    cues, warnings = read(f"1\n{ONE}\nfirst\n second\n\n2\n{TWO}\nthird")
    assert cues == [
        RawCue(2, Timing(1.0, 2.0), ["first", " second"]),
        RawCue(7, Timing(2.0, 3.0), ["third"]),
    ]
    assert warnings == []
    assert cues[0].cue(Turn("Ada", "hello")) == Cue("hello", 2, 1.0, 2.0, "Ada")


def test_a_name_above_a_timing_is_a_label_only_where_names_are_allowed() -> None:
    text = f"intro\n{ONE}\nhello"
    assert read(text, named=True) == ([RawCue(2, Timing(1.0, 2.0), ["hello"])], [])
    cues, warnings = read(text)
    assert [(cue.line_number, cue.lines) for cue in cues] == [(1, ["intro"]), (2, ["hello"])]
    assert warnings == ["1: text without a timing; kept"]


def test_of_two_lines_above_a_timing_neither_is_a_name() -> None:
    cues, warnings = read(f"lost\nwords\n{ONE}\nhello", named=True)
    assert [cue.lines for cue in cues] == [["lost", "words"], ["hello"]]
    assert warnings == ["1: text without a timing; kept"]


def test_a_number_that_is_almost_one_is_left_out_with_a_warning() -> None:
    cues, warnings = read(f"#1O\n{ONE}\nhello")
    assert [cue.lines for cue in cues] == [["hello"]]
    assert warnings == ["1: malformed number of a cue"]


def test_a_number_without_a_blank_line_before_it_is_not_text() -> None:
    cues, _ = read(f"{ONE}\nseven\n7\n{TWO}\n8\n9")
    assert [cue.lines for cue in cues] == [["seven"], ["8", "9"]]


@pytest.mark.parametrize(("named", "lines"), [(True, [["a", " ", "b"]]), (False, [["a"], ["b"]])])
def test_a_line_of_spaces_ends_a_cue_unless_captions_roll(
    named: bool, lines: list[list[str]]
) -> None:
    assert [cue.lines for cue in read(f"{ONE}\na\n \nb", named)[0]] == lines


def test_what_is_wrong_is_said_with_its_line() -> None:
    _, warnings = read(f"{TWO}\na\n\n{ONE}\nb\n\n{TWO}\n\n5\n\n00:00:09.000 --> x\nc")
    assert warnings == [
        "4: a cue begins before the one above it; kept in this order",
        "7: a cue without text",
        "9: the number of a cue without a timing",
        "11: malformed timing; the text is kept",
    ]


LINES = ["", ONE, TWO, "00:00:09.000 --> x", "word", "other words", "Ada: x"]


@given(st.lists(st.sampled_from([*LINES, " "])))
def test_every_line_of_text_is_in_one_cue_in_order(lines: list[str]) -> None:
    cues, _ = read("\n".join(lines))
    kept = [line for cue in cues for line in cue.lines]
    assert kept == [line for line in lines if line.strip() and "-->" not in line]


@given(st.lists(st.sampled_from(LINES)))
def test_where_cues_have_names_these_alone_are_left_out(lines: list[str]) -> None:
    cues, _ = read("\n".join(lines), named=True)
    kept = [line for cue in cues for line in cue.lines]
    around = zip(["", *lines], lines, [*lines[1:], ""], strict=False)
    assert kept == [
        line
        for above, line, below in around
        if line and "-->" not in line and not (above == "" and "-->" in below)
    ]


def test_a_name_stands_right_above_its_timing() -> None:
    cues, warnings = read(f"lost words\n \n{ONE}\nhello", named=True)
    assert [cue.lines for cue in cues] == [["lost words"], ["hello"]]
    assert warnings == ["1: text without a timing; kept"]
