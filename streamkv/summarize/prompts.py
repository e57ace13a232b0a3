"""What the model is told. Pure functions over strings.

The instruction comes after the text it is about, and is short: that is what small models follow
best. The transcript stands between marks that do not occur in it, as data.
"""

PROMPT_VERSION = 1
SYSTEM = "You take notes. You write short, factual notes about the text you are shown."
# Makes the answer speak about the text. A small model left to itself goes on with the text instead.
OPENING = "- They talk about"
OVERALL_OPENING = "The transcript is about"
_SEGMENT = "Part of a transcript:\n{quoted}\n\n"
_SEGMENT_TASK = (
    "What was said in this part? Answer with 1 to 3 short bullet points, in your own words."
)
_GROUP = "Notes on a part of a transcript, in order:\n{quoted}\n"
_GROUP_TASK = "Shorten these notes to at most 3 short bullet points."
_OVERALL = "Notes on a whole transcript, in order:\n{quoted}\n"
_OVERALL_TASK = "What is this transcript about? Answer in 2 to 3 short sentences."


def segment_prompt(text: str) -> str:
    """Asks for bullet points about a part of the transcript."""
    return _SEGMENT.format(quoted=quote(text)) + _SEGMENT_TASK


def group_prompt(notes: str) -> str:
    """Asks for fewer notes on several consecutive parts."""
    return _GROUP.format(quoted=quote(notes)) + _GROUP_TASK


def overall_prompt(notes: str) -> str:
    """Asks for a summary of everything, from notes on all parts."""
    return _OVERALL.format(quoted=quote(notes)) + _OVERALL_TASK


def tasks() -> tuple[str, ...]:
    """The instructions: an answer that repeats one of them is no answer."""
    return (SYSTEM, _SEGMENT_TASK, _GROUP_TASK, _OVERALL_TASK)


def quote(text: str) -> str:
    """`text` between marks on lines of their own, longer than any such mark in it."""
    mark = '"""'
    while mark in text:
        mark += '"'
    return f"{mark}\n{text}\n{mark}"
