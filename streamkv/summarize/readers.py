"""A transcript file of any known format as a stream of cues.

The format is told by the content, not by the name: captions are saved as .txt and texts as .srt.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from streamkv.errors import InputError
from streamkv.summarize.cues import Cue, ReadWarnings
from streamkv.summarize.source import PhysicalLine, SourceInfo, inspect_file, read_lines
from streamkv.summarize.srt import read_srt
from streamkv.summarize.text import read_text
from streamkv.summarize.timings import parse_timing
from streamkv.summarize.vtt import is_vtt_header, read_vtt

_SNIFFED_LINES = 100


class TranscriptFormat(Enum):
    """The formats that are read."""

    TEXT = "text"
    SRT = "srt"
    VTT = "vtt"


_READERS = {
    TranscriptFormat.TEXT: read_text,
    TranscriptFormat.SRT: read_srt,
    TranscriptFormat.VTT: read_vtt,
}


@dataclass(frozen=True, slots=True)
class Transcript:
    """A file that was looked at and can be read any number of times.

    Attributes:
        path: the file.
        info: its identity and encoding.
        format: what its content looks like.
    """

    path: Path
    info: SourceInfo
    format: TranscriptFormat

    def cues(self, warnings: ReadWarnings) -> Iterator[Cue]:
        """The cues in the order of the file, read as they are asked for.

        Raises:
            InputError: the file cannot be read, or was changed since it was looked at.
        """
        lines = read_lines(self.path, self.info, warnings)
        return _READERS[self.format](lines, warnings)


def open_transcript(path: Path) -> Transcript:
    """Look at a file: identity, encoding, format.

    Raises:
        InputError: no such file, unreadable, empty, binary, or without any text in it.
    """
    info = inspect_file(path)
    lines = read_lines(path, info, ReadWarnings(str(path)))
    transcript = Transcript(path, info, _sniff(path, list(itertools.islice(lines, _SNIFFED_LINES))))
    if next(transcript.cues(ReadWarnings(str(path))), None) is None:
        raise InputError("path", str(path), "no text in it", "Give a file with text in it.")
    return transcript


def _sniff(path: Path, lines: list[PhysicalLine]) -> TranscriptFormat:
    texts = [line.text for line in lines if line.text.strip()]
    if texts and is_vtt_header(texts[0]):
        return TranscriptFormat.VTT
    timed = any(parse_timing(text) is not None for text in texts)
    suffix = path.suffix.lower()
    if suffix == ".vtt" and timed:
        return TranscriptFormat.VTT
    return TranscriptFormat.SRT if timed or suffix == ".srt" else TranscriptFormat.TEXT
