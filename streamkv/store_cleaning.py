"""What belongs to no session any more, and is taken away.

    when a store is opened   blocks kept for sessions without a journal, digests without one,
                             journals that were being made when their process was killed
    when it is compacted     open blocks that no resume needs

Invariant: nothing that a session with a journal needs is touched. The caller holds the store's
lock. It knows neither models nor the insides of a journal.
"""

import fcntl
import logging
import os
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from streamkv import journal_file
from streamkv.names import DIGESTS_SUFFIX
from streamkv.tiers.keys import is_partial
from streamkv.tiers.ssd import SsdTier

_log = logging.getLogger(__name__)


def clean_store(sessions: Path, blocks: SsdTier, names: Collection[str]) -> None:
    """Take away what sessions left that are no more, or never came to be.

    Args:
        sessions: directory of journals and digests.
        blocks: the ssd tier, open.
        names: of all sessions that have a journal.

    Raises:
        StoreError: the ssd tier failed.
    """
    for session in blocks.manifests().keys() - set(names):
        _log.warning("%s: blocks kept for session %r, which is no more", blocks.path, session)
        blocks.delete_session(session)
    for path in sessions.glob("*" + DIGESTS_SUFFIX):
        if path.name.removesuffix(DIGESTS_SUFFIX) not in names:
            _delete(path)
    for path in sessions.glob(journal_file.UNFINISHED + "*"):
        _delete_unfinished(path)


def drop_superseded(blocks: SsdTier) -> int:
    """Delete the records of open blocks that no resume needs; returns how many there were."""
    doomed = [
        entry.key for entry in blocks.entries() if is_partial(entry.key) and not entry.sessions
    ]
    blocks.delete(doomed)
    return len(doomed)


def _delete_unfinished(path: Path) -> None:
    """Delete a file that is not being written: whoever writes one holds its lock."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return
    try:
        with suppress(OSError):
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _delete(path)
    finally:
        os.close(fd)


def _delete(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        _log.warning("%s: belongs to no session and cannot be deleted (%s)", path, error)
