"""Where an engine keeps what outlives it: one directory with blocks and journals.

    STORE/blocks/            the ssd tier (LMDB), owner-only
    STORE/sessions/*.journal one journal per session
    STORE/sessions/*.digests beside it, if the session can recall: digests of its blocks
    STORE/feeds/*.jsonl      which files a session was fed by the command line
    STORE/summaries/*.jsonl  what a summary has come to; its session is called summary-*

One store belongs to one model with its weights; the ssd tier's own header says which.
"""

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self

from streamkv.config import EngineConfig, parse_size
from streamkv.errors import StoreError
from streamkv.names import DIGESTS_SUFFIX, JOURNAL_SUFFIX
from streamkv.store_cleaning import clean_store
from streamkv.tiers.ssd import SsdTier
from streamkv.tiers.store_format import StoreIdentity
from streamkv.tiers.store_tier import require_free

if TYPE_CHECKING:  # a store is listed and cleaned without torch
    from streamkv.model import ModelAdapter

_SUMMARY_PREFIX = "summary-"


@dataclass(frozen=True, slots=True)
class Store:
    """An open store.

    Attributes:
        path: its directory.
        blocks: the ssd tier.
    """

    path: Path
    blocks: SsdTier

    @staticmethod
    def require_free(config: EngineConfig) -> None:
        """Raise if another process has the store that `config` names, before a model is loaded.

        Raises:
            StoreError: as `open`, of a store in use.
        """
        if config.store is not None:
            require_free(blocks_path(Path(config.store).expanduser()))

    @classmethod
    def open(cls, config: EngineConfig, model: "ModelAdapter") -> "Self | None":
        """Open the store that `config` names, making it if it is missing; `None` if it names none.

        Raises:
            StoreError: it cannot be used, or belongs to another process, model or format.
        """
        if config.store is None:
            return None
        path = Path(config.store).expanduser()
        try:
            (path / "sessions").mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise StoreError(
                f"store={str(path)!r}: cannot be made ({error.strerror}). "
                "Use a directory that you may write."
            ) from error
        if not os.access(path / "sessions", os.W_OK | os.X_OK):
            raise StoreError(
                f"store={str(path)!r}: cannot be written. Use a directory that you may write."
            )
        blocks = SsdTier(
            blocks_path(path),
            model.spec,
            StoreIdentity(model.name, model.fingerprint),
            limit_bytes=parse_size("ssd_bytes", config.ssd_bytes),
            codec=config.codec,
        )
        try:
            clean_store(path / "sessions", blocks, session_names(path))
        except BaseException:
            blocks.close()
            raise
        return cls(path, blocks)

    def journal_path(self, name: str) -> Path:
        """Where the journal of a session lies, or would."""
        return journal_path(self.path, name)

    def digests_path(self, name: str) -> Path:
        """Where the digests of a session lie, or would."""
        return digests_path(self.path, name)

    def session_names(self) -> list[str]:
        """Names of all sessions that have a journal, sorted."""
        return session_names(self.path)

    def close(self) -> None:
        """Close the ssd tier."""
        self.blocks.close()


def blocks_path(store: Path) -> Path:
    """Directory of the ssd tier of a store."""
    return store / "blocks"


def journal_path(store: Path, name: str) -> Path:
    """Where the journal of a session lies, or would."""
    return store / "sessions" / (name + JOURNAL_SUFFIX)


def digests_path(store: Path, name: str) -> Path:
    """Where the digests of a session lie, or would."""
    return store / "sessions" / (name + DIGESTS_SUFFIX)


def notes_path(store: Path, name: str) -> Path:
    """Where it is noted which files a session was fed."""
    return store / "feeds" / (name + ".jsonl")


def delete_digests(store: Path, name: str) -> None:
    """Delete the digests of a session, if it has any. A file that stays belongs to no session."""
    with suppress(OSError):
        digests_path(store, name).unlink(missing_ok=True)


def delete_companions(store: Path, name: str) -> None:
    """Delete what lies beside the journal of a session: digests, notes, what it was made for.

    Raises:
        StoreError: a file cannot be deleted.
    """
    paths = [digests_path(store, name), notes_path(store, name)]
    if name.startswith(_SUMMARY_PREFIX):
        paths.append(store / "summaries" / (name.removeprefix(_SUMMARY_PREFIX) + ".jsonl"))
    for path in paths:
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise StoreError(
                f"{path}: cannot be deleted ({error.strerror}), so session {name!r} is still "
                "there. Make its directory writable and delete the session again."
            ) from error


def session_names(store: Path) -> list[str]:
    """Names of the sessions kept in a store, sorted."""
    return sorted(
        path.name.removesuffix(JOURNAL_SUFFIX)
        for path in (store / "sessions").glob("*" + JOURNAL_SUFFIX)
    )
