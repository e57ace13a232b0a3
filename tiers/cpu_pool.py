"""The cpu pool: sealed blocks in host memory, oldest unlocked evicted first.

Invariant: a block is in one of three states. *Unpublished* (reserved, being filled, nobody finds
    it),
*listed* (found by its key) and *unlisted but locked* (deleted while somebody still reads it; its
slot returns when the last lock goes). Only listed blocks without a lock are evicted, least recently
used first. The memory never grows beyond the bytes given. Safe to use from several threads.

For a GPU the memory is page-locked piece by piece (`pinning`), and only what is page-locked is ever
given out: a kernel that reads another address faults. Each block then begins on a page, so that no
piece cuts one. A pool that needs room pins its next piece before it evicts anything; if the system
refuses one, the pool stays as large as it is.

Index budget: about 400 bytes of Python objects for each block held, nothing for evicted ones. This
module does not know why a block is locked, nor what lies below.
"""

import mmap
import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from streamkv.errors import ConfigError
from streamkv.tiers.free_list import FreeList
from streamkv.tiers.host_memory import Bytes, anonymous_memory, blocks_of, keep_from_forks
from streamkv.tiers.pinning import PIECE_BYTES, PageLock, Pinning
from streamkv.tiers.spec import BlockKey, KVSpec
from streamkv.tiers.usage import TierUsage


@dataclass(slots=True, eq=False)
class CpuBlock:
    """A locked block of the pool; whoever holds it must `unlock` it once.

    Attributes:
        key: the block's name.
        slot_id: which part of the memory it occupies.
        num_locks: holders that still need it.
        listed: whether `lock(key)` finds it.
    """

    key: BlockKey
    slot_id: int
    num_locks: int = 1
    listed: bool = False


