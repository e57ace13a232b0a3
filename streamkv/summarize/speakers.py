"""Who speaks: `Name: text` at the start of a line. Pure functions over strings.

Nothing is lost by a wrong guess: a cue is shown to the model as `Name: text` again.
"""

import re
from collections.abc import Iterable
from typing import NamedTuple

MAX_NAME_WORDS = 4
_NAME = re.compile(r"(?:>>+\s*)?([^\W\d_][\w.,'’()/& -]{0,39}?)\s*(?::(?=\s|$)|：)\s*")
_CHEVRONS = re.compile(r">>+\s*")


class Turn(NamedTuple):
    """What one speaker says in a cue."""

    speaker: str | None
    text: str


def split_speaker(line: str) -> Turn:
    """`Name: text` as speaker and text; a line that does not begin like a name has no speaker."""
    line = line.strip()
    match = _NAME.match(line)
    if match is None or not _is_name(match.group(1)):
        return Turn(None, _CHEVRONS.sub("", line, count=1) if line.startswith(">>") else line)
    return Turn(match.group(1), line[match.end() :])


def join_turns(turns: Iterable[Turn]) -> list[Turn]:
    """Wrapped lines joined to whole turns: a line without a speaker goes on with the one above."""
    joined: list[Turn] = []
    for turn in turns:
        if joined and turn.speaker is None:
            before = joined.pop()
            joined.append(Turn(before.speaker, f"{before.text} {turn.text}".strip()))
        elif turn.speaker or turn.text:
            joined.append(turn)
    return joined


def _is_name(name: str) -> bool:
    words = name.split()
    return len(words) <= MAX_NAME_WORDS and not name[0].islower()
