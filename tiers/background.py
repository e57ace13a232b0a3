"""What the tiers do in the background: copies down, checkpoints, deletions, one after another.

Invariant: a job holds the gpu blocks it reads from the moment it is queued until it ended, and
    every job
ends: done, cancelled, or discarded with an error. Methods without an underscore are called with the
shared condition held; jobs run on the worker's thread, which takes the condition only for
bookkeeping. This module does not know who waits for gpu blocks, nor why a block was dropped.
"""

import threading
from collections.abc import Iterable

from streamkv.errors import InputError, StoreError
from streamkv.tiers.jobs import Checkpoint, CheckpointTicket, Collect, Demote, Forget, Job
from streamkv.tiers.lower import LowerTiers
from streamkv.tiers.policy import Claims, Policy
from streamkv.tiers.prefetch import Prefetching
from streamkv.tiers.residents import Residents
from streamkv.tiers.spec import BlockKey
from streamkv.tiers.transfer import Completion
from streamkv.tiers.usage import Counters
from streamkv.tiers.writer import WriteBehind


class Background:
    """The worker of a tier manager.

    Args:
        condition: guards `residents`, the claims and the queue.
        residents: users of the gpu blocks.
        lower: the tiers below; only the worker changes them.
        policy: what is kept.
        counters: where `dropped` is counted.
        prefetching: what is being read from ssd into memory, where nothing deleted may come.

    Attributes:
        writer: the thread and its queue.
    """

    def __init__(
        self,
        condition: threading.Condition,
        residents: Residents,
        lower: LowerTiers,
        policy: Policy,
        counters: Counters,
        prefetching: Prefetching,
    ) -> None:
        self._condition = condition
        self._residents = residents
        self._lower = lower
        self._policy = policy
        self._counters = counters
        self._prefetching = prefetching
        self._claims = Claims()
        self._copying: dict[BlockKey, Demote] = {}
        self._unwanted: set[BlockKey] = set()
        self.writer: WriteBehind[Job] = WriteBehind(
            condition,
            perform=self._perform,
            discard=self._discard,
            idle=lower.write_oldest,
            max_pending=policy.max_pending,
        )

    def keeps(self, key: BlockKey) -> bool:
        """Whether the lower tiers go on holding a block."""
        num_users = self._residents.num_users(key)
        return self._policy.keeps(key, num_users=num_users, claimed=key in self._claims)

    def copy_of(self, key: BlockKey) -> Demote | None:
        """The copy of a block that is pending or under way."""
        return self._copying.get(key)

    def demote(self, key: BlockKey, block_id: int, written: Completion) -> None:
        """Queue the copy of a sealed block to the tier below."""
        job = Demote(key, block_id, written)
        self._copying[key] = job
        self._residents.hold(block_id)
        self.writer.submit(job)

    def checkpoint(self, job: Checkpoint) -> None:
        """Queue a checkpoint; its blocks are kept from now on.

        One of the same session that was to be made at leisure is not made any more.
        """
        for block_id in job.held():
            self._residents.hold(block_id)
        self._claims.begin(job.keys())
        # After that, or what both need would be deleted.
        self.give_up_leisurely(job.session)
        # Somebody waits for the gpu blocks of one that is made at leisure.
        self.writer.submit(job, first=job.at_leisure)

    def give_up_leisurely(self, session: str | None) -> None:
        """Do not make the checkpoint of a session that was to be made at leisure."""

        def matches(job: Job) -> bool:
            if not isinstance(job, Checkpoint) or job.session != session:
                return False
            return (job.at_leisure or job.ticket.is_kept()) and not job.ticket.is_awaited

        if session is not None and isinstance(job := self.writer.cancel(matches), Checkpoint):
            self._give_up(job)

    def give_up(self, ticket: CheckpointTicket) -> bool:
        """Do not make a checkpoint. False: it is too late for that."""
        job = self.writer.cancel(lambda job: isinstance(job, Checkpoint) and job.ticket is ticket)
        if not isinstance(job, Checkpoint):
            return False
        self._give_up(job)
        return True

    def hurry(self, ticket: CheckpointTicket) -> None:
        """Somebody waits for a checkpoint that was to be made at leisure."""
        ticket.is_awaited = True
        self.writer.hurry(lambda job: isinstance(job, Checkpoint) and job.ticket is ticket)

    def _give_up(self, job: Checkpoint) -> None:
        self._unhold_all(job)
        self.collect(self._claims.abandon(job.keys()))
        job.ticket.resolve(durable=False)

    def collect(self, keys: Iterable[BlockKey]) -> None:
        """Have those blocks deleted that nobody needs, now and when the worker comes to it."""
        keys = [key for key in keys if not self.keeps(key)]
        if not keys or not self.writer.is_running():
            return
        for key in keys:
            self._cancel_copy(key)
        if not self._unwanted:
            self.writer.submit(Collect())
        self._unwanted.update(keys)

    def give_up_a_copy(self) -> bool:
        """Cancel the oldest pending copy of a block that was given back, if there is one."""

        def matches(job: Job) -> bool:
            return isinstance(job, Demote) and not self._residents.is_owned(job.block_id)

        job = self.writer.cancel(matches)
        if isinstance(job, Demote):
            self._end_demote(job)
            self._counters.add("dropped")
        return job is not None

    def check_integrity(self) -> None:
        """Assert that nothing is left over once the worker is quiet."""
        self._claims.check_integrity()
        self._prefetching.check_integrity()
        if self.writer.is_quiet():
            assert not self._copying and not self._unwanted, "a job was never finished"
            assert self._residents.num_holds == 0, "a block is held by nobody"
            self._lower.check_integrity()

    def _cancel_copy(self, key: BlockKey) -> None:
        job = self._copying.get(key)
        if job is not None and self.writer.cancel(lambda queued: queued is job) is job:
            self._end_demote(job)

    def _perform(self, job: Job) -> None:
        match job:
            case Demote():
                self._perform_demote(job)
            case Checkpoint():
                self._perform_checkpoint(job)
            case Forget():
                self._perform_forget(job)
            case Collect():
                self._perform_collect()

    def _discard(self, job: Job, error: BaseException) -> None:
        match job:
            case Demote():
                self._end_demote(job)
                self._counters.add("dropped")
            case Checkpoint():
                self._unhold_all(job)
                self._claims.abandon(job.keys())
                job.ticket.fail(error)
            case Forget():
                job.ticket.fail(error)
            case Collect():
                self._unwanted.clear()

    def _perform_demote(self, job: Demote) -> None:
        job.written.wait()
        self._lower.put(job.key, job.block_id)
        with self._condition:
            self._end_demote(job)
            self.collect([job.key])

    def _end_demote(self, job: Demote) -> None:
        del self._copying[job.key]
        self._residents.unhold(job.block_id)
        self._condition.notify_all()

    def _perform_checkpoint(self, job: Checkpoint) -> None:
        job.written.wait()
        if job.at_leisure and self._keep_in_memory(job):
            return
        if job.session is not None:
            self._adopt_manifest(job.session)
        error, durable, missing = self._store(job)
        with self._condition:
            self._unhold_all(job)
            if job.session is not None:
                self.collect(self._claims.settle(job.session, job.keys()))
            else:
                self._claims.abandon(job.keys())
        if error is not None:
            job.ticket.fail(error)
        else:
            job.ticket.resolve(durable=durable, missing=missing)

    def _keep_in_memory(self, job: Checkpoint) -> bool:
        """Take all blocks into memory, and leave the rest for later; False: it is to be done now.

        Where memory has no room, what has waited for longer is stored first, and lets go of it.
        """
        session = job.session
        if session is None or not (self._lower.has_cpu and self._lower.has_ssd):
            return False
        while self._lower.keep(session, job.wanted) > 0:
            if not self.writer.perform_later():
                return False
        with self._condition:
            self._unhold_all(job)
            job.wanted = [(key, None) for key, _ in job.wanted]
            job.at_leisure = False
            job.ticket.keep()
            self.writer.submit_later(job)
            if job.ticket.is_awaited or self.writer.has(lambda other: is_about(other, session)):
                # What was asked for since then must find this done.
                self.writer.hurry(lambda other: other is job)
        return True

    def _store(self, job: Checkpoint) -> tuple[Exception | None, bool, int]:
        error: Exception | None = None
        if self._lower.has_ssd:
            try:
                missing = self._lower.checkpoint(job.session, job.wanted)
                return None, missing == 0, missing
            except InputError as caught:
                return caught, False, len(job.wanted)
            except (StoreError, OSError) as caught:
                error = caught
                self._lower.disable_ssd(error)
        return error, False, self._lower.keep(job.session, job.wanted)

    def _unhold_all(self, job: Checkpoint) -> None:
        for block_id in job.held():
            self._residents.unhold(block_id)
        self._condition.notify_all()

    def _adopt_manifest(self, session: str) -> None:
        """Remember what an earlier process stored, so that it is deleted once superseded."""
        with self._condition:
            known = self._claims.knows(session)
        keys = [] if known else self._lower.manifest(session)
        with self._condition:
            if keys:
                self._claims.begin(keys)
                self._claims.settle(session, keys)

    def _perform_forget(self, job: Forget) -> None:
        self._adopt_manifest(job.session)
        self._lower.forget(job.session)
        with self._condition:
            keys = {*self._claims.forget(job.session), *job.keys}
            unused = [key for key in keys - job.spared if not self._is_used(key)]
            self._delete_in_memory(unused)
        are_gone = self._lower.erase_stored(unused)
        with self._condition:
            self._prefetching.unbar(unused)
        job.ticket.resolve(durable=are_gone)

    def _is_used(self, key: BlockKey) -> bool:
        return self._residents.num_users(key) > 0 or key in self._claims

    def _perform_collect(self) -> None:
        with self._condition:
            unused = [key for key in self._unwanted if not self.keeps(key)]
            self._unwanted.clear()
            # A block sealed again from here on must not find the copy that is about to go.
            self._delete_in_memory(unused)
        self._delete_stored(unused)

    def _delete_in_memory(self, keys: list[BlockKey]) -> None:
        # Until they are gone from the ssd, too, they could be read from there into memory again.
        self._prefetching.bar(keys)
        self._lower.delete_in_memory(keys)

    def _delete_stored(self, keys: list[BlockKey]) -> None:
        self._lower.delete_stored(keys)
        with self._condition:
            self._prefetching.unbar(keys)


def is_about(job: Job, session: str) -> bool:
    """Whether a job changes what is kept for a session."""
    return isinstance(job, Checkpoint | Forget) and job.session == session
