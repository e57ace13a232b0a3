"""Which records a store gives up: the oldest that no session's resume needs.

Invariant: a key named by any manifest, or part of the write that asks for room, is never chosen.
The cost of a choice does not grow with locked records already passed over. Pure bookkeeping: no
LMDB, no bytes.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from streamkv.tiers.spec import BlockKey
from streamkv.tiers.store_tables import OrderRow


@dataclass(frozen=True, slots=True)
class Victims:
    """What to remove.

    Attributes:
        rows: records to remove, oldest first.
        num_pages: pages of their pieces.
        scanned_to: every record of a smaller sequence number is removed or locked.
    """

    rows: tuple[OrderRow, ...]
    num_pages: int
    scanned_to: int


class Eviction:
    """Locks by manifest, and the choice of victims.

    Attributes:
        manifests: keys that each session's resume needs.
    """

    def __init__(self, manifests: dict[str, tuple[BlockKey, ...]]) -> None:
        self.manifests = dict(manifests)
        self._ref_counts = Counter(key for keys in manifests.values() for key in set(keys))
        self._scan_from = 0

    @property
    def scan_from(self) -> int:
        """Sequence number from which unlocked records may be found."""
        return self._scan_from

    def is_locked(self, key: BlockKey) -> bool:
        """Whether a manifest names `key`."""
        return key in self._ref_counts

    def choose(
        self,
        rows: Iterable[OrderRow],
        num_pages: int,
        piece_pages: int,
        protected: Collection[BlockKey],
    ) -> Victims:
        """The oldest unlocked of `rows` (from `scan_from` on) that together hold `num_pages`.

        The victims hold fewer pages if all others are locked or protected.
        """
        chosen: list[OrderRow] = []
        pages, scanned_to = 0, self._scan_from
        passed_protected = False
        for row in rows:
            if pages >= num_pages:
                break
            locked = self.is_locked(row.key)
            if not locked and row.key not in protected:
                chosen.append(row)
                pages += row.num_pieces * piece_pages
            elif not locked:
                passed_protected = True
            if not passed_protected:
                scanned_to = row.sequence + 1
        return Victims(tuple(chosen), pages, scanned_to)

    def removed(self, victims: Victims) -> None:
        """Remember, once the removal is committed, how far records were looked through."""
        self._scan_from = victims.scanned_to

    def released_by(self, session: str, keys: Sequence[BlockKey]) -> list[BlockKey]:
        """Keys that nothing would lock any more if `keys` became the manifest of `session`."""
        dropped = set(self.manifests.get(session, ())) - set(keys)
        return [key for key in dropped if self._ref_counts[key] == 1]

    def replace(self, session: str, keys: Sequence[BlockKey], oldest_released: int | None) -> None:
        """Make `keys` the manifest of `session`; none forgets it.

        Args:
            oldest_released: smallest sequence number of the records that this releases.
        """
        for key in set(self.manifests.pop(session, ())):
            self._ref_counts[key] -= 1
            if not self._ref_counts[key]:
                del self._ref_counts[key]
        if keys:
            self.manifests[session] = tuple(keys)
            self._ref_counts.update(set(keys))
        if oldest_released is not None:
            self._scan_from = min(self._scan_from, oldest_released)
