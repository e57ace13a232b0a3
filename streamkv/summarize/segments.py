"""Cues to segments: consecutive pieces of the transcript of at most N tokens. Pure.

Invariant: every cue lies in exactly one segment, in order; a cue longer than N tokens is cut into
parts, each of which lies in exactly one segment. `Coverage` adds up what went in, so that the end
of a run can prove it.
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from streamkv.summarize.cues import Cue, TimeRange, time_range

CountTokens = Callable[[str], int]
MIN_SEGMENT_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Segment:
    """A piece of the transcript that is summarised by itself.

    Attributes:
        index: place among the segments, from 0.
        cues: its cues, or parts of cues, in order; never empty.
        num_lines: cues that begin in it.
    """

    index: int
    cues: tuple[Cue, ...]
    num_lines: int

    @property
    def text(self) -> str:
        """What the model reads: one `Name: text` per line."""
        return "\n".join(cue.rendered for cue in self.cues)

    @property
    def num_chars(self) -> int:
        """Characters of speech in it, names not counted."""
        return sum(len(cue.text) for cue in self.cues)

    @property
    def time_range(self) -> TimeRange:
        """From when to when."""
        return time_range(self.cues)

    @property
    def speakers(self) -> tuple[str, ...]:
        """Who speaks, in order of appearance."""
        return tuple(dict.fromkeys(cue.speaker for cue in self.cues if cue.speaker))


@dataclass(frozen=True, slots=True)
class Coverage:
    """How many cues and characters of speech."""

    num_lines: int = 0
    num_chars: int = 0

    def __add__(self, other: "Coverage") -> "Coverage":
        return Coverage(self.num_lines + other.num_lines, self.num_chars + other.num_chars)


def coverage_of_cues(cues: Iterable[Cue]) -> Coverage:
    """Cues and characters of whole cues."""
    total = Coverage()
    for cue in cues:
        total += Coverage(1, len(cue.text))
    return total


def cut_segments(
    cues: Iterable[Cue], count_tokens: CountTokens, max_tokens: int
) -> Iterator[Segment]:
    """Segments of at most `max_tokens` tokens each, newlines between cues included, lazily."""
    assert max_tokens >= MIN_SEGMENT_TOKENS
    index, taken, num_lines, num_tokens = 0, list[Cue](), 0, 0
    for cue in cues:
        for number, part in enumerate(cut_cue(cue, count_tokens, max_tokens)):
            part_tokens = count_tokens(part.rendered + "\n")
            if taken and num_tokens + part_tokens > max_tokens:
                yield Segment(index, tuple(taken), num_lines)
                index, taken, num_lines, num_tokens = index + 1, [], 0, 0
            taken.append(part)
            num_lines += number == 0
            num_tokens += part_tokens
    if taken:
        yield Segment(index, tuple(taken), num_lines)


def cut_cue(cue: Cue, count_tokens: CountTokens, max_tokens: int) -> Iterator[Cue]:
    """The cue itself, or its parts if it is longer than `max_tokens`; no character is lost."""
    if cue.speaker:
        # Only a tag that was never closed makes a name that long; of it the beginning will do.
        name = _fitting_prefix(cue.speaker, count_tokens, max_tokens // 2)
        cue = dataclasses.replace(cue, speaker=name)
    frame = dataclasses.replace(cue, text="")
    room = max_tokens - count_tokens(frame.rendered + "\n") - 2
    for part in cut_text(cue.text, count_tokens, room) if cue.text else [""]:
        yield dataclasses.replace(cue, text=part)


def cut_text(text: str, count_tokens: CountTokens, max_tokens: int) -> Iterator[str]:
    """Parts of at most `max_tokens` tokens (at least a character), cut at spaces if there are."""
    while text:
        part = _fitting_prefix(text, count_tokens, max_tokens)
        yield part
        text = text[len(part) :]


def halve(segment: Segment) -> tuple[Segment, ...]:
    """The segment in two halves of about the same length; itself if it cannot be cut."""
    if len(segment.cues) > 1:
        middle = _middle(segment.cues)
        first, second = segment.cues[:middle], segment.cues[middle:]
    else:
        (cue,) = segment.cues
        cut = cue.text.rfind(" ", 0, len(cue.text) // 2 + 1) + 1 or len(cue.text) // 2
        if cut == 0:
            return (segment,)
        first = (dataclasses.replace(cue, text=cue.text[:cut]),)
        second = (dataclasses.replace(cue, text=cue.text[cut:]),)
    num_first = min(len(first), segment.num_lines)
    return (
        Segment(segment.index, first, num_first),
        Segment(segment.index, second, segment.num_lines - num_first),
    )


def _middle(cues: tuple[Cue, ...]) -> int:
    half, seen = sum(len(cue.rendered) for cue in cues) / 2, 0
    for index, cue in enumerate(cues[:-1]):
        seen += len(cue.rendered)
        if seen >= half:
            return index + 1
    return len(cues) - 1


def _fitting_prefix(text: str, count_tokens: CountTokens, max_tokens: int) -> str:
    # No tokenizer makes much longer tokens on running text, so that this bounds what is counted.
    size = min(len(text), max(1, max_tokens) * 8)
    while size > 1 and (num_tokens := count_tokens(text[:size])) > max_tokens:
        size = max(1, min(size - 1, size * max_tokens // num_tokens))
    if size < len(text):
        size = text.rfind(" ", size // 2, size) + 1 or size
    return text[:size]
