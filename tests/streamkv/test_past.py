"""What is remembered of a stream, and how much text lies before a token."""

import pytest

from streamkv.errors import SessionError
from streamkv.journal_records import Fed, Flushed, Generated, Given, GivenKind, Kept, Rewound
from streamkv.past import MAX_REMEMBERED, MemoryPast, TextMark, TextMarks, text_chars_at

RECORDS = [
    Given(GivenKind.SYSTEM, (1,)),
    Fed("one two thr", 3, (11, 12)),
    Flushed((13,)),
    *[Generated((20 + number,)) for number in range(4)],
    Given(GivenKind.TEMPLATE, (30, 31)),
    Fed("four", 0, (14, 15)),
]


def no_text(start: int, end: int) -> str:
    raise AssertionError("nothing to decode")


def test_text_is_known_at_the_ends_of_records() -> None:
    marks = TextMarks.of(RECORDS)
    known = [text_chars_at(marks.at(index), index, no_text) for index in (0, 1, 3, 4, 6, 8, 10, 12)]
    assert known == [0, 0, 8, 11, 11, 11, 11, 15]


def test_within_a_record_its_tokens_tell_and_never_more_than_was_fed() -> None:
    mark = TextMarks.of(RECORDS).at(2)
    assert mark == TextMark(1, 0, 8, False)
    assert text_chars_at(mark, 2, lambda start, end: "one " * (end - start)) == 4
    assert text_chars_at(mark, 2, lambda start, end: "x" * 99) == 8


def test_a_turn_counts_from_its_first_token() -> None:
    marks = TextMarks.of(RECORDS)
    assert [marks.at(index).has_turns for index in (8, 9, 12)] == [False, True, True]


def test_generated_tokens_need_no_marks() -> None:
    marks = TextMarks.of([*RECORDS, *[Generated((5,))] * 1000])
    assert len(marks._tokens) < 12
    assert marks.at(700) == TextMark(12, 15, 15, True)


def test_marks_go_on_after_a_rewind() -> None:
    marks = TextMarks.of([*RECORDS, Rewound(2, 4, False), Fed("xy", 0, (16,))])
    assert marks.at(2) == TextMark(2, 4, 6, False)
    assert marks.at(3) == TextMark(3, 6, 6, False)


def test_memory_remembers_ids_and_what_was_kept() -> None:
    past = MemoryPast()
    past.append(*RECORDS, Given(GivenKind.CALLER, (40, 41)), Kept(12, 2))
    forked = past.fork()
    past.append(Rewound(12, 15, True), Generated((50,)))
    assert past.ids(10, 13).tolist() == [14, 15, 50]
    assert (past.state.num_tokens, past.state.kept) == (13, [])
    assert forked.ids(10, 14).tolist() == [14, 15, 40, 41]
    assert (forked.state.num_tokens, forked.state.kept) == (14, [Kept(12, 2)])
    forked.append(Rewound(13, 15, True))
    assert forked.state.kept == [Kept(12, 2)]


def test_memory_is_bounded() -> None:
    past = MemoryPast()
    for _ in range(MAX_REMEMBERED // 4096):
        past.append(Given(GivenKind.CALLER, (7,) * 4096))
    assert past.ids(MAX_REMEMBERED - 1, MAX_REMEMBERED).tolist() == [7]
    past.append(Generated((7,)))
    with pytest.raises(SessionError, match="remembers its first 1048576 tokens only"):
        past.ids(0, 1)
    assert past.state.num_tokens == MAX_REMEMBERED + 1
    assert past.fork().state.num_tokens == MAX_REMEMBERED + 1
