import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamkv.summarize.cues import Cue
from streamkv.summarize.segments import (
    Coverage,
    Segment,
    coverage_of_cues,
    cut_cue,
    cut_segments,
    cut_text,
    halve,
)

WORDS = st.text(alphabet="ab é漢", max_size=400)
CUES = st.lists(
    st.builds(
        Cue,
        text=WORDS,
        line_number=st.integers(1, 10**6),
        speaker=st.none() | st.text(alphabet="AB ", min_size=1, max_size=60),
    ),
    max_size=30,
)


def one_char_a_token(text: str) -> int:
    return len(text)


@given(CUES, st.integers(16, 80))
def test_every_cue_lies_in_exactly_one_segment(cues: list[Cue], max_tokens: int) -> None:
    segments = list(cut_segments(cues, one_char_a_token, max_tokens))
    total = Coverage()
    for index, segment in enumerate(segments):
        assert segment.index == index
        assert len(segment.text) <= max_tokens
        total += Coverage(segment.num_lines, segment.num_chars)
    assert total == coverage_of_cues(cues)
    spoken = "".join(cue.text for segment in segments for cue in segment.cues)
    assert spoken == "".join(cue.text for cue in cues)


def test_cues_are_taken_lazily_and_segments_filled() -> None:
    cues = (Cue("x" * 9, number) for number in iter(int, 1))
    segments = cut_segments(cues, one_char_a_token, 20)
    assert [len(next(segments).cues) for _ in range(3)] == [2, 2, 2]


def test_a_long_cue_is_cut_at_spaces_and_counted_once() -> None:
    cue = Cue("one two three four five six", 7, 1.0, 2.0, "Ada")
    segments = list(cut_segments([cue], one_char_a_token, 20))
    assert [segment.text for segment in segments] == [
        "Ada: one two",
        "Ada: three four",
        "Ada: five six",
    ]
    assert [segment.num_lines for segment in segments] == [1, 0, 0]
    assert sum(segment.num_chars for segment in segments) == len(cue.text)
    assert {part.line_number for segment in segments for part in segment.cues} == {7}


def test_text_without_spaces_is_cut_too_and_no_character_is_lost() -> None:
    parts = list(cut_text("漢" * 1000, one_char_a_token, 64))
    assert "".join(parts) == "漢" * 1000
    assert max(map(len, parts)) == 64


def test_a_ten_million_character_line_is_cut_by_counting_little() -> None:
    counted = 0

    def count(text: str) -> int:
        nonlocal counted
        counted += len(text)
        return len(text) // 4 + 1

    text = "word " * 20_000
    assert "".join(cut_text(text, count, 100)) == text
    assert counted < 10 * len(text)


def test_of_an_endless_name_the_beginning_is_kept() -> None:
    cue = Cue("hi there", 1, speaker="N" * 100)
    assert [part.rendered for part in cut_cue(cue, one_char_a_token, 32)] == [
        "N" * 16 + ": hi there"
    ]


@pytest.mark.parametrize(
    ("texts", "halves"),
    [
        (["aaaa", "bb", "cc"], [["aaaa"], ["bb", "cc"]]),
        (["a", "bbbbbb"], [["a"], ["bbbbbb"]]),
        (["one two three"], [["one "], ["two three"]]),
        (["abcd"], [["ab"], ["cd"]]),
        (["a"], [["a"]]),
    ],
)
def test_halves_add_up_to_the_segment(texts: list[str], halves: list[list[str]]) -> None:
    segment = Segment(4, tuple(Cue(text, 1) for text in texts), len(texts))
    parts = halve(segment)
    assert [[cue.text for cue in part.cues] for part in parts] == halves
    assert sum(part.num_lines for part in parts) == segment.num_lines
    assert sum(part.num_chars for part in parts) == segment.num_chars
    assert {part.index for part in parts} == {4}
