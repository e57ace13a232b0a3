"""Who may take how many blocks of the gpu pool. Pure; safe to use from several threads.

Room is promised before it is used, so that a session that grows cannot take what another one was
opened with. Invariant: what is promised to all owners together is at most the pool.
"""

import threading
from collections.abc import Hashable


class PoolRoom:
    """Blocks promised to owners.

    Args:
        num_blocks: of the pool.

    Attributes:
        num_blocks: as given.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._promised: dict[Hashable, int] = {}
        self._lock = threading.Lock()

    @property
    def num_free(self) -> int:
        """Blocks that nobody was promised."""
        with self._lock:
            return self.num_blocks - sum(self._promised.values())

    @property
    def owners(self) -> set[Hashable]:
        """Who was promised some."""
        with self._lock:
            return set(self._promised)

    def promised(self, owner: Hashable) -> int:
        """Blocks that an owner was promised."""
        with self._lock:
            return self._promised.get(owner, 0)

    def reserve(self, owner: Hashable, num_blocks: int) -> bool:
        """Promise an owner so many blocks, in place of what it was promised before.

        Returns False, and nothing has changed, if that is more than is left.
        """
        assert num_blocks >= 0
        with self._lock:
            others = sum(self._promised.values()) - self._promised.get(owner, 0)
            if others + num_blocks > self.num_blocks:
                return False
            self._promised[owner] = num_blocks
            return True

    def release(self, owner: Hashable) -> None:
        """An owner needs nothing any more."""
        with self._lock:
            self._promised.pop(owner, None)
