"""Who uses which gpu block: its owners, the copies that read it, and the name it was sealed under.

Pure bookkeeping over the pool's free list. Invariant: ref_count of a block == its owners + copies
that hold it, so its id is reused only after every owner gave it back and every copy has finished.
Several own only what is sealed: nobody writes it any more. A sealed block is owned; a block that
its last owner gave back but that is still held is *leaving*. At most 512 bytes of Python objects
for each block in use, nothing for others.
"""

from collections import Counter
from collections.abc import Sequence

from streamkv.tiers.free_list import FreeList
from streamkv.tiers.spec import BlockKey


class Residents:
    """Owners, holders and names of the blocks of one gpu pool."""

    def __init__(self, free_list: FreeList) -> None:
        self._free_list = free_list
        self._owned: set[int] = set()
        self._sharers: Counter[int] = Counter()
        self._holds: Counter[int] = Counter()
        self._keys: dict[int, BlockKey] = {}
        self._blocks: dict[BlockKey, set[int]] = {}

    @property
    def num_leaving(self) -> int:
        """Blocks given back by their last owner that a copy still uses."""
        return self._free_list.num_used - len(self._owned)

    @property
    def num_holds(self) -> int:
        """Copies under way or pending, all blocks together."""
        return self._holds.total()

    def allocate(self) -> int:
        """Take a free block for an owner.

        Raises:
            PoolFullError: there is none.
        """
        block_id = self._free_list.allocate()
        self._owned.add(block_id)
        return block_id

    def allocate_many(self, num_blocks: int) -> list[int]:
        """`allocate` so many, of which as many are free."""
        block_ids = self._free_list.allocate_many(num_blocks)
        self._owned.update(block_ids)
        return block_ids

    def share(self, block_id: int) -> None:
        """One more owner for a sealed block; each of them gives it back once."""
        assert block_id in self._keys, f"block {block_id} is not sealed and has one owner"
        self._free_list.acquire(block_id)
        self._sharers[block_id] += 1

    def give_back(self, block_id: int) -> BlockKey | None:
        """An owner is done with a block. Returns the name it was sealed under, if it was."""
        assert block_id in self._owned, f"block {block_id} has no owner"
        self._free_list.release(block_id)
        if block_id in self._sharers:
            self._sharers[block_id] -= 1
            if self._sharers[block_id] == 0:
                del self._sharers[block_id]
            return self._keys[block_id]
        self._owned.remove(block_id)
        key = self._keys.pop(block_id, None)
        if key is not None:
            self._blocks[key].remove(block_id)
            if not self._blocks[key]:
                del self._blocks[key]
        return key

    def hold(self, block_id: int) -> None:
        """A copy is going to read this block: keep its id from reuse."""
        self._free_list.acquire(block_id)
        self._holds[block_id] += 1

    def unhold(self, block_id: int) -> None:
        """A copy has finished with this block, or will not take place."""
        assert self._holds[block_id] > 0, f"block {block_id} is not held"
        self._holds[block_id] -= 1
        if self._holds[block_id] == 0:
            del self._holds[block_id]
        self._free_list.release(block_id)

    def seal(self, block_id: int, key: BlockKey) -> None:
        """An owned block is full and has a name now."""
        self.seal_many(((key, block_id),))

    def seal_many(self, named: Sequence[tuple[BlockKey, int]]) -> None:
        """`seal` each of several different blocks, in their order."""
        ids = {block_id: key for key, block_id in named}
        assert len(ids) == len(named) and self._owned.issuperset(ids), f"of {ids} one has no owner"
        assert self._keys.keys().isdisjoint(ids), f"of {ids} one is sealed already"
        self._keys.update(ids)
        blocks = self._blocks
        for key, block_id in named:
            if key in blocks:
                blocks[key].add(block_id)
            else:
                blocks[key] = {block_id}

    def ref_count(self, block_id: int) -> int:
        """Sequences that a block belongs to."""
        return (block_id in self._owned) + self._sharers.get(block_id, 0)

    def is_owned(self, block_id: int) -> bool:
        """Whether a block is allocated and not given back."""
        return block_id in self._owned

    def is_sealed(self, block_id: int) -> bool:
        """Whether a block has a name."""
        return block_id in self._keys

    def find(self, key: BlockKey) -> int | None:
        """A sealed block with this name."""
        blocks = self._blocks.get(key)
        return None if blocks is None else next(iter(blocks))

    def num_users(self, key: BlockKey) -> int:
        """Sealed blocks with this name."""
        return len(self._blocks.get(key, ()))

    def check_integrity(self) -> None:
        """Assert that owners, holds, names and ref_counts agree for every block of the pool."""
        self._free_list.check_integrity()
        for block_id in range(self._free_list.num_blocks):
            owners = (block_id in self._owned) + self._sharers.get(block_id, 0)
            users = owners + self._holds.get(block_id, 0)
            assert self._free_list.ref_count(block_id) == users, f"block {block_id}: {users} users"
        assert set(self._keys) <= self._owned, "a sealed block has no owner"
        assert set(self._sharers) <= set(self._keys), "a block that is not sealed is shared"
        assert all(count > 0 for count in self._sharers.values()), "a block is shared by nobody"
        assert sum(map(len, self._blocks.values())) == len(self._keys)
        for block_id, key in self._keys.items():
            assert block_id in self._blocks[key], f"block {block_id} is not found by its name"
