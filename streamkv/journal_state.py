"""What is remembered of a journal while it is open: O(1) values and a sparse index.

Invariant: the state after applying the records of a file in order is the same whether they were
just written or read back. Pure: no files, no clock, no tokenizer.
"""

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from typing import NamedTuple

from streamkv.journal_records import (
    Checkpoint,
    Chosen,
    Closed,
    Fed,
    Given,
    GivenKind,
    Kept,
    ModeSet,
    RecordKind,
    Rewound,
    Turn,
    decode_record,
    ids_offset,
)
from streamkv.recall_history import RecallHistory

INDEX_STRIDE = 4096
"""Tokens between two entries of the sparse index."""

_WITH_IDS = frozenset({RecordKind.FED, RecordKind.GIVEN, RecordKind.GENERATED, RecordKind.FLUSHED})


class Stretch(NamedTuple):
    """Tokens `[start, end)` that lie one after another in the file.

    Attributes:
        start, end: token indices.
        first: token index with which the record at `offset` begins; at most `start`.
        offset: of the record's frame.
    """

    start: int
    end: int
    first: int
    offset: int


class TokenIndex:
    """File offsets of records, one for each `INDEX_STRIDE` tokens and each rewind: 16 bytes each.

    Records of tokens that a rewind gave up stay in the file: from one remembered record up to the
    next the file holds the stream's tokens in order, and perhaps more behind them.
    """

    __slots__ = ("_first_tokens", "_next_mark", "_offsets")

    def __init__(self) -> None:
        self._first_tokens = array("Q")
        self._offsets = array("Q")
        self._next_mark = 0

    def __len__(self) -> int:
        return len(self._offsets)

    def note(self, first_token: int, num_tokens: int, offset: int) -> None:
        """Remember the record at `offset` if it holds the next token that is a multiple."""
        end = first_token + num_tokens
        if end > self._next_mark:
            self._first_tokens.append(first_token)
            self._offsets.append(offset)
            self._next_mark = (end - 1) // INDEX_STRIDE * INDEX_STRIDE + INDEX_STRIDE

    def find(self, token_index: int) -> tuple[int, int]:
        """(first token, offset) of the last remembered record that starts at or before it."""
        place = bisect_right(self._first_tokens, token_index) - 1
        return self._first_tokens[place], self._offsets[place]

    def stretches(self, start: int, end: int) -> Iterator[Stretch]:
        """Where the tokens `[start, end)` lie, in order."""
        place = bisect_right(self._first_tokens, start) - 1
        while start < end:
            is_last = place + 1 == len(self._first_tokens)
            stop = end if is_last else min(end, self._first_tokens[place + 1])
            yield Stretch(start, stop, self._first_tokens[place], self._offsets[place])
            start, place = stop, place + 1

    def cut(self, token_index: int) -> None:
        """Forget the tokens from `token_index` on; the next record is remembered."""
        place = bisect_left(self._first_tokens, token_index)
        del self._first_tokens[place:], self._offsets[place:]
        self._next_mark = token_index


