"""Asking a model: in a session of its own, and only as much as was asked for."""

from collections.abc import Callable
from typing import Any

import pytest

from streamkv.summarize.asking import Question, RawAnswer, ask, read_on

Scripted = Callable[[Callable[[str], str]], Any]
CUT_OFF = "<cut off>"


def question(max_lines: int = 9, retry: bool = False) -> Question:
    return Question("What was said?", "- They", 40, max_lines, retry)


def test_an_answer_begins_with_its_opening_and_leaves_no_session(scripted: Scripted) -> None:
    engine = scripted(lambda prompt: "agree.")
    assert ask(engine, "q", question()) == RawAnswer("- They agree.", ended=True)
    assert engine.session_names() == []


def test_an_answer_that_was_cut_off_has_not_ended(scripted: Scripted) -> None:
    engine = scripted(lambda prompt: "agree on" + CUT_OFF)
    assert ask(engine, "q", question()) == RawAnswer("- They agree on", ended=False)


@pytest.mark.parametrize(
    ("max_lines", "answer"),
    [
        (1, "- They agree.\n"),
        (2, "- They agree.\n - Then\n"),
        (3, "- They agree.\n - Then\n stop."),
    ],
)
def test_enough_lines_end_an_answer(scripted: Scripted, max_lines: int, answer: str) -> None:
    engine = scripted(lambda prompt: "agree.\n - Then\n stop.")
    assert ask(engine, "q", question(max_lines)) == RawAnswer(answer, ended=True)
    assert engine.session_names() == []


def test_what_an_interrupted_run_left_is_not_gone_on_with(scripted: Scripted) -> None:
    engine = scripted(lambda prompt: "agree.")
    left = engine.session("q")
    left.say("an older question")
    ask(engine, "q", question())
    assert left.said == ["an older question"]


def test_a_model_that_fails_leaves_no_session(scripted: Scripted) -> None:
    def broken(prompt: str) -> str:
        raise RuntimeError("the disk is gone")

    engine = scripted(broken)
    with pytest.raises(RuntimeError, match="disk is gone"):
        ask(engine, "q", question())
    assert engine.session_names() == []


def test_only_a_retry_has_noise_and_always_the_same() -> None:
    first, again = question().params, question(retry=True).params
    assert (first.temperature, first.max_tokens, first.stop_strings) == (0.0, 40, ("\n\n",))
    assert again.temperature > 0 and again.seed is not None
    assert again == question(retry=True).params


@pytest.mark.parametrize(
    ("read_before", "expected"), [(0, "0123456789"), (104, "456789"), (110, ""), (500, "")]
)
def test_reading_goes_on_where_the_session_stands(
    scripted: Scripted, read_before: int, expected: str
) -> None:
    session = scripted(str).session("transcript")
    session.fed = "x" * read_before
    assert read_on(session, "0123456789", 100 if read_before else 0) == (len(expected) + 3) // 4
    assert session.fed == "x" * read_before + expected
