"""Rendered segments, split at the special tokens of their markup.

Between two special tokens, markup and content form one run of text, so that they are tokenised
together as the model saw them in training (`user\n` and a content that begins with a newline). Only
markup yields special tokens: content that spells one stays text. Knows no tokenizer.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from streamkv.chat import Segment


@dataclass(frozen=True, slots=True)
class Marker:
    """A special token.

    Attributes:
        token_id: its id.
        text: what it reads like.
        strips_left, strips_right: it takes the whitespace next to it away.
    """

    token_id: int
    text: str
    strips_left: bool = False
    strips_right: bool = False


class MarkupSplitter:
    """Splits segments into runs of text and markers."""

    def __init__(self, markers: Iterable[Marker]) -> None:
        self._markers = {marker.text: marker for marker in markers}
        longest_first = sorted(self._markers, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")

    @property
    def texts(self) -> frozenset[str]:
        """What the markers read like."""
        return frozenset(self._markers)

    def leading_marker(self, markup: str) -> str:
        """The marker that `markup` begins with, or an empty text."""
        found = self._pattern.match(markup)
        return found.group() if found else ""

    def split(self, segments: Iterable[Segment]) -> Iterator[str | Marker]:
        """Non-empty runs of text and markers, in order."""
        previous: Marker | None = None
        run = ""
        for piece in self._pieces(segments):
            if isinstance(piece, str):
                run += piece
                continue
            yield from _stripped(run, previous, piece)
            yield piece
            previous, run = piece, ""
        yield from _stripped(run, previous, None)

    def _pieces(self, segments: Iterable[Segment]) -> Iterator[str | Marker]:
        for segment in segments:
            start = 0
            for found in self._pattern.finditer(segment.text) if segment.is_markup else ():
                yield segment.text[start : found.start()]
                yield self._markers[found.group()]
                start = found.end()
            yield segment.text[start:]


def _stripped(run: str, left: Marker | None, right: Marker | None) -> Iterator[str]:
    run = run.lstrip() if left and left.strips_right else run
    run = run.rstrip() if right and right.strips_left else run
    if run:
        yield run
