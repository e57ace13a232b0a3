"""The cache directory: converted models, and short notes about weights that are dear to compute.

Whatever appears under its final name is whole: it is made beside it and renamed. Everything here
can be deleted at any time and is made again. This module knows nothing of models.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from streamkv.errors import ModelError

MAX_NOTES = 256
"""Notes kept, newest first; one that is gone is computed again."""


def cache_root() -> Path:
    """`STREAMKV_CACHE`, else `XDG_CACHE_HOME/streamkv`, else `~/.cache/streamkv`."""
    chosen = os.environ.get("STREAMKV_CACHE")
    if chosen:
        return Path(chosen).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base).expanduser() if base else Path.home() / ".cache") / "streamkv"


def file_stamp(paths: Iterable[Path]) -> str:
    """Hex name of these files as they are now: of path, size, mtime and inode of each.

    Raises:
        ModelError: a file is gone or cannot be read.
    """
    digest = hashlib.blake2b(digest_size=12)
    for path in sorted(path.resolve() for path in paths):
        try:
            status = path.stat()
        except OSError as error:
            raise ModelError(f"{path}: cannot be read ({error}). Fetch the model again.") from error
        line = f"{path}\0{status.st_size}\0{status.st_mtime_ns}\0{status.st_ino}\n"
        digest.update(line.encode(errors="surrogateescape"))
    return digest.hexdigest()


def build_directory(target: Path, build: Callable[[Path], None]) -> Path:
    """`target`, filled by `build(temporary directory)` if it is not there yet.

    Of several processes one builds and the others wait for it. A process killed in the middle
    leaves nothing under the final name, and the next one removes its remains.

    Raises:
        ModelError: the cache directory cannot be written.
    """
    if target.is_dir():
        return target
    with _cache_errors(target), _lock(target.with_name(target.name + ".lock")):
        if not target.is_dir():
            _remove_remains(target)
            made = Path(tempfile.mkdtemp(prefix=f".{target.name}.making-", dir=target.parent))
            try:
                build(made)
                _sync_tree(made)
                made.rename(target)
            except BaseException:
                shutil.rmtree(made, ignore_errors=True)
                raise
    return target


def read_note(name: str) -> Any | None:
    """The JSON value noted under `name`, or `None` when there is none, or none that can be read."""
    try:
        return json.loads(_note_path(name).read_text())
    except (OSError, ValueError):
        return None


def write_note(name: str, value: Any) -> None:
    """Note a JSON value. A cache that cannot be written is no error: the value is made again."""
    path = _note_path(name)
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        handle, made = tempfile.mkstemp(prefix=".note-", dir=path.parent)
        with os.fdopen(handle, "w") as file:
            json.dump(value, file)
        os.replace(made, path)
        _forget_old_notes(path.parent)


def _note_path(name: str) -> Path:
    return cache_root() / "notes" / f"{name}.json"


def _forget_old_notes(directory: Path) -> None:
    notes = sorted(directory.glob("*.json"), key=lambda note: note.stat().st_mtime_ns)
    for note in notes[:-MAX_NOTES]:
        note.unlink(missing_ok=True)


@contextlib.contextmanager
def _cache_errors(target: Path) -> Iterator[None]:
    try:
        target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        yield
    except OSError as error:
        raise ModelError(
            f"{target}: the cache directory cannot be written ({error}). "
            "Free space there, or set STREAMKV_CACHE to another directory."
        ) from error


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Hold the advisory lock of `path`; the kernel frees it when the process dies."""
    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _remove_remains(target: Path) -> None:
    for remains in target.parent.glob(f".{target.name}.making-*"):
        shutil.rmtree(remains, ignore_errors=True)


def _sync_tree(directory: Path) -> None:
    """Make the files durable before the rename does, so that a power cut leaves no empty ones."""
    for path in [*(path for path in directory.rglob("*") if path.is_file()), directory]:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
