"""How many pages a store may fill, so that its file never passes the limit and no write fails.

Invariant: the map of the store is the limit, so the file cannot grow past it, and live pages stay
below the map by a reserve: 5 % of the map, so that deletes succeed, and at least what three write
transactions need, because LMDB reuses pages only from the second transaction after the one that
freed them. Pure.
"""

from dataclasses import dataclass

from streamkv.errors import ConfigError
from streamkv.tiers.record import PieceLayout
from streamkv.tiers.spec import KVSpec

MAX_CHUNK_BYTES = 32 << 20
"""Payload of one write transaction: its fsync is cheap for it, and memory has room for it."""

_MIN_BLOCKS = 8
_TREE_PAGES = 128  # the trees themselves, and what copy-on-write adds per transaction


@dataclass(frozen=True, slots=True)
class StoreRoom:
    """Sizes of a store, in pages.

    Attributes:
        page_bytes: LMDB's page.
        map_pages: the limit.
        block_pages: pages of the payload of one block, at most.
        chunk_pages: most pages of payload in one write transaction.
    """

    page_bytes: int
    map_pages: int
    block_pages: int
    chunk_pages: int

    @classmethod
    def of(cls, limit_bytes: int, spec: KVSpec, page_bytes: int) -> "StoreRoom":
        """The sizes for a limit of the file.

        Raises:
            ConfigError: the limit has no room for some blocks.
        """
        block_pages = PieceLayout.of(spec, page_bytes).num_pages(spec.block_bytes)
        minimum = (_MIN_BLOCKS * block_pages + _TREE_PAGES) * page_bytes
        if limit_bytes < minimum:
            problem = f"no room for {_MIN_BLOCKS} blocks of {spec.block_bytes} bytes"
            raise ConfigError("ssd_bytes", limit_bytes, problem, f"Use at least {minimum} bytes.")
        map_pages = limit_bytes // page_bytes
        chunk_pages = max(block_pages, min(MAX_CHUNK_BYTES // page_bytes, map_pages // 64))
        return cls(page_bytes, map_pages, block_pages, chunk_pages)

    def budget(self, file_pages: int | None = None) -> int:
        """Live pages allowed.

        Args:
            file_pages: pages that the file cannot outgrow because the disk is full, so that
                transactions take one block each; None: it can.
        """
        usable, chunk_pages = self.map_pages, self.chunk_pages
        if file_pages is not None:
            usable, chunk_pages = min(usable, file_pages), self.block_pages
        return max(0, usable - max(usable // 20, 3 * chunk_pages + _TREE_PAGES // 2))
