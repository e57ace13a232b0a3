"""How a model's turns look, found by rendering its chat template with placeholders.

A template renders a whole conversation; a stream needs each turn as a suffix. So the template is
rendered for conversations that grow by one turn. If each rendering begins with the one before it,
the difference is the turn (source `template`). Templates that rewrite earlier turns (dropped
reasoning) or fail still show their markers, which are then used alone (source `markers`).

A system text that the template would add by itself never gets in: the user's turn is taken from
the middle of a conversation, and a system turn with words of its own is rebuilt from the user's
markers.
"""

import re
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import NamedTuple

from streamkv.chat import PLAIN, ChatFormat, TurnFormat
from streamkv.errors import ModelError

Message = dict[str, str]
Render = Callable[[list[Message], bool], str]
"""Text of a conversation, with or without the assistant's header; `ModelError` if it cannot."""

_SYSTEM, _FIRST, _REPLY, _SECOND = "qz0x", "qz1x", "qz2x", "qz3x"

# The markers of common families, for templates that fail on the conversations tried here.
_FAMILIES = (
    ("<|im_start|>{}\n", "<|im_end|>", "<|im_end|>\n", "assistant"),
    ("<|start_header_id|>{}<|end_header_id|>\n\n", "<|eot_id|>", "<|eot_id|>", "assistant"),
    ("<start_of_turn>{}\n", "<end_of_turn>", "<end_of_turn>\n", "model"),
)


class _Renderings(NamedTuple):
    """One conversation, growing; what is `invited` ends with the assistant's header."""

    first: str
    first_invited: str
    reply: str
    second: str
    second_invited: str


def find_format(render: Render | None, markers: Collection[str], bos: str = "") -> ChatFormat:
    """The format of a model's turns.

    Args:
        render: its chat template; `None` if it has none.
        markers: texts of its special tokens.
        bos: text of the token that begins a stream.
    """
    if render is None:
        return PLAIN
    seen = [shown for system in (_SYSTEM, "") if (shown := _render_all(render, system))]
    formats = [build(shown) for build in (_from_suffixes, _from_markers) for shown in seen]
    found = next((found for found in formats if found and _is_clean(found)), None)
    if found is None:
        return _from_families(markers)
    found = _with_trimming(render, found)
    return _with_system(render, found, markers, bos)


def _messages(*texts: str, system: str = "") -> list[Message]:
    roles = ("user", "assistant", "user")
    turns = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]
    return [{"role": "system", "content": system}, *turns] if system else turns


def _render_all(render: Render, system: str) -> _Renderings | None:
    try:
        one = _messages(_FIRST, system=system)
        three = _messages(_FIRST, _REPLY, _SECOND, system=system)
        return _Renderings(
            render(one, False),
            render(one, True),
            render(_messages(_FIRST, _REPLY, system=system), False),
            render(three, False),
            render(three, True),
        )
    except ModelError:
        return None


def _is_clean(found: ChatFormat) -> bool:
    """Whether a format holds markup only; some templates move earlier content around."""
    markup = found.user.before + found.user.after + found.header + found.close
    placeholders = (_SYSTEM, _FIRST, _REPLY, _SECOND)
    return bool(markup) and not any(placeholder in markup for placeholder in placeholders)


def _from_suffixes(seen: _Renderings) -> ChatFormat | None:
    """The format if every rendering begins with the one before it."""
    steps = (
        (seen.first, seen.first_invited),
        (seen.first_invited + _REPLY, seen.reply),
        (seen.reply, seen.second),
        (seen.second, seen.second_invited),
    )
    if not all(longer.startswith(shorter) for shorter, longer in steps):
        return None
    before, _, after = seen.second.removeprefix(seen.reply).partition(_SECOND)
    return ChatFormat(
        source="template",
        system=TurnFormat("", ""),
        user=TurnFormat(before, after),
        header=seen.second_invited.removeprefix(seen.second),
        close=seen.reply.removeprefix(seen.first_invited + _REPLY),
    )


