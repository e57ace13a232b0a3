"""What a store holds, counted."""

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from streamkv.cli.session_view import file_owner
from streamkv.errors import StoreError
from streamkv.session_copy import BlockSource
from streamkv.store import blocks_path
from streamkv.tiers.keys import is_partial
from streamkv.tiers.ssd import SsdReader, SsdTier, open_existing
from streamkv.tiers.store_files import DATA_FILE, OWNER_FILE
from streamkv.tiers.store_view import StoreEntry


@dataclass(frozen=True, slots=True)
class StoreSummary:
    """A store at a glance.

    Attributes:
        store: its directory.
        model: the model it belongs to.
        owner: process that has it open for writing, where the system tells.
        block_bytes: bytes of a block in memory.
        num_blocks: records, those of open blocks included.
        num_locked: records that the resume of some session needs.
        live_bytes: bytes of live pages.
        coded_bytes: bytes of the coded blocks.
        file_bytes: size of the file.
        limit_bytes: limit of the file, as its last writer set it.
        codecs: records by codec.
        sessions: locked records by session; one may count for several.
    """

    store: str
    model: str
    owner: int | None
    block_bytes: int
    num_blocks: int
    num_locked: int
    live_bytes: int
    coded_bytes: int
    file_bytes: int
    limit_bytes: int
    codecs: dict[str, int] = field(default_factory=dict)
    sessions: dict[str, int] = field(default_factory=dict)

    @property
    def ratio(self) -> float:
        """Bytes of the blocks over bytes of their coded form."""
        return self.num_blocks * self.block_bytes / self.coded_bytes if self.coded_bytes else 1.0


def open_reader(store: Path) -> SsdReader:
    """The blocks of a store, for reading beside its writer.

    Raises:
        StoreError: there is none, or it cannot be read.
    """
    _require_blocks(store)
    return SsdReader(blocks_path(store))


def open_source(store: Path) -> BlockSource:
    """The blocks of a store, to be read whole beside its writer.

    Raises:
        StoreError: there is none, or it cannot be read.
    """
    _require_blocks(store)
    return BlockSource(blocks_path(store))


def open_writer(store: Path) -> SsdTier:
    """The blocks of a store, for changing them.

    Raises:
        StoreError: there is none, or it cannot be written.
        StoreLockedError: another process has it; names the process.
    """
    _require_blocks(store)
    return open_existing(blocks_path(store))


def has_blocks(store: Path) -> bool:
    """Whether there is a file of blocks, whatever it holds."""
    return (blocks_path(store) / DATA_FILE).is_file()


def _require_blocks(store: Path) -> None:
    if not blocks_path(store).is_dir():
        raise StoreError(
            f"store={str(store)!r}: there is none. Give the --store or the --model of an engine "
            "that has run."
        )


def summarize_store(reader: SsdReader, store: Path) -> StoreSummary:
    """Count the records of a store; `store` is the directory that holds sessions too."""
    codecs: Counter[str] = Counter()
    sessions: Counter[str] = Counter()
    num_locked = coded_bytes = 0
    for entry in reader.entries():
        codecs[entry.codec] += 1
        sessions.update(entry.sessions)
        num_locked += bool(entry.sessions)
        coded_bytes += entry.coded_bytes
    return StoreSummary(
        store=str(store),
        model=reader.format.identity.model,
        owner=file_owner(reader.path / OWNER_FILE),
        block_bytes=reader.format.spec.block_bytes,
        num_blocks=codecs.total(),
        num_locked=num_locked,
        live_bytes=reader.usage().num_bytes,
        coded_bytes=coded_bytes,
        file_bytes=reader.file_bytes(),
        limit_bytes=reader.format.limit_bytes,
        codecs=dict(sorted(codecs.items())),
        sessions=dict(sorted(sessions.items())),
    )


def describe_entry(entry: StoreEntry) -> dict[str, Any]:
    """A record as a JSON object."""
    return {
        "key": entry.key.hex(),
        "kind": "partial" if is_partial(entry.key) else "block",
        "num_bytes": entry.num_bytes,
        "coded_bytes": entry.coded_bytes,
        "codec": entry.codec,
        "sessions": list(entry.sessions),
    }
