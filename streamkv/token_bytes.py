"""The bytes of tokens, from a tokenizer's vocabulary strings.

Two families are known: byte-level (each character of a token stands for a byte) and SentencePiece
(`▁` stands for a space, `<0x0A>` for a byte). What a tokenizer does when it decodes is read from
its decoder's description in `tokenizer.json`; another decoder is refused, because its text would
depend on more than the tokens before. This module is pure.

Bytes that are no UTF-8 become U+FFFD as `bytes.decode(errors="replace")` makes them. (The
tokenizers library replaces every byte of a run of `<0x..>` tokens if any of them is bad, which
cannot be known while they arrive.)
"""

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from streamkv.detokenizer import LeadingSpace
from streamkv.errors import ModelError

Spec = dict[str, Any]
"""One component of a `tokenizer.json`."""

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE_MARK = "▁"
_SENTENCEPIECE = {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}


class DecoderKind(NamedTuple):
    """How the tokens of a tokenizer become text."""

    byte_level: bool
    byte_fallback: bool
    space_mark: bool
    leading_space: LeadingSpace

    def bytes_of(self, token: str) -> bytes:
        """UTF-8 bytes of a vocabulary string."""
        if self.byte_level:
            return _byte_level_bytes(token)
        found = _BYTE_TOKEN.fullmatch(token) if self.byte_fallback else None
        if found:
            return bytes.fromhex(found.group(1))
        return (token.replace(_SPACE_MARK, " ") if self.space_mark else token).encode()


def decoder_kind(decoder: Spec | None) -> DecoderKind:
    """The kind of a decoder.

    Raises:
        ModelError: a decoder of another family.
    """
    parts = list(components(decoder))
    types = [part["type"] for part in parts]
    # transformers 5.17 puts a GGUF's SentencePiece steps before ByteLevel; on that alphabet,
    # which has no space mark, they change nothing.
    if types[-1:] == ["ByteLevel"] and set(types[:-1]) <= {"ByteFallback", "Fuse", "Replace"}:
        return DecoderKind(True, False, False, LeadingSpace.KEEP)
    if not types or not all(_is_sentencepiece(part) for part in parts):
        raise ModelError(
            f"tokenizer: its decoder {types or None} is not supported. "
            "Use a model with a byte-level or SentencePiece tokenizer."
        )
    space_mark = "Replace" in types or "Metaspace" in types
    return DecoderKind(False, "ByteFallback" in types, space_mark, _leading_space(parts))


def components(spec: Spec | None) -> Iterator[Spec]:
    """The parts of a component in order; a sequence is opened."""
    if spec is None:
        return
    if spec["type"] != "Sequence":
        yield spec
        return
    for key in ("normalizers", "pretokenizers", "decoders"):
        for part in spec.get(key, ()):
            yield from components(part)


def _is_sentencepiece(part: Spec) -> bool:
    if part["type"] == "Replace":
        return (part["pattern"], part["content"]) == ({"String": _SPACE_MARK}, " ")
    if part["type"] == "Strip":
        return (part["content"], part["start"], part["stop"]) in ((" ", 1, 0), (" ", 0, 0))
    if part["type"] == "Metaspace":
        return bool(part["replacement"] == _SPACE_MARK)
    return part["type"] in _SENTENCEPIECE


def _leading_space(parts: list[Spec]) -> LeadingSpace:
    for part in parts:
        if part["type"] == "Metaspace" and part.get("prepend_scheme", "always") != "never":
            return LeadingSpace.STRIP_FIRST_TOKEN
        if part["type"] == "Strip" and part["start"] == 1:
            return LeadingSpace.STRIP_ONE
    return LeadingSpace.KEEP


def _byte_of_char() -> dict[str, int]:
    """GPT-2's alphabet: printable Latin-1 stands for itself, the other bytes for U+0100 upwards."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    alphabet = {chr(byte): byte for byte in printable}
    alphabet.update({chr(0x100 + index): byte for index, byte in enumerate(others)})
    return alphabet


_ALPHABET = _byte_of_char()


def _byte_level_bytes(token: str) -> bytes:
    try:
        return bytes([_ALPHABET[char] for char in token])
    except KeyError:
        # An added token is written as it reads, not in the alphabet.
        return token.encode()
