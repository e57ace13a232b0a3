"""Accepting input: checked, encoded, written to the journal, and only then part of the stream.

This is the one place where a stream grows. What it has returned from will be computed and survives
a kill; what it refused has changed nothing.
"""

import threading
from collections.abc import Iterator
from collections.abc import Sequence as Ids
from contextlib import contextmanager
from typing import Any

from streamkv.chat import Segment
from streamkv.errors import EngineClosedError, InputError, JournalError, QuotaError, StreamKVError
from streamkv.incremental import require_text
from streamkv.instruments import ACCEPTED
from streamkv.journal import Journal
from streamkv.journal_records import (
    Fed,
    Flushed,
    Generated,
    Given,
    GivenKind,
    Kept,
    Record,
    Rewound,
    Turn,
)
from streamkv.past import MemoryPast
from streamkv.quotas import require_tokens
from streamkv.sequence import Sequence
from streamkv.tiers.usage import Counters
from streamkv.tokenizer import Tokenizer

PIECE_CHARS = 4096
"""Characters of a long text accepted at a time, so that memory and latency stay bounded."""

PIECE_IDS = 4096
"""The same for a long list of token ids."""

MAX_IDS_AHEAD = 65_536
"""Token ids that may be pending because more of a list was accepted before its turn."""

_COUNTED_AS = {
    GivenKind.CALLER: "fed_tokens",
    GivenKind.TEMPLATE: "said_tokens",
    GivenKind.SYSTEM: "system_tokens",
}


def pieces(item: Any) -> Iterator[str | list[int]]:
    """A fed item in pieces of bounded size; nothing for an empty one."""
    size = PIECE_CHARS if isinstance(item, str) else PIECE_IDS
    if not isinstance(item, str | list | tuple):
        raise InputError(
            "items", item, "not a text and not a list of token ids", "Yield str or list[int]."
        )
    for start in range(0, len(item), size):
        piece = item[start : start + size]
        yield piece if isinstance(piece, str) else list(piece)


