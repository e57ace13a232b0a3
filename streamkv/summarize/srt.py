"""SRT (and SBV) to cues. Tolerant: see `raw_cues`."""

from collections.abc import Iterable, Iterator

from streamkv.summarize.cues import Cue, ReadWarnings
from streamkv.summarize.markup import plain_text
from streamkv.summarize.raw_cues import read_raw_cues
from streamkv.summarize.source import PhysicalLine
from streamkv.summarize.speakers import join_turns, split_speaker


def read_srt(lines: Iterable[PhysicalLine], warnings: ReadWarnings) -> Iterator[Cue]:
    """The cues of an SRT file in the order of the file, one per speaker's turn."""
    for raw in read_raw_cues(lines, warnings, named=False):
        for turn in join_turns(split_speaker(plain_text(line)) for line in raw.lines):
            yield raw.cue(turn)