class CpuPool:
    """Blocks in host memory.

    Args:
        spec: layout of a block.
        num_bytes: limit; a multiple of the block size is used of it. 0 makes a pool without room.
        page_lock: makes memory readable for a GPU; `None` for a pool that no GPU reads.
        piece_bytes: memory that is page-locked at once.

    Raises:
        ConfigError: more than 0 bytes but fewer than one block, or more than the system gives.
    """

    def __init__(
        self,
        spec: KVSpec,
        num_bytes: int,
        page_lock: PageLock | None = None,
        piece_bytes: int = PIECE_BYTES,
    ) -> None:
        # Blocks of nearly every model fill pages anyway: 64 tokens of a head make 16 KiB.
        step = mmap.PAGESIZE if page_lock is not None else 1
        self._row_bytes = -(-spec.block_bytes // step) * step
        num_blocks = num_bytes // self._row_bytes
        if num_bytes > 0 and num_blocks == 0:
            raise ConfigError(
                "cpu_bytes",
                num_bytes,
                f"smaller than one block of {self._row_bytes} bytes",
                "Use at least that, or 0 to go without a cpu pool.",
            )
        self._block_bytes = spec.block_bytes
        self._limit_bytes = num_bytes
        memory = anonymous_memory("cpu_bytes", max(num_blocks * self._row_bytes, 1))
        self._rows = blocks_of(memory, num_blocks, self._row_bytes)
        self._free_list = FreeList(num_blocks if page_lock is None else 0)
        self._pinning: Pinning | None = None
        if page_lock is not None:
            keep_from_forks(memory)
            flat = self._rows.reshape(-1)
            self._pinning = Pinning(flat, self._row_bytes, page_lock, piece_bytes)
        self._index: dict[BlockKey, CpuBlock] = {}
        self._evictable: OrderedDict[BlockKey, CpuBlock] = OrderedDict()
        self._num_unlisted = 0
        self._num_evictions = 0
        self._closed = False
        self._mutex = threading.Lock()
        # Held while a piece is pinned, which takes long; readers must not wait for that.
        self._growing = threading.Lock()

    @property
    def num_blocks(self) -> int:
        """Blocks that fit, those in memory that is still to be pinned included."""
        return len(self._rows) if self._may_grow() else self._free_list.num_blocks

    @property
    def num_pinned_bytes(self) -> int:
        """Bytes that are page-locked; 0 in a pool that no GPU reads."""
        return self._pinning.num_pinned_bytes if self._pinning is not None else 0

    @property
    def num_evictions(self) -> int:
        """Blocks evicted so far."""
        return self._num_evictions

    def contains(self, key: BlockKey) -> bool:
        """Whether a listed block has this key."""
        with self._mutex:
            return key in self._index

    def pin_next(self) -> bool:
        """Page-lock one more piece, to give its blocks out. Returns whether that was done.

        This stalls the GPU's driver: it belongs between two steps.
        """
        with self._growing:
            return self._grow()

    def pin_ahead(self) -> bool:
        """The same if what is free, without evicting anything, is less than one piece."""
        with self._growing:
            return self._may_grow() and self._lacks_room() and self._grow()

    def reserve(self, key: BlockKey) -> CpuBlock | None:
        """Room for a block, locked and unpublished; evicts if need be. None: all are locked.

        A pool that a GPU reads pins its next piece, on this thread, before it evicts.
        """
        while True:
            with self._mutex:
                if self._free_list.num_free > 0:
                    return self._take(key)
            # Only who holds this lock knows that no other thread is about to add a piece.
            with self._growing:
                if self._free_list.num_free == 0 and not (self._may_grow() and self._grow()):
                    with self._mutex:
                        return self._take(key)

    def publish(self, block: CpuBlock) -> bool:
        """List a reserved block that has been filled. It stays locked.

        Returns False if another block of this key is listed already: this one then stays as it is,
        found by nobody, and its memory is reused once it is unlocked.
        """
        with self._mutex:
            assert not block.listed, "published twice"
            if block.key in self._index:
                return False
            block.listed = True
            self._index[block.key] = block
            self._num_unlisted -= 1
            return True

    def lock(self, key: BlockKey) -> CpuBlock | None:
        """Find a block and keep it from eviction and reuse until `unlock`. None: not here."""
        return self.lock_many([key])[0]

    def lock_many(self, keys: Sequence[BlockKey]) -> list[CpuBlock | None]:
        """`lock` of each, all at the same moment."""
        with self._mutex:
            blocks = [self._index.get(key) for key in keys]
            for block in blocks:
                if block is not None:
                    block.num_locks += 1
                    self._evictable.pop(block.key, None)
            return blocks

    def unlock(self, block: CpuBlock) -> None:
        """Give one lock back. Without locks a listed block is the last to be evicted."""
        self.unlock_many([block])

    def unlock_many(self, blocks: Iterable[CpuBlock]) -> None:
        """`unlock` each, in this order."""
        with self._mutex:
            for block in blocks:
                assert block.num_locks > 0, f"block in slot {block.slot_id} is not locked"
                block.num_locks -= 1
                if block.num_locks > 0:
                    continue
                if block.listed:
                    self._evictable[block.key] = block
                else:
                    self._num_unlisted -= 1
                    self._free_list.release(block.slot_id)

    def delete(self, key: BlockKey) -> None:
        """Forget a block. Its memory is reused once nobody holds a lock on it."""
        with self._mutex:
            block = self._index.get(key)
            if block is not None:
                self._evictable.pop(key, None)
                self._unlist(block)

    def data(self, block: CpuBlock) -> Bytes:
        """The memory of a block that the caller has locked: uint8 [block_bytes], no copy."""
        row: Bytes = self._rows[block.slot_id, : self._block_bytes]
        return row

    def usage(self) -> TierUsage:
        """Blocks and bytes in use. The limit is what is pinned, once more cannot be."""
        num_used = self._free_list.num_used
        limit = self._limit_bytes
        if self.num_blocks < len(self._rows):
            limit = self.num_blocks * self._row_bytes
        return TierUsage(num_used, num_used * self._block_bytes, limit)

    def close(self) -> None:
        """Give no block out any more, and undo the page-locking. Idempotent."""
        with self._growing:
            with self._mutex:
                self._closed = True
            if self._pinning is not None:
                self._pinning.close()

    def check_integrity(self) -> None:
        """Assert that free + used == total, and that lists, locks and slots agree."""
        with self._mutex:
            self._free_list.check_integrity()
            assert self._closed or self._all_is_pinned(), "a block could be given out unpinned"
            slots = {block.slot_id for block in self._index.values()}
            assert len(slots) == len(self._index), "two blocks share a slot"
            assert self._free_list.num_used == len(self._index) + self._num_unlisted
            unlocked = {key for key, block in self._index.items() if block.num_locks == 0}
            assert unlocked == set(self._evictable), "evictable blocks are not the unlocked ones"
            assert all(block.listed for block in self._index.values())

    def _take(self, key: BlockKey) -> CpuBlock | None:
        if self._closed:
            return None
        if self._free_list.num_free == 0:
            if not self._evictable:
                return None
            _, oldest = self._evictable.popitem(last=False)
            self._unlist(oldest)
            self._num_evictions += 1
        self._num_unlisted += 1
        return CpuBlock(key, self._free_list.allocate())

    def _may_grow(self) -> bool:
        return self._pinning is not None and not self._pinning.ended

    def _all_is_pinned(self) -> bool:
        num_bytes = self._free_list.num_blocks * self._row_bytes
        return self._pinning is None or self._pinning.num_pinned_bytes >= num_bytes

    def _lacks_room(self) -> bool:
        assert self._pinning is not None
        return self._free_list.num_free * self._row_bytes < self._pinning.piece_bytes

    def _grow(self) -> bool:
        if self._pinning is None or not self._pinning.pin_next():
            return False
        with self._mutex:
            num_pinned = self._pinning.num_pinned_bytes // self._row_bytes
            self._free_list.grow(num_pinned - self._free_list.num_blocks)
        return True

    def _unlist(self, block: CpuBlock) -> None:
        del self._index[block.key]
        block.listed = False
        if block.num_locks == 0:
            self._free_list.release(block.slot_id)
        else:
            self._num_unlisted += 1