class Intake:
    """Where the tokens of one session come in.

    Args:
        sequence: the stream.
        tokenizer: of the model, with its chat template.
        journal: of the session; `None` keeps nothing.
        vocab_size: token ids are below it.
        trained_length: positions that sink tokens and window may take together.
        memory: what remembers the stream of a session without a journal, if anything does.
        name: of the session.
        tokens_allowed: most tokens that it may have; `None`: any number.
        counted: has the names `ACCEPTED`: where accepted tokens are counted.

    Attributes:
        vocab_size, tokens_allowed: as given.
    """

    def __init__(
        self,
        sequence: Sequence,
        tokenizer: Tokenizer,
        journal: Journal | None,
        vocab_size: int,
        trained_length: int,
        memory: MemoryPast | None = None,
        name: str = "",
        tokens_allowed: int | None = None,
        counted: Counters | None = None,
    ) -> None:
        self._name = name
        self.tokens_allowed = tokens_allowed
        self._memory = memory
        self._counted = counted if counted is not None else Counters(ACCEPTED)
        self._sequence = sequence
        self._tokenizer = tokenizer
        self._journal = journal
        self.vocab_size = vocab_size
        self._trained_length = trained_length
        self._encoder = tokenizer.encoder()
        self._tail = ""
        self._has_turns = False
        self._closed = False
        self.lock = threading.Lock()
        self.text_chars = 0

    @property
    def turn_stops(self) -> tuple[str, ...]:
        """Texts that end an answer of a model whose turns have no end marker."""
        return self._tokenizer.chat.stop_strings if self._has_turns else ()

    @property
    def _is_start(self) -> bool:
        """Whether no text precedes; a tokenizer's prefix (BOS) does not count as text."""
        return self._sequence.num_tokens <= len(self._tokenizer.prefix_ids)

    @contextmanager
    def at_hand(self) -> Iterator[bool]:
        """Keep others from the journal; False: it is in other hands, or closed."""
        is_mine = self.lock.acquire(blocking=False)
        try:
            yield is_mine and not self._closed
        finally:
            if is_mine:
                self.lock.release()

    def restore(self, text_chars: int, tail: str, has_turns: bool) -> None:
        """Go on where the journal ends.

        Args:
            text_chars: characters accepted.
            tail: accepted text that is not yet among the tokens.
            has_turns: the stream holds turns, so an answer may be open.
        """
        self._encoder = self._tokenizer.encoder(tail=tail, at_start=self._is_start)
        self._tail = tail
        self._has_turns = has_turns
        self.text_chars = text_chars

    def pieces(self, item: Any) -> Iterator[str | list[int]]:
        """A fed item in pieces; a list, which is handed over whole, has room whole or is refused.

        Raises:
            InputError: neither a text nor a list of token ids.
            QuotaError: a list of more tokens than the session may have.
        """
        if isinstance(item, list | tuple):
            self.require_room(len(item))
        return pieces(item)

    def accept(self, piece: str | list[int]) -> None:
        """Accept a piece of text, or token ids.

        The last word of a text is held back until what follows shows where its tokens end.

        Raises:
            InputError: invalid Unicode, or a token id out of range.
            QuotaError: the session would have more tokens than it may.
            JournalError: it could not be written, so it was not accepted.
        """
        if isinstance(piece, str):
            self._accept_text(piece)
        else:
            self._check_ids(piece)
            self.flush()
            self._give(GivenKind.CALLER, piece)

    def _accept_text(self, text: str) -> None:
        require_text("items", text)
        at_start = self._encoder.at_start
        ids = self._encoder.push(text)
        held = self._held_tokens(len(ids))
        self._write_or_restore(Fed(text, self._encoder.num_held, tuple(ids)), at_start, held)
        self.text_chars += len(text)
        self._add("fed_tokens", ids)

    def flush(self) -> None:
        """Make tokens of the text that is held back.

        Raises:
            JournalError: it could not be written; the text stays held back.
        """
        at_start = self._encoder.at_start
        ids = self._encoder.flush()
        if ids:
            self._write_or_restore(Flushed(tuple(ids)), at_start)
            self._add("fed_tokens", ids)

    def require_room(self, num_tokens: int) -> None:
        """Raise `QuotaError` if so many more tokens would be more than the session may have."""
        require_tokens(self._name, self._sequence.num_tokens + num_tokens, self.tokens_allowed)

    def _held_tokens(self, num_new: int) -> int:
        """Tokens that the text that is held back will make, if it matters how many."""
        tail, allowed = self._encoder.tail, self.tokens_allowed
        # No character makes more tokens than it has bytes, which are four at most.
        most = self._sequence.num_tokens + num_new + 4 * len(tail) + 1
        if allowed is None or most <= allowed:
            return 0
        twin = self._tokenizer.encoder(tail=tail, at_start=self._encoder.at_start)
        return len(twin.flush())

    def _write_or_restore(self, record: Fed | Flushed, at_start: bool, num_held: int = 0) -> None:
        """Write what the encoder has just made; if that fails, put the encoder back."""
        before = self._tail
        try:
            self.require_room(len(record.ids) + num_held)
            self._write(record)
        except (JournalError, EngineClosedError, InputError, QuotaError):
            self._encoder = self._tokenizer.encoder(tail=before, at_start=at_start)
            raise
        self._tail = self._encoder.tail

    def fork_into(self, other: "Intake") -> None:
        """Have the intake of a forked sequence go on where this one stands."""
        other.restore(self.text_chars, self._encoder.tail, self._has_turns)

    def rewind(self, rewound: Rewound, *more: Record) -> None:
        """Write that the stream ends earlier, and `more`; the text held back is given up.

        The caller holds `lock`, and rewinds the sequence next.

        Raises:
            JournalError: it could not be written; nothing has changed.
            EngineClosedError: the session was closed meanwhile.
        """
        self.require_open()
        self._append(rewound, *more)

    def require_open(self) -> None:
        """Raise `EngineClosedError` if nothing is accepted any more."""
        if self._closed:
            raise EngineClosedError("The session was closed meanwhile. Open it again.")

    def begin(self, ids: Ids[int]) -> None:
        """Begin a new stream: a tokenizer's prefix, a system prompt."""
        if ids:
            self._give(GivenKind.SYSTEM, ids)

    def close(self) -> None:
        """Accept nothing more."""
        self._closed = True

    def turn(self, role: str, text: str) -> None:
        """Accept a turn, up to where the answer begins.

        Raises:
            InputError: empty or invalid text, or a role that the template does not know.
            JournalError: it could not be written.
        """
        require_text("text", text)
        if not text.strip():
            raise InputError("text", text, "an empty turn", "Say something.")
        chat = self._tokenizer.chat
        segments: list[Segment] = []
        if self._has_turns:
            segments.extend(chat.render_close(ended=self._ends_with_end_marker()))
        segments.extend(chat.render_turn(role, text))
        self.flush()
        ids = self._tokenizer.encode_segments(segments, at_start=self._is_start)
        self._give(GivenKind.TEMPLATE, ids)
        self._has_turns = True

    def keep(self, text: str) -> None:
        """Accept text whose tokens become sink tokens.

        Raises:
            InputError: empty or invalid text, or too many sink tokens.
            JournalError: it could not be written.
        """
        require_text("text", text)
        if not text:
            raise InputError("text", text, "nothing to keep", "Pass at least one character.")
        at_start = self._is_start and not self._encoder.num_held
        ids = self._tokenizer.encode(text, at_start=at_start)
        self._check_room(text, len(ids))
        self.flush()
        start = self._sequence.num_tokens
        window = self._sequence.final_window.with_sinks(start, start + len(ids))
        self._give(GivenKind.CALLER, ids, Kept(start, len(ids)))
        self._sequence.change_window(start, window)

    def end_turn(self, info: dict[str, Any]) -> None:
        """Journal that a generation ended, and wait until all of it is on disk.

        Nothing happens if the session was closed meanwhile: going to sleep has done it.

        Raises:
            JournalError: it could not be written.
        """
        with self.lock:
            if self._journal is not None and not self._closed:
                self._journal.append(Turn(info))
                self._journal.sync()

    def generated(self, token_id: int) -> None:
        """Accept a sampled token. It may be handed out once this has returned.

        Raises:
            QuotaError: the session would have more tokens than it may.
            JournalError: it could not be written.
        """
        if self.tokens_allowed is not None:
            self.require_room(1)
        ids = (token_id,)
        self._write(Generated(ids))
        self._add("generated_tokens", ids)

    def _ends_with_end_marker(self) -> bool:
        recent = self._sequence.recent_ids
        return bool(recent) and recent[-1] in self._tokenizer.stop_ids

    def _check_room(self, text: str, num_tokens: int) -> None:
        """Raise if so many more sink tokens would not fit the trained length."""
        window = self._sequence.final_window
        num_sinks = window.num_sink_tokens + num_tokens
        total = num_sinks + window.window_size
        if total > self._trained_length:
            raise InputError(
                "text",
                text,
                f"{num_sinks} sink tokens and a window of {window.window_size} make "
                f"{total}, beyond the trained length of {self._trained_length}",
                "Keep less, or open the engine with a smaller window_size.",
            )

    def _give(self, kind: GivenKind, ids: Ids[int], *more: Record) -> None:
        """Accept ids while no text is held back, and what the journal says about them."""
        self.require_room(len(ids))
        self._write(Given(kind, tuple(ids)), *more)
        self._add(_COUNTED_AS[kind], ids)
        self._encoder = self._tokenizer.encoder(at_start=self._is_start)
        self._tail = ""

    def _add(self, counted_as: str, ids: Ids[int]) -> None:
        """Accepted tokens are part of the stream from now on."""
        self._sequence.append(ids)
        self._counted.add(counted_as, len(ids))

    def _write(self, *records: Record) -> None:
        with self.lock:
            if self._closed:
                self.require_open()
            self._append(*records)

    def _append(self, *records: Record) -> None:
        if self._journal is not None:
            self._journal.append(*records)
        elif self._memory is not None:
            self._memory.append(*records)

    def _check_ids(self, ids: list[int]) -> None:
        # By the whole list first: token by token it is a tenth of what scoring costs on the host.
        if set(map(type, ids)) == {int} and min(ids) >= 0 and max(ids) < self.vocab_size:
            return
        for token_id in ids:
            is_int = isinstance(token_id, int) and not isinstance(token_id, bool)
            if not is_int or not 0 <= token_id < self.vocab_size:
                raise InputError(
                    "token id",
                    token_id,
                    "outside the vocabulary",
                    f"Use whole numbers from 0 to {self.vocab_size - 1}.",
                )


