"""Writing one session into one file: to be kept, or imported into another store.

    journal, as far as it has come
    digests, if all blocks are wanted
    blocks of its newest checkpoint, its open block, and, if wanted, every older one that is stored

Invariant: the file appears under its name whole and durable, or not at all. The session is only
read, also while it is awake, in this process or another. Whose engine it is is not known here.
"""

import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Protocol

import numpy as np

from streamkv.errors import InputError, StoreError
from streamkv.export_format import PIECE_BYTES, ExportHeader, ExportKind, ExportWriter
from streamkv.journal import Journal
from streamkv.journal_file import sync_directory
from streamkv.names import validate_session_name
from streamkv.session_copy import Snapshot, blocks_are_missing, read_snapshot
from streamkv.store import digests_path, journal_path
from streamkv.tiers.codec import Bytes
from streamkv.tiers.spec import BlockKey, KVSpec
from streamkv.tiers.store_format import StoreFormat

MAX_ATTEMPTS = 10
"""Tries to read a checkpoint's blocks before newer ones replace them."""

OnExport = Callable[[int, int], object]
"""Called with blocks written so far, and with all there are."""


class Blocks(Protocol):
    """Where blocks are read: a store that is open for reading or writing."""

    def read(self, key: BlockKey, out: Bytes) -> bool:
        """Fill `out`, uint8 `[block_bytes]`. False: a miss, `out` is undefined."""


@dataclass(frozen=True, slots=True)
class SessionExport:
    """What was exported.

    Attributes:
        num_tokens: tokens of the stream.
        text_chars: characters of text that it has accepted.
        num_blocks: blocks in the file.
        num_absent: old blocks that were wanted and are not stored any more.
        num_bytes: of the file.
        needs_old: the session attends to old blocks, and they were not wanted.
    """

    num_tokens: int
    text_chars: int
    num_blocks: int
    num_absent: int
    num_bytes: int
    needs_old: bool


def export_session(
    store: Path,
    name: str,
    path: Path,
    blocks: Blocks,
    stored: StoreFormat,
    *,
    old_keys: Callable[[Journal], list[BlockKey]] | None = None,
    overwrite: bool = False,
    on_progress: OnExport | None = None,
) -> SessionExport:
    """Write the session `name` of a store into the file `path`.

    Args:
        store: directory of the store.
        blocks: its blocks.
        stored: what the store says of itself.
        old_keys: names of all blocks of a stream, for those that are to go along; `None`: only
            what a resume needs does, and no digests.
        overwrite: replace a file of this name.
        on_progress: called after each block.

    Raises:
        InputError: not a name of a session, or there is a file of this name.
        JournalError: there is no such session, or it cannot be read.
        StoreError: the file cannot be written, or blocks changed faster than they could be read.
    """
    validate_session_name(name)
    if path.exists() and not overwrite:
        raise _exists(path)
    source = journal_path(store, name)
    identity, has_all = stored.identity, old_keys is not None
    header = ExportHeader(
        name, identity.model, identity.weights.hex(), stored.spec, time.time(), has_all
    )
    for _ in range(MAX_ATTEMPTS):
        snapshot = read_snapshot(source, old_keys)
        try:
            with _appearing(path, overwrite) as file:
                writer = ExportWriter(file, header, stored.codec)
                _write_pieces(writer, ExportKind.JOURNAL, source, snapshot.num_bytes)
                if has_all:
                    _write_pieces(writer, ExportKind.DIGESTS, digests_path(store, name))
                num_copied = _copy_blocks(writer, blocks, snapshot, stored.spec, on_progress)
                writer.end()
                num_bytes = file.tell()
        except _Replaced as error:
            num_copied = error.num_copied
            continue
        return SessionExport(
            snapshot.num_tokens,
            snapshot.text_chars,
            num_copied,
            len(snapshot.keys) + len(snapshot.old_keys) - num_copied,
            num_bytes,
            needs_old=snapshot.attends_to_old and not has_all,
        )
    raise blocks_are_missing(source, len(snapshot.keys), num_copied)


class _Replaced(Exception):
    """A block of the checkpoint is not there any more: a newer one may have come."""

    def __init__(self, num_copied: int) -> None:
        super().__init__(num_copied)
        self.num_copied = num_copied


def _copy_blocks(
    writer: ExportWriter,
    blocks: Blocks,
    snapshot: Snapshot,
    spec: KVSpec,
    on_progress: OnExport | None,
) -> int:
    """Copy all blocks that are there, one in memory at a time; returns how many that were."""
    block = np.empty(spec.block_bytes, dtype=np.uint8)
    keys = [*snapshot.keys, *snapshot.old_keys]
    num_copied = 0
    for index, key in enumerate(keys):
        if blocks.read(key, block):
            writer.block(key, block)
            num_copied += 1
        elif index < len(snapshot.keys):
            raise _Replaced(num_copied)
        if on_progress is not None:
            on_progress(index + 1, len(keys))
    return num_copied


def _write_pieces(
    writer: ExportWriter, kind: ExportKind, path: Path, num_bytes: int | None = None
) -> None:
    """Write a file, or its first `num_bytes`; nothing if there is none."""
    try:
        file = open(path, "rb")  # noqa: SIM115 - closed below; a missing file is none
    except FileNotFoundError:
        return
    with file:
        left = num_bytes if num_bytes is not None else os.fstat(file.fileno()).st_size
        while left > 0 and (piece := file.read(min(left, PIECE_BYTES))):
            writer.piece(kind, piece)
            left -= len(piece)


@contextmanager
def _appearing(path: Path, overwrite: bool) -> Iterator[BinaryIO]:
    """A file to write, which appears as `path` at the end of the block; on an error, nothing does.

    Raises:
        InputError: there is a file of this name by now.
        StoreError: it cannot be written.
    """
    temporary = ""
    try:
        fd, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        with os.fdopen(fd, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        _name(temporary, path, overwrite)
    except FileExistsError as error:
        raise _exists(path) from error
    except OSError as error:
        raise StoreError(
            f"{path}: cannot be written ({error.strerror}). Its directory must exist, be writable "
            "and have room; nothing was exported."
        ) from error
    finally:
        if temporary:
            with suppress(OSError):
                os.unlink(temporary)


def _name(temporary: str, path: Path, overwrite: bool) -> None:
    if overwrite:
        os.replace(temporary, path)
    else:
        os.link(temporary, path)  # unlike a rename it never replaces a file
    sync_directory(path.parent)


def _exists(path: Path) -> InputError:
    remedy = "Use another name, or overwrite=True; on the command line --force."
    return InputError("file", str(path), "exists already", remedy)
