"""The file of answers: whatever a run leaves behind, the next one goes on from there."""

from pathlib import Path
from typing import Any

import pytest
from recall_answers import answer

from streamkv.errors import InputError
from streamkv.recall_bench.answers import AnswerFile, NotPossible, Task, read_answers

SETTING: dict[str, Any] = {"seed": 0, "depths": [0.1, 0.5], "lengths": [1024], "date": "Monday"}
ANSWERS = [answer(index=index, found=index % 2 == 0, recalled=True) for index in range(3)]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A file with three answers."""
    path = tmp_path / "new" / "recall.jsonl"
    with AnswerFile(path, SETTING, resume=False) as file:
        for item in ANSWERS:
            file.append(item)
        file.refuse(NotPossible("dense", 8192, "too long"))
    return path


def test_answers_are_read_as_they_were_written(path: Path) -> None:
    recorded = read_answers(path)
    assert recorded.setting == SETTING
    assert recorded.answers == ANSWERS
    assert recorded.not_possible == [NotPossible("dense", 8192, "too long")]
    assert recorded.num_bytes == path.stat().st_size


def test_a_run_goes_on_with_what_is_missing(path: Path) -> None:
    setting = {**SETTING, "lengths": [1024, 2048], "date": "Tuesday"}
    with AnswerFile(path, setting, resume=True) as file:
        tasks = [Task(length, 2, "window") for length in (1024, 2048)]
        assert file.missing(iter(tasks)) == [Task(2048, 2, "window")]
        file.append(answer(length=2048, index=2))
        file.refuse(NotPossible("dense", 8192, "too long"))
    recorded = read_answers(path)
    assert recorded.setting == setting
    assert recorded.answers == [*ANSWERS, answer(length=2048, index=2)]
    assert len(recorded.not_possible) == 1


def test_a_file_cut_anywhere_in_its_last_line_is_gone_on_with(path: Path) -> None:
    whole = path.read_bytes()
    end_of_second = whole[: whole.rindex(b'{"kind": "answer"')]
    last = whole[len(end_of_second) :].splitlines(keepends=True)[0]
    for cut in range(len(last)):
        path.write_bytes(end_of_second + last[:cut])
        assert read_answers(path).answers == ANSWERS[:2]
        with AnswerFile(path, SETTING, resume=True) as file:
            assert file.answers == ANSWERS[:2]
            file.append(ANSWERS[2])
        assert read_answers(path).answers == ANSWERS


def test_a_file_without_a_whole_line_begins_anew(path: Path) -> None:
    path.write_bytes(b"")
    with AnswerFile(path, SETTING, resume=True) as file:
        assert file.answers == []
    assert read_answers(path).setting == SETTING


def test_a_file_that_exists_is_not_overwritten(path: Path) -> None:
    before = path.read_bytes()
    with pytest.raises(InputError, match=r"it exists. Go on with --resume"):
        AnswerFile(path, SETTING, resume=False)
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    ("changed", "told"),
    [({"seed": 1}, "its seed is 0, not 1"), ({"depths": [0.1]}, r"its depths is \[0.1, 0.5\]")],
)
def test_answers_to_other_questions_are_not_mixed_in(
    path: Path, changed: dict[str, Any], told: str
) -> None:
    before = path.read_bytes()
    with pytest.raises(InputError, match=told):
        AnswerFile(path, {**SETTING, **changed}, resume=True)
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    "content", ["no JSON\n", "[1]\n", '{"kind": "answer", "length": 1}\n', '{"kind": "x"}\n', "\n"]
)
def test_another_file_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "other.jsonl"
    path.write_text(content)
    with pytest.raises(InputError, match=r"Give the .jsonl of a run"):
        read_answers(path)
    with pytest.raises(InputError, match=r"answers=.*nowhere"):
        read_answers(tmp_path / "nowhere.jsonl")
