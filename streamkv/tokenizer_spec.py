"""Edits of a `tokenizer.json` that make plain text stay plain. Pure functions on its parsed form.

A stream begins once, so the space that some tokenizers put before a text must not come back at
every piece. And in a unigram model a control token such as `</s>` is an ordinary piece, found in
any text that spells it.
"""

import copy
from collections.abc import Collection
from typing import Any

from streamkv.token_bytes import Spec, components

_UNREACHABLE = "\U0010fffd"  # a private character before the name: no text is spelled like this


def adds_space(spec: Spec) -> bool:
    """Whether the tokenizer puts a space before a text that begins a stream."""
    return any(_adds_space(part) for part in _text_components(spec))


def adds_space_after_special(spec: Spec) -> bool:
    """Whether it does so again after every special token inside a text."""
    return any(
        _adds_space(part) and part.get("prepend_scheme") != "first"
        for part in _text_components(spec)
    )


def without_added_space(spec: Spec) -> Spec:
    """The same tokenizer for a text in mid-stream."""
    edited = {**spec}
    for key in ("normalizer", "pre_tokenizer"):
        edited[key] = _edited(copy.deepcopy(spec.get(key)))
    return edited


def with_hidden_pieces(spec: Spec, hidden: Collection[str]) -> Spec:
    """The same tokenizer, whose unigram model no longer finds the pieces `hidden` in a text."""
    model = spec["model"]
    vocab = [[_UNREACHABLE + p if p in hidden else p, score] for p, score in model["vocab"]]
    return {**spec, "model": {**model, "vocab": vocab}}


def _text_components(spec: Spec) -> list[Spec]:
    return [*components(spec.get("normalizer")), *components(spec.get("pre_tokenizer"))]


def _adds_space(part: Spec) -> bool:
    if part["type"] == "Metaspace":
        return bool(part.get("prepend_scheme", "always") != "never")
    return part["type"] == "Prepend" or bool(part.get("add_prefix_space", False))


def _edited(part: Any) -> Any:
    if part is None or part["type"] == "Prepend":
        return None
    for key in ("normalizers", "pretokenizers"):
        if key in part:
            part[key] = [kept for child in part[key] if (kept := _edited(child)) is not None]
    if part["type"] == "Metaspace":
        part["prepend_scheme"] = "never"
    if "add_prefix_space" in part:
        part["add_prefix_space"] = False
    return part
