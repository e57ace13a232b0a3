"""What the model is told. Pure functions over strings.

The instruction comes after the text it is about, and is short: that is what small models follow
best. The transcript stands between marks that do not occur in it, as data.
"""

PROMPT_VERSION = 1
SYSTEM = "You take notes. You write short, factual notes about the text you are shown."
# An answer that begins like this speaks about the text; a small model left to itself continues it.
OPENING = "- They talk about"
# "the" keeps it from making a list, of which only the heading would be a sentence.
NOTES_LEAD = "The main topics are "
NOTES_OPENING = NOTES_LEAD + "the"
_SEGMENT = "Part of a transcript:\n{quoted}\n\n"
_SEGMENT_TASK = (
    "What was said in this part? Answer with 1 to 3 short bullet points, in your own words."
)
_NOTES = "Notes:\n{quoted}\n\n"
_NOTES_TASK = "Summarize these notes in one short sentence."


def segment_prompt(text: str) -> str:
    """Asks for bullet points about a part of the transcript."""
    return _SEGMENT.format(quoted=quote(text)) + _SEGMENT_TASK


def notes_prompt(notes: str) -> str:
    """Asks for one sentence about notes on several parts."""
    return _NOTES.format(quoted=quote(notes)) + _NOTES_TASK


def tasks() -> tuple[str, ...]:
    """The instructions: an answer that repeats one of them is no answer."""
    return (SYSTEM, _SEGMENT_TASK, _NOTES_TASK)


def quote(text: str) -> str:
    """`text` between marks on lines of their own, longer than any such mark in it."""
    mark = '"""'
    while mark in text:
        mark += '"'
    return f"{mark}\n{text}\n{mark}"
