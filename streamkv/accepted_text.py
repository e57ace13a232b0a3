"""The text that a session was fed and still holds, by its records.

Text of tokens that a rewind gave up is left out, as far as the rewind knew where it begins. Pure
but for the records, which are read twice.
"""

from collections.abc import Callable, Iterable, Iterator

from streamkv.journal_records import Fed, Record, Rewound


def accepted_text(records: Callable[[], Iterable[Record]]) -> Iterator[str]:
    """The text in pieces, in order; together `text_chars` characters.

    Args:
        records: reads all records of the session, from the first on.
    """
    limits = _limits(records())
    start = 0
    for record in records():
        if isinstance(record, Rewound):
            start = record.text_chars
            limits.pop()
        elif isinstance(record, Fed):
            text = record.text
            if limits:
                text = text[: max(limits[-1] - start, 0)]
            start += len(record.text)
            if text:
                yield text


def _limits(records: Iterable[Record]) -> list[int]:
    """Characters left by each rewind and all those after it, the first rewind last."""
    ends = [record.text_chars for record in records if isinstance(record, Rewound)]
    limits: list[int] = []
    for end in reversed(ends):
        limits.append(min(end, limits[-1]) if limits else end)
    return limits
