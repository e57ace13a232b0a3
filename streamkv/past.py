"""What a session remembers of its stream, so that it can be taken back to an earlier token.

With a store that is the journal; without one the ids lie in memory, 4 bytes a token, up to
`MAX_REMEMBERED` tokens. Besides ids, both know how much fed text lies before a token: at the end of
each record exactly, within a record by the text of its tokens. Pure: no files, no tokenizer.
"""

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, Self

import numpy as np
import numpy.typing as npt

from streamkv.errors import SessionError
from streamkv.journal_records import (
    Checkpoint,
    Chosen,
    Closed,
    Fed,
    Flushed,
    Generated,
    Given,
    GivenKind,
    Kept,
    ModeSet,
    Record,
    Rewound,
    Turn,
)
from streamkv.recall_history import RecallHistory

MAX_REMEMBERED = 1 << 20
"""Tokens up to which a session without a store remembers its ids: 4 MiB."""

Ids = npt.NDArray[np.uint32]


class PastState(Protocol):
    """Where the stream stands."""

    @property
    def num_tokens(self) -> int:
        """Tokens in the stream."""

    @property
    def kept(self) -> list[Kept]:
        """Ranges that became sink tokens after creation, oldest first."""

    @property
    def last_checkpoint(self) -> Checkpoint | None:
        """The newest checkpoint from which the stream can be restored."""

    @property
    def last_closed(self) -> Closed | None:
        """The newest record of the open block."""

    @property
    def was_rewound(self) -> bool:
        """Whether tokens were ever given up."""

    @property
    def rewinds(self) -> "array[int]":
        """Tokens that each rewind left, in their order."""

    @property
    def recall(self) -> RecallHistory:
        """Modes and choices."""

    @property
    def computed_until(self) -> int | None:
        """Tokens from here on have to be computed anew, whatever is stored of them."""

    @property
    def in_answer(self) -> bool:
        """Whether the stream ends with a generated token, and nothing was decided since."""


class Past(Protocol):
    """A stream's ids and where it stands: a journal, or memory."""

    @property
    def state(self) -> PastState:
        """Where the stream stands."""

    def ids(self, start: int, end: int) -> Ids:
        """Ids of the tokens start <= token_index < end."""


class TextMark(NamedTuple):
    """What is known of the text before a token.

    Attributes:
        token_index: a token at or before it whose place in the text is known.
        text_chars: characters of fed text before that.
        max_chars: characters of fed text before the next token whose place is known.
        has_turns: whether a turn of the chat template begins before it.
    """

    token_index: int
    text_chars: int
    max_chars: int
    has_turns: bool


class TextMarks:
    """How much fed text lies before each token, by the records in their order.

    Holds 16 bytes for each record that fed text, none for generated tokens.
    """

    def __init__(self) -> None:
        self._tokens = array("Q", [0])
        self._chars = array("Q", [0])
        self._num_tokens = 0
        self._text_chars = 0
        self._num_held = 0
        self._first_turn: int | None = None

    @classmethod
    def of(cls, records: Iterable[Record]) -> Self:
        """The marks of all records of a session."""
        marks = cls()
        for record in records:
            marks.apply(record)
        return marks

    def apply(self, record: Record) -> None:
        """Take in what happened next."""
        match record:
            case Fed(text, tail_len, ids):
                self._text_chars += len(text)
                self._num_held = tail_len
                self._add(len(ids))
            case Flushed(ids):
                self._num_held = 0
                self._add(len(ids))
            case Generated(ids):
                self.add_generated(len(ids))
            case Given(kind, ids):
                if kind is GivenKind.TEMPLATE and self._first_turn is None:
                    self._first_turn = self._num_tokens
                self._add(len(ids))
            case Rewound():
                self._cut(rewound=record)

    def add_generated(self, num_tokens: int) -> None:
        """Take in so many tokens that the model chose: `apply` for the record of them."""
        self._add(num_tokens)

    def at(self, token_index: int) -> TextMark:
        """What is known of the text before a token of the stream, or its end."""
        place = bisect_right(self._tokens, token_index) - 1
        following = min(place + 1, len(self._chars) - 1)
        has_turns = self._first_turn is not None and self._first_turn < token_index
        return TextMark(self._tokens[place], self._chars[place], self._chars[following], has_turns)

    def copy(self) -> "TextMarks":
        """The same marks, which from now on go their own way."""
        marks = TextMarks()
        marks._tokens, marks._chars = self._tokens[:], self._chars[:]
        marks._num_tokens, marks._text_chars = self._num_tokens, self._text_chars
        marks._num_held, marks._first_turn = self._num_held, self._first_turn
        return marks

    def _add(self, num_tokens: int) -> None:
        self._num_tokens += num_tokens
        chars = self._text_chars - self._num_held
        if len(self._chars) > 1 and self._chars[-1] == self._chars[-2] == chars:
            # Tokens without text in a row need no mark but at their ends.
            self._tokens[-1] = self._num_tokens
        else:
            self._tokens.append(self._num_tokens)
            self._chars.append(chars)

    def _cut(self, rewound: Rewound) -> None:
        place = bisect_left(self._tokens, rewound.token_index)
        del self._tokens[place:], self._chars[place:]
        self._tokens.append(rewound.token_index)
        self._chars.append(rewound.text_chars)
        self._num_tokens, self._text_chars = rewound.token_index, rewound.text_chars
        self._num_held = 0
        if not rewound.has_turns:
            self._first_turn = None


