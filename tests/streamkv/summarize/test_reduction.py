import pytest

from streamkv.summarize.reduction import Limits, reduce_notes

LIMITS = Limits(room=100, note=30)


def test_notes_that_fit_are_not_asked_about() -> None:
    def never(notes: str, retry: bool) -> tuple[str, ...] | None:
        raise AssertionError

    reduced = reduce_notes(["- a", "- b"], never, len, LIMITS)
    assert reduced.notes == "- a\n- b"
    assert reduced.num_unshortened == 0


def test_a_question_never_holds_more_than_the_room_and_nothing_is_left_out() -> None:
    asked = []

    def shorten(notes: str, retry: bool) -> tuple[str, ...] | None:
        asked.append(notes)
        return (notes[2:4] + notes[-4:],)

    notes = [f"- {number:04d} " + "x" * 20 for number in range(100)]
    reduced = reduce_notes(notes, shorten, len, LIMITS)
    assert max(map(len, asked)) <= 100
    assert len(reduced.notes) <= 100
    first_level = "\n".join(asked)
    assert all(note in first_level for note in notes[:99])


def test_a_long_note_is_clipped() -> None:
    reduced = reduce_notes(["w " * 500, "short"], lambda notes, retry: ("x",), len, LIMITS)
    assert reduced.notes == ("w " * 15).strip() + "\nshort"


def test_a_group_that_fails_is_asked_about_in_halves() -> None:
    asked = []

    def shorten(notes: str, retry: bool) -> tuple[str, ...] | None:
        asked.append((notes.count("\n") + 1, retry))
        return ("short",) if retry else None

    reduced = reduce_notes(["n" * 30] * 6, shorten, len, LIMITS)
    assert asked[:3] == [(3, False), (1, True), (2, True)]
    assert reduced.num_unshortened == 0


@pytest.mark.parametrize("num_notes", [1, 2, 3, 7, 64, 200])
@pytest.mark.parametrize("answer", [None, (), ("y" * 500,)])
def test_it_ends_whatever_the_model_answers(num_notes: int, answer: tuple[str, ...] | None) -> None:
    notes = [f"{number:030d}" for number in range(num_notes)]
    reduced = reduce_notes(notes, lambda notes, retry: answer, len, LIMITS)
    assert len(reduced.notes) <= 100
    if answer is None:
        assert reduced.num_unshortened > 0 or num_notes <= 3
