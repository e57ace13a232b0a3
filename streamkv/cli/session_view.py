"""What can be said of a session from its journal alone, beside whoever writes it."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from streamkv.errors import JournalError, StoreFormatError
from streamkv.journal import Journal
from streamkv.journal_file import lock_owner
from streamkv.store import digests_path, journal_path, session_names


@dataclass(frozen=True, slots=True)
class SessionView:
    """A session at a glance.

    Attributes:
        name: its name.
        journal: the file.
        journal_bytes: size of the file.
        digest_bytes: size of the digests beside it; 0 without.
        changed_s: when it was last written, seconds since 1970 (UTC).
        owner: process that has it open, where the system tells; `None` if it sleeps.
        problem: why the journal cannot be read; empty if it can. Then the rest is zero.
        model: the model it belongs to.
        num_tokens: tokens in the stream.
        text_chars: characters of text accepted.
        window_size: newest tokens attended.
        num_sink_tokens: first tokens attended for ever, at creation.
        checkpoint_token_index: tokens whose KV a resume finds stored.
        created_s: seconds since 1970 (UTC).
        torn_bytes: bytes of an unfinished record at the end, which the next opener gives up.
        mode: how it attends.
        recall_blocks: that an engine must have room for to open it; 0 if it never recalled.
        session_tokens: most tokens that it may have; `None`: as the engine says.
        expire_after_s: seconds of sleep after which it is deleted; 0: never, `None`: as the engine
            says.
    """

    name: str
    journal: Path
    journal_bytes: int
    changed_s: float
    owner: int | None
    problem: str = ""
    model: str = ""
    num_tokens: int = 0
    text_chars: int = 0
    window_size: int = 0
    num_sink_tokens: int = 0
    checkpoint_token_index: int = 0
    created_s: float = 0.0
    torn_bytes: int = 0
    digest_bytes: int = 0
    mode: str = "window"
    recall_blocks: int = 0
    session_tokens: int | None = None
    expire_after_s: float | None = None

    def expires_s(self, otherwise_s: float | None) -> float | None:
        """When it will be deleted if it sleeps on, seconds since 1970 (UTC); `None`: never.

        Args:
            otherwise_s: seconds that sessions may sleep that say nothing of it.
        """
        after_s = otherwise_s if self.expire_after_s is None else self.expire_after_s or None
        return None if after_s is None or self.problem else self.changed_s + after_s


def view_sessions(store: Path) -> Iterator[SessionView]:
    """All sessions of a store, by name; one that is deleted meanwhile is left out."""
    for name in session_names(store):
        try:
            yield view_session(store, name)
        except FileNotFoundError:
            continue


def view_session(store: Path, name: str) -> SessionView:
    """One session. Damage is told in `problem`.

    Raises:
        FileNotFoundError: there is none of this name.
    """
    path = journal_path(store, name)
    status = path.stat()
    owner = file_owner(path)
    try:
        journal = Journal.read_beside(path)
    except (JournalError, StoreFormatError) as error:
        return SessionView(name, path, status.st_size, status.st_mtime, owner, problem=str(error))
    with journal:
        header, state = journal.header, journal.state
        stored, newest = state.last_checkpoint, state.recall.newest
        return SessionView(
            name=name,
            journal=path,
            journal_bytes=status.st_size,
            changed_s=status.st_mtime,
            owner=owner,
            model=header.model,
            num_tokens=state.num_tokens,
            text_chars=state.text_chars,
            window_size=header.window_size,
            num_sink_tokens=header.num_sink_tokens,
            checkpoint_token_index=stored.token_index if stored is not None else 0,
            created_s=header.created_s,
            torn_bytes=journal.torn_bytes,
            digest_bytes=_size(digests_path(store, name)),
            mode=newest.mode if newest is not None else "window",
            recall_blocks=state.recall.most_blocks,
            session_tokens=header.session_tokens,
            expire_after_s=header.expire_after_s,
        )


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def file_owner(path: Path) -> int | None:
    """Id of the process that holds the lock of a file, where the system tells."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        return lock_owner(fd)
    finally:
        os.close(fd)
