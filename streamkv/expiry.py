"""Deleting sessions that have slept for too long.

A session sleeps since its journal was last written. Its own header says how long it may, else the
engine does. Looked for when an engine opens, and then at most once an hour.

Invariant: an open session is never deleted, and none is opened while it is being deleted; what
deleting spares is what `session.delete()` spares. This module knows no models.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import NamedTuple

from streamkv.errors import StreamKVError
from streamkv.journal import Journal, read_header
from streamkv.quotas import NEVER_S, expires_after
from streamkv.store import journal_path, session_names

EVERY_S = 3600.0
"""Between two looks."""

_POLL_S = 60.0

_log = logging.getLogger(__name__)


class Sleeper(NamedTuple):
    """A session by its journal.

    Attributes:
        name: of the session.
        slept_s: seconds since its journal was written.
        may_sleep_s: seconds after which it is deleted; `None`: never.
        is_kept: it was created to be kept for ever.
    """

    name: str
    slept_s: float
    may_sleep_s: float | None
    is_kept: bool

    @property
    def is_expired(self) -> bool:
        """Whether it has slept for too long."""
        return self.may_sleep_s is not None and self.slept_s > self.may_sleep_s


def sleepers(store: Path, otherwise_s: float | None, now_s: float) -> Iterator[Sleeper]:
    """Every session of a store whose journal can be read, the open ones included.

    Args:
        store: directory of the store; another process may have it open.
        otherwise_s: seconds that sessions may sleep that say nothing of it; `None`: any number.
        now_s: seconds since 1970 (UTC).
    """
    for name in session_names(store):
        sleeper = sleeper_of(store, name, otherwise_s, now_s)
        if sleeper is not None:
            yield sleeper


def sleeper_of(store: Path, name: str, otherwise_s: float | None, now_s: float) -> Sleeper | None:
    """One session; `None`: its journal cannot be read."""
    path = journal_path(store, name)
    try:
        slept_s = now_s - path.stat().st_mtime
        header = read_header(path)
    except (StreamKVError, OSError) as error:
        _log.warning("session %r is not looked at for expiry: %s", name, error)
        return None
    is_kept = header.expire_after_s == NEVER_S
    return Sleeper(name, slept_s, expires_after(header, otherwise_s), is_kept)


class Expiry:
    """Deletes what has expired in one engine's store.

    Args:
        store: its directory.
        otherwise_s: what counts for sessions that say nothing; `None`: they never expire.
        alone: a session's name to a context in which it is not open and cannot be opened; it gives
            whether that could be had.
        delete: deletes the session of an open journal.
        clock: seconds since 1970 (UTC); a test has its own.
    """

    def __init__(
        self,
        store: Path,
        otherwise_s: float | None,
        alone: Callable[[str], AbstractContextManager[bool]],
        delete: Callable[[str, Journal], None],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._store = store
        self._otherwise_s = otherwise_s
        self._alone = alone
        self._delete = delete
        self._clock = clock
        self._looked_s: float | None = None
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def look(self) -> list[str]:
        """Delete what has expired if the last look was an hour ago; returns names."""
        now_s = self._clock()
        # A clock that was set back does not end it.
        if self._looked_s is not None and 0 <= now_s - self._looked_s < EVERY_S:
            return []
        self._looked_s = now_s
        return self.expire()

    def expire(self, older_than_s: float | None = None) -> list[str]:
        """Delete what has expired now; returns names.

        Args:
            older_than_s: delete what has slept longer than this instead, but not what never
                expires.
        """
        deleted = []
        for sleeper in sleepers(self._store, self._otherwise_s, self._clock()):
            if is_due(sleeper, older_than_s) and self._delete_one(sleeper.name, older_than_s):
                deleted.append(sleeper.name)
        return deleted

    def start(self) -> None:
        """Look now and then, on a thread of its own, until `close`."""
        self._thread = threading.Thread(target=self._run, name="streamkv-expiry", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread; waits for the session that is being deleted."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(_POLL_S):
            try:
                self.look()
            except Exception:
                # Whatever it was, sessions go on; the next look is an hour away.
                _log.exception("sessions that have expired could not be looked for")

    def _delete_one(self, name: str, older_than_s: float | None) -> bool:
        """Delete a session unless it was opened, or has been awake, meanwhile."""
        with self._alone(name) as is_alone:
            path = journal_path(self._store, name)
            if self._stop.is_set() or not is_alone or not path.exists():
                return False
            again = sleeper_of(self._store, name, self._otherwise_s, self._clock())
            if again is None or not is_due(again, older_than_s):
                return False
            try:
                with Journal.open(path) as journal:
                    self._delete(name, journal)
            except StreamKVError as error:
                _log.warning("session %r has expired and cannot be deleted: %s", name, error)
                return False
        _log.info("session %r was deleted: it had slept for %.0f s", name, again.slept_s)
        return True


def is_due(sleeper: Sleeper, older_than_s: float | None) -> bool:
    """Whether a session is to be deleted, by its own time or by one that is given."""
    if older_than_s is None:
        return sleeper.is_expired
    return sleeper.slept_s > older_than_s and not sleeper.is_kept
