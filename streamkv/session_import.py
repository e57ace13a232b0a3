"""Making a session of an exported one, in another store or under another name.

    1  the file is read to its end, and nothing is made if anything in it is wrong
    2  its journal lies in an unfinished file; the blocks that it names get new names
    3  blocks are stored, locked from the first on by the manifest of the session to be
    4  digests, then the journal: with it there is a session

The session gets a salt of its own, so that what came in the file is shown to no other session,
whoever made it; only if a tenant is named do its blocks become that tenant's, who so trusts the
file. Blocks of a prompt that was shared with all come in under the session's own salt, too.

Invariant: an import that raised, or was killed, leaves no session; what a kill leaves besides goes
when the store is opened next (`store_cleaning`). Memory is bounded by a few blocks, and some 200
bytes for each block that the stream ever had.
"""

import contextlib
import fcntl
import os
import secrets
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO

from streamkv import journal_file
from streamkv.deletion import created_window
from streamkv.digest_file import rename_digests
from streamkv.errors import InputError, JournalError, StoreError, StoreFormatError
from streamkv.export_format import BadExportError, ExportKind, ExportReader
from streamkv.journal import Journal
from streamkv.journal_frames import HEADER_SEED, MAGIC, encode_frame, frame_crc
from streamkv.journal_records import SessionHeader, encode_record
from streamkv.rekeying import new_names, renamed
from streamkv.session_copy import read_snapshot
from streamkv.sharing import salting_of
from streamkv.store import delete_digests, digests_path, journal_path
from streamkv.stream_keys import StreamKeys
from streamkv.tiers.codec import Bytes
from streamkv.tiers.keys import SALT_BYTES, Salting, tenant_salt
from streamkv.tiers.spec import BlockKey
from streamkv.tiers.ssd import SsdTier

WRITE_BYTES = 16 << 20
"""Of blocks that are written at once."""

_PARTS_BYTES = 1 << 20

OnImport = Callable[[int, int], object]
"""Called with bytes of the file done so far, and with all there are; it is read twice."""

Root = Callable[[Salting], BlockKey]
"""Root of the keys of a stream of the engine's model, by where its salt enters."""


@dataclass(frozen=True, slots=True)
class SessionImport:
    """What was imported.

    Attributes:
        name: of the session.
        num_tokens: tokens of its stream.
        text_chars: characters of text that it has accepted.
        num_blocks: blocks that came with it.
        num_unknown: blocks of the file that its journal does not name; they were left out.
    """

    name: str
    num_tokens: int
    text_chars: int
    num_blocks: int
    num_unknown: int


@dataclass(frozen=True, slots=True)
class _Checked:
    """What is known of a file that was read to its end."""

    name: str
    keys: list[BlockKey]
    num_bytes: int


