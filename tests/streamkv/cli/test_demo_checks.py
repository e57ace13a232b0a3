"""Each check holds when it should, and fails when it should."""

from pathlib import Path

import pytest

from streamkv.cli.demo_checks import (
    CheckFailed,
    Continuation,
    JournalCheck,
    check_copy_distance,
    check_journal,
    check_same_stream,
    compare,
)
from streamkv.cli.demo_job import Reading, Wrote
from streamkv.cli.text_file import TextFile
from streamkv.journal import Journal
from streamkv.journal_records import Fed, Generated, SessionHeader
from streamkv.session_copy import SessionCopy

HEADER = SessionHeader(
    model="tiny",
    weights="00",
    vocab_size=1000,
    window_size=128,
    num_sink_tokens=4,
    mode="window",
    position_policy="cache",
    salt="",
    created_s=0.0,
)


def acknowledged(token_index: int, text_chars: int) -> Reading:
    return Reading(token_index, token_index, text_chars, 4, 128, {})


def make_journal(path: Path, *texts: str, first_id: int = 0) -> Path:
    """A journal that was fed `texts`, one token for each."""
    with Journal.create(path, HEADER) as journal:
        for number, text in enumerate(texts):
            journal.append(Fed(text, 0, (first_id + number,)))
    return path


@pytest.fixture
def text(tmp_path: Path) -> TextFile:
    path = tmp_path / "text.txt"
    path.write_text("one two three four", encoding="utf-8")
    return TextFile.check(path)


def test_a_journal_with_all_that_was_acknowledged_holds(tmp_path: Path, text: TextFile) -> None:
    path = make_journal(tmp_path / "j", "one ", "two ", "thr")
    assert check_journal(path, text, acknowledged(2, 8)) == JournalCheck(3, 11, 0)


def test_a_torn_record_that_was_not_acknowledged_is_told(tmp_path: Path, text: TextFile) -> None:
    path = make_journal(tmp_path / "j", "one ", "two ")
    path.write_bytes(path.read_bytes() + b"\x20\x00\x00")
    assert check_journal(path, text, acknowledged(2, 8)) == JournalCheck(2, 8, 3)


@pytest.mark.parametrize(
    ("said", "problem"),
    [
        (acknowledged(3, 8), "3 tokens were acknowledged, the journal holds 2"),
        (acknowledged(2, 9), "9 characters were acknowledged, the journal holds 8"),
    ],
)
def test_a_journal_that_lost_something_fails(
    tmp_path: Path, text: TextFile, said: Reading, problem: str
) -> None:
    path = make_journal(tmp_path / "j", "one ", "two ")
    with pytest.raises(CheckFailed, match=problem):
        check_journal(path, text, said)


@pytest.mark.parametrize(
    ("texts", "problem"),
    [
        (("one ", "three "), r"differs from .* after 4 characters"),
        (("one ", "two ", "two "), "differs from .* after 8 characters"),
        (("One ",), "differs from .* after 0 characters"),
        (("one two three four", "!"), "beyond the end of"),
    ],
)
def test_a_journal_with_other_text_fails(
    tmp_path: Path, text: TextFile, texts: tuple[str, ...], problem: str
) -> None:
    path = make_journal(tmp_path / "j", *texts)
    with pytest.raises(CheckFailed, match=problem):
        check_journal(path, text, acknowledged(0, 0))


def test_streams_are_compared_as_far_as_asked(tmp_path: Path) -> None:
    one = make_journal(tmp_path / "one", "a", "b", "c")
    other = tmp_path / "other"
    with Journal.create(other, HEADER) as journal:
        journal.append(Fed("ab", 0, (0, 1)))
        journal.append(Generated((9,)))
    check_same_stream(one, other, 2)
    with pytest.raises(CheckFailed, match="differ from token 2 on"):
        check_same_stream(one, other, 3)
    with pytest.raises(CheckFailed, match="holds 3 of 4 tokens"):
        check_same_stream(one, other, 4)


@pytest.mark.parametrize(("num_tokens", "holds"), [(8_192, True), (8_193, False), (0, False)])
def test_the_copy_is_at_most_8192_tokens_old(num_tokens: int, holds: bool) -> None:
    copied = SessionCopy(1000, 4000, 960, 9, 1)
    killed = JournalCheck(1000 + num_tokens, 40_000, 0)
    if holds:
        assert check_copy_distance(copied, killed) == num_tokens
    else:
        with pytest.raises(CheckFailed, match="tokens before the kill"):
            check_copy_distance(copied, killed)


def tokens(*ids: int, margins: dict[int, float] | None = None) -> list[Wrote]:
    margins = margins or {}
    return [Wrote(f"<{i}>", i, 100 + at, margins.get(at, 2.0)) for at, i in enumerate(ids)]


def test_equal_tokens_hold_and_near_ties_are_counted() -> None:
    calm = tokens(1, 2, 3, margins={0: 0.5, 1: 9e-5})
    assert compare(tokens(1, 2, 3), calm, 3) == Continuation(3, 1, None, 9e-5)


def test_a_difference_at_a_near_tie_holds_and_nothing_after_it_counts() -> None:
    calm = tokens(1, 2, 3, 4, margins={1: 9e-5})
    assert compare(tokens(1, 7, 8, 9), calm, 4) == Continuation(4, 1, 1, 9e-5)


def test_a_difference_elsewhere_fails() -> None:
    calm = tokens(1, 2, 3, margins={1: 1e-4})
    with pytest.raises(CheckFailed, match="token 2 of 3 differs: '<7>' instead of '<2>'"):
        compare(tokens(1, 7, 3), calm, 3)


def test_a_near_tie_that_both_decided_alike_excuses_nothing_later() -> None:
    calm = tokens(1, 2, 3, margins={0: 1e-6})
    with pytest.raises(CheckFailed, match="token 3 of 3 differs"):
        compare(tokens(1, 2, 7), calm, 3)


def test_the_same_token_at_another_place_fails() -> None:
    moved = [Wrote(t.text, t.token_id, t.token_index + 1, t.margin) for t in tokens(1, 2)]
    with pytest.raises(CheckFailed, match="token 1 of 2 differs"):
        compare(moved, tokens(1, 2), 2)


def test_too_few_tokens_fail_and_a_flush_of_text_is_no_token() -> None:
    flush = Wrote("x", None, 102, float("inf"))
    assert compare([*tokens(1, 2), flush], tokens(1, 2), 2).num_tokens == 2
    with pytest.raises(CheckFailed, match="1 and 2 tokens were generated, not 2"):
        compare([*tokens(1), flush], tokens(1, 2), 2)
