"""Deleting a session that is stored: its blocks, what lies beside its journal, the journal.

Invariant: the journal goes last, because without it nobody knows what else there was; until then
the session is there, and may be deleted again.
"""

from collections.abc import Iterator
from pathlib import Path

from streamkv.deletion import keys_to_delete
from streamkv.errors import StoreError
from streamkv.journal import Journal
from streamkv.store import Store, delete_companions
from streamkv.tiers.manager import TierManager
from streamkv.tiers.spec import BlockKey


def delete_stored(
    name: str, journal: Journal, root: BlockKey, block_size: int, store: Store, tiers: TierManager
) -> None:
    """Delete a session; none of its blocks is live.

    Args:
        name: of the session.
        journal: open, and locked by that.
        root: root of its chain of keys.
        block_size: tokens per block.
        store: where it is kept.
        tiers: owner of the blocks.

    Raises:
        StoreError: blocks or files cannot be deleted. The session is still there.
        JournalError: the journal cannot be deleted; likewise.
    """
    keys = keys_to_delete(journal, root, block_size, _other_journals(store, name))
    if not tiers.forget(name, keys.doomed, spared=keys.spared).wait():
        raise StoreError(
            f"session {name!r}: its blocks cannot be deleted, because the ssd tier failed, so it "
            "is still there. Open the engine again, then delete it."
        )
    delete_companions(store.path, name)
    journal.delete()


def _other_journals(store: Store, name: str) -> Iterator[Path]:
    for other in store.session_names():
        if other != name:
            yield store.journal_path(other)
