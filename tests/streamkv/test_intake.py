"""Where a stream grows: the sequence and the journal say the same, whatever fails."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from small_tiers import new_journal

from streamkv.errors import EngineClosedError, InputError, JournalError
from streamkv.intake import PIECE_CHARS, PIECE_IDS, Intake, pieces
from streamkv.journal import Journal
from streamkv.journal_records import Given, GivenKind, Kept, Turn
from streamkv.sequence import Sequence
from streamkv.tiers.faults import inject
from streamkv.tiers.spec import BlockKey
from streamkv.tokenizer import Tokenizer, load_tokenizer
from streamkv.window import Window

VOCAB_SIZE, TRAINED_LENGTH = 400, 200
TEXT = "The quick brown fox jumps over the lazy dog, "


@pytest.fixture(scope="module")
def tokenizer(tiny_model_dir: Path) -> Tokenizer:
    return load_tokenizer(tiny_model_dir)


class Desk:
    """An intake with its journal on disk.

    Attributes:
        path: the journal's file.
        intake, journal, sequence: what is tested; anew after `reopen`.
    """

    def __init__(self, path: Path, tokenizer: Tokenizer) -> None:
        self.path = path
        self._tokenizer = tokenizer
        self._take(new_journal(path))

    def _take(self, journal: Journal) -> None:
        self.journal = journal
        self.sequence = Sequence(1, Window(64, ((0, 4),)), 64, BlockKey(b"r" * 16))
        self.intake = Intake(self.sequence, self._tokenizer, journal, VOCAB_SIZE, TRAINED_LENGTH)

    def reopen(self) -> None:
        """Go on as another process would, from the journal alone."""
        self.journal.close()
        self._take(Journal.open(self.path))
        state = self.journal.state
        self.sequence.append(self.journal.ids(0, state.num_tokens).tolist())
        self.intake.restore(state.text_chars, state.tail, state.has_turns)

    def ids(self) -> list[int]:
        """The stream; asserts that the file holds the same."""
        accepted = list(self.sequence.pending)
        assert self.journal.ids(0, self.journal.state.num_tokens).tolist() == accepted
        assert self.journal.state.text_chars == self.intake.text_chars
        return accepted


@pytest.fixture
def desk(tmp_path: Path, tokenizer: Tokenizer) -> Iterator[Desk]:
    desk = Desk(tmp_path / "diary.journal", tokenizer)
    yield desk
    desk.journal.close()


def fail_on_disk() -> None:
    raise OSError(28, "No space left on device")


def test_long_items_come_in_pieces_of_bounded_size() -> None:
    text, ids = "ab" * PIECE_CHARS, list(range(PIECE_IDS + 1))
    assert [len(piece) for piece in pieces(text)] == [PIECE_CHARS] * 2
    assert "".join(str(piece) for piece in pieces(text)) == text
    assert list(pieces(ids)) == [ids[:PIECE_IDS], [PIECE_IDS]]
    assert list(pieces((1, 2))) == [[1, 2]]
    assert list(pieces("")) == list(pieces([])) == []
    for bad in (b"bytes", 7, None, {1, 2}):
        with pytest.raises(InputError, match="not a text and not a list"):
            list(pieces(bad))


@pytest.mark.parametrize("size", [1, 3, 7, 1000])
@pytest.mark.parametrize("reopens", [False, True])
def test_text_is_joined_as_given_also_over_a_restart(
    desk: Desk, tokenizer: Tokenizer, size: int, reopens: bool
) -> None:
    for start in range(0, len(TEXT), size):
        desk.intake.accept(TEXT[start : start + size])
        if reopens:
            desk.reopen()
    desk.intake.flush()
    assert desk.ids() == tokenizer.encode(TEXT)
    assert desk.intake.text_chars == len(TEXT)


@pytest.mark.parametrize("reopens", [False, True])
def test_a_tokenizers_own_space_is_added_where_the_stream_begins_only(
    tmp_path: Path, built: Callable[[str], Any], reopens: bool
) -> None:
    """A text that goes on where another one was ended has no space of its own."""
    tokenizer = built("metaspace").tokenizer
    desk = Desk(tmp_path / "diary.journal", tokenizer)
    desk.intake.accept("The la")
    desk.intake.flush()
    if reopens:
        desk.reopen()
    desk.intake.accept("zy dog")
    desk.intake.flush()
    assert tokenizer.decode(desk.ids()) == "The lazy dog"
    desk.journal.close()


def test_the_word_held_back_is_in_the_journal_before_it_is_a_token(
    desk: Desk, tokenizer: Tokenizer
) -> None:
    desk.intake.accept("The lazy d")
    assert desk.journal.state.tail != "" and desk.intake.text_chars == 10
    held = desk.journal.state.tail
    assert tokenizer.decode(desk.ids()) + held == "The lazy d"
    desk.intake.accept([9, 8])
    assert desk.ids() == [*tokenizer.encode("The lazy d"), 9, 8]


REFUSALS: dict[str, Callable[[Intake], None]] = {
    "text": lambda intake: intake.accept("og and a fox "),
    "ids": lambda intake: intake.accept([1, 2]),
    "turn": lambda intake: intake.turn("user", "Who?"),
    "keep": lambda intake: intake.keep("a secret"),
    "flush": lambda intake: intake.flush(),
    "generated": lambda intake: (intake.flush(), intake.generated(5))[0],
}


@pytest.mark.parametrize("what", REFUSALS)
def test_what_a_full_disk_refuses_can_be_given_again(
    desk: Desk, tokenizer: Tokenizer, what: str
) -> None:
    desk.intake.accept("The lazy d")
    before = desk.ids()
    with inject("journal.write", fail_on_disk), pytest.raises(JournalError):
        REFUSALS[what](desk.intake)
    assert desk.ids() == before
    assert desk.journal.state.tail == " d" or what == "generated"
    REFUSALS[what](desk.intake)
    written = desk.ids()
    fresh = Desk(desk.path.with_name("fresh.journal"), tokenizer)
    fresh.intake.accept("The lazy d")
    REFUSALS[what](fresh.intake)
    assert written == fresh.ids()
    fresh.journal.close()


def test_an_id_outside_the_vocabulary_refuses_the_whole_piece(desk: Desk) -> None:
    desk.intake.accept("The lazy d")
    before = desk.ids()
    for bad in (VOCAB_SIZE, -1, True, 2.0):
        with pytest.raises(InputError, match="from 0 to 399"):
            desk.intake.accept([5, bad])  # type: ignore[list-item]
    assert desk.ids() == before
    desk.intake.accept([VOCAB_SIZE - 1])
    assert desk.ids()[-1] == VOCAB_SIZE - 1


def test_after_close_nothing_is_accepted(desk: Desk) -> None:
    desk.intake.accept("The lazy d")
    before, num_bytes = desk.ids(), desk.journal.num_bytes
    desk.intake.close()
    for refused in REFUSALS.values():
        with pytest.raises(EngineClosedError):
            refused(desk.intake)
    desk.intake.end_turn({"reason": "stop"})
    assert (desk.ids(), desk.journal.num_bytes) == (before, num_bytes)


def test_the_second_turn_closes_the_answer_before_it(desk: Desk, tokenizer: Tokenizer) -> None:
    desk.intake.turn("user", "Who?")
    desk.intake.generated(tokenizer.encode("dog")[0])
    desk.intake.turn("user", "Why?")
    desk.reopen()
    [end_marker] = [i for i in tokenizer.stop_ids if i == tokenizer.end_marker_id]
    desk.intake.generated(end_marker)
    desk.intake.turn("user", "Oh.")
    text = tokenizer.decode(desk.ids(), skip_special=False)
    first = tokenizer.decode([tokenizer.encode("dog")[0]])
    assert text == (
        "<|im_start|>user\nWho?<|im_end|>\n<|im_start|>assistant\n" + first + "<|im_end|>\n"
        "<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n<|im_end|>\n"
        "<|im_start|>user\nOh.<|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_turn_ends_the_word_before_it(desk: Desk, tokenizer: Tokenizer) -> None:
    desk.intake.accept("The lazy d")
    desk.intake.turn("user", "og?")
    text = tokenizer.decode(desk.ids(), skip_special=False)
    assert text == "The lazy d<|im_start|>user\nog?<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(("role", "text"), [("user", " \n"), ("Nobody!", "hi"), ("user", "\ud800")])
def test_a_refused_turn_does_not_even_end_a_word(desk: Desk, role: str, text: str) -> None:
    desk.intake.accept("The lazy d")
    before = desk.ids()
    with pytest.raises(InputError):
        desk.intake.turn(role, text)
    assert desk.ids() == before and desk.journal.state.tail == " d"


def test_kept_text_becomes_sink_tokens_from_its_first_token_on(
    desk: Desk, tokenizer: Tokenizer
) -> None:
    desk.intake.accept(TEXT)
    start = len(tokenizer.encode(TEXT))
    secret = tokenizer.encode("a secret", at_start=False)
    desk.intake.keep("a secret")
    end = start + len(secret)
    assert desk.ids()[start:] == secret
    assert list(desk.journal.scan())[-1] == Kept(start, len(secret))
    assert desk.sequence.next_boundary == start
    assert desk.sequence.final_window == Window(64, ((0, 4), (start, end)))
    desk.intake.keep("a secret")
    # Apart, though they touch: what attended to the first alone is not named like one range.
    again = (end, end + len(secret))
    assert desk.sequence.final_window == Window(64, ((0, 4), (start, end), again))


def test_kept_text_may_fill_the_trained_length_and_no_more(
    desk: Desk, tokenizer: Tokenizer
) -> None:
    room = TRAINED_LENGTH - 64 - 4
    text = "\n" * 3 * room
    while len(tokenizer.encode(text)) > room:
        text = text[:-1]
    desk.intake.accept(TEXT)
    before = desk.ids()
    with pytest.raises(InputError, match="beyond the trained length of 200"):
        desk.intake.keep(text + "\n\n\n\n")
    assert desk.ids() == before, "not even a word was ended"
    assert desk.sequence.final_window.num_sink_tokens == 4
    desk.intake.keep(text)
    assert desk.sequence.final_window.num_sink_tokens == 4 + len(tokenizer.encode(text))


def test_a_new_stream_begins_with_given_ids(desk: Desk) -> None:
    desk.intake.begin([])
    assert list(desk.journal.scan())[1:] == []
    desk.intake.begin([1, 2])
    assert list(desk.journal.scan())[1:] == [Given(GivenKind.SYSTEM, (1, 2))]
    assert desk.ids() == [1, 2]


def test_the_end_of_a_generation_is_on_disk_when_it_returns(desk: Desk) -> None:
    synced = list[Turn | None]()
    with inject("journal.fsync", lambda: synced.append(desk.journal.state.last_turn)):
        desk.intake.end_turn({"reason": "stop", "seed": 3})
    assert synced == [Turn({"reason": "stop", "seed": 3})]


def test_without_a_journal_the_stream_is_the_same(tokenizer: Tokenizer) -> None:
    sequence = Sequence(1, Window(64), 64, BlockKey(b"r" * 16))
    intake = Intake(sequence, tokenizer, None, VOCAB_SIZE, TRAINED_LENGTH)
    intake.accept("The lazy d")
    intake.accept("og")
    intake.end_turn({"reason": "stop"})
    intake.accept([7])
    assert list(sequence.pending) == [*tokenizer.encode("The lazy dog"), 7]


def test_text_to_keep_that_cannot_be_written_changes_nothing(desk: Desk) -> None:
    desk.intake.accept([5, 6])
    with inject("journal.write", fail_on_disk), pytest.raises(JournalError):
        desk.intake.keep("a secret")
    assert desk.ids() == [5, 6]
    assert desk.sequence.final_window.num_sink_tokens == 4
    desk.intake.keep("a secret")
    expected = desk.ids()
    desk.reopen()
    assert desk.ids() == expected and desk.journal.state.num_tokens == len(expected)


FIRST: dict[str, Callable[[Intake], None]] = {
    "ids": lambda intake: intake.accept([9, 8]),
    "turn": lambda intake: intake.turn("user", "hi"),
    "keep": lambda intake: intake.keep("hi"),
}


@pytest.mark.parametrize("first", FIRST.keys())
def test_text_after_other_tokens_does_not_begin_the_stream(
    tmp_path: Path, built: Callable[[str], Any], first: str
) -> None:
    tokenizer = built("metaspace").tokenizer
    found = []
    for reopens in (False, True):
        desk = Desk(tmp_path / f"diary-{reopens}.journal", tokenizer)
        FIRST[first](desk.intake)
        if reopens:
            desk.reopen()
        desk.intake.accept("dog")
        desk.intake.flush()
        found.append(desk.ids())
        desk.journal.close()
    assert found[0] == found[1]
