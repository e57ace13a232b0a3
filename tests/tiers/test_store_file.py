from pathlib import Path

import pytest

from streamkv.errors import StoreError, StoreFullError
from streamkv.tiers.ssd import LmdbFile
from streamkv.tiers.store_file import NoRoomError, StoreFile, StoreReadError


def open_file(path: Path) -> StoreFile:
    return LmdbFile(path, 1 << 20)


def test_lmdb_is_such_a_file(tmp_path: Path) -> None:
    file = open_file(tmp_path)
    assert file.path == tmp_path
    assert file.num_pages() * file.page_bytes <= 1 << 20
    file.commit(lambda txn: txn.put(b"a", b"1"))
    file.sync()
    file.forget_dead_readers()
    with file.read() as txn:
        assert bytes(txn.get(b"a")) == b"1"
    file.close()


@pytest.mark.parametrize("on_disk", [True, False])
def test_no_room_tells_where_and_is_a_full_store(on_disk: bool) -> None:
    error = NoRoomError("no room", on_disk=on_disk)
    assert isinstance(error, StoreFullError)
    assert error.on_disk is on_disk
    assert issubclass(StoreReadError, StoreError)
