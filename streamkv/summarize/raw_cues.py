"""Physical lines of an SRT or VTT file to cues with their lines of text still marked up.

Invariant: every line of text ends up in exactly one raw cue, in the order of the file; what has no
readable timing is kept without times and with a warning. Only numbers and names of cues are left
out. This module does not know tags, voices or speakers.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from streamkv.summarize.cues import Cue, ReadWarnings
from streamkv.summarize.source import PhysicalLine
from streamkv.summarize.speakers import Turn
from streamkv.summarize.timings import Timing, parse_timing

_NUMBER = re.compile(r"\s*\d+\s*")
_NEARLY_NUMBER = re.compile(r"\s*[^\w\s]*\d[\dOolI]*[^\w\s]*\s*")


@dataclass(slots=True)
class RawCue:
    """A cue as it lies in the file; `lines` are its lines of text, not empty."""

    line_number: int
    timing: Timing
    lines: list[str] = field(default_factory=list)

    def cue(self, turn: Turn) -> Cue:
        """One turn of this cue."""
        timing = self.timing
        return Cue(turn.text, self.line_number, timing.start_s, timing.end_s, turn.speaker)


def read_raw_cues(
    lines: Iterable[PhysicalLine], warnings: ReadWarnings, *, named: bool
) -> Iterator[RawCue]:
    """Cues in the order of the file. `named`: a name may stand above a timing, as in VTT."""
    assembler = _Assembler(warnings, named)
    for line in lines:
        yield from assembler.add(line)
    yield from assembler.finish()


class _Assembler:
    """The open cue, and the lines after a blank one of which nobody knows yet what they are."""

    def __init__(self, warnings: ReadWarnings, named: bool) -> None:
        self._warnings = warnings
        self._named = named
        self._cue: RawCue | None = None
        self._held: list[PhysicalLine] = []
        self._last_start_s = float("-inf")

    def add(self, line: PhysicalLine) -> Iterator[RawCue]:
        timing = parse_timing(line.text)
        if timing is not None:
            yield from self._begin(line.number, timing)
        elif self._ends_cue(line.text):
            yield from self.finish()
        elif self._cue is not None:
            self._cue.lines.append(line.text)
        elif line.text.strip():
            self._held.append(line)

    def finish(self) -> Iterator[RawCue]:
        """At a blank line or the end of the file: what is open is complete."""
        yield from self._close()
        yield from self._release()

    def _ends_cue(self, text: str) -> bool:
        """A blank line does. In VTT spaces do not: rolling captions have such lines."""
        return not text if self._named else not text.strip()

    def _begin(self, number: int, timing: Timing) -> Iterator[RawCue]:
        self._drop_number(number)
        yield from self.finish()
        if timing.problem:
            self._warnings.add(number, timing.problem)
        elif timing.start_s is not None and timing.start_s < self._last_start_s:
            self._warnings.add(number, "a cue begins before the one above it; kept in this order")
        self._last_start_s = timing.start_s if timing.start_s is not None else self._last_start_s
        self._cue = RawCue(number, timing)

    def _drop_number(self, number: int) -> None:
        """Leave out the number or name of the cue that begins: the line just above its timing."""
        just_above = bool(self._held) and self._held[-1].number == number - 1
        if just_above and self._is_label(self._held[-1].text, alone=len(self._held) == 1):
            label = self._held.pop().text
            if not self._named and not _NUMBER.fullmatch(label):
                self._warnings.add(number - 1, "malformed number of a cue")
        elif self._cue is not None and self._cue.lines and _NUMBER.fullmatch(self._cue.lines[-1]):
            self._cue.lines.pop()

    def _is_label(self, text: str, *, alone: bool) -> bool:
        return bool(_NEARLY_NUMBER.fullmatch(text)) or (self._named and alone)

    def _close(self) -> Iterator[RawCue]:
        cue, self._cue = self._cue, None
        if cue is None:
            return
        if cue.lines:
            yield cue
        else:
            self._warnings.add(cue.line_number, "a cue without text")

    def _release(self) -> Iterator[RawCue]:
        """Lines that turned out to belong to no timing."""
        held, self._held = self._held, []
        if held and _NUMBER.fullmatch(held[0].text):
            self._warnings.add(held[0].number, "the number of a cue without a timing")
            held = held[1:]
        if held:
            self._warnings.add(held[0].number, "text without a timing; kept")
            yield RawCue(held[0].number, Timing(None, None), [line.text for line in held])
