import errno
import os
import resource
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from streamkv.append_file import AppendFile
from streamkv.errors import JournalError
from streamkv.tiers.faults import inject


def open_file(path: Path) -> AppendFile:
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    return AppendFile(path, fd, os.fstat(fd).st_size)


@pytest.fixture
def file(tmp_path: Path) -> Iterator[AppendFile]:
    file = open_file(tmp_path / "file")
    yield file
    file.close()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A real file system of 64 KiB."""
    mount = tmp_path / "disk"
    mount.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(mount)], capture_output=True
    )
    if made.returncode != 0:
        pytest.skip("needs the right to mount a tmpfs")
    yield mount
    subprocess.run(["umount", str(mount)], check=True)


@contextmanager
def file_size_limit(num_bytes: int) -> Iterator[None]:
    """Let the system refuse, in this process, what lies behind `num_bytes` of any file."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def fail(number: int) -> Callable[[], None]:
    def action() -> None:
        raise OSError(number, os.strerror(number))

    return action


def test_appends_follow_each_other(file: AppendFile) -> None:
    file.append(b"one")
    file.append(b"two")
    assert file.end == 6
    assert file.path.read_bytes() == b"onetwo"


def test_what_lies_behind_the_end_stays_until_the_first_append(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"whole, torn and long")
    file = open_file(path)
    file.end = 5
    assert path.read_bytes() == b"whole, torn and long"
    file.append(b"!")
    assert path.read_bytes() == b"whole!"
    file.close()


def test_a_write_that_fails_at_once_leaves_the_file_as_it_was(file: AppendFile) -> None:
    file.append(b"one")
    with (
        inject("journal.write", fail(errno.ENOSPC)),
        pytest.raises(JournalError, match=r"No space left on device.*free space on the disk"),
    ):
        file.append(b"two")
    assert file.path.read_bytes() == b"one"
    file.append(b"three")
    assert file.path.read_bytes() == b"onethree"


def test_a_short_write_is_taken_back(file: AppendFile) -> None:
    file.append(b"12345")
    with file_size_limit(8), pytest.raises(JournalError, match="File too large"):
        file.append(b"abcdefgh")
    assert file.path.read_bytes() == b"12345"
    file.append(b"ABC")
    assert file.path.read_bytes() == b"12345ABC"


@pytest.mark.parametrize(
    ("failure", "seen", "left"),
    [
        (OSError(errno.EIO, "broken"), JournalError, b"12345"),
        (KeyboardInterrupt(), KeyboardInterrupt, b"12345left over"),
    ],
    ids=["failed", "interrupted"],
)
def test_a_write_that_stops_halfway_leaves_nothing_behind_the_next(
    file: AppendFile, failure: BaseException, seen: type[BaseException], left: bytes
) -> None:
    file.append(b"12345")

    def write_half_and_stop() -> None:
        os.pwrite(file.fd, b"left over", 5)
        raise failure

    with inject("journal.write", write_half_and_stop), pytest.raises(seen):
        file.append(b"left over and more")
    assert file.path.read_bytes() == left
    file.append(b"y")
    assert file.path.read_bytes() == b"12345y"


def test_a_full_disk_loses_nothing_and_is_forgotten_when_space_returns(small_disk: Path) -> None:
    file = open_file(small_disk / "file")
    ballast = small_disk / "ballast"
    ballast.write_bytes(bytes(40 << 10))
    accepted = 0
    record = bytes(range(200)) * 5
    with pytest.raises(JournalError, match="No space left on device"):
        while True:
            file.append(record)
            accepted += 1
    assert accepted > 4
    for _ in range(3):
        with pytest.raises(JournalError, match="No space left on device"):
            file.append(record * 9)
        assert file.path.stat().st_size == 1000 * accepted
    ballast.unlink()
    file.append(b"more")
    file.sync()
    assert file.path.read_bytes() == record * accepted + b"more"
    file.close()


def test_a_failed_sync_is_an_error_and_the_next_one_writes_all_of_it_again(
    file: AppendFile,
) -> None:
    file.append(b"synced")
    file.sync()
    file.append(b" and not")
    with (
        inject("journal.fsync", fail(errno.EIO)),
        pytest.raises(JournalError, match="cannot be made durable"),
    ):
        file.sync()
    # Stands for pages that the system dropped after the failure.
    file.append(b", at all")
    before = file.path.stat().st_mtime_ns
    file.sync()
    assert file.path.read_bytes() == b"synced and not, at all"
    assert file.path.stat().st_mtime_ns > before
    settled = file.path.stat().st_mtime_ns
    file.sync()
    assert file.path.stat().st_mtime_ns == settled


def test_a_file_of_several_copies_is_written_again_whole(file: AppendFile) -> None:
    content = bytes(range(256)) * 10_000
    file.append(content)
    with inject("journal.fsync", fail(errno.EIO)), pytest.raises(JournalError):
        file.sync()
    file.sync()
    assert file.path.read_bytes() == content


def test_a_file_that_was_deleted_is_not_called_durable(file: AppendFile) -> None:
    file.append(b"one")
    file.sync()
    file.path.unlink()
    file.append(b"two")
    for _ in range(2):
        with pytest.raises(JournalError, match="was deleted while it was open"):
            file.sync()
