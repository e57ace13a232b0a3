"""Reading files into a session, each character once, with progress.

Invariant: a file that was cut off goes on at the first character that the session's journal does
not hold, and one that has grown goes on where it ended; what was read is compared with the file
first.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from streamkv.accepted_text import accepted_text
from streamkv.cli.console import Output
from streamkv.cli.feed_notes import FeedNote, FeedNotes, copy_notes
from streamkv.cli.progress import ProgressDisplay
from streamkv.cli.text_file import TextFile
from streamkv.errors import InputError
from streamkv.journal import Journal
from streamkv.store import journal_path, notes_path

if TYPE_CHECKING:
    from streamkv.session import Session


class Feeder:
    """Feeds files to one session.

    Args:
        session: open; who opened it closes it.
        store: where the session is kept.
        output: of the command.
    """

    def __init__(self, session: "Session", store: Path, output: Output) -> None:
        self.session = session
        self.output = output
        self._store = store
        self._journal_path = journal_path(store, session.name)
        self._notes_path = notes_path(store, session.name)

    def feed(self, path: Path, *, again: bool = False) -> None:
        """Read what the session has not read of a file yet.

        Args:
            path: the file, UTF-8.
            again: read it from the start, whatever was read before.

        Raises:
            InputError: not a text file, or it differs from what was read of it before.
            JournalError, StoreError: the store cannot be written.
        """
        file = TextFile.check(path)
        with Journal.read_beside(self._journal_path) as journal:
            notes = FeedNotes(self._notes_path, _identity(journal))
            note = None if again else notes.newest(path.resolve())
            start = 0 if note is None else _next_char(note, file, journal)
        if start == file.num_chars:
            self.output.note(f"{path}: read before, nothing new. --again reads it once more.")
            return
        if start:
            self.output.note(f"{path}: goes on at character {start:,} of {file.num_chars:,}.")
        self._feed_noted(file, start, notes)

    def feed_pieces(
        self, pieces: Iterable[str], what: str, start: int = 0, num_chars: int | None = None
    ) -> None:
        """Read texts, showing how far it has come.

        Args:
            pieces: texts.
            what: names them.
            start: characters that come before, of `num_chars`.
            num_chars: all characters; `None` if nobody knows.
        """
        before, num_tokens, num_reused, rate = self.session.text_chars, 0, 0, 0.0
        with ProgressDisplay(self.output, f"reading {what}") as display:
            for progress in self.session.feed(pieces):
                num_tokens, rate = progress.num_tokens, progress.tokens_per_s
                num_reused = progress.num_reused
                done = start + progress.text_chars - before
                fraction = None if num_chars is None else done / num_chars
                display.update(fraction, f"{num_tokens:,} tokens, {rate:,.0f} tokens/s")
        read = self.session.text_chars - before
        stored = f" ({num_reused:,} of them stored already)" if num_reused else ""
        self.output.note(
            f"{what}: {read:,} characters, {num_tokens:,} tokens{stored}, {rate:,.0f} per s."
        )
        self.output.json(
            {
                "file": what,
                "start_char": start,
                "num_chars": read,
                "num_tokens": num_tokens,
                "num_reused": num_reused,
                "tokens_per_s": rate,
                "session_tokens": self.session.num_tokens,
            }
        )

    def fork(self, name: str) -> None:
        """Fork the session into one that sleeps, and has read the same files.

        Raises:
            InputError, PoolFullError, JournalError: as `Session.fork`.
            StoreError: the notes of what was read cannot be copied.
        """
        with self.session.fork(name):
            copy_notes(self._store, self.session.name, name)

    def _feed_noted(self, file: TextFile, start: int, notes: FeedNotes) -> None:
        before = self.session.text_chars
        resolved = str(file.path.resolve())
        notes.write(FeedNote(notes.session, resolved, start, before))
        try:
            self.feed_pieces(file.pieces(start), str(file.path), start, file.num_chars)
        finally:
            read = self.session.text_chars - before
            digest = file.digest(start + read)
            notes.write(FeedNote(notes.session, resolved, start, before, read, digest))


def _identity(journal: Journal) -> str:
    """Differs for every session, also for one created anew under an old name."""
    return journal.header.created_s.hex()


def _next_char(note: FeedNote, file: TextFile, journal: Journal) -> int:
    """First character of `file` that the session has not accepted."""
    accepted = max(0, journal.state.text_chars - note.text_chars)
    num_chars = note.num_chars
    # A journal that lost its end (a repair, a power cut) holds less than the note says, and one
    # that was rewound may hold something else.
    if num_chars is None or num_chars > accepted or journal.state.was_rewound:
        num_chars = accepted if num_chars is None else min(num_chars, accepted)
        same = _holds(journal, note.text_chars, num_chars, file.pieces(note.first_char))
    else:
        end = note.first_char + num_chars
        same = end <= file.num_chars and file.digest(end) == note.digest
    if not same:
        raise InputError(
            "file",
            str(file.path),
            "the session has read it before, and it was otherwise then",
            "--again reads it from the start.",
        )
    return note.first_char + num_chars


def _holds(journal: Journal, start: int, num_chars: int, pieces: Iterator[str]) -> bool:
    """Whether the text accepted from character `start` on begins `pieces`."""
    expected = ""
    for accepted in accepted_text(journal.scan):
        text = accepted[start : start + num_chars]
        start = max(start - len(accepted), 0)
        while len(expected) < len(text):
            piece = next(pieces, "")
            if not piece:
                return False
            expected += piece
        if not expected.startswith(text):
            return False
        expected = expected[len(text) :]
        num_chars -= len(text)
    return num_chars == 0
