"""Token ids to text while the ids arrive.

Invariant: the deltas and the last flush, joined, are the text of all ids, and no delta holds part
of a character. Bytes that can no longer become a character turn into U+FFFD at once. At most three
bytes are held back, and a push costs the same at the first and at the millionth token.

This module knows no tokenizer: it is handed the bytes of each token.
"""

import codecs
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

_MAX_PENDING = 3  # bytes of a UTF-8 character that lacks its last one


class LeadingSpace(Enum):
    """What a tokenizer takes away where a stream begins."""

    KEEP = "keep"
    STRIP_ONE = "strip one space"
    STRIP_FIRST_TOKEN = "strip the spaces of the first token"


@dataclass(frozen=True, slots=True)
class TokenText:
    """The text of tokens, as bytes.

    Attributes:
        token_bytes: UTF-8 bytes of a token id; empty for an unknown id.
        special_ids: tokens that are not text.
        leading_space: what is taken away where a stream begins.
    """

    token_bytes: Callable[[int], bytes]
    special_ids: frozenset[int]
    leading_space: LeadingSpace


class IncrementalDecoder:
    """Decodes a stream of token ids.

    Args:
        tokens: the text of tokens.
        previous: ids before the stream, whose text is not repeated. A character that they begin is
            completed.
        skip_special: special tokens give no text.
    """

    def __init__(
        self, tokens: TokenText, previous: Sequence[int] = (), *, skip_special: bool = True
    ) -> None:
        self._tokens = tokens
        self._skipped = tokens.special_ids if skip_special else frozenset()
        self._pending = b""
        self._strip = tokens.leading_space
        self._take_previous(previous)

    @property
    def pending(self) -> bytes:
        """The bytes held back: the start of a character, at most three bytes."""
        return self._pending

    def push(self, token_id: int) -> str:
        """The text that became certain; empty while a character is incomplete."""
        return self._decode(self._bytes(token_id))

    def flush(self) -> str:
        """What is left of an incomplete character: U+FFFD, or nothing."""
        return self._decode(b"", final=True)

    def _take_previous(self, previous: Sequence[int]) -> None:
        kept, num_bytes = list[bytes](), 0
        for token_id in reversed(previous):
            if num_bytes >= _MAX_PENDING:
                break
            if token_id not in self._skipped:
                kept.append(self._tokens.token_bytes(token_id))
                num_bytes += len(kept[-1])
        if kept:
            self._strip = LeadingSpace.KEEP
            self._decode(b"".join(reversed(kept)))

    def _decode(self, data: bytes, *, final: bool = False) -> str:
        data = self._pending + data
        text, num_used = codecs.utf_8_decode(data, "replace", final)
        self._pending = data[num_used:]
        return text

    def _bytes(self, token_id: int) -> bytes:
        if token_id in self._skipped:
            return b""
        data = self._tokens.token_bytes(token_id)
        return data if self._strip is LeadingSpace.KEEP else self._stripped(data)

    def _stripped(self, data: bytes) -> bytes:
        strip, self._strip = self._strip, LeadingSpace.KEEP
        if strip is LeadingSpace.STRIP_ONE:
            return data.removeprefix(b" ")
        return data.replace(b" ", b"")


def decode(tokens: TokenText, ids: Sequence[int], *, skip_special: bool = True) -> str:
    """The text of all ids."""
    decoder = IncrementalDecoder(tokens, skip_special=skip_special)
    return "".join([decoder.push(token_id) for token_id in ids]) + decoder.flush()
