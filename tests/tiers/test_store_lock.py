import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from streamkv.errors import StoreError, StoreLockedError
from streamkv.tiers.store_lock import FileLock

HOLD = """
import sys
from pathlib import Path
from streamkv.tiers.store_lock import FileLock
lock = FileLock(Path(sys.argv[1]), shared=sys.argv[2] == "shared", remedy="Wait.")
print("held", flush=True)
sys.stdin.read()
"""


def holder(path: Path, kind: str) -> "subprocess.Popen[str]":
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(path), kind],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def test_another_process_is_named_with_host_and_remedy(tmp_path: Path) -> None:
    path = tmp_path / "owner.lock"
    with holder(path, "exclusive") as process:
        with pytest.raises(StoreLockedError) as caught:
            FileLock(path, remedy="Use another --store.")
        message = str(caught.value)
        assert f"is open in process {process.pid} on {socket.gethostname()} (since 2" in message
        assert message.endswith("Use another --store.")
        process.kill()
    FileLock(path, remedy="").close()


def test_this_process_is_refused_too(tmp_path: Path) -> None:
    lock = FileLock(tmp_path / "owner.lock", remedy="")
    with pytest.raises(StoreLockedError, match=f"process {os.getpid()} "):
        FileLock(tmp_path / "owner.lock", remedy="")
    lock.close()
    lock.close()
    FileLock(tmp_path / "owner.lock", remedy="").close()


def test_shared_holders_keep_an_exclusive_one_out(tmp_path: Path) -> None:
    path = tmp_path / "readers.lock"
    with holder(path, "shared") as process:
        FileLock(path, shared=True, remedy="").close()
        with pytest.raises(StoreLockedError, match="is open in another process"):
            FileLock(path, named=False, remedy="")
        process.kill()
    FileLock(path, named=False, remedy="").close()
    assert path.read_bytes() == b""


def test_the_file_is_for_its_owner_only(tmp_path: Path) -> None:
    FileLock(tmp_path / "owner.lock", remedy="").close()
    assert (tmp_path / "owner.lock").stat().st_mode & 0o777 == 0o600


def test_a_lock_that_cannot_be_made_is_a_store_error(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="cannot lock"):
        FileLock(tmp_path / "missing" / "owner.lock", remedy="")
