"""Text to token ids while the text arrives.

Invariant: however a text is cut into pushes, the ids are those of one push of the whole, and those
of the tokenizer for the whole text (except inside a run of more than `MAX_RUN` characters that has
no safe cut, which is cut at multiples of `MAX_RUN` from its start). Text after the last safe cut
is held back. Each character is encoded once and looked at a bounded number of times.

This module knows no tokenizer: it is handed the function that encodes and the safe cuts.
"""

from streamkv.cuts import MAX_RUN, Cuts, Encode
from streamkv.errors import InputError


def require_text(field: str, text: object) -> None:
    """Raise `InputError` unless `text` is a str that has a UTF-8 form, naming the bad position."""
    if not isinstance(text, str):
        problem = f"not text but {type(text).__name__}"
        raise InputError(field, text, problem, "Pass a str.")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        problem = f"invalid Unicode: lone surrogate U+{ord(text[error.start]):04X} at character"
        shown = text[max(0, error.start - 10) : error.start + 10]
        remedy = "Decode the source with errors='replace', or remove the character."
        raise InputError(field, shown, f"{problem} {error.start}", remedy) from error


class IncrementalEncoder:
    """Encodes a stream of text, special tokens off.

    Args:
        encode: ids of a text; its flag says whether the text begins the stream.
        cuts: where the text may be cut.
        tail: text that an earlier encoder held back.
        at_start: whether nothing precedes the text (or the tail) in the stream.
    """

    def __init__(
        self, encode: Encode, cuts: Cuts, *, tail: str = "", at_start: bool = True
    ) -> None:
        require_text("tail", tail)
        self._encode = encode
        self._cuts = cuts
        self._held = [tail] if tail else []
        self._num_held = len(tail)
        self._last = tail[-1:]
        self._at_start = at_start

    @property
    def tail(self) -> str:
        """The text held back: with `at_start`, all that is needed to go on later."""
        self._held = ["".join(self._held)] if self._held else []
        return self._held[0] if self._held else ""

    @property
    def num_held(self) -> int:
        """Characters held back."""
        return self._num_held

    @property
    def at_start(self) -> bool:
        """Whether nothing of the stream was encoded yet."""
        return self._at_start

    def push(self, text: str) -> list[int]:
        """The ids that became final.

        Raises:
            InputError: not a str, or invalid Unicode. Nothing of `text` is taken then.
        """
        require_text("text", text)
        if not text:
            return []
        may_cut = self._num_held + len(text) > MAX_RUN or self._cuts.contains_cut(self._last + text)
        self._hold(text)
        return self._take() if may_cut else []

    def flush(self) -> list[int]:
        """The ids of the text held back, as if the text ended here."""
        tail = self.tail
        self._replace_held("")
        return self._encode_piece(tail) if tail else []

    def _hold(self, text: str) -> None:
        self._held.append(text)
        self._num_held += len(text)
        self._last = text[-1]

    def _replace_held(self, text: str) -> None:
        self._held = []
        self._num_held = 0
        self._last = ""
        if text:
            self._hold(text)

    def _take(self) -> list[int]:
        text, start, ids = self.tail, 0, list[int]()
        while (cut := self._next_cut(text, start)) is not None:
            ids += self._encode_piece(text[start:cut])
            start = cut
        self._replace_held(text[start:])
        return ids

    def _next_cut(self, text: str, start: int) -> int | None:
        if len(text) - start > MAX_RUN:
            limit = start + MAX_RUN
            return self._cuts.last_cut(text, start, limit) or limit
        return self._cuts.last_cut(text, start, len(text))

    def _encode_piece(self, text: str) -> list[int]:
        ids = self._encode(text, self._at_start)
        self._at_start = False
        return ids
