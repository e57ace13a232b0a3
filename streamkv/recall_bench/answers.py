"""What was asked and answered, one JSON line each, in a file from which a run goes on.

Invariant: a line is written whole or cut off when the run goes on, and nothing is asked twice. The
first line of every run says under which settings; answers under others are never mixed with them.
"""

import dataclasses
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

from streamkv.errors import InputError

MAY_DIFFER = frozenset(
    {"lengths", "questions", "modes", "data", "date", "machine", "versions", "commit"}
)
"""Settings that a run may change when it goes on; all others decide what is answered."""


@dataclass(frozen=True, slots=True)
class Task:
    """A question as one mode is asked it."""

    length: int
    index: int
    mode: str


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer of one mode.

    Attributes:
        length, index, depth, number, source, source_token, needle_start, needle_end: the question,
            see `Question`.
        mode: that answered.
        fed_in: mode in which the stream was read.
        text: what was generated, after the given start.
        found: whether the number is in it.
        beyond_window: all of the needle had left the window when the answer began.
        feed_s, feed_tokens: of reading the stream; forks of one reading share these.
        answer_s, answer_tokens: of generating.
        recalled_blocks: blocks recalled for the answer; `None` where the session does not say.
        needle_recalled: whether one of them holds part of the needle.
    """

    length: int
    index: int
    depth: float
    number: str
    source: str
    source_token: int
    needle_start: int
    needle_end: int
    mode: str
    fed_in: str
    text: str
    found: bool
    beyond_window: bool
    feed_s: float
    feed_tokens: int
    answer_s: float
    answer_tokens: int
    recalled_blocks: int | None = None
    needle_recalled: bool | None = None

    @property
    def task(self) -> Task:
        """What it is the answer to."""
        return Task(self.length, self.index, self.mode)


class NotPossible(NamedTuple):
    """Why a mode cannot be asked at a length."""

    mode: str
    length: int
    reason: str


@dataclass(frozen=True, slots=True)
class Recorded:
    """What a file of answers holds.

    Attributes:
        setting: of its last run.
        answers: all of them.
        not_possible: what could not be asked.
        num_bytes: up to the end of its last whole line.
    """

    setting: dict[str, Any]
    answers: list[Answer]
    not_possible: list[NotPossible]
    num_bytes: int


def read_answers(path: Path) -> Recorded:
    """Read a file of answers; a last line that was cut off is left out.

    Raises:
        InputError: no such file, or none of answers.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        reason = error.strerror or str(error)
        raise InputError("answers", str(path), reason, "Give the .jsonl of a run.") from error
    num_bytes = data.rfind(b"\n") + 1
    setting: dict[str, Any] = {}
    answers: dict[Task, Answer] = {}
    not_possible: dict[tuple[str, int], NotPossible] = {}
    for number, line in enumerate(data[:num_bytes].splitlines(), start=1):
        try:
            record = json.loads(line)
            kind = record.pop("kind")
            if kind == "run":
                setting = record
            elif kind == "answer":
                answer = Answer(**record)
                answers[answer.task] = answer
            elif kind == "not possible":
                refused = NotPossible(**record)
                not_possible[refused.mode, refused.length] = refused
            else:
                raise ValueError(f"unknown kind {kind!r}")
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            problem = f"line {number} is no record of answers ({error})"
            raise InputError("answers", str(path), problem, "Give the .jsonl of a run.") from error
    if not setting:
        raise InputError("answers", str(path), "no run in it", "Give the .jsonl of a run.")
    return Recorded(setting, list(answers.values()), list(not_possible.values()), num_bytes)


class AnswerFile:
    """Appends answers to a file; a context manager.

    Args:
        path: the file.
        setting: of this run, JSON values.
        resume: go on with a file that exists.

    Attributes:
        answers: those of the file, newest last.

    Raises:
        InputError: the file exists and `resume` is off, holds another setting, or cannot be read.
        OSError: it cannot be written.
    """

    def __init__(self, path: Path, setting: dict[str, Any], *, resume: bool) -> None:
        self.path = path
        self.answers: list[Answer] = []
        self.not_possible: list[NotPossible] = []
        begin = 0
        if path.exists():
            if not resume:
                remedy = "Go on with --resume, give another --name, or move the file away."
                raise InputError("answers", str(path), "it exists", remedy)
            if path.stat().st_size:
                recorded = read_answers(path)
                _require_same(path, recorded.setting, setting)
                self.answers = recorded.answers
                self.not_possible = recorded.not_possible
                begin = recorded.num_bytes
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open(path, "ab")  # noqa: SIM115  closed by __exit__
        self._file.truncate(begin)
        self._write("run", setting)

    def append(self, answer: Answer) -> None:
        """Add an answer; it is in the file when this returns."""
        self._write("answer", dataclasses.asdict(answer))
        self.answers.append(answer)

    def refuse(self, refused: NotPossible) -> None:
        """Say that a mode cannot be asked at a length."""
        if refused not in self.not_possible:
            self._write("not possible", refused._asdict())
            self.not_possible.append(refused)

    def missing(self, tasks: Iterator[Task]) -> list[Task]:
        """Of `tasks` those that have no answer yet."""
        known = {answer.task for answer in self.answers}
        return [task for task in tasks if task not in known]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.close()

    def _write(self, kind: str, record: dict[str, Any]) -> None:
        line = json.dumps({"kind": kind, **record}, ensure_ascii=False)
        self._file.write(line.encode() + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())


def _require_same(path: Path, old: dict[str, Any], new: dict[str, Any]) -> None:
    """Raise unless answers of both settings may stand side by side."""
    for name in sorted({*old, *new} - MAY_DIFFER):
        # As JSON holds it: a tuple comes back as a list.
        wanted = json.loads(json.dumps(new.get(name)))
        if old.get(name) != wanted:
            raise InputError(
                "answers",
                str(path),
                f"its {name} is {old.get(name)!r}, not {wanted!r}",
                f"Give the same {name}, or another --name.",
            )
