"""Notes on all parts to notes that fit one question, level by level.

Invariant: a question never holds more than `room` tokens of notes, and every level has at most half
as many notes, rounded up, as the one below, so that it ends whatever the model answers. A group of
which the model makes nothing is represented by the beginnings of its notes: no part is left out.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from streamkv.summarize.segments import CountTokens, cut_text

# (notes, retry) to points; None: no usable answer.
AskGroup = Callable[[str, bool], tuple[str, ...] | None]


@dataclass(frozen=True, slots=True)
class Limits:
    """Sizes in tokens: of the notes in one question, and of the notes on one part.

    At least two notes fit into one question.
    """

    room: int
    note: int

    def __post_init__(self) -> None:
        assert self.room >= 2 * self.note > 0


@dataclass(frozen=True, slots=True)
class Reduced:
    """Notes that fit one question; `num_unshortened` groups had to be cut instead of shortened."""

    notes: str
    num_unshortened: int


def reduce_notes(
    notes: Sequence[str], ask_group: AskGroup, count_tokens: CountTokens, limits: Limits
) -> Reduced:
    """Shorten `notes`, one per part and in order, until they fit one question together."""
    level = [_clip(note, count_tokens, limits.note) for note in notes]
    num_unshortened = 0
    while len(groups := _pack(level, count_tokens, limits.room)) > 1:
        level = []
        for group in groups:
            points = _shorten(group, ask_group) if len(group) > 1 else tuple(group)
            if points is None:
                num_unshortened += 1
                points = _beginnings(group, count_tokens, limits.note)
            level.append(_clip("\n".join(points), count_tokens, limits.note))
    return Reduced("\n".join(level), num_unshortened)


def _shorten(group: Sequence[str], ask_group: AskGroup) -> tuple[str, ...] | None:
    """Points for the group, else for its halves, else `None`."""
    points = ask_group("\n".join(group), False)
    if points is not None:
        return _as_notes(points)
    middle = len(group) // 2
    halves = [ask_group("\n".join(half), True) for half in (group[:middle], group[middle:])]
    if halves[0] is None or halves[1] is None:
        return None
    return _as_notes(halves[0] + halves[1])


def _as_notes(points: Sequence[str]) -> tuple[str, ...]:
    return tuple(f"- {point}" for point in points)


def _beginnings(group: Sequence[str], count_tokens: CountTokens, room: int) -> tuple[str, ...]:
    share = max(1, room // len(group) - 1)
    return tuple(_clip(note, count_tokens, share) for note in group)


def _clip(text: str, count_tokens: CountTokens, max_tokens: int) -> str:
    return next(cut_text(text, count_tokens, max_tokens), "").rstrip()


def _pack(notes: Sequence[str], count_tokens: CountTokens, room: int) -> list[list[str]]:
    """Consecutive notes in groups of at most `room` tokens, of two at least but for the last."""
    groups: list[list[str]] = []
    for note in notes:
        if groups and (len(groups[-1]) < 2 or count_tokens("\n".join([*groups[-1], note])) <= room):
            groups[-1].append(note)
        else:
            groups.append([note])
    return groups
