"""Tags and entities inside the text of a cue. Pure functions over strings.

Only tags of the two formats are taken out: `<laughs>` is something that somebody typed.
"""

import html
import re

_TAG = re.compile(
    r"</?(?:i|b|u|s|em|strong|c|v|lang|ruby|rt|font|span|br)(?:[.\s][^<>]*)?/?>", re.IGNORECASE
)
_WORD_TIME = re.compile(r"<\s*(?:\d+:)?\d{1,2}:\d{2}(?:[.,]\d{1,3})?(?:\s*>|\s|(?=$))")
_OVERRIDE = re.compile(r"\{\\[^{}]*\}")
_SPACES = re.compile(r"\s+")


def has_word_times(line: str) -> bool:
    """Whether the line carries word timings such as `<00:00:18.400>`."""
    return _WORD_TIME.search(line) is not None


def plain_text(line: str) -> str:
    """The line without tags, word timings and style overrides, entities resolved, spaces joined."""
    line = _OVERRIDE.sub("", _WORD_TIME.sub("", _TAG.sub("", line)))
    return _SPACES.sub(" ", html.unescape(line)).strip()
