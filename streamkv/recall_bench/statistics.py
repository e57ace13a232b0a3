"""Shares of questions answered, with Wilson's score interval.

Pure arithmetic over answers. The interval is that of E. B. Wilson, "Probable inference, the law of
succession, and statistical inference", JASA 22 (1927): it stays within 0 and 1 and is right for the
few questions and extreme shares that are usual here.
"""

import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from streamkv.recall_bench.answers import Answer

Z_95 = 1.959963984540054
"""97.5 % quantile of the normal distribution."""

Key = TypeVar("Key", bound=Hashable)


class Interval(NamedTuple):
    """A confidence interval."""

    low: float
    high: float


def wilson(found: int, asked: int, z: float = Z_95) -> Interval:
    """Wilson's score interval of `found` of `asked`; all of 0 to 1 if nothing was asked."""
    assert 0 <= found <= asked
    if asked == 0:
        return Interval(0.0, 1.0)
    share, square = found / asked, z * z / asked
    centre = (share + square / 2) / (1 + square)
    half = z / (1 + square) * math.sqrt(share * (1 - share) / asked + square / (4 * asked))
    # At the ends the formula gives 0 and 1 but for rounding.
    low = 0.0 if found == 0 else max(centre - half, 0.0)
    high = 1.0 if found == asked else min(centre + half, 1.0)
    return Interval(low, high)


@dataclass(frozen=True, slots=True)
class Share:
    """So many of so many."""

    found: int
    asked: int

    @property
    def value(self) -> float | None:
        """The share; `None` of nothing."""
        return self.found / self.asked if self.asked else None

    @property
    def interval(self) -> Interval:
        """Its 95 % interval."""
        return wilson(self.found, self.asked)

    def __str__(self) -> str:
        return f"{self.found}/{self.asked}"


class Cell(NamedTuple):
    """Answers of one mode to streams of one length with needles at one depth."""

    mode: str
    length: int
    depth: float


class Row(NamedTuple):
    """Answers of one mode to streams of one length."""

    mode: str
    length: int


def shares(answers: Iterable[Answer], key: Callable[[Answer], Key]) -> dict[Key, Share]:
    """Shares found, grouped by `key`, sorted."""
    found: dict[Key, list[bool]] = {}
    for answer in answers:
        found.setdefault(key(answer), []).append(answer.found)
    return {name: Share(sum(values), len(values)) for name, values in found.items()}


def by_cell(answers: Iterable[Answer]) -> dict[Cell, Share]:
    """Shares for each mode, length and depth."""
    return shares(answers, lambda answer: Cell(answer.mode, answer.length, answer.depth))


def by_row(answers: Iterable[Answer]) -> dict[Row, Share]:
    """Shares for each mode and length, all depths together."""
    return shares(answers, lambda answer: Row(answer.mode, answer.length))


def beyond_window(answers: Iterable[Answer]) -> dict[Row, Share]:
    """The same, of needles that had left the window."""
    return by_row(answer for answer in answers if answer.beyond_window)


def agreement(answers: Sequence[Answer], mode: str, reference: str) -> dict[int, Share]:
    """Of the questions that `reference` answers, how many `mode` answers, for each length.

    Only questions that both were asked count.
    """
    known = {(answer.length, answer.index): answer for answer in answers if answer.mode == mode}
    pairs: dict[int, list[bool]] = {}
    for answer in answers:
        other = known.get((answer.length, answer.index))
        if answer.mode == reference and other is not None:
            pairs.setdefault(answer.length, [])
            if answer.found:
                pairs[answer.length].append(other.found)
    return {length: Share(sum(both), len(both)) for length, both in sorted(pairs.items())}


def needle_recalled(answers: Iterable[Answer]) -> dict[Row, Share]:
    """How often a block of the needle was among those recalled, of needles beyond the window."""
    told: dict[Row, list[bool]] = {}
    for answer in answers:
        if answer.beyond_window and answer.needle_recalled is not None:
            told.setdefault(Row(answer.mode, answer.length), []).append(answer.needle_recalled)
    return {row: Share(sum(values), len(values)) for row, values in told.items()}


def mean_recalled_blocks(answers: Iterable[Answer]) -> dict[Row, float]:
    """Mean number of recalled blocks, where sessions say it."""
    told: dict[Row, list[int]] = {}
    for answer in answers:
        if answer.recalled_blocks is not None:
            told.setdefault(Row(answer.mode, answer.length), []).append(answer.recalled_blocks)
    return {row: sum(values) / len(values) for row, values in told.items()}


def feed_rates(answers: Iterable[Answer]) -> dict[Row, float]:
    """Tokens/s of reading, by the mode in which streams were read; each reading counts once."""
    readings = {
        (answer.fed_in, answer.length, answer.index, answer.feed_s): answer for answer in answers
    }
    return _rates(
        (Row(answer.fed_in, answer.length), answer.feed_tokens, answer.feed_s)
        for answer in readings.values()
    )


def answer_rates(answers: Iterable[Answer]) -> dict[Row, float]:
    """Tokens/s of generating."""
    return _rates(
        (Row(answer.mode, answer.length), answer.answer_tokens, answer.answer_s)
        for answer in answers
    )


def _rates(timed: Iterable[tuple[Row, int, float]]) -> dict[Row, float]:
    totals: dict[Row, tuple[int, float]] = {}
    for row, num_tokens, seconds in timed:
        tokens, spent = totals.get(row, (0, 0.0))
        totals[row] = (tokens + num_tokens, spent + seconds)
    return {row: tokens / max(spent, 1e-9) for row, (tokens, spent) in totals.items()}
