"""Copying one session out of a store that may be open, and at work, in another process.

    source journal, as far as it has come   ->  the same bytes
    its newest CHECKPOINT (and CLOSED)      ->  the blocks that they name

Invariant: a copy that returned is a session that an engine resumes as it would have resumed the
original had it been killed at that moment; a copy that raised, or was killed, left no session. The
source is only read: no lock of its writer is taken. Old blocks and their digests stay behind: what
the original recalled is absent in the copy. It knows neither engines nor models.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from streamkv import journal_file
from streamkv.errors import JournalError, StoreError
from streamkv.journal import Journal
from streamkv.names import validate_session_name
from streamkv.store import blocks_path, journal_path
from streamkv.tiers.codec import Bytes
from streamkv.tiers.spec import BlockKey
from streamkv.tiers.ssd import SsdReader, SsdTier
from streamkv.tiers.store_blocks import READ_COUNTERS, BlockReader
from streamkv.tiers.store_format import StoreFormat
from streamkv.tiers.usage import Counters
from streamkv.window_blocks import WindowBlocks

MAX_ATTEMPTS = 10
"""Tries to read a checkpoint's blocks before newer ones replace them in the source."""


@dataclass(frozen=True, slots=True)
class SessionCopy:
    """What was copied.

    Attributes:
        num_tokens: tokens in the copy's stream.
        text_chars: characters of text that it has accepted.
        num_stored: of the tokens, those before its newest checkpoint; 0 without one.
        num_blocks: blocks copied.
        num_bytes: their bytes, decoded.
    """

    num_tokens: int
    text_chars: int
    num_stored: int
    num_blocks: int
    num_bytes: int


class Snapshot(NamedTuple):
    """A session as it stood when its journal was read.

    Attributes:
        num_bytes: of its journal; what comes later is appended behind them.
        num_tokens: tokens in its stream.
        text_chars: characters of text that it has accepted.
        num_stored: of the tokens, those before its newest checkpoint; 0 without one.
        keys: blocks that a resume needs: those of its newest checkpoint, and the open block.
        old_keys: of other blocks that were asked for.
        attends_to_old: it recalls old blocks, or attends to all of them.
    """

    num_bytes: int
    num_tokens: int
    text_chars: int
    num_stored: int
    keys: list[BlockKey]
    old_keys: list[BlockKey]
    attends_to_old: bool


class BlockSource(SsdReader):
    """A store beside its writer, from which whole blocks are read."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._blocks = BlockReader(self.format.spec, self._snapshot, Counters(READ_COUNTERS))

    def read(self, key: BlockKey, out: Bytes) -> bool:
        """Fill `out`, uint8 `[block_bytes]`. False: a miss, `out` is undefined."""
        return self._blocks.read(key, range(self.format.spec.num_layers), out)

    def read_all(self, keys: list[BlockKey]) -> list[tuple[BlockKey, Bytes]]:
        """The blocks of those `keys` that are there, up to the first that is not."""
        found = []
        for key in keys:
            block = np.empty(self.format.spec.block_bytes, dtype=np.uint8)
            if not self.read(key, block):
                break
            found.append((key, block))
        return found


def copy_session(source: Path, target: Path, name: str) -> SessionCopy:
    """Copy the session `name` of the store `source` into the store `target`.

    Args:
        source: a store; another process may be writing it, this one may not.
        target: a store of the same model, or a directory that is made.

    Raises:
        InputError: not a name of a session.
        JournalError: there is no such session, or `target` has one of that name already.
        StoreFormatError: `target` belongs to another model or layout.
        StoreError: a store cannot be read or written, or its blocks changed faster than they could
            be read.
    """
    path = journal_path(target, validate_session_name(name))
    if path.exists():
        raise JournalError(f"{path}: exists already. Copy into another store.")
    with BlockSource(blocks_path(source)) as blocks:
        snapshot, copied = _read_whole(journal_path(source, name), blocks)
        stored = blocks.format
    with open(journal_path(source, name), "rb") as file:
        content = file.read(snapshot.num_bytes)
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    _write_blocks(target, name, stored, copied)
    os.close(journal_file.create_locked(path, content))
    num_bytes = sum(block.size for _, block in copied)
    place = (snapshot.num_tokens, snapshot.text_chars, snapshot.num_stored)
    return SessionCopy(*place, len(copied), num_bytes)


def _read_whole(path: Path, blocks: BlockSource) -> tuple[Snapshot, list[tuple[BlockKey, Bytes]]]:
    """A journal and all blocks that it names: newer checkpoints replace those of older ones."""
    for _ in range(MAX_ATTEMPTS):
        snapshot = read_snapshot(path)
        found = blocks.read_all(snapshot.keys)
        if len(found) == len(snapshot.keys):
            return snapshot, found
    raise blocks_are_missing(path, len(snapshot.keys), len(found))


def blocks_are_missing(path: Path, num_blocks: int, num_read: int) -> StoreError:
    """The error for a journal whose checkpoint is not all there."""
    return StoreError(
        f"{path}: of the {num_blocks} blocks of its newest checkpoint only {num_read} "
        "can be read. Copy it while its session is idle, or copy the store's files."
    )


def read_snapshot(
    path: Path, old_keys: Callable[[Journal], list[BlockKey]] | None = None
) -> Snapshot:
    """Read a journal, which somebody may be writing, and what a resume needs by now.

    Args:
        path: of the journal.
        old_keys: names of all blocks of a stream, if others than those are asked for.

    Raises:
        JournalError, StoreFormatError: there is none, or it cannot be read.
    """
    with Journal.read_beside(path) as journal:
        state = journal.state
        keys: list[BlockKey] = []
        num_stored = 0
        if state.last_checkpoint is not None:
            num_stored = state.last_checkpoint.token_index
            window = WindowBlocks.decode(num_stored, state.last_checkpoint.digest)
            keys = [key for _, key in window.blocks]
        closed = state.last_closed
        if closed is not None and closed.partial_key and closed.token_index >= num_stored:
            keys.append(BlockKey(closed.partial_key))
        newest, needed = state.recall.newest, set(keys)
        return Snapshot(
            journal.num_bytes,
            state.num_tokens,
            state.text_chars,
            num_stored,
            keys,
            [key for key in old_keys(journal) if key not in needed] if old_keys else [],
            attends_to_old=newest is not None and newest.mode != "window",
        )


def _write_blocks(
    target: Path, name: str, stored: StoreFormat, copied: list[tuple[BlockKey, Bytes]]
) -> None:
    """Blocks first, then the manifest that keeps them: the journal comes last of all."""
    with SsdTier(
        blocks_path(target),
        stored.spec,
        stored.identity,
        limit_bytes=stored.limit_bytes,
        codec=stored.codec,
    ) as tier:
        tier.write(copied)
        tier.set_manifest(name, [key for key, _ in copied])
        tier.sync()