def text_chars_at(mark: TextMark, token_index: int, decode: Callable[[int, int], str]) -> int:
    """Characters of fed text before a token.

    Args:
        mark: what is known of it.
        token_index: the token.
        decode: text of the tokens of a range, characters that it cuts in two left out.
    """
    if mark.token_index == token_index or mark.text_chars == mark.max_chars:
        return mark.text_chars
    return min(mark.text_chars + len(decode(mark.token_index, token_index)), mark.max_chars)


@dataclass(slots=True)
class _MemoryState:
    """Where a session without a journal stands."""

    num_tokens: int = 0
    kept: list[Kept] = field(default_factory=list)
    last_checkpoint: Checkpoint | None = None
    last_closed: Closed | None = None
    was_rewound: bool = False
    rewinds: "array[int]" = field(default_factory=lambda: array("Q"))
    recall: RecallHistory = field(default_factory=RecallHistory)
    computed_until: int | None = None
    in_answer: bool = False


class MemoryPast:
    """The past of a session without a store.

    Attributes:
        state: where the stream stands.
        marks: how much text lies before each token.
    """

    def __init__(self) -> None:
        self.state = _MemoryState()
        self.marks = TextMarks()
        self._ids: array[int] | None = array("I")

    def append(self, *records: Record) -> None:
        """Take in what happened next."""
        for record in records:
            if type(record) is Generated:
                # By far the most: one for each token of an answer.
                if self._ids is not None:
                    self.marks.add_generated(len(record.ids))
                self.state.in_answer = True
                self._add(record.ids)
                continue
            if self._ids is not None:
                self.marks.apply(record)
            if not isinstance(record, Turn | Chosen | Kept):
                self.state.in_answer = False
            match record:
                case Fed(_, _, ids) | Flushed(ids) | Given(_, ids):
                    self._add(ids)
                case Kept():
                    self.state.kept.append(record)
                case Rewound():
                    self._cut(record.token_index)
                case ModeSet():
                    self.state.recall.set_mode(record)
                case Chosen():
                    self.state.recall.choose(record)

    def ids(self, start: int, end: int) -> Ids:
        """Ids of the tokens start <= token_index < end.

        Raises:
            SessionError: the stream is longer than what is remembered.
        """
        if self._ids is None:
            raise SessionError(
                f"a session without a store remembers its first {MAX_REMEMBERED} tokens only, and "
                f"it has {self.state.num_tokens}. Open the engine with a store to go back in it."
            )
        return np.array(self._ids[start:end], dtype=np.uint32)

    def fork(self) -> "MemoryPast":
        """The same past, which from now on goes its own way."""
        forked = MemoryPast()
        forked.state.num_tokens = self.state.num_tokens
        forked.state.kept = list(self.state.kept)
        forked.state.was_rewound = self.state.was_rewound
        forked.state.rewinds = self.state.rewinds[:]
        forked.state.recall = self.state.recall.copy()
        forked.state.in_answer = self.state.in_answer
        forked.marks = self.marks.copy()
        forked._ids = None if self._ids is None else array("I", self._ids)
        return forked

    def _add(self, ids: tuple[int, ...]) -> None:
        self.state.num_tokens += len(ids)
        if self.state.num_tokens > MAX_REMEMBERED:
            self._ids, self.marks = None, TextMarks()
        if self._ids is not None:
            self._ids.extend(ids)

    def _cut(self, token_index: int) -> None:
        state = self.state
        state.num_tokens, state.was_rewound = token_index, True
        state.rewinds.append(token_index)
        # A rewind without a store computes what its window has lost anew, and with it all of this.
        state.computed_until = state.recall.rewind(token_index)
        state.kept = [kept for kept in state.kept if kept.token_index < token_index]
        if self._ids is not None:
            del self._ids[token_index:]
