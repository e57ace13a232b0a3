"""Which files a session has read, so that one that was cut off goes on where it stopped.

One JSON line when a file is begun, one when it is done, in STORE/feeds/NAME.jsonl. The journal is
the truth of what was accepted; a note says only which file that was. Notes of a deleted session of
the same name do not count: each names the session it was made for. Losing the notes loses nothing
but this memory.
"""

import json
import os
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

from streamkv.errors import StoreError
from streamkv.store import notes_path


@dataclass(frozen=True, slots=True)
class FeedNote:
    """A stretch of a file that a session has read, or was reading.

    Attributes:
        session: names one session, also among those that had the same name.
        file: the file's resolved path.
        first_char: where in the file the stretch begins.
        text_chars: characters that the session had accepted before it.
        num_chars: length of the stretch; `None` while it is being read.
        digest: of the file up to the end of the stretch; empty while it is being read.
    """

    session: str
    file: str
    first_char: int
    text_chars: int
    num_chars: int | None = None
    digest: str = ""


class FeedNotes:
    """The notes of one session.

    Args:
        path: of the notes.
        session: names the session that they are for.
    """

    def __init__(self, path: Path, session: str) -> None:
        self._path = path
        self.session = session

    def newest(self, file: Path) -> FeedNote | None:
        """The newest note of `file`, if there is one.

        Raises:
            StoreError: the notes cannot be read.
        """
        found = None
        for line in self._lines():
            try:
                note = FeedNote(**json.loads(line))
            except (ValueError, TypeError):
                continue  # torn by a kill, or of another version
            if note.session == self.session and note.file == str(file):
                found = note
        return found

    def write(self, note: FeedNote) -> None:
        """Add a note.

        Raises:
            StoreError: it cannot be written.
        """
        try:
            self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with open(self._path, "a", encoding="utf-8") as file:
                file.write("\n" + json.dumps(asdict(note)))
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise StoreError(
                f"{self._path}: cannot be written ({error.strerror}). Free space there, or make it "
                "writable."
            ) from error

    def _lines(self) -> list[str]:
        try:
            return self._path.read_text("utf-8", errors="replace").splitlines()
        except FileNotFoundError:
            return []
        except OSError as error:
            raise StoreError(f"{self._path}: cannot be read ({error.strerror}).") from error


def copy_notes(store: Path, name: str, other: str) -> None:
    """Give a session the notes of another one, in place of any that an earlier session left.

    Raises:
        StoreError: they cannot be read or written.
    """
    source, target = notes_path(store, name), notes_path(store, other)
    try:
        if source.exists():
            shutil.copyfile(source, target)
        else:
            target.unlink(missing_ok=True)
    except OSError as error:
        raise StoreError(
            f"{target}: cannot be written ({error.strerror}). Without it a file that was read "
            "before is read once more."
        ) from error
