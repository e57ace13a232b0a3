import errno
from pathlib import Path

import pytest

from streamkv.errors import StoreError
from streamkv.tiers.store_files import (
    BALLAST_BYTES,
    Ballast,
    allocate_lock_file,
    prepare_directory,
    sync_path,
)


def test_a_directory_is_made_for_its_owner_only(tmp_path: Path) -> None:
    prepare_directory(tmp_path / "a" / "store")
    assert (tmp_path / "a" / "store").stat().st_mode & 0o777 == 0o700
    prepare_directory(tmp_path / "a" / "store")


def test_a_directory_that_cannot_be_made_is_refused_with_a_remedy(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match=r"store='.*/file/store': .*Use another --store"):
        prepare_directory(tmp_path / "file" / "store")
    with pytest.raises(StoreError, match=r"store='.*/file'"):
        prepare_directory(tmp_path / "file")
    with pytest.raises(StoreError):
        prepare_directory(Path("/proc/streamkv"))


def test_the_lock_file_gets_its_space_once(tmp_path: Path) -> None:
    allocate_lock_file(tmp_path)
    file = tmp_path / "lock.mdb"
    assert file.stat().st_size == 128 << 10
    assert file.stat().st_blocks * 512 >= 128 << 10
    assert file.stat().st_mode & 0o777 == 0o600
    file.write_bytes(b"x" * 65664)
    allocate_lock_file(tmp_path)
    assert file.read_bytes() == b"x" * 65664


def test_ballast_takes_space_and_gives_it_back(tmp_path: Path) -> None:
    ballast = Ballast(tmp_path)
    ballast.hold()
    ballast.hold()
    file = tmp_path / "reserve"
    assert file.stat().st_size == BALLAST_BYTES
    assert file.stat().st_blocks * 512 >= BALLAST_BYTES
    assert file.stat().st_mode & 0o777 == 0o600
    ballast.release()
    ballast.release()
    assert not file.exists()


def test_ballast_without_a_place_is_no_error(tmp_path: Path) -> None:
    Ballast(tmp_path / "missing").hold()
    Ballast(tmp_path / "missing").release()


def test_files_and_directories_are_synced(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    sync_path(tmp_path / "file")
    sync_path(tmp_path)
    with pytest.raises(OSError) as caught:
        sync_path(tmp_path / "missing")
    assert caught.value.errno == errno.ENOENT
