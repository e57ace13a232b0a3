"""The tier manager: a block's life from the gpu pool down and back.

    allocate -> (filled by the model) -> seal -> [copied down in the background] -> drop
                                                        restore <- cpu pool, else ssd

Invariant: a gpu block is reused only after every owner gave it back and every copy of it has
finished. A sealed block may be restored from the moment it is sealed until it is evicted, and what
is restored is bit for bit what was sealed, or a miss. One condition guards the bookkeeping; no
block is copied, read or written while it is held.

Bookkeeping, Python objects included: at most 512 bytes for each block in use of the gpu pool, 400
for each in the cpu pool, 200 for each key of a session's two newest manifests; nothing for blocks
that only the ssd holds and nothing for evicted ones. The manager knows a session by its name only,
and no tokens.
"""

import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Self

from streamkv.errors import PoolFullError
from streamkv.tiers.background import Background
from streamkv.tiers.cpu_pool import CpuPool
from streamkv.tiers.gpu_pool import GpuPool
from streamkv.tiers.jobs import Checkpoint, CheckpointTicket, Forget, Wanted
from streamkv.tiers.keys import is_partial
from streamkv.tiers.lower import LowerTiers
from streamkv.tiers.policy import OnPressure, Place, Policy, Retain
from streamkv.tiers.residents import Residents
from streamkv.tiers.spec import BlockKey, KVSpec
from streamkv.tiers.store import Store
from streamkv.tiers.transfer import Transfer
from streamkv.tiers.usage import Counters, TierUsage

_READ_THREADS = 4  # cold reads measured: 0.92 GB/s with one thread, 1.35 with four

_COUNTERS = (
    "promotions",  # blocks read back into the gpu pool from a lower tier
    "cpu_reads",  # of these from the cpu pool
    "ssd_reads",  # of these from ssd
    "shared",  # blocks restored from another gpu block of the same key
    "demotions",  # blocks copied from the gpu pool one tier down
    "misses",  # restores that found nothing
    "dropped",  # blocks given up for want of room or of time
    "writes",  # blocks written to ssd
    "read_errors",  # reads of the ssd that failed and count as misses
    "ssd_disabled",  # times that writing to the ssd was given up
)


