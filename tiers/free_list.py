"""Which blocks of a pool are free, and how many users each of the others has.

Pure bookkeeping: no tensors, no files, no threads, no clock. Invariant: every block id is either on
the free list with ref_count 0 or in use with ref_count >= 1, so free + used == total. A block
returns to the free list only when its last user releases it. Reuse is last in, first out: ids that
were never handed out stay untouched as long as possible, and with them their memory.
"""

from array import array

from streamkv.errors import PoolFullError


class FreeList:
    """Free blocks and ref_counts of a pool of `num_blocks` blocks, which may grow.

    Holds 4 bytes and one list entry per block of the pool, whatever happens.
    """

    def __init__(self, num_blocks: int) -> None:
        self._ref_counts = array("i", bytes(4 * num_blocks))
        self._free = list(range(num_blocks - 1, -1, -1))

    @property
    def num_blocks(self) -> int:
        """Blocks of the pool."""
        return len(self._ref_counts)

    @property
    def num_free(self) -> int:
        """Blocks without a user."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Blocks with at least one user."""
        return self.num_blocks - self.num_free

    def grow(self, num_blocks: int) -> None:
        """Add free blocks, which are handed out after those that are free now."""
        first = self.num_blocks
        self._ref_counts.extend(array("i", bytes(4 * num_blocks)))
        self._free[:0] = range(first + num_blocks - 1, first - 1, -1)

    def allocate(self) -> int:
        """Take a free block; its ref_count becomes 1.

        Raises:
            PoolFullError: every block is in use.
        """
        if not self._free:
            raise PoolFullError(f"all {self.num_blocks} blocks of the pool are in use")
        block_id = self._free.pop()
        self._ref_counts[block_id] = 1
        return block_id

    def allocate_many(self, num_blocks: int) -> list[int]:
        """`allocate` so many, of which as many are free."""
        assert num_blocks <= len(self._free), (num_blocks, len(self._free))
        first = len(self._free) - num_blocks
        block_ids = self._free[first:][::-1]
        del self._free[first:]
        for block_id in block_ids:
            self._ref_counts[block_id] = 1
        return block_ids

    def acquire(self, block_id: int) -> None:
        """Add a user to a block that is in use."""
        assert self._ref_counts[block_id] > 0, f"block {block_id} is free and cannot gain a user"
        self._ref_counts[block_id] += 1

    def release(self, block_id: int) -> bool:
        """Take a user away. Returns True if it was the last one and the block is free now."""
        assert self._ref_counts[block_id] > 0, f"block {block_id} is free already"
        self._ref_counts[block_id] -= 1
        if self._ref_counts[block_id] > 0:
            return False
        self._free.append(block_id)
        return True

    def ref_count(self, block_id: int) -> int:
        """Users of a block; 0 if it is free."""
        return self._ref_counts[block_id]

    def check_integrity(self) -> None:
        """Assert that free + used == total, and that no block is both or twice on the free list."""
        num_used = sum(count > 0 for count in self._ref_counts)
        shown = f"free={len(self._free)} used={num_used} total={self.num_blocks}"
        assert len(self._free) + num_used == self.num_blocks, shown
        assert len(set(self._free)) == len(self._free), (
            f"a block is twice on the free list: {shown}"
        )
        assert all(self._ref_counts[block_id] == 0 for block_id in self._free), shown
        assert min(self._ref_counts, default=0) >= 0, "a ref_count is negative"
