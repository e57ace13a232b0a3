"""Turns of a conversation as suffixes of a stream.

A turn is rendered as segments: markup, whose special tokens count, and content, which is always
plain text. Nothing that was rendered before is ever rendered anew, so the token ids of a reply
stay as they were sampled. How the turns of a model look is found by `streamkv.chat_format`; this
module only puts them together and knows no tokenizer.
"""

import re
from dataclasses import dataclass
from typing import Literal, NamedTuple

from streamkv.errors import InputError

Source = Literal["template", "markers", "plain"]

_ROLE = re.compile(r"[a-z][a-z_]{0,31}")


class Segment(NamedTuple):
    """A piece of a rendered turn; in content, special tokens are ordinary text."""

    text: str
    is_markup: bool


@dataclass(frozen=True, slots=True)
class TurnFormat:
    """What stands around the content of a turn.

    Attributes:
        before, after: markup.
        trim_left, trim_right: the model's template strips whitespace off the content.
    """

    before: str
    after: str
    trim_left: bool = False
    trim_right: bool = False

    def render(self, text: str) -> list[Segment]:
        """The turn of a text."""
        text = text.lstrip() if self.trim_left else text
        text = text.rstrip() if self.trim_right else text
        return [Segment(self.before, True), Segment(text, False), Segment(self.after, True)]

    def for_role(self, role: str) -> "TurnFormat":
        """The same turn of another role than `user`."""
        before = role.join(self.before.rsplit("user", 1))
        return TurnFormat(before, self.after, self.trim_left, self.trim_right)


@dataclass(frozen=True, slots=True)
class ChatFormat:
    """How the turns of a model look.

    Attributes:
        source: `template`: as the model's chat template renders them; `markers`: the same markers,
            where the template itself cannot be followed; `plain`: the model has no template.
        system, user: these turns.
        header: what invites the assistant's turn.
        close: what ends the assistant's turn, its end marker first.
        bos: what the template puts before the first turn only.
        notes: for people: where this differs from the template, and why.
    """

    source: Source
    system: TurnFormat
    user: TurnFormat
    header: str
    close: str
    bos: str = ""
    notes: tuple[str, ...] = ()


PLAIN = ChatFormat(
    source="plain",
    system=TurnFormat("", "\n\n", trim_right=True),
    user=TurnFormat("User: ", "\n", trim_left=True, trim_right=True),
    header="Assistant:",
    close="\n",
    notes=("the model has no chat template: turns are plain `User:` and `Assistant:` lines",),
)


class ChatTemplate:
    """Renders turns.

    Args:
        chat_format: how they look.
        end_marker: the special token that `chat_format.close` begins with, if there is one.
    """

    def __init__(self, chat_format: ChatFormat, end_marker: str = "") -> None:
        assert chat_format.close.startswith(end_marker)
        self.format = chat_format
        self.end_marker = end_marker

    @property
    def source(self) -> Source:
        """Where the format is from: `template`, `markers` or `plain`."""
        return self.format.source

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """Texts that end a reply of a model whose turns have no end marker."""
        return ("\nUser:",) if self.source == "plain" else ()

    def render_system(self, text: str) -> list[Segment]:
        """The system prompt, without any text of the template's own."""
        return self.format.system.render(text)

    def render_turn(self, role: str, text: str, *, header: bool = True) -> list[Segment]:
        """One turn.

        Args:
            role: `user`, `assistant`, `system`, or another one that the model's markers can name.
            text: its content.
            header: end with what invites the assistant's turn.

        Raises:
            InputError: the role cannot be rendered.
        """
        segments = self._turn(role, text)
        return [*segments, Segment(self.format.header, True)] if header else segments

    def render_close(self, *, ended: bool) -> list[Segment]:
        """What closes the assistant's turn before the next one.

        Args:
            ended: the stream already ends with the end marker. Otherwise (the reply reached its
                length, was cut, or ended by another stop) the marker is part of what is rendered.
        """
        close = self.format.close
        return [Segment(close.removeprefix(self.end_marker) if ended else close, True)]

    def _turn(self, role: str, text: str) -> list[Segment]:
        if role == "system":
            return self.render_system(text)
        if role == "user":
            return self.format.user.render(text)
        if role == "assistant":
            return TurnFormat(self.format.header, self.format.close).render(text)
        if _ROLE.fullmatch(role) and "user" in self.format.user.before:
            return self.format.user.for_role(role).render(text)
        raise InputError("role", role, "unknown role", "Use user, assistant or system.")
