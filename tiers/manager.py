"""The tier manager: a block's life from the gpu pool down and back.

    allocate -> (filled by the model) -> seal -> [copied down in the background] -> drop
                                                 fetch, restore <- cpu pool, else ssd
                                                       prefetch:   cpu pool  <-   ssd

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
from streamkv.tiers.prefetch import Prefetching
from streamkv.tiers.residents import Residents
from streamkv.tiers.restoring import Restore, Restoring, Target
from streamkv.tiers.spec import BlockKey, KVSpec
from streamkv.tiers.store import Store
from streamkv.tiers.transfer import Transfer
from streamkv.tiers.usage import Counters, TierUsage

READ_LIMIT_S = 30.0
"""After so long a read from ssd is given up: disks answer in milliseconds, or hang."""

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
    "reads_given_up",  # reads of the ssd that took too long and count as misses
    "prefetched",  # blocks read ahead from ssd into the cpu pool
    "prefetch_skipped",  # prefetches that did not begin: no room, too many, or due before
)


class TierManager:
    """Moves blocks between the gpu pool, the cpu pool and the ssd. A context manager.

    The manager owns its worker and the threads that read from ssd; pools and the ssd tier belong to
    the caller, who closes the manager first. Methods are safe to call from several threads; one
    block has one caller at a time.

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
        read_limit_s: seconds after which a read from ssd is given up.
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
        read_limit_s: float = READ_LIMIT_S,
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
        self._prefetching = Prefetching(
            self._condition,
            cpu_pool if ssd is not None else None,
            self._lower.read_into,
            lambda key: self._background.keeps(key),
            self._counters,
            read_limit_s,
        )
        self._background = Background(
            self._condition,
            self._residents,
            self._lower,
            self._policy,
            self._counters,
            self._prefetching,
        )
        self._writer = self._background.writer
        self._restoring = Restoring(
            self._condition,
            self._residents,
            self._background,
            self._lower,
            self._prefetching,
            self._transfer,
            self._counters,
            read_limit_s,
        )

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
            return self._allocate()

    def allocate_many(self, num_blocks: int) -> list[int]:
        """`allocate` so many, or none if that raises."""
        with self._condition:
            if num_blocks <= self._free_list.num_free:
                return self._residents.allocate_many(num_blocks)
            block_ids: list[int] = []
            try:
                block_ids.extend(self._allocate() for _ in range(num_blocks))
            except BaseException:
                self._give_back(block_ids)
                raise
            return block_ids

    def _allocate(self) -> int:
        while self._free_list.num_free == 0:
            if not self._is_one_leaving():
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

        Returns False on a miss; the block is then to be freed. Its contents are undefined, and a
        read that was given up may still write to it until its id is given out anew.
        """
        return self.restore_many([(key, block_id)])[0]

    def restore_many(self, wanted: Sequence[tuple[BlockKey, int]]) -> list[bool]:
        """`restore` for (key, block_id) pairs, several at a time; results in their order."""
        return self.end_restore(self.begin_restore(wanted))

    def begin_restore(self, wanted: Sequence[tuple[BlockKey, int]]) -> Restore:
        """Begin what `restore_many` does, and return while blocks are copied and read.

        The caller goes on with `end_restore`, or gives it up with `Restore.abandon`; only then he
        gives the blocks back. Until then they are not sealed, and he touches none of them.
        """
        return self._restoring.begin([Target(key, block_id) for key, block_id in wanted])

    def end_restore(self, restore: Restore) -> list[bool]:
        """Wait for what was begun; results in the order of what was wanted."""
        found = restore.wait()
        named = [
            target
            for target, is_there in zip(restore.targets, found, strict=True)
            if is_there and not is_partial(target.key)
        ]
        with self._condition:
            self._residents.seal_many(named)
        return found

    def fetch(self, keys: Sequence[BlockKey]) -> list[int | None]:
        """Gpu blocks, newly allocated, that hold what the tiers have under these names.

        What is in memory is copied on this thread; what only the ssd holds is read by up to eight
        threads at the same time. A block that is being prefetched is waited for, which is counted.
        No wait for one read lasts longer than the limit: it is then given up, logged and counted as
        `reads_given_up`. Nothing can be written over by a read that ends later: its block is held
        until then, so that nobody owns it (see `restoring`).

        Returns:
            The block of each key, in order, with one owner: the caller, who gives it back by `drop`
            (by `free` if the key is a partial one). None where no tier has it.

        Raises:
            PoolFullError: the gpu pool has no room for all of them. Nothing is kept of the others,
                as after any other error.
        """
        block_ids = self.allocate_many(len(keys))
        try:
            found = self.restore_many(list(zip(keys, block_ids, strict=True)))
        except BaseException:
            self._give_back(block_ids)
            raise
        pairs = list(zip(block_ids, found, strict=True))
        self._give_back(block_id for block_id, is_there in pairs if not is_there)
        return [block_id if is_there else None for block_id, is_there in pairs]

    def prefetch(self, keys: Iterable[BlockKey]) -> None:
        """Have blocks that only the ssd holds read into the cpu pool, before they are due.

        Returns at once, and what goes wrong is no error: without room in the cpu pool, with too
        many pending or once closed, a block is skipped and counted, and read when it is due. It may
        be evicted from the cpu pool like any other.
        """
        with self._condition:
            for key in keys:
                if self._background.copy_of(key) or self._residents.find(key) is not None:
                    continue
                if not self._lower.holds_in_memory(key):
                    self._prefetching.ask(key)

    def where(self, key: BlockKey) -> Place | None:
        """The fastest tier that a restore would find a block in, as far as is known unread."""
        with self._condition:
            if self._background.copy_of(key) or self._residents.find(key) is not None:
                return "gpu"
        return self._lower.where(key)

    def checkpoint(
        self, session: str, blocks: Sequence[Wanted], *, at_leisure: bool = False
    ) -> CheckpointTicket:
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
            at_leisure: the caller wants the gpu blocks back soon, and the rest has time: as soon as
                the cpu pool holds all blocks, locked, the ticket says that they are kept, and they
                may be dropped. They are stored when there is nothing else to do, when the cpu pool
                runs short, or when somebody waits by `wait_for_checkpoint`; or never, if another
                checkpoint of the session comes first. This never waits for room in the queue.

        Raises:
            StoreError, EngineClosedError: the worker stopped or was closed.
        """
        return self._submit_checkpoint(session, blocks, at_leisure)

    def give_up_checkpoint(self, ticket: CheckpointTicket) -> bool:
        """Do not make a checkpoint, which has not begun; it is then done, and not durable.

        Returns False if it has: it goes on.
        """
        with self._condition:
            return self._background.give_up(ticket)

    def wait_for_checkpoint(self, ticket: CheckpointTicket) -> bool:
        """`ticket.wait()`; one that is to be made at leisure is made now."""
        with self._condition:
            self._background.hurry(ticket)
        return ticket.wait()

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

        Returns:
            Its `wait` tells whether they are gone; not if the ssd tier failed.

        Raises:
            StoreError, EngineClosedError: the worker stopped or was closed.
        """
        job = Forget(session, list(keys), frozenset(spared))
        with self._condition:
            self._writer.raise_if_stopped()
            self._background.give_up_leisurely(session)
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
        counted["prefetch_waits"] = self._prefetching.waits
        counted["prefetch_wait_ms"] = int(1000 * self._prefetching.waited_s)
        return counted

    def check_integrity(self) -> None:
        """Assert that owners and copies account for every gpu block; once quiet, the tiers below.

        Only while no block is being read into the gpu pool.
        """
        with self._condition:
            self._residents.check_integrity()
            self._background.check_integrity()

    def close(self, *, drain: bool = True) -> None:
        """Stop the threads. Idempotent; afterwards blocks can be given back and restored, no more.

        Args:
            drain: finish what is pending, write what `retain` wants on ssd, and sync. Otherwise
                only the job under way is finished, and tickets raise `EngineClosedError`.
        """
        self._prefetching.close()
        self._restoring.close()
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
        return self._free_list.num_free > 0 or not self._is_one_leaving()

    def _is_one_leaving(self) -> bool:
        """Whether waiting brings a block; one that a hanging read may still write to does not."""
        return self._residents.num_leaving > self._restoring.num_stuck

    def _submit_checkpoint(
        self, session: str | None, blocks: Sequence[Wanted], at_leisure: bool = False
    ) -> CheckpointTicket:
        job = Checkpoint(session, list(blocks), self._transfer.written(), at_leisure)
        with self._condition:
            self._writer.raise_if_stopped()
            if self._policy.retain == "none" or not (self._lower.has_cpu or self._lower.has_ssd):
                job.ticket.resolve(durable=False, missing=len(blocks))
            else:
                if not at_leisure:
                    self._writer.wait_for(self._writer.has_room)
                    self._writer.raise_if_stopped()
                self._background.checkpoint(job)
        return job.ticket

    def _give_back(self, block_ids: Iterable[int]) -> None:
        """Give unsealed blocks back."""
        with self._condition:
            for block_id in block_ids:
                self._residents.give_back(block_id)
            self._condition.notify_all()