class JournalState:
    """Where a session stands, by its journal.

    Attributes:
        num_tokens: tokens in the stream.
        text_chars: characters of text accepted.
        tail: the text held back: accepted, but not yet among the tokens.
        has_turns: whether a turn was rendered by the chat template.
        kept: ranges that became sink tokens after creation, oldest first.
        last_turn: the newest record of its kind.
        last_checkpoint, last_closed: the same, unless tokens that they are about were given up.
        was_rewound: whether tokens were ever given up.
        fewest_left: fewest tokens that a rewind left; `None` if there was none.
        rewinds: tokens that each rewind left, in their order.
        recall: modes and choices.
        computed_until: tokens from here on have to be computed anew, because a choice for them came
            after the newest checkpoint; `None` if that is good.
        in_answer: it ends with a generated token, and nothing was decided since.
        index: where tokens lie in the file.
    """

    __slots__ = (
        "computed_until",
        "fewest_left",
        "has_turns",
        "in_answer",
        "index",
        "kept",
        "last_checkpoint",
        "last_closed",
        "last_turn",
        "num_tokens",
        "recall",
        "rewinds",
        "tail",
        "text_chars",
        "was_rewound",
    )

    def __init__(self) -> None:
        self.num_tokens = 0
        self.text_chars = 0
        self.tail = ""
        self.has_turns = False
        self.kept: list[Kept] = []
        self.last_turn: Turn | None = None
        self.last_checkpoint: Checkpoint | None = None
        self.last_closed: Closed | None = None
        self.was_rewound = False
        self.fewest_left: int | None = None
        self.rewinds = array("Q")
        self.recall = RecallHistory()
        self.computed_until: int | None = None
        self.in_answer = False
        self.index = TokenIndex()

    def apply(self, kind: int, payload: bytes, offset: int) -> None:
        """Take in the record whose frame lies at `offset`.

        Raises:
            ValueError: not a payload of that kind, or it contradicts the records before it.
        """
        if kind in _WITH_IDS:
            self.in_answer = kind == RecordKind.GENERATED
            if kind != RecordKind.GENERATED:
                self._apply_tail(kind, payload)
            self._count_ids(len(payload) - ids_offset(kind, payload), offset)
            return
        match decode_record(kind, payload):
            case Kept() as kept:
                self.kept.append(kept)
            case Turn() as turn:
                self.last_turn = turn
            case Checkpoint() as checkpoint:
                self.last_checkpoint = checkpoint
                self.computed_until = None
            case Closed() as closed:
                self.last_closed = closed
            case Rewound() as rewound:
                self._apply_rewound(rewound)
            case ModeSet() as mode:
                self._require_reached(mode.token_index)
                self.recall.set_mode(mode)
                self._void(mode.token_index)
                self.in_answer = False
            case Chosen() as chosen:
                self._require_reached(chosen.made_at)
                self.recall.choose(chosen)
                self._void(chosen.token_index)
                if chosen.token_index < chosen.made_at:
                    self._limit(chosen.token_index)
            case _:
                raise ValueError("a second header")

    def _count_ids(self, num_bytes: int, offset: int) -> None:
        num_ids, rest = divmod(num_bytes, 4)
        if rest or num_bytes < 0:
            raise ValueError("ids cut off in the middle")
        if num_ids:
            self.index.note(self.num_tokens, num_ids, offset)
            self.num_tokens += num_ids

    def _require_reached(self, token_index: int) -> None:
        if token_index > self.num_tokens:
            raise ValueError(f"decided at token {token_index} of {self.num_tokens}")

    def _void(self, token_index: int) -> None:
        """Tokens from `token_index` on are computed anew, with other blocks or other names."""
        if self.last_closed is not None and self.last_closed.token_index > token_index:
            self.last_closed = None
        if self.last_checkpoint is not None and self.last_checkpoint.token_index > token_index:
            self.last_checkpoint = None
            self._limit(token_index)

    def _limit(self, token_index: int) -> None:
        until = self.computed_until
        self.computed_until = token_index if until is None else min(until, token_index)

    def _apply_rewound(self, rewound: Rewound) -> None:
        end, text_chars = rewound.token_index, rewound.text_chars
        if not 0 < end <= self.num_tokens or text_chars > self.text_chars:
            raise ValueError(f"rewound to token {end} of {self.num_tokens}")
        self.num_tokens, self.text_chars, self.tail = end, text_chars, ""
        self.has_turns = rewound.has_turns
        self.kept = [kept for kept in self.kept if kept.token_index < end]
        # A resume keeps the last token pending, so it needs a checkpoint before that.
        if self.last_checkpoint is not None and self.last_checkpoint.token_index >= end:
            self.last_checkpoint = None
        if self.last_closed is not None and self.last_closed.token_index > end:
            self.last_closed = None
        lost = self.recall.rewind(end)
        if lost is not None:
            self._void(lost)
            self._limit(lost)
        if self.computed_until is not None and self.computed_until >= end:
            self.computed_until = None
        self.in_answer = False
        self.was_rewound = True
        self.rewinds.append(end)
        self.fewest_left = end if self.fewest_left is None else min(end, self.fewest_left)
        self.index.cut(end)

    def _apply_tail(self, kind: int, payload: bytes) -> None:
        match decode_record(kind, payload):
            case Fed(text, tail_len, _):
                held = self.tail + text
                if tail_len > len(held):
                    raise ValueError(f"{tail_len} characters held back of {len(held)}")
                self.tail = held[len(held) - tail_len :]
                self.text_chars += len(text)
            case Given(given_kind, _) if given_kind is GivenKind.TEMPLATE:
                self.has_turns = True
            case _ if kind == RecordKind.FLUSHED:
                self.tail = ""
