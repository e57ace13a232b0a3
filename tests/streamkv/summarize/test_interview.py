from collections.abc import Callable

import pytest

from streamkv.summarize.cues import Cue
from streamkv.summarize.interview import NOTHING_USABLE, Interview
from streamkv.summarize.plan import Plan
from streamkv.summarize.segments import Segment

from .conftest import CUT_OFF, Script, ScriptedEngine

Scripted = Callable[[Script], ScriptedEngine]
SEGMENT = Segment(
    2,
    (
        Cue("the roof will be finished on the tenth of March if it stays dry", 4, 6.0, 11.0, "Ada"),
        Cue("then the forty shelves can come two days later, all of them", 8, 12.0, 17.0, "Grace"),
    ),
    2,
)


def interview(engine: ScriptedEngine) -> Interview:
    return Interview(engine, "q", Plan(segment=200, answer=50))


def test_points_carry_their_place_and_the_question_leaves_no_session(scripted: Scripted) -> None:
    engine = scripted(lambda prompt: "the new roof.\n- They expect forty shelves.")
    summary = interview(engine).summarize(SEGMENT)
    assert [point.text for point in summary.points] == [
        "They talk about the new roof.",
        "They expect forty shelves.",
    ]
    assert {str(point.place.time_range) for point in summary.points} == {"0:00:06 – 0:00:17"}
    assert summary.place.speakers == ("Ada", "Grace")
    assert summary.gaps == ()
    assert engine.sessions == {}


def test_after_three_lines_it_has_said_enough(scripted: Scripted) -> None:
    engine = scripted(lambda prompt: "one new roof.\n- b c d e\n- f g h i\n- never\n- never")
    assert len(interview(engine).summarize(SEGMENT).points) == 3


@pytest.mark.parametrize(
    ("bad", "problem"),
    [
        ("", "the model gave no answer"),
        ("the roof and" + CUT_OFF, "the model's answer was cut off before its first point"),
        ("it is it is it is it is it is it is it is it is", "the model's answer repeated itself"),
        (
            "\n- then the forty shelves can come two days later, all of them",
            "the model copied its input",
        ),
    ],
)
def test_a_bad_answer_is_asked_for_again_about_each_half(
    scripted: Scripted, bad: str, problem: str
) -> None:
    def script(prompt: str) -> str:
        whole = "roof" in prompt and "shelves" in prompt
        return bad if whole or "shelves" in prompt else "the builders' new roof."

    summary = interview(scripted(script)).summarize(SEGMENT)
    [point] = summary.points
    assert point.text == "They talk about the builders' new roof."
    assert (point.place.first_line, point.place.last_line) == (4, 4)
    [gap] = summary.gaps
    assert gap.problem.startswith(problem)
    assert (gap.place.speakers, gap.place.first_line) == (("Grace",), 8)
    assert gap.begins == "Grace: then the forty shelves can come two days later, all of them"
    assert summary.coverage.num_lines == 2


def test_without_any_usable_part_the_overall_summary_says_so(scripted: Scripted) -> None:
    talk = interview(scripted(lambda prompt: ""))
    overall = talk.summarize_all([talk.summarize(SEGMENT)])
    assert (overall.text, overall.problem) == ("", NOTHING_USABLE)


def test_the_overall_summary_is_made_from_the_notes_on_all_parts(scripted: Scripted) -> None:
    asked = []

    def script(prompt: str) -> str:
        asked.append(prompt)
        return "library that opens." if "these notes" in prompt else "forty new shelves."

    talk = interview(scripted(script))
    overall = talk.summarize_all([talk.summarize(SEGMENT)] * 3)
    assert overall.text == "The main topics are the library that opens."
    assert overall.problem == ""
    assert asked[-1].count("- They talk about forty new shelves.") == 3


def test_a_failed_overall_summary_is_asked_for_twice_and_named(scripted: Scripted) -> None:
    num_asked = 0

    def script(prompt: str) -> str:
        nonlocal num_asked
        if "these notes" not in prompt:
            return "forty new shelves."
        num_asked += 1
        return ""

    talk = interview(scripted(script))
    overall = talk.summarize_all([talk.summarize(SEGMENT)])
    assert (overall.text, num_asked) == ("", 2)
    assert overall.problem == "No overall summary: the model gave no answer"