class TierManager:
    """Moves blocks between the gpu pool, the cpu pool and the ssd. A context manager.

    The manager owns its worker thread; pools and the ssd tier belong to the caller, who closes the
    manager first. Methods are safe to call from several threads; one block has one caller at a
    time.

    Args:
        spec: layout of a block, the same in every tier.
        gpu_pool: the pool that attention reads.
        cpu_pool: None or without room: blocks go straight to ssd.
        ssd: None: blocks evicted from the cpu pool are gone.
        retain: `all`, `window` or `none`, see `Policy`.
        on_pressure: `wait` or `drop`, see `Policy`.
        watermark: share of the cpu pool that blocks not yet on ssd may take.
        max_pending: copies and checkpoints that may wait for the worker.
        transfer: how blocks are copied; by default plain copies.
    """

    def __init__(
        self,
        spec: KVSpec,
        gpu_pool: GpuPool,
        cpu_pool: CpuPool | None,
        ssd: Store | None,
        *,
        retain: Retain,
        on_pressure: OnPressure,
        watermark: float = 0.75,
        max_pending: int = 32,
        transfer: Transfer | None = None,
    ) -> None:
        self._block_bytes = spec.block_bytes
        self._free_list = gpu_pool.free_list
        self._cpu_pool = cpu_pool
        self._ssd = ssd
        self._policy = Policy(retain, on_pressure, watermark, max_pending)
        self._counters = Counters(_COUNTERS)
        self._transfer = transfer if transfer is not None else Transfer(gpu_pool)
        self._lower = LowerTiers(self._transfer, cpu_pool, ssd, self._policy, self._counters)
        self._residents = self._make_residents()
        self._condition = threading.Condition()
        self._background = Background(
            self._condition, self._residents, self._lower, self._policy, self._counters
        )
        self._writer = self._background.writer

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close(drain=kind is None)

    def allocate(self) -> int:
        """Take a free gpu block; its contents are undefined.

        Waits if blocks were given back that a copy still uses; under `drop`, copies that have not
        begun are given up instead.

        Raises:
            PoolFullError: every block is owned; drop or free some first.
            StoreError, EngineClosedError: the worker stopped or was closed while this waited.
        """
        with self._condition:
            while self._free_list.num_free == 0:
                if self._residents.num_leaving == 0:
                    raise PoolFullError(
                        f"all {self._free_list.num_blocks} gpu blocks are in use; "
                        "close a session or use a larger gpu_bytes"
                    )
                if self._policy.on_pressure == "wait" or not self._background.give_up_a_copy():
                    self._writer.wait_for(self._may_allocate)
            return self._residents.allocate()

    def seal(self, block_id: int, key: BlockKey) -> None:
        """A block is full: name it and, if `retain` says so, have it copied down.

        With too many copies pending this waits, or under `drop` gives this copy up.

        Raises:
            StoreError, EngineClosedError: the worker stopped or was closed; nothing was sealed.
        """
        written = self._transfer.written()
        with self._condition:
            copies = self._copies_at_seal() and self._find_room()
            self._writer.raise_if_stopped()
            self._residents.seal(block_id, key)
            known = self._background.copy_of(key) or self._lower.holds_in_memory(key)
            if copies and not known:
                self._background.demote(key, block_id, written)

    def share(self, block_id: int) -> None:
        """One more sequence owns a sealed block; each of them drops it once. Nothing is copied."""
        with self._condition:
            self._residents.share(block_id)

    def copy(self, source: int, block_id: int) -> None:
        """Fill an allocated block with what another one, of the same caller, holds now."""
        self._transfer.written().wait()
        self._transfer.copy(source, block_id).wait()

    def drop(self, block_id: int) -> None:
        """A sealed block leaves a window. Its id is reused once every owner has dropped it and no
        copy of it is pending.
        """
        with self._condition:
            assert self._residents.is_sealed(block_id), f"block {block_id} is not sealed; use free"
            key = self._residents.give_back(block_id)
            assert key is not None
            self._background.collect([key])
            self._condition.notify_all()

    def free(self, block_id: int) -> None:
        """Give an unsealed block back."""
        with self._condition:
            assert not self._residents.is_sealed(block_id), f"block {block_id} is sealed; use drop"
            self._residents.give_back(block_id)
            self._condition.notify_all()

    def restore(self, key: BlockKey, block_id: int) -> bool:
        """Fill an allocated block with a stored one: from the gpu or cpu pool, else from ssd.

        A restored sealed block counts as sealed; the record of an open block does not.

        Returns False on a miss; the block's contents are then undefined.
        """
        if self._copy_resident(key, block_id):
            self._counters.add("shared")
        elif self._lower.read(key, block_id):
            self._counters.add("promotions")
        else:
            self._counters.add("misses")
            return False
        if not is_partial(key):
            with self._condition:
                self._residents.seal(block_id, key)
        return True

    def where(self, key: BlockKey) -> Place | None:
        """The fastest tier that a restore would find a block in, as far as is known unread."""
        with self._condition:
            if self._background.copy_of(key) or self._residents.find(key) is not None:
                return "gpu"
        return self._lower.where(key)

    def restore_many(self, wanted: Sequence[tuple[BlockKey, int]]) -> list[bool]:
        """`restore` for (key, block_id) pairs, several at a time; results in their order."""
        if len(wanted) < 2:
            return [self.restore(key, block_id) for key, block_id in wanted]
        num_threads = min(_READ_THREADS, len(wanted))
        with ThreadPoolExecutor(num_threads, thread_name_prefix="streamkv-restore") as readers:
            return list(readers.map(lambda pair: self.restore(*pair), wanted))

    def checkpoint(self, session: str, blocks: Sequence[Wanted]) -> CheckpointTicket:
        """Make what a session's resume needs durable, in the background.

        Blocks not yet stored are written, the session's manifest is set, the store is synced, in
        this order. The blocks are kept from now on, also if they are dropped before the ticket is
        done. The manifest before is honoured until the session's next checkpoint is done, so that
        the caller may write its journal record once this ticket is. Without an ssd tier the blocks
        are locked in the cpu pool, and the ticket says that they are not durable.

        Args:
            session: whose blocks.
            blocks: (key, block_id) of each, with None for one that is no longer in the gpu pool;
                the record of an open block is one of them, under its partial key.

        Raises:
            StoreError, EngineClosedError: the worker stopped or was closed.
        """
        return self._submit_checkpoint(session, blocks)

    def write_partial(self, key: BlockKey, block_id: int) -> CheckpointTicket:
        """Store the open block under its partial key, without touching any manifest.

        Raises:
            StoreError, EngineClosedError: the worker stopped or was closed.
        """
        return self._submit_checkpoint(None, [(key, block_id)])

    def write_down(self, keys: Iterable[BlockKey]) -> CheckpointTicket:
        """Store sealed blocks that have left the gpu pool, without touching any manifest.

        The ticket is done once they are on ssd and synced; it counts those that were given up.

        Raises:
            StoreError, EngineClosedError: the worker stopped or was closed.
        """
        return self._submit_checkpoint(None, [(key, None) for key in keys])

    def forget(
        self,
        session: str,
        keys: Iterable[BlockKey] = (),
        *,
        spared: Iterable[BlockKey] = (),
    ) -> CheckpointTicket:
        """Forget a session's manifest and delete its blocks that no window or manifest here needs.

        Args:
            session: its name.
            keys: further blocks of the session, for example those that left its window.
            spared: blocks that stay, because a stream that is not known here shares them.

        Raises:
            StoreError, EngineClosedError: the worker stopped or was closed.
        """
        job = Forget(session, list(keys), frozenset(spared))
        with self._condition:
            self._writer.raise_if_stopped()
            self._writer.submit(job)
        return job.ticket

    def flush(self) -> None:
        """Wait until no copy, checkpoint or write above the watermark is pending.

        Raises:
            StoreError, EngineClosedError: the worker stopped or was closed meanwhile.
        """
        with self._condition:
            self._writer.wait_for(self._writer.is_quiet)
            self._writer.raise_if_stopped()

    def between_steps(self, *, idle: bool = False) -> bool:
        """Do what would stall the GPU's driver in a step: page-lock a piece of the cpu pool.

        To be called by the thread that takes the steps: after each of them, and again and again
        while it has none to take. After a step a piece is pinned only if what is free of the pool
        falls short of one; an idle engine goes on until all is pinned. Without a GPU this does
        nothing.

        Returns whether a piece was pinned: an idle caller calls again.
        """
        if self._cpu_pool is None:
            return False
        return self._cpu_pool.pin_next() if idle else self._cpu_pool.pin_ahead()

    def usage(self) -> dict[str, TierUsage]:
        """Blocks and bytes of `gpu`, `cpu` and `ssd`. A tier that is not there holds 0 of 0."""
        num_used, num_blocks = self._free_list.num_used, self._free_list.num_blocks
        ssd = self._ssd.usage() if self._ssd is not None else TierUsage()
        return {
            "gpu": TierUsage(
                num_used, num_used * self._block_bytes, num_blocks * self._block_bytes
            ),
            "cpu": self._cpu_pool.usage() if self._cpu_pool is not None else TierUsage(),
            "ssd": TierUsage(ssd.num_blocks, ssd.num_bytes, ssd.limit_bytes),
        }

    def counters(self) -> dict[str, int]:
        """All counters by name, those that never moved included."""
        counted = self._counters.snapshot()
        counted["evictions"] = self._cpu_pool.num_evictions if self._cpu_pool is not None else 0
        counted["waits"] = self._writer.waits
        counted["wait_ms"] = self._writer.wait_ms
        return counted

    def check_integrity(self) -> None:
        """Assert that owners and copies account for every gpu block; once quiet, the tiers below.

        Only while no `restore` is under way.
        """
        with self._condition:
            self._residents.check_integrity()
            self._background.check_integrity()

    def close(self, *, drain: bool = True) -> None:
        """Stop the worker. Idempotent; afterwards blocks can be given back and restored, no more.

        Args:
            drain: finish what is pending, write what `retain` wants on ssd, and sync. Otherwise
                only the job under way is finished, and tickets raise `EngineClosedError`.
        """
        running = self._writer.is_running()
        self._writer.close(drain=drain)
        if drain and running:
            self._lower.flush()

    def _make_residents(self) -> Residents:
        return Residents(self._free_list)

    def _copies_at_seal(self) -> bool:
        lower = self._lower
        return self._policy.copies_at_seal(has_cpu=lower.has_cpu, has_ssd=lower.has_ssd)

    def _find_room(self) -> bool:
        """Room for a copy in the worker's queue: waited for, or False and counted."""
        if not self._writer.has_room() and self._policy.on_pressure == "drop":
            self._counters.add("dropped")
            return False
        self._writer.wait_for(self._writer.has_room)
        return True

    def _may_allocate(self) -> bool:
        return self._free_list.num_free > 0 or self._residents.num_leaving == 0

    def _submit_checkpoint(self, session: str | None, blocks: Sequence[Wanted]) -> CheckpointTicket:
        job = Checkpoint(session, list(blocks), self._transfer.written())
        with self._condition:
            self._writer.raise_if_stopped()
            if self._policy.retain == "none" or not (self._lower.has_cpu or self._lower.has_ssd):
                job.ticket.resolve(durable=False, missing=len(blocks))
            else:
                self._writer.wait_for(self._writer.has_room)
                self._writer.raise_if_stopped()
                self._background.checkpoint(job)
        return job.ticket

    def _copy_resident(self, key: BlockKey, block_id: int) -> bool:
        """Restore from a gpu block of the same name, or one that is still being copied down."""
        with self._condition:
            job = self._background.copy_of(key)
            source = job.block_id if job is not None else self._residents.find(key)
            if source is None:
                return False
            self._residents.hold(source)
        try:
            if job is not None:
                job.written.wait()
            self._transfer.copy(source, block_id).wait()
        finally:
            with self._condition:
                self._residents.unhold(source)
                self._condition.notify_all()
        return True
