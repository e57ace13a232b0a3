"""What is remembered of a journal while it is open: O(1) values and a sparse index.

Invariant: the state after applying the records of a file in order is the same whether they were
just written or read back. Pure: no files, no clock, no tokenizer.
"""

from array import array
from bisect import bisect_right

from streamkv.journal_records import (
    Checkpoint,
    Closed,
    Fed,
    Given,
    GivenKind,
    Kept,
    RecordKind,
    Turn,
    decode_record,
    ids_offset,
)

INDEX_STRIDE = 4096
"""Tokens between two entries of the sparse index."""

_WITH_IDS = frozenset({RecordKind.FED, RecordKind.GIVEN, RecordKind.GENERATED, RecordKind.FLUSHED})


class TokenIndex:
    """File offsets of records, one for each `INDEX_STRIDE` tokens: 16 bytes each."""

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


class JournalState:
    """Where a session stands, by its journal.

    Attributes:
        num_tokens: tokens in the stream.
        text_chars: characters of text accepted.
        tail: the text held back: accepted, but not yet among the tokens.
        has_turns: whether a turn was rendered by the chat template.
        kept: ranges that became sink tokens after creation, oldest first.
        last_turn, last_checkpoint, last_closed: the newest record of each kind.
        index: where tokens lie in the file.
    """

    __slots__ = (
        "has_turns",
        "index",
        "kept",
        "last_checkpoint",
        "last_closed",
        "last_turn",
        "num_tokens",
        "tail",
        "text_chars",
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
        self.index = TokenIndex()

    def apply(self, kind: int, payload: bytes, offset: int) -> None:
        """Take in the record whose frame lies at `offset`.

        Raises:
            ValueError: not a payload of that kind, or it contradicts the records before it.
        """
        if kind in _WITH_IDS:
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
            case Closed() as closed:
                self.last_closed = closed
            case _:
                raise ValueError("a second header")

    def _count_ids(self, num_bytes: int, offset: int) -> None:
        num_ids, rest = divmod(num_bytes, 4)
        if rest or num_bytes < 0:
            raise ValueError("ids cut off in the middle")
        if num_ids:
            self.index.note(self.num_tokens, num_ids, offset)
            self.num_tokens += num_ids

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
