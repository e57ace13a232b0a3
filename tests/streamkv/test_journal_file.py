import fcntl
import os
import signal
import stat
from pathlib import Path

import pytest

from streamkv import journal_file
from streamkv.errors import JournalError, SessionError


def hold_lock_until_killed(path: Path, ready: int) -> None:
    journal_file.open_locked(path)
    os.write(ready, b"locked")
    signal.pause()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "a.journal"


def test_a_created_file_is_private_whole_and_alone(path: Path) -> None:
    fd = journal_file.create_locked(path, b"content")
    os.close(fd)
    assert path.read_bytes() == b"content"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [entry.name for entry in path.parent.iterdir()] == ["a.journal"]


def test_an_existing_file_is_left_alone(path: Path) -> None:
    path.write_bytes(b"precious")
    with pytest.raises(JournalError, match="exists already"):
        journal_file.create_locked(path, b"other")
    assert path.read_bytes() == b"precious"
    assert [entry.name for entry in path.parent.iterdir()] == ["a.journal"]


def test_a_missing_directory_is_named(tmp_path: Path) -> None:
    with pytest.raises(JournalError, match=r"missing/a\.journal: cannot be created"):
        journal_file.create_locked(tmp_path / "missing" / "a.journal", b"")


def test_a_missing_file_and_a_directory_are_refused(path: Path) -> None:
    with pytest.raises(JournalError, match="no such journal"):
        journal_file.open_locked(path)
    with pytest.raises(JournalError, match="cannot be opened"):
        journal_file.open_locked(path.parent)


def test_a_created_file_is_locked_until_closed(path: Path) -> None:
    fd = journal_file.create_locked(path, b"")
    with pytest.raises(SessionError, match=rf"open already, in this process \({os.getpid()}\)"):
        journal_file.open_locked(path)
    os.close(fd)
    os.close(journal_file.open_locked(path))


def test_a_second_process_is_told_who_holds_the_lock(path: Path) -> None:
    os.close(journal_file.create_locked(path, b""))
    reader, writer = os.pipe()
    owner = os.fork()
    if owner == 0:
        try:
            hold_lock_until_killed(path, writer)
        finally:
            os._exit(1)
    assert os.read(reader, 6) == b"locked"
    with pytest.raises(SessionError, match=rf"in process {owner}\. Close it there"):
        journal_file.open_locked(path)
    os.kill(owner, signal.SIGKILL)
    os.waitpid(owner, 0)
    os.close(reader)
    os.close(writer)
    # The lock dies with its owner: no stale lock file to clean up.
    os.close(journal_file.open_locked(path))


def test_nobody_owns_a_free_lock(path: Path) -> None:
    fd = journal_file.create_locked(path, b"")
    fcntl.flock(fd, fcntl.LOCK_UN)
    assert journal_file.lock_owner(fd) is None
    os.close(fd)


def test_a_removed_file_is_gone_and_removing_it_again_is_fine(path: Path) -> None:
    os.close(journal_file.create_locked(path, b""))
    journal_file.remove(path)
    assert not path.exists()
    journal_file.remove(path)


def test_removing_below_a_missing_directory_is_an_error(path: Path) -> None:
    with pytest.raises(JournalError, match="cannot be deleted"):
        journal_file.remove(path / "below" / "x")
