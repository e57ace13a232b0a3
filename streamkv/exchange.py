"""Sessions of one engine out into files, and in from them.

Invariant: nothing here touches an open session but to read its journal and its stored blocks; a
session that comes in is asleep. Names that are on their way, in or out for good, are known, so that
nobody opens a session of that name meanwhile.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from streamkv.deletion import created_window
from streamkv.errors import ConfigError, InputError, SessionError
from streamkv.journal import Journal
from streamkv.model import ModelAdapter
from streamkv.names import validate_session_name
from streamkv.session_deletion import delete_stored
from streamkv.session_export import OnExport, SessionExport, export_session
from streamkv.session_import import Importer, OnImport, SessionImport
from streamkv.sharing import Sharers, salting_of
from streamkv.store import Store, blocks_path, journal_path
from streamkv.stream_keys import StreamKeys
from streamkv.tiers.keys import Salting, root_key
from streamkv.tiers.manager import TierManager
from streamkv.tiers.spec import BlockKey


class Exchange:
    """Exports and imports sessions.

    Args:
        adapter: the engine's model.
        store: where sessions last; `None` if they do not.
        tiers: owner of the blocks.
        check: raises if a session of this name and journal may not come in.
    """

    def __init__(
        self,
        adapter: ModelAdapter,
        store: Store | None,
        tiers: TierManager,
        check: Callable[[str, Journal], None],
    ) -> None:
        self._adapter = adapter
        self._store = store
        self._tiers = tiers
        self._check = check
        self._lock = threading.Lock()
        self._arriving: set[str] = set()

    def export(
        self,
        name: str,
        path: str | Path,
        all_blocks: bool,
        overwrite: bool,
        on_progress: OnExport | None,
    ) -> SessionExport:
        """Write a session, open or asleep, into a file; errors as `export_session`."""
        store = self._require_store()
        if all_blocks:
            self._tiers.flush()
        return export_session(
            store.path,
            validate_session_name(name),
            _outside(Path(path).expanduser(), store),
            store.blocks,
            store.blocks.stored_format,
            old_keys=self._keys_of if all_blocks else None,
            overwrite=overwrite,
            on_progress=on_progress,
        )

    def bring(
        self,
        path: str | Path,
        name: str | None,
        tenant: str | None,
        on_progress: OnImport | None,
    ) -> SessionImport:
        """Make a session of an exported one; errors as `Importer`, and those of the check."""
        store = self._require_store()
        if name is not None:
            validate_session_name(name)
        Sharers(tenant)
        place = Path(path).expanduser()
        importer = Importer(place, store.path, store.blocks, self._root, on_progress)
        chosen = validate_session_name(name if name is not None else importer.name)
        with self._reserved(chosen, store):
            return importer.run(chosen, tenant, lambda journal: self._check(chosen, journal))

    @contextmanager
    def alone(self, name: str, is_open: Callable[[], bool]) -> Iterator[bool]:
        """A context in which nobody opens this session; whether it is not open already."""
        with self._lock:
            is_alone = name not in self._arriving and not is_open()
            if is_alone:
                self._arriving.add(name)
        try:
            yield is_alone
        finally:
            if is_alone:
                with self._lock:
                    self._arriving.discard(name)

    def delete(self, name: str, journal: Journal) -> None:
        """Delete a session that sleeps; errors as `delete_stored`."""
        spec = self._adapter.spec
        root = self._root(salting_of(journal.header, spec.block_size))
        delete_stored(name, journal, root, spec.block_size, self._require_store(), self._tiers)

    def require_not_arriving(self, name: str) -> None:
        """Raise `SessionError` if a session of this name is being imported or deleted."""
        with self._lock:
            if name in self._arriving:
                raise SessionError(
                    f"session {name!r} is being imported, or has expired and is being deleted. "
                    "Try again in a moment."
                )

    @contextmanager
    def _reserved(self, name: str, store: Store) -> Iterator[None]:
        with self._lock:
            if name in self._arriving or store.journal_path(name).exists():
                remedy = "Import it under another name, or delete that session first."
                raise InputError("name", name, "there is a session of this name", remedy)
            self._arriving.add(name)
        try:
            yield
        finally:
            with self._lock:
                self._arriving.discard(name)

    def _require_store(self) -> Store:
        if self._store is None:
            remedy = "Open the engine with a store."
            raise ConfigError("store", None, "sessions without one are not kept", remedy)
        return self._store

    def _root(self, salting: Salting) -> BlockKey:
        adapter = self._adapter
        salt = salting.root_salt
        return root_key(adapter.fingerprint, adapter.spec, adapter.rope_identity, salt)

    def _keys_of(self, journal: Journal) -> list[BlockKey]:
        size = self._adapter.spec.block_size
        salting = salting_of(journal.header, size)
        window = created_window(journal.header)
        keys = StreamKeys(self._root(salting), size, window, salting)
        keys.read(journal.scan())
        return keys.chain


def _outside(path: Path, store: Store) -> Path:
    """The path of an export, which is no place of the store's own files."""
    for own in (blocks_path(store.path), journal_path(store.path, "any").parent):
        if path.resolve().is_relative_to(own.resolve()):
            remedy = f"Use a path outside {own}."
            problem = "lies in the store, whose files are its own"
            raise InputError("path", str(path), problem, remedy)
    return path
