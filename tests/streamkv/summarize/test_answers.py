import pytest

from streamkv.summarize.answers import Answer, Problem, check_answer

SOURCE = (
    "Ada: The committee decided to move the whole budget review to the second week of May, "
    "because the auditors asked for more time and nobody objected to the change."
)


def check(text: str, *, ended: bool = True, not_again: tuple[str, ...] = ()) -> Answer:
    return check_answer(text, ended=ended, source=SOURCE, not_again=not_again)


def test_points_are_read_in_every_style() -> None:
    text = (
        "Here they are:\n- The review was moved.\n* Auditors need time.\n\n2) Nobody minded that."
    )
    assert check(text).points == (
        "The review was moved.",
        "Auditors need time.",
        "Nobody minded that.",
    )


def test_at_most_three_points_are_kept_and_each_once() -> None:
    text = "- It is one.\n- It is two.\n- It is one.\n- It is three.\n- It is four."
    assert check(text).points == ("It is one.", "It is two.", "It is three.")


@pytest.mark.parametrize(
    "text", ["", "-", "- \n-\n", "...", "- Ok.", "- One two.", "Here are the points:"]
)
def test_crumbs_are_an_empty_answer(text: str) -> None:
    assert check(text) == Answer(problem=Problem.EMPTY)


def test_of_an_answer_that_was_cut_off_the_complete_part_is_kept() -> None:
    cut = check("- The review was moved.\n- Auditors asked for", ended=False)
    assert cut.points == ("The review was moved.",)
    assert check("- The review was moved. Then they", ended=False).points == (
        "The review was moved.",
    )
    assert check("- The review was moved.", ended=False).points == ("The review was moved.",)
    assert check("- The review was", ended=False) == Answer(problem=Problem.TRUNCATED)


def test_what_says_no_more_than_its_opening_is_a_crumb() -> None:
    text = "- They talk about.\n- They talk about the host.\n- They talk about forty new shelves."
    answer = check_answer(text, ended=True, source="", opening="- They talk about")
    assert answer.points == ("They talk about forty new shelves.",)


def test_a_sentence_is_kept_once() -> None:
    answer = check_answer("It is new. It is big. It is new.", ended=True, source="")
    assert answer.points == ("It is new. It is big.",)


@pytest.mark.parametrize(
    "text",
    [
        "- the plan is the plan is the plan is the plan is the plan",
        "- " + "ha" * 30,
        "- " + "漢字" * 20,
        "\n".join(["- they talked about the weather today."] * 5),
    ],
)
def test_an_answer_that_goes_round_in_circles_is_none(text: str) -> None:
    assert check(text) == Answer(problem=Problem.LOOPING)


def test_copied_points_are_dropped_and_a_copied_answer_is_none() -> None:
    copied = "- decided to move the whole budget review to the second week of May"
    assert check(copied) == Answer(problem=Problem.COPIED)
    assert check(copied + "\n- Auditors wanted longer.").points == ("Auditors wanted longer.",)


def test_instructions_and_earlier_points_are_not_repeated() -> None:
    again = ("Answer with 1 to 3 short bullet points.", "Auditors wanted longer.")
    text = "- Answer with 1 to 3 short bullet points.\n- Auditors wanted longer."
    assert check(text, not_again=again) == Answer(problem=Problem.COPIED)


def test_scripts_without_spaces_are_compared_by_character() -> None:
    source = "委員会は予算の見直しを五月の第二週に移すことを決めた"
    copied = check_answer("- " + source, ended=True, source=source)
    assert copied.problem is Problem.COPIED
    fresh = check_answer("- 見直しは延期された。", ended=True, source=source)
    assert fresh.points == ("見直しは延期された。",)