class Importer:
    """Brings one file into one store.

    Args:
        path: the file.
        store: directory of the store.
        blocks: its ssd tier.
        root_of: makes the roots of keys.
        on_progress: called now and then.

    Raises:
        InputError: the file is missing, damaged, no export, or of another model.
    """

    def __init__(
        self,
        path: Path,
        store: Path,
        blocks: SsdTier,
        root_of: Root,
        on_progress: OnImport | None = None,
    ) -> None:
        self._path = path
        self._store = store
        self._blocks = blocks
        self._root_of = root_of
        self._on_progress = on_progress or (lambda _done, _total: None)
        self._checked = self._check()

    @property
    def name(self) -> str:
        """Name of the session that was exported."""
        return self._checked.name

    def run(self, name: str, tenant: str | None, check: Callable[[Journal], None]) -> SessionImport:
        """Make the session `name` of the file.

        Args:
            name: valid, and of no session that is there.
            tenant: whose it will be; `None`: nobody's.
            check: raises if the session that the journal tells of is not wanted.

        Raises:
            InputError: the file changed meanwhile, or its journal is damaged.
            StoreFullError: no room for its blocks.
            JournalError, StoreError: the store cannot be written.
        """
        with _unfinished(self._store / "sessions") as spool, contextlib.ExitStack() as undo:
            undo.callback(delete_digests, self._store, name)
            arrival = _Arrival(name, tenant, check, self._blocks, self._root_of)
            undo.callback(arrival.undo, journal_path(self._store, name))
            with self._open() as (file, reader), self._digests(name) as digests:
                for frame in reader.frames():
                    if frame.kind is ExportKind.JOURNAL:
                        _write(spool, frame.payload)
                    elif frame.kind is ExportKind.DIGESTS:
                        _write(digests, frame.payload)
                    else:
                        arrival.begin(spool, self._checked.keys)
                        arrival.take(reader.key_of(frame), reader.block_of(frame))
                    self._on_progress(self._checked.num_bytes + file.tell(), self._both)
                arrival.begin(spool, self._checked.keys)
            arrival.finish()
            self._rename_digests(name, arrival.names)
            arrival.appear(journal_path(self._store, name))
            undo.pop_all()
        return arrival.result

    @property
    def _both(self) -> int:
        return 2 * self._checked.num_bytes

    def _check(self) -> _Checked:
        """Read the whole file, so that nothing is begun with a damaged one."""
        keys = []
        with self._open() as (file, reader):
            self._check_model(reader)
            num_bytes = os.fstat(file.fileno()).st_size
            for frame in reader.frames():
                if frame.kind is ExportKind.BLOCK:
                    keys.append(reader.key_of(frame))
                self._on_progress(file.tell(), 2 * num_bytes)
            return _Checked(reader.header.name, keys, num_bytes)

    def _check_model(self, reader: ExportReader) -> None:
        theirs, ours = reader.header, self._blocks.stored_format
        if theirs.weights != ours.identity.weights.hex():
            weights = ours.identity.weights.hex()[:16]
            raise self._refused(
                f"of model {theirs.model} (weights {theirs.weights[:16]}), and this engine has "
                f"{ours.identity.model} (weights {weights})",
                "Import it with the model that it was made with.",
            )
        if theirs.spec != ours.spec:
            raise self._refused(
                f"of KV layout {theirs.spec}, and this engine has {ours.spec}",
                "Import it with the dtype that it was made with.",
            )

    @contextlib.contextmanager
    def _open(self) -> Iterator[tuple[BinaryIO, ExportReader]]:
        try:
            with open(self._path, "rb") as file:
                yield file, ExportReader(file)
        except BadExportError as error:
            remedy = "Export the session again, or use another copy of the file."
            raise self._refused(str(error), remedy) from error
        except OSError as error:
            problem = f"cannot be read ({error.strerror})"
            raise self._refused(problem, "Check the path, its rights and the disk.") from error

    @contextlib.contextmanager
    def _digests(self, name: str) -> Iterator[BinaryIO]:
        path = digests_path(self._store, name)
        try:
            with open(path, "wb", opener=_private) as file:
                yield file
                is_empty = file.tell() == 0
            if is_empty:
                delete_digests(self._store, name)
        except OSError as error:
            raise _cannot_write(path, error) from error

    def _rename_digests(self, name: str, names: Mapping[BlockKey, BlockKey]) -> None:
        path = digests_path(self._store, name)
        try:
            if path.exists() and rename_digests(path, names) == 0:
                delete_digests(self._store, name)
        except OSError as error:
            raise _cannot_write(path, error) from error

    def _refused(self, problem: str, remedy: str) -> InputError:
        return InputError("file", str(self._path), problem, remedy)


