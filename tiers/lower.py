"""The tiers below the gpu pool as one place: cpu pool first, ssd below, either may be missing.

Invariant: `put`, `checkpoint`, `delete` and `write_oldest` are called by one thread, the worker;
`lock_many`, `promote_many` and reads by any. A block that `retain` wants on ssd stays locked in the
cpu pool until it is there. When the ssd tier fails, writing to it ends for this process, said once
in the log and counted; the cpu pool then evicts its oldest blocks freely, and what the ssd already
holds can still be read.
This module does not know who uses a block nor who waits for it.
"""

import logging
from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import islice

from streamkv.errors import StoreError, StoreFullError
from streamkv.tiers.cpu_pool import CpuBlock, CpuPool
from streamkv.tiers.host_memory import Bytes
from streamkv.tiers.jobs import Wanted
from streamkv.tiers.keys import is_partial
from streamkv.tiers.policy import Place, Policy
from streamkv.tiers.spec import BlockKey
from streamkv.tiers.store import Store
from streamkv.tiers.transfer import Completion, Transfer
from streamkv.tiers.usage import Counters

_log = logging.getLogger(__name__)


class LowerTiers:
    """Keeps blocks in the cpu pool and on ssd.

    Args:
        transfer: copies to and from the gpu pool.
        cpu_pool: None or without room: blocks go straight to ssd.
        ssd: None: old blocks are evicted from the cpu pool and gone.
        policy: what goes where.
        counters: where `demotions`, `writes`, `dropped`, `ssd_disabled`, `read_errors` are
            counted.
    """

    def __init__(
        self,
        transfer: Transfer,
        cpu_pool: CpuPool | None,
        ssd: Store | None,
        policy: Policy,
        counters: Counters,
    ) -> None:
        self._transfer = transfer
        self._cpu = cpu_pool if cpu_pool is not None and cpu_pool.num_blocks > 0 else None
        self._ssd = ssd
        self._policy = policy
        self._counters = counters
        self._disabled_by: BaseException | None = None
        self._unstored: dict[BlockKey, CpuBlock] = {}
        self._kept: dict[str, list[CpuBlock]] = {}

    @property
    def has_cpu(self) -> bool:
        """Whether there is a cpu pool with room for a block; not if none of it can be pinned."""
        return self._cpu is not None and self._cpu.num_blocks > 0

    @property
    def has_ssd(self) -> bool:
        """Whether the ssd tier is there and still written to."""
        return self._ssd is not None and self._disabled_by is None

    def holds_in_memory(self, key: BlockKey) -> bool:
        """Whether the cpu pool has the block."""
        return self._cpu is not None and self._cpu.contains(key)

    def where(self, key: BlockKey) -> Place | None:
        """Where a block would be found, as far as is known unread."""
        if self.holds_in_memory(key):
            return "cpu"
        try:
            return "ssd" if self._ssd is not None and self._ssd.contains(key) else None
        except (StoreError, OSError):
            return None

    def lock_many(self, keys: Sequence[BlockKey]) -> list[CpuBlock | None]:
        """Blocks of the cpu pool, to be copied and then unlocked; None where it has none."""
        return self._cpu.lock_many(keys) if self._cpu else [None] * len(keys)

    def promote_many(self, pairs: Sequence[tuple[CpuBlock, int]]) -> Completion:
        """Copy locked blocks of the cpu pool into gpu blocks; done when all are."""
        assert self._cpu is not None
        data = self._cpu.data
        # One by one: the first is under way while the others are looked up.
        return self._transfer.promote_many((data(block), at) for block, at in pairs)

    def unlock_many(self, blocks: Sequence[CpuBlock]) -> None:
        """The copies of locked blocks have finished."""
        assert self._cpu is not None
        self._cpu.unlock_many(blocks)

    def read_stored(self, key: BlockKey, block_id: int) -> bool:
        """Read a block from ssd into a gpu block; False is a miss, contents are then undefined."""
        if self._ssd is None:
            return False
        with self._transfer.filling(block_id) as out:
            return self.read_into(key, out)

    def read_into(self, key: BlockKey, out: Bytes) -> bool:
        """Read a block from ssd into host memory, uint8 `[block_bytes]`.

        Returns False on a miss: the ssd does not hold the block, what it holds is damaged, or it
        failed, which is counted and logged. The contents are then undefined.
        """
        if self._ssd is None:
            return False
        try:
            return self._ssd.read(key, out)
        except (StoreError, OSError) as error:
            self._counters.add("read_errors")
            _log.warning("reading a block from ssd failed and counts as a miss: %s", error)
            return False

    def put(self, key: BlockKey, block_id: int) -> bool:
        """Copy a sealed gpu block one tier down. Returns False if no tier has room for it."""
        if self.holds_in_memory(key):
            return True
        block = self._reserve(key)
        if block is not None:
            if not self._fill(block, block_id):
                # It was read ahead meanwhile, and what came from the ssd is there.
                self._unlock(block)
                return True
            self._publish(block)
            self._counters.add("demotions")
            return True
        if self._policy.outlives_window(key) and self._try(lambda: self._write([(key, block_id)])):
            self._counters.add("demotions")
            return True
        if self._policy.outlives_window(key):
            self._counters.add("dropped")
        return False

    def checkpoint(self, session: str | None, wanted: Sequence[Wanted]) -> int:
        """Make blocks durable: store what is not yet stored, set the manifest, sync.

        Args:
            session: whose manifest the blocks become; None leaves manifests alone.
            wanted: the blocks.

        Returns:
            How many blocks could not be had from anywhere.

        Raises:
            StoreError, OSError: the ssd tier failed.
        """
        assert self._ssd is not None
        self._keep_partial(wanted)
        self._store_missing(wanted)
        if session is not None:
            self._ssd.set_manifest(session, [key for key, _ in wanted])
        # Without the manifest's protection a full store may have evicted the first for the last.
        missing = self._store_missing(wanted)
        self._ssd.sync()
        for key, _ in wanted:
            self._settle(key)
        if session is not None:
            self.release_kept(session)
        return missing

    def _keep_partial(self, wanted: Sequence[Wanted]) -> None:
        """Have open blocks in the cpu pool, too, where the sealed ones are since they were full."""
        for key, block_id in wanted:
            if self._cpu is not None and block_id is not None and is_partial(key):
                self.put(key, block_id)

    def keep(self, session: str | None, wanted: Sequence[Wanted]) -> int:
        """Hold blocks in the cpu pool when there is no ssd to hold them: locked, if for a session.

        Returns how many are in no tier for want of room.
        """
        kept = [block for key, block_id in wanted if (block := self._keep_one(key, block_id))]
        if session is not None:
            self.release_kept(session)
            self._kept[session] = kept
        else:
            for block in kept:
                self._unlock(block)
        return len(wanted) - len(kept)

    def release_kept(self, session: str) -> None:
        """Unlock what `keep` locked."""
        for block in self._kept.pop(session, ()):
            self._unlock(block)

    def delete_in_memory(self, keys: Iterable[BlockKey]) -> None:
        """Forget blocks of the cpu pool."""
        for key in keys:
            self._settle(key)
            if self._cpu:
                self._cpu.delete(key)

    def delete_stored(self, keys: Iterable[BlockKey]) -> None:
        """Forget blocks of the ssd. One that fails to go stays until it is evicted."""
        stored = [key for key in keys if self._is_stored(key)]
        if self._ssd is not None and stored:
            ssd = self._ssd
            self._try(lambda: ssd.delete(stored))

    def erase_stored(self, keys: Collection[BlockKey]) -> bool:
        """Remove blocks from the ssd, also those that are damaged and so not shown, and sync.

        Returns whether they are gone; not if the ssd tier failed, now or before.
        """
        if self._ssd is None:
            return True
        ssd = self._ssd
        return self._try(lambda: ssd.delete(keys)) and self._try(ssd.sync)

    def manifest(self, session: str) -> list[BlockKey]:
        """What the ssd keeps for a session, from this process or an earlier one."""
        found: list[BlockKey] = []
        if self._ssd is not None and self.has_ssd:
            ssd = self._ssd
            self._try(lambda: found.extend(ssd.manifest(session)))
        return found

    def forget(self, session: str) -> None:
        """Drop a session's manifest on ssd and its locks in the cpu pool."""
        self.release_kept(session)
        if self._ssd is None:
            return
        ssd = self._ssd
        if isinstance(self._disabled_by, StoreFullError):
            _log.warning("a session was forgotten: the full ssd tier is tried again")
            self._disabled_by = None
        if self.manifest(session):
            self._try(lambda: ssd.set_manifest(session, ()))

    def write_oldest(self) -> bool:
        """If over the watermark write a batch to ssd. Returns whether there is more to do."""
        num_blocks = self._cpu.num_blocks if self._cpu else 0
        self._write_unstored(self._policy.num_to_write(len(self._unstored), num_blocks))
        return self._policy.num_to_write(len(self._unstored), num_blocks) > 0

    def flush(self) -> None:
        """Write everything that `retain` wants on ssd, and sync."""
        while self._unstored:
            self._write_unstored(self._policy.batch_blocks)
        if self._ssd is not None and self.has_ssd:
            self._try(self._ssd.sync)

    def disable_ssd(self, error: BaseException) -> None:
        """Carry on without writing to the ssd; loud the first time."""
        if not self.has_ssd:
            return
        self._disabled_by = error
        self._counters.add("ssd_disabled")
        _log.error("the ssd tier failed and is no longer written to: %s", error)
        for key in list(self._unstored):
            self._settle(key)

    def check_integrity(self) -> None:
        """Assert what must hold between calls."""
        if self._cpu is None:
            assert not self._unstored and not any(self._kept.values())
            return
        self._cpu.check_integrity()
        assert self.has_ssd or not self._unstored, "blocks wait for an ssd that is not written to"
        assert len(self._unstored) <= self._cpu.num_blocks

    def _reserve(self, key: BlockKey) -> CpuBlock | None:
        if self._cpu is None:
            return None
        while (block := self._cpu.reserve(key)) is None and self._unstored:
            self._write_unstored(self._policy.batch_blocks)
        return block

    def _fill(self, block: CpuBlock, block_id: int) -> bool:
        """Copy a gpu block into a reserved one, and list that unless another one is listed."""
        assert self._cpu is not None
        try:
            self._transfer.demote(block_id, self._cpu.data(block)).wait()
        except BaseException:
            self._cpu.unlock(block)
            raise
        return self._cpu.publish(block)

    def _publish(self, block: CpuBlock) -> None:
        key = block.key
        if self._policy.outlives_window(key) and not self._is_stored(key) and self.has_ssd:
            self._unstored[key] = block
        else:
            self._unlock(block)

    def _keep_one(self, key: BlockKey, block_id: int | None) -> CpuBlock | None:
        if self._cpu is None:
            return None
        while (block := self._cpu.lock(key)) is None and block_id is not None:
            block = self._reserve(key)
            if block is None:
                return None
            if self._fill(block, block_id):
                self._counters.add("demotions")
                return block
            self._unlock(block)  # it was read ahead meanwhile: lock that
        return block

    def _store_missing(self, wanted: Sequence[Wanted]) -> int:
        """Write the wanted blocks that are not on ssd; returns how many could not be had."""
        assert self._ssd is not None
        absent = [item for item in wanted if not self._ssd.contains(item[0])]
        ready = [item for item in absent if item[1] is not None or self.holds_in_memory(item[0])]
        for first in range(0, len(ready), self._policy.batch_blocks):
            self._write(ready[first : first + self._policy.batch_blocks])
        return len(absent) - len(ready)

    def _write(self, items: Sequence[Wanted]) -> None:
        """Write blocks to ssd, each from the cpu pool if it is there, else from the gpu."""
        assert self._ssd is not None
        locked = [self._cpu.lock(key) if self._cpu else None for key, _ in items]
        try:
            sources = zip(items, locked, strict=True)
            rows = [(key, self._bytes_of(at, block)) for (key, at), block in sources]
            self._ssd.write(rows)
            self._counters.add("writes", len(rows))
        finally:
            for block in locked:
                if block is not None:
                    self._unlock(block)

    def _bytes_of(self, block_id: int | None, block: CpuBlock | None) -> Bytes:
        if self._cpu is not None and block is not None:
            return self._cpu.data(block)
        assert block_id is not None
        return self._transfer.read(block_id)

    def _is_stored(self, key: BlockKey) -> bool:
        if self._ssd is None:
            return False
        ssd = self._ssd
        found: list[bool] = []
        return self._try(lambda: found.append(ssd.contains(key))) and found[0]

    def _write_unstored(self, num_blocks: int) -> None:
        batch = list(islice(self._unstored, num_blocks))
        if batch and self._try(lambda: self._write([(key, None) for key in batch])):
            for key in batch:
                self._settle(key)

    def _settle(self, key: BlockKey) -> None:
        """The block need not wait for the ssd in the cpu pool any more."""
        block = self._unstored.pop(key, None)
        if block is not None:
            self._unlock(block)

    def _unlock(self, block: CpuBlock) -> None:
        assert self._cpu is not None
        self._cpu.unlock(block)

    def _try(self, action: Callable[[], object]) -> bool:
        if not self.has_ssd:
            return False
        try:
            action()
        except (StoreError, OSError) as error:
            self.disable_ssd(error)
            return False
        return True
