"""What the model answered: cut into bullet points, and told from no answer at all. Pure.

A point is dropped when it is too short, cut off, copied from what it is about, an echo of the
instruction, or there already. When nothing is left, or the answer goes round in circles, that is a
`Problem`, and the caller asks again or says so.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

MAX_POINTS = 3
MIN_POINT_UNITS = 3
COPY_NGRAM = 8
MAX_COPIED_SHARE = 0.5
LOOP_NGRAM = 6
MAX_NGRAM_REPEATS = 2
# Scripts without spaces count by the character.
_UNIT = re.compile(r"[぀-ヿ㐀-鿿가-힣฀-๿]|[^\W_]+")
_MARK = re.compile(r"\s*(?:[-*•–—]+|\d{1,2}[.)])\s*")
_SENTENCE_END = re.compile(r"[.!?…][\"'”’)\]]*(?=\s|$)|[。！？।]")
_SENTENCE_GAP = re.compile(r"(?<=[.!?…])\s+")
_STUTTER = re.compile(r"(.{1,24}?)\1{7,}", re.DOTALL)


class Problem(Enum):
    """Why an answer is none."""

    EMPTY = "the model gave no answer"
    TRUNCATED = "the model's answer was cut off before its first point was complete"
    LOOPING = "the model's answer repeated itself"
    COPIED = "the model copied its input instead of summarising it"


@dataclass(frozen=True, slots=True)
class Answer:
    """A checked answer: points, or the problem."""

    points: tuple[str, ...] = ()
    problem: Problem | None = None


def check_answer(
    text: str,
    *,
    ended: bool,
    source: str,
    opening: str = "",
    not_again: Iterable[str] = (),
    max_points: int = MAX_POINTS,
) -> Answer:
    """The usable points of an answer.

    Args:
        text: what the model wrote.
        ended: whether it ended by itself, rather than at the limit of tokens.
        source: what the answer is about.
        opening: how the answer was made to begin; what says no more than this says nothing.
        not_again: texts that it must not repeat: instructions, earlier points.
        max_points: points kept.
    """
    if _loops(text):
        return Answer(problem=Problem.LOOPING)
    points = _points(text, _MARK.sub("", opening, count=1))
    if not points:
        return Answer(problem=Problem.EMPTY)
    if not ended:
        points = _complete(points)
    if not points:
        return Answer(problem=Problem.TRUNCATED)
    copied_from = _ngrams(_units(source))
    for other in not_again:
        copied_from |= _ngrams(_units(other))
    own = [point for point in points if not _is_copied(point, copied_from)]
    return Answer(tuple(own[:max_points])) if own else Answer(problem=Problem.COPIED)


def _points(text: str, opening: str) -> list[str]:
    """Lines of the answer without their marks; headings, crumbs and repetitions left out."""
    points: list[str] = []
    said: set[str] = set()
    for line in text.splitlines():
        sentences = []
        for sentence in _SENTENCE_GAP.split(_MARK.sub("", line, count=1).strip()):
            if sentence not in said:
                said.add(sentence)
                sentences.append(" ".join(sentence.split()))
        point = " ".join(sentences)
        beyond = _units(point.removeprefix(opening))
        if not point.endswith(":") and len(beyond) >= MIN_POINT_UNITS:
            points.append(point)
    return points


def _complete(points: list[str]) -> list[str]:
    """The points up to the last sentence that ends."""
    *before, last = points
    ends = [match.end() for match in _SENTENCE_END.finditer(last)]
    return [*before, last[: ends[-1]]] if ends else before


def _loops(text: str) -> bool:
    if _STUTTER.search(text):
        return True
    seen: dict[tuple[str, ...], int] = {}
    units = _units(text)
    for start in range(len(units) - LOOP_NGRAM + 1):
        ngram = tuple(units[start : start + LOOP_NGRAM])
        seen[ngram] = seen.get(ngram, 0) + 1
    return max(seen.values(), default=0) > MAX_NGRAM_REPEATS


def _is_copied(point: str, copied_from: set[tuple[str, ...]]) -> bool:
    units = _units(point)
    if len(units) < COPY_NGRAM:
        return tuple(units) in copied_from
    covered = [False] * len(units)
    for start in range(len(units) - COPY_NGRAM + 1):
        if tuple(units[start : start + COPY_NGRAM]) in copied_from:
            covered[start : start + COPY_NGRAM] = [True] * COPY_NGRAM
    return sum(covered) > MAX_COPIED_SHARE * len(units)


def _ngrams(units: Sequence[str]) -> set[tuple[str, ...]]:
    """Runs of `COPY_NGRAM` units, and the whole if it is shorter."""
    if len(units) < COPY_NGRAM:
        return {tuple(units)} if units else set()
    return {tuple(units[i : i + COPY_NGRAM]) for i in range(len(units) - COPY_NGRAM + 1)}


def _units(text: str) -> list[str]:
    return _UNIT.findall(text.casefold())
