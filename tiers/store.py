"""What a tier below the pools must offer: the ssd today, a remote one later.

Raw bytes cross this seam, never tensors. Invariant asked of an implementation: `read` fills `out`
with exactly what was written under the key, or returns False; and a key in a manifest is neither
evicted nor deleted. Failures are raised as StoreError or OSError. This module implements nothing.
"""

from collections.abc import Collection, Sequence
from typing import Protocol

from streamkv.tiers.host_memory import Bytes
from streamkv.tiers.spec import BlockKey


class SizedUsage(Protocol):
    """Blocks and bytes that a store holds, and its limit."""

    @property
    def num_blocks(self) -> int: ...
    @property
    def num_bytes(self) -> int: ...
    @property
    def limit_bytes(self) -> int: ...


class Store(Protocol):
    """A tier of stored blocks. Reads come from several threads, everything else from one."""

    def write(self, items: Sequence[tuple[BlockKey, Bytes]]) -> int:
        """Store blocks, evicting the oldest unlocked ones for room. First writer wins.

        An open block may grow meanwhile; what is stored must pass its own checks all the same.
        """

    def sync(self) -> None:
        """Make everything written so far survive a power cut."""

    def contains(self, key: BlockKey) -> bool:
        """Whether a block is stored."""

    def read(self, key: BlockKey, out: Bytes) -> bool:
        """Copy a block into `out`, verified. False: absent or damaged; `out` is then undefined."""

    def delete(self, keys: Collection[BlockKey]) -> None:
        """Forget blocks."""

    def set_manifest(self, session: str, keys: Sequence[BlockKey]) -> None:
        """Protect these blocks for a session, instead of those before; none: forget the session."""

    def manifest(self, session: str) -> list[BlockKey]:
        """The blocks protected for a session."""

    def usage(self) -> SizedUsage:
        """How full the store is."""
