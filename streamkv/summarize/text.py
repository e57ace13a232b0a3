"""Plain text to cues: one per line, with a leading time stamp and `Name:` where there is one."""

from collections.abc import Iterable, Iterator

from streamkv.summarize.cues import Cue, ReadWarnings
from streamkv.summarize.source import PhysicalLine
from streamkv.summarize.speakers import split_speaker
from streamkv.summarize.timings import split_leading_time


def read_text(lines: Iterable[PhysicalLine], warnings: ReadWarnings) -> Iterator[Cue]:
    """The lines of a text that are not blank. A time alone on a line holds for those below it."""
    shared_s: float | None = None
    for line in lines:
        own_s, rest = split_leading_time(line.text)
        if own_s is not None and not rest.strip():
            shared_s = own_s
            continue
        start_s = shared_s if own_s is None else own_s
        turn = split_speaker(" ".join(rest.split()))
        if turn.speaker or turn.text:
            yield Cue(turn.text, line.number, start_s, None, turn.speaker)
