"""What the demo claims, checked: nothing was lost, and the continuation is the undisturbed one.

Invariant: a check that does not hold raises `CheckFailed`; one that could not be made does too.
Journals are read from their files, not asked of the engine that wrote them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from streamkv.cli.demo_job import Reading, Wrote
from streamkv.cli.text_file import TextFile
from streamkv.journal import Journal
from streamkv.journal_records import Fed
from streamkv.session_copy import SessionCopy

NEAR_TIE = 1e-4
"""Two logits closer than this may change places by rounding (fp32)."""

MAX_COPY_TOKENS = 8192


class CheckFailed(Exception):
    """Something that streamkv promises did not hold."""


@dataclass(frozen=True, slots=True)
class JournalCheck:
    """A journal that holds all that it should.

    Attributes:
        num_tokens: tokens in it.
        text_chars: characters of text accepted.
        torn_bytes: of a record that was being written; it was never acknowledged.
    """

    num_tokens: int
    text_chars: int
    torn_bytes: int


@dataclass(frozen=True, slots=True)
class Continuation:
    """Two runs that were compared.

    Attributes:
        num_tokens: tokens compared.
        num_near_ties: steps at which the undisturbed top two logits differ by under `NEAR_TIE`.
        first_difference: step at which they part, at a near tie; `None` if they are equal.
        smallest_margin: least difference of the top two logits in the undisturbed run.
    """

    num_tokens: int
    num_near_ties: int
    first_difference: int | None
    smallest_margin: float


def check_journal(path: Path, text: TextFile, acknowledged: Reading) -> JournalCheck:
    """See that a journal holds every token and character that was acknowledged, as they were.

    Raises:
        CheckFailed: it does not.
        JournalError: it is damaged.
    """
    with Journal.read_beside(path) as journal:
        state = journal.state
        if state.num_tokens < acknowledged.token_index:
            raise CheckFailed(
                f"{acknowledged.token_index:,} tokens were acknowledged, the journal holds "
                f"{state.num_tokens:,}"
            )
        if state.text_chars < acknowledged.text_chars:
            raise CheckFailed(
                f"{acknowledged.text_chars:,} characters were acknowledged, the journal holds "
                f"{state.text_chars:,}"
            )
        _check_text(journal, text)
        return JournalCheck(state.num_tokens, state.text_chars, journal.torn_bytes)


def _check_text(journal: Journal, text: TextFile) -> None:
    """The text fed is the beginning of `text`, without a gap, an addition or a change."""
    source, unread, num_chars = text.pieces(), "", 0
    for record in journal.scan():
        if not isinstance(record, Fed):
            continue
        while len(unread) < len(record.text):
            piece = next(source, None)
            if piece is None:
                raise CheckFailed(f"the journal holds text beyond the end of {text.path}")
            unread += piece
        if not unread.startswith(record.text):
            raise CheckFailed(
                f"the journal's text differs from {text.path} after {num_chars:,} characters"
            )
        unread = unread[len(record.text) :]
        num_chars += len(record.text)


def check_copy_distance(copied: SessionCopy, killed: JournalCheck) -> int:
    """Tokens between the copy and the kill.

    Raises:
        CheckFailed: too many for the comparison that the demo promises.
    """
    distance = killed.num_tokens - copied.num_tokens
    if not 0 < distance <= MAX_COPY_TOKENS:
        raise CheckFailed(
            f"the copy was taken {distance:,} tokens before the kill, not 1 to {MAX_COPY_TOKENS:,}"
        )
    return distance


def check_same_stream(path: Path, other: Path, num_tokens: int) -> None:
    """See that two journals hold the same first `num_tokens` token ids.

    Raises:
        CheckFailed: they do not.
    """
    with Journal.read_beside(path) as journal, Journal.read_beside(other) as undisturbed:
        shorter = min(journal.state.num_tokens, undisturbed.state.num_tokens)
        if shorter < num_tokens:
            raise CheckFailed(f"a journal holds {shorter:,} of {num_tokens:,} tokens")
        ids, other_ids = journal.ids(0, num_tokens), undisturbed.ids(0, num_tokens)
    different = np.flatnonzero(ids != other_ids)
    if different.size:
        raise CheckFailed(f"the two streams differ from token {different[0]:,} on")


def compare(resumed: Sequence[Wrote], undisturbed: Sequence[Wrote], wanted: int) -> Continuation:
    """Compare what was generated after the resume with what the undisturbed run generated.

    Raises:
        CheckFailed: they differ at a step that is no near tie, or are not `wanted` tokens.
    """
    steps, calm = _tokens(resumed), _tokens(undisturbed)
    if len(steps) != wanted or len(calm) != wanted:
        raise CheckFailed(f"{len(steps)} and {len(calm)} tokens were generated, not {wanted}")
    margins = [token.margin for token in calm]
    num_near_ties = sum(margin < NEAR_TIE for margin in margins)
    first = _first_difference(steps, calm)
    if first is not None and margins[first] >= NEAR_TIE:
        raise CheckFailed(
            f"token {first + 1} of {wanted} differs: {steps[first].text!r} instead of "
            f"{calm[first].text!r}, where the top two logits of the undisturbed run are "
            f"{margins[first]:.2g} apart"
        )
    return Continuation(wanted, num_near_ties, first, min(margins))


def _first_difference(steps: Sequence[Wrote], calm: Sequence[Wrote]) -> int | None:
    for place, (mine, other) in enumerate(zip(steps, calm, strict=True)):
        if (mine.token_id, mine.token_index) != (other.token_id, other.token_index):
            return place
    return None


def _tokens(written: Sequence[Wrote]) -> list[Wrote]:
    """Without a last flush of text, which has no token."""
    return [token for token in written if token.token_id is not None]
