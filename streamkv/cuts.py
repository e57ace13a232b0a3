"""Where a text may be cut without changing its tokens.

A cut rule names a pair of neighbouring characters. A rule is *safe* for a tokenizer if encoding
both sides of such a pair separately gives the ids of encoding them together, whatever stands
around them. Whether a place is a cut depends on the two characters only, so it never changes as
text arrives.

The rules avoid what tokenizers decide by looking ahead or behind: inside and behind runs of
whitespace, at apostrophes (contractions), inside numbers, before combining marks and before Hangul
letters, which compose.
This module knows no tokenizer: `safe_rules` is handed a function that encodes, and the vocabulary.
"""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

Encode = Callable[[str, bool], list[int]]
"""Ids of a text, special tokens off; the flag says whether the text begins a stream."""

MAX_RUN = 16_384
"""Characters. A run without a safe cut is cut at multiples of this, measured from its start."""

_SEPARATOR = "\t"  # neither side of any rule
_RARE = "\U000f1234"  # private use: in no vocabulary
_UNKNOWN_LETTER = "字"  # stands for bytes that are no whole character


@dataclass(frozen=True, slots=True)
class CutRule:
    """A cut between two characters.

    Attributes:
        name: for messages.
        before: regular expression of the character before the cut.
        after: that of the character after it.
        left_probes, right_probes: texts that end, begin with such a character; every left one is
            tried with every right one.
    """

    name: str
    before: str
    after: str
    left_probes: tuple[str, ...]
    right_probes: tuple[str, ...]


RULES = (
    CutRule(
        "space",
        r"\S",
        r" ",
        (
            *(
                "word",
                "a b",
                "12",
                "字",
                "é",
                "e\u0301",
                ".",
                "!)",
                "'",
                "\U0001f600",
                "don't",
                "x_",
            ),
            *("한", "a  \u0301", "a  \x07", "a  \u200b", "a  \ufeff", "a  \u00ad", "a  \u0378"),
        ),
        (" word", " 12", " 字", "  two", " \n", " \t x", " ", "   ", " 's", " .", " \u0301", " 한"),
    ),
    CutRule(
        "line after a word",
        r"[^\W_]",
        r"[\r\n]",
        ("word", " e", "12", "é", "字", "a.b", "한"),
        ("\n", "\nword", "\n\nword", "\r\n", "\r\n\r\n12", "\n  \n x", "\n's", "\n."),
    ),
    CutRule(
        "line after a sign",
        r"[!-/:-@\[-`{-~，。、！？：；）」』》”]",
        r"[\r\n]",
        (".", "word.", "!)", ");", "'", '"', "字。", " -", "...", "_"),
        ("\n", "\nword", "\n\nword", "\r\n", "\r\n\r\n12", "\n  \n x", "\n's", "\n."),
    ),
    CutRule(
        "punctuation",
        r"[^\W\d_]",
        r"[,.;:!?)\]}]",
        ("word", " e", "x1y", "Wörter", "字", "a.b", "한"),
        (",", ".", "...", ".5", ".com", ", x", ")", ");\n", "!\n\n", ".g.", "?!", "://x.y", "].a"),
    ),
    CutRule(
        "symbol",
        r"[^\W\d_]",
        r"[(\[{<>=+*/\"&|%#@~^-]",
        ("word", " e", "x1y", "Wörter", "字", "a.b", "한"),
        ("(", "(x", "()\n", "/y", "//", "-z", "==", "=1", "<b>", '"', '":', "&x;", "++", "{}"),
    ),
    CutRule(
        "cjk punctuation",
        r"[^\W\d_]",
        r"[，。、！？：；（）「」『』《》“”]",
        ("字", "文字", "かな", "カナ", "word", "한"),
        ("。", "，字", "、かな", "！？", "（字）", "”", "。\n", "：“字", "》。"),
    ),
)


class Cuts:
    """The places where text may be cut under a choice of safe rules."""

    def __init__(self, rules: tuple[CutRule, ...]) -> None:
        self.rules = rules
        places = "|".join(f"(?<={rule.before})(?={rule.after})" for rule in rules) or r"(?!)"
        self._any = re.compile(places)
        self._last = re.compile(rf"(?s:.+)(?:{places})")

    def contains_cut(self, text: str) -> bool:
        """Whether there is a cut between two characters of `text`."""
        return self._any.search(text) is not None

    def last_cut(self, text: str, start: int, stop: int) -> int | None:
        """The last cut in (start, stop], seeing the character after it; `None` if there is none."""
        found = self._last.match(text, start, stop + 1)
        return found.end() if found else None


def safe_rules(encode: Encode, vocabulary: str) -> tuple[CutRule, ...]:
    """The rules that are safe for a tokenizer.

    A rule is dropped if a token of the vocabulary spans its pair, or if a probe encodes differently
    when cut. No rule is safe if the tokenizer drops characters that it does not know, for then any
    two characters may become neighbours.

    Args:
        encode: the tokenizer.
        vocabulary: from `vocabulary_text`.
    """
    if not encode(_RARE, False):
        return ()
    return tuple(
        rule for rule in RULES if not _spanned(rule, vocabulary) and _probes_agree(rule, encode)
    )


def vocabulary_text(tokens: Iterable[str]) -> str:
    """The texts of all tokens as one, for `safe_rules`; U+FFFD stands for incomplete characters."""
    return _SEPARATOR.join(tokens).replace("\ufffd", _UNKNOWN_LETTER)


def _spanned(rule: CutRule, vocabulary: str) -> bool:
    return re.search(rf"(?<={rule.before})(?={rule.after})", vocabulary) is not None


def _probes_agree(rule: CutRule, encode: Encode) -> bool:
    return all(
        encode(left + right, at_start) == encode(left, at_start) + encode(right, False)
        for left in rule.left_probes
        for right in rule.right_probes
        for at_start in (True, False)
    )