def _from_markers(seen: _Renderings) -> ChatFormat | None:
    """The format from what stands between the turns, if the template rewrites earlier ones."""
    if any(text.count(_REPLY) != 1 for text in (seen.reply, seen.second)):
        return None
    close = seen.reply.partition(_REPLY)[2]
    between, _, after = seen.second.partition(_REPLY)[2].partition(_SECOND)
    invited = seen.second_invited.partition(_SECOND)[2]
    if not (between.startswith(close) and invited.startswith(after)):
        return None
    return ChatFormat(
        source="markers",
        system=TurnFormat("", ""),
        user=TurnFormat(between.removeprefix(close), after),
        header=invited.removeprefix(after),
        close=close,
        notes=("the chat template rewrites earlier turns: its markers are used as they stand",),
    )


def _from_families(markers: Collection[str]) -> ChatFormat:
    """A common format whose markers the model has, else the plain one."""
    for opening, marker, end, assistant in _FAMILIES:
        if marker in markers and any(opening.startswith(known) for known in markers):
            return ChatFormat(
                source="markers",
                system=TurnFormat(opening.format("system"), end),
                user=TurnFormat(opening.format("user"), end),
                header=opening.format(assistant),
                close=end,
                notes=("the chat template cannot be rendered turn by turn: its markers are used",),
            )
    note = "the chat template cannot be rendered turn by turn: turns are plain lines"
    return replace(PLAIN, notes=(note,))


def _with_trimming(render: Render, found: ChatFormat) -> ChatFormat:
    """The format with what the template strips off a user's text."""
    for system in (_SYSTEM, ""):
        try:
            text = render(_messages(_FIRST, _REPLY, f" \n{_SECOND}\n ", system=system), False)
        except ModelError:
            continue
        user = _trimmed(found.user, text, _SECOND)
        return replace(found, user=user)
    return found


def _trimmed(turn: TurnFormat, text: str, placeholder: str) -> TurnFormat:
    return replace(
        turn,
        trim_left=f" \n{placeholder}" not in text,
        trim_right=f"{placeholder}\n " not in text,
    )


def _with_system(
    render: Render, found: ChatFormat, markers: Collection[str], bos: str
) -> ChatFormat:
    """The format with its system turn."""
    user_turn = found.user.before + _FIRST + found.user.after
    try:
        text = render(_messages(_FIRST, system=_SYSTEM), False)
        padded = render(_messages(_FIRST, system=f" \n{_SYSTEM}\n "), False)
    except ModelError:
        text = padded = ""
    if text.count(_SYSTEM) != 1 or not text.endswith(user_turn):
        bos = _leading_bos(render, found, bos)
        note = "the chat template has no system turn of its own: the system prompt is a user turn"
        return replace(found, system=found.user, bos=bos, notes=(*found.notes, note))
    before, _, after = text.removesuffix(user_turn).partition(_SYSTEM)
    bos = bos if bos and before.startswith(bos) and not user_turn.startswith(bos) else ""
    system = _trimmed(TurnFormat(before.removeprefix(bos), after), padded, _SYSTEM)
    if not _has_own_words(system, found.user, markers):
        return replace(found, system=system, bos=bos)
    if "user" in found.user.before:
        system = replace(found.user.for_role("system"), trim_left=system.trim_left)
    note = "the chat template adds words of its own to a system prompt: they are left out"
    return replace(found, system=system, bos=bos, notes=(*found.notes, note))


def _leading_bos(render: Render, found: ChatFormat, bos: str) -> str:
    try:
        text = render(_messages(_FIRST), False)
    except ModelError:
        return ""
    return bos if bos and text.startswith(bos) and not found.user.before.startswith(bos) else ""


def _has_own_words(system: TurnFormat, user: TurnFormat, markers: Collection[str]) -> bool:
    if (system.before, system.after) == (user.for_role("system").before, user.after):
        return False
    rest = system.before + system.after
    for marker in sorted(markers, key=len, reverse=True):
        rest = rest.replace(marker, " ")
    return re.search(r"\w", re.sub(r"\bsystem\b|<<?/?SYS>>?|\[/?INST\]", " ", rest)) is not None