class FedItem:
    """One item of a feed, accepted piece by piece.

    Of a list of token ids, which its caller handed over whole, more may be accepted before the
    pieces before it are computed. What is refused then is refused when its turn comes.

    Args:
        intake: accepts the pieces.
        sequence: the stream that they come to.
        item: a text or a list of token ids.
    """

    def __init__(self, intake: Intake, sequence: Sequence, item: Any) -> None:
        self._intake = intake
        self._sequence = sequence
        self._pieces = intake.pieces(item)
        self._is_list = isinstance(item, list | tuple)
        self._refused: str | list[int] | None = None

    def accept_next(self) -> bool:
        """Accept the next piece; False: there is none.

        Raises:
            InputError, QuotaError, JournalError: as `Intake.accept`.
        """
        refused, self._refused = self._refused, None
        piece = refused if refused is not None else next(self._pieces, None)
        if piece is None:
            return False
        self._intake.accept(piece)
        return True

    def accept_more(self) -> bool:
        """Accept as many ids again as are pending, within the limit; False: nothing was accepted.

        No more than that, so that looking ahead stays in proportion to what was found.
        """
        before = self._sequence.num_pending
        end = min(2 * before, MAX_IDS_AHEAD)
        while self._is_list and self._refused is None and self._sequence.num_pending < end:
            room = MAX_IDS_AHEAD - self._sequence.num_pending
            piece = next(self._pieces, None) if room >= PIECE_IDS else None
            if piece is None:
                break
            try:
                self._intake.accept(piece)
            except StreamKVError:
                self._refused = piece
        return self._sequence.num_pending > before