class _Arrival:
    """Blocks and journal of a session that is being made."""

    def __init__(
        self,
        name: str,
        tenant: str | None,
        check: Callable[[Journal], None],
        blocks: SsdTier,
        root_of: Root,
    ) -> None:
        self._name = name
        self._tenant = tenant
        self._check = check
        self._blocks = blocks
        self._root_of = root_of
        self._journal: Journal | None = None
        self._needed: list[BlockKey] = []
        self._written: list[BlockKey] = []
        self._batch: list[tuple[BlockKey, Bytes]] = []
        self._num_blocks = self._num_unknown = 0
        self.names: dict[BlockKey, BlockKey] = {}

    def begin(self, spool: BinaryIO, keys: list[BlockKey]) -> None:
        """The journal is whole: read it, and lock the blocks that will come."""
        if self._journal is not None:
            return
        path = Path(spool.name)
        try:
            spool.flush()
            journal = self._journal = Journal.read_beside(path)
            self._needed = read_snapshot(path).keys
        except OSError as error:
            raise _cannot_write(path, error) from error
        except (JournalError, StoreFormatError) as error:
            raise BadExportError(f"its journal cannot be read ({error})") from error
        if journal.header.weights != self._blocks.stored_format.identity.weights.hex():
            raise BadExportError("its journal is of other weights")
        self._check(journal)
        self.header = _new_header(journal.header, self._tenant)
        size = self._blocks.spec.block_size
        old, new = (self._keys(header, size) for header in (journal.header, self.header))
        self._root = new.root
        self.names = new_names(journal.scan(), old, new, self._name)
        self._blocks.set_manifest(self._name, [self.names[k] for k in keys if k in self.names])

    def take(self, key: BlockKey, block: Bytes) -> None:
        """A block of the file."""
        named = self.names.get(key)
        if named is None:
            self._num_unknown += 1
            return
        self._num_blocks += 1
        if not self._blocks.contains(named):
            self._written.append(named)
            self._batch.append((named, block))
        if len(self._batch) * block.size >= WRITE_BYTES:
            self._write()

    def finish(self) -> None:
        """All blocks have come: make them last, and keep those that a resume needs."""
        self._write()
        needed = [self.names[key] for key in self._needed if key in self.names]
        self._blocks.set_manifest(self._name, needed)
        self._blocks.sync()

    def appear(self, path: Path) -> None:
        """Make the journal: there is a session now."""
        assert self._journal is not None
        parts = _parts(self._journal, self.header, self.names, self._root)
        os.close(journal_file.create_locked(path, parts))
        self._journal.close()

    def undo(self, path: Path) -> None:
        """Take back what was stored; if `path` is there, a session of this name came meanwhile."""
        if self._journal is not None:
            self._journal.close()
        with contextlib.suppress(StoreError):
            if not path.exists():
                self._blocks.set_manifest(self._name, [])
            self._blocks.delete(self._written)

    @property
    def result(self) -> SessionImport:
        """What has come."""
        assert self._journal is not None
        state = self._journal.state
        place = (state.num_tokens, state.text_chars)
        return SessionImport(self._name, *place, self._num_blocks, self._num_unknown)

    def _keys(self, header: SessionHeader, block_size: int) -> StreamKeys:
        salting = salting_of(header, block_size)
        return StreamKeys(self._root_of(salting), block_size, created_window(header), salting)

    def _write(self) -> None:
        self._blocks.write(self._batch)
        self._batch = []


def _new_header(header: SessionHeader, tenant: str | None) -> SessionHeader:
    salt = secrets.token_bytes(SALT_BYTES) if tenant is None else tenant_salt(tenant)
    return replace(
        header, salt=salt.hex(), num_shared_tokens=0, origin=header.origin or header.salt
    )


def _parts(
    journal: Journal,
    header: SessionHeader,
    names: Mapping[BlockKey, BlockKey],
    root: BlockKey,
) -> Iterator[bytes]:
    """The bytes of the journal with its new header and the new names, in pieces."""
    first = encode_frame(*encode_record(header), len(MAGIC), HEADER_SEED)
    seed = frame_crc(first)
    part = bytearray(MAGIC + first)
    offset = len(part)
    for record in journal.scan():
        if isinstance(record, SessionHeader):
            continue
        frame = encode_frame(*encode_record(renamed(record, names, root)), offset, seed)
        part += frame
        offset += len(frame)
        if len(part) >= _PARTS_BYTES:
            yield bytes(part)
            part.clear()
    yield bytes(part)


@contextlib.contextmanager
def _unfinished(directory: Path) -> Iterator[BinaryIO]:
    """A file for the time of an import; one that a kill leaves is taken away at the next open."""
    try:
        fd, name = tempfile.mkstemp(prefix=journal_file.UNFINISHED, dir=directory)
    except OSError as error:
        raise _cannot_write(directory, error) from error
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # By its name, so that it can be read by it.
        with os.fdopen(fd, "wb"), open(name, "r+b") as file:
            yield file
    finally:
        with contextlib.suppress(OSError):
            os.unlink(name)


def _write(file: BinaryIO, content: bytes) -> None:
    try:
        file.write(content)
    except OSError as error:
        raise _cannot_write(Path(file.name), error) from error


def _private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_CLOEXEC, 0o600)


def _cannot_write(path: Path, error: OSError) -> StoreError:
    return StoreError(
        f"{path}: cannot be written ({error.strerror}). Free space there; nothing was imported."
    )
