from pathlib import Path

from streamkv.cli.feed_notes import FeedNote, FeedNotes
from streamkv.store import notes_path


def test_the_newest_note_of_a_file_and_session_counts(tmp_path: Path) -> None:
    path = notes_path(tmp_path, "a")
    notes = FeedNotes(path, "s1")
    assert notes.newest(tmp_path / "f") is None
    for session, file, first in (("s1", "f", 1), ("s1", "f", 2), ("s1", "g", 3), ("s2", "f", 4)):
        notes.write(FeedNote(session, str(tmp_path / file), first, 0))
    assert notes.newest(tmp_path / "f") == FeedNote("s1", str(tmp_path / "f"), 2, 0)


def test_a_torn_line_is_passed_over(tmp_path: Path) -> None:
    path = notes_path(tmp_path, "a")
    notes = FeedNotes(path, "s")
    note = FeedNote("s", str(tmp_path / "f"), 0, 0, 5, "digest")
    notes.write(note)
    with path.open("a") as file:
        file.write('\n{"session": "s", "fi')
    assert notes.newest(tmp_path / "f") == note
    later = FeedNote("s", str(tmp_path / "f"), 5, 5)
    notes.write(later)
    assert notes.newest(tmp_path / "f") == later
