"""WebVTT to cues: header and comments left out, voices as speakers, rolling captions read once.

Captions made by YouTube show every line twice: once with word timings while it is spoken, then
again, plain, above the next one. From the first word timing on, leading plain lines that repeat the
end of what was shown before are left out; a line with word timings is always new.
"""

import re
from collections.abc import Iterable, Iterator

from streamkv.summarize.cues import Cue, ReadWarnings
from streamkv.summarize.markup import has_word_times, plain_text
from streamkv.summarize.raw_cues import read_raw_cues
from streamkv.summarize.source import PhysicalLine
from streamkv.summarize.speakers import Turn, join_turns, split_speaker
from streamkv.summarize.timings import parse_timing

_HEADER = re.compile(r"\s*WEBVTT(?:\s|$)", re.IGNORECASE)
_COMMENT = re.compile(r"(?:NOTE|STYLE|REGION)(?:\s|$)")
_VOICE = re.compile(r"<v(?:\.[^\s<>]*)?\s+([^<>]*)>")


def read_vtt(lines: Iterable[PhysicalLine], warnings: ReadWarnings) -> Iterator[Cue]:
    """The cues of a VTT file in the order of the file, one per speaker's turn."""
    rolling = _RollingCaptions()
    for raw in read_raw_cues(_without_comments(lines, warnings), warnings, named=True):
        turns = [turn for line in rolling.new_lines(raw.lines) for turn in _voices(line)]
        for turn in join_turns(turns):
            yield raw.cue(turn)


def is_vtt_header(line: str) -> bool:
    """Whether a line is the first one of a VTT file."""
    return _HEADER.match(line) is not None


def _without_comments(
    lines: Iterable[PhysicalLine], warnings: ReadWarnings
) -> Iterator[PhysicalLine]:
    skipping, after_blank, first = False, True, True
    for line in lines:
        blank = not line.text
        if first and line.text.strip():
            first, skipping = False, is_vtt_header(line.text)
            if not skipping:
                warnings.add(line.number, "a VTT file that does not begin with WEBVTT")
        if after_blank and _COMMENT.match(line.text):
            skipping = True
        if blank or parse_timing(line.text) is not None:
            skipping = False
        if not skipping:
            yield line
        after_blank = blank


def _voices(line: str) -> list[Turn]:
    before, *voiced = _VOICE.split(line)
    turns = [split_speaker(plain_text(before))] if plain_text(before) or not voiced else []
    for name, text in zip(voiced[0::2], voiced[1::2], strict=True):
        turns.append(Turn(plain_text(name) or None, plain_text(text)))
    return turns


class _RollingCaptions:
    """Remembers the lines shown last, to tell repeated lines from new ones."""

    def __init__(self) -> None:
        self._active = False
        self._shown: list[str] = []

    def new_lines(self, lines: list[str]) -> list[str]:
        """The lines of a cue that the cue before did not show already."""
        self._active = self._active or any(has_word_times(line) for line in lines)
        if not self._active:
            return lines
        lines = [line for line in lines if plain_text(line)]
        num_repeated = self._overlap(lines)
        self._shown = [plain_text(line) for line in lines]
        return lines[num_repeated:]

    def _overlap(self, lines: list[str]) -> int:
        plain: list[str] = []
        for line in lines:
            if has_word_times(line):
                break
            plain.append(plain_text(line))
        for length in range(min(len(plain), len(self._shown)), 0, -1):
            if self._shown[-length:] == plain[:length]:
                return length
        return 0
