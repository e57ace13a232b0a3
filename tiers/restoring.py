"""Blocks come back into the gpu pool: from a gpu block of the same name, the cpu pool, or ssd.

What is in memory is copied on the calling thread, every copy issued before the first is waited for;
what only the ssd holds is read by threads meanwhile. Who has other blocks to ask for issues those,
too, before waiting for the first (`Restore`). Invariant: a block that is read into is held
until the read has ended, also if nobody waits for it any more. A read that takes longer than the
limit is therefore given up safely: it counts as a miss, the caller frees the block as after any
miss, and the hold keeps the block's id from being given out before the late read has written the
last of its bytes; whoever owns the block next can be written over by nobody.

This module does not know who wants the blocks, nor when they are written down.
"""

import logging
import threading
from collections.abc import Sequence
from typing import NamedTuple

from streamkv.tiers.background import Background
from streamkv.tiers.copies import Copies, Copy, Promotion, Promotions
from streamkv.tiers.lower import LowerTiers
from streamkv.tiers.prefetch import Prefetching
from streamkv.tiers.read_threads import MAX_THREADS, Read, ReadThreads
from streamkv.tiers.residents import Residents
from streamkv.tiers.spec import BlockKey
from streamkv.tiers.transfer import Completion, Transfer
from streamkv.tiers.usage import Counters

_log = logging.getLogger(__name__)


EAGER = 4
"""Blocks whose copies are issued before the others are looked up: that takes as long as they do."""


class Target(NamedTuple):
    """A block that is wanted, and the allocated gpu block that it goes to."""

    key: BlockKey
    block_id: int


class Sources(NamedTuple):
    """Where targets can be copied from in memory.

    Attributes:
        copies: of other gpu blocks, which are held.
        promotions: of blocks of the cpu pool, which are locked.
        found: of each target, whether one of these is for it.
    """

    copies: list[Copy]
    promotions: Promotions
    found: list[bool]


class Restore:
    """Targets that are being filled: to be waited for or abandoned, once, by one thread at a time.

    The targets that could not be filled have undefined contents, and may be written to only after
    they were given back and allocated anew. Nothing counts as sealed by this.

    Args:
        restoring: does the work.
        targets: what goes where.

    Attributes:
        targets: as given.
    """

    def __init__(self, restoring: "Restoring", targets: Sequence[Target]) -> None:
        self._restoring = restoring
        self.targets = targets
        self._found = [False] * len(targets)
        self._reads: dict[int, Read] = {}
        self._awaited: dict[int, Read] = {}
        self._copies = Copies(restoring.counters)

    def begin(self) -> None:
        """See `Restoring.begin`."""
        among_gpu_blocks = Copies(self._restoring.counters)
        try:
            self._begin_part(0, EAGER, among_gpu_blocks)
            if len(self.targets) > EAGER:
                self._begin_part(EAGER, len(self.targets), among_gpu_blocks)
            among_gpu_blocks.start()
            among_gpu_blocks.wait()
        except BaseException:
            among_gpu_blocks.end()
            self.abandon()
            raise

    def _begin_part(self, first: int, end: int, among_gpu_blocks: Copies) -> None:
        copies, promotions, found = self._restoring.sources(self.targets[first:end])
        for copy in copies:
            among_gpu_blocks.add(copy)
        self._copies.add(promotions)
        self._found[first:end] = found
        # The ssd takes longest, so it is asked first, and reads while all else is done.
        for at, is_found in enumerate(found, first):
            if is_found:
                continue
            target = self.targets[at]
            if (read := self._restoring.under_way(target.key)) is not None:
                self._awaited[at] = read
            else:
                self._reads[at] = self._restoring.read(target)
        self._copies.start()

    def is_done(self) -> bool:
        """Whether `wait` would not have to wait, but for blocks that are being prefetched."""
        return self._copies.are_done() and all(read.ended for read in self._reads.values())

    def wait_for_copies(self) -> bool:
        """Wait for copies from memory, which is soon; False: something else is under way."""
        if not self.is_only_copied:
            return False
        self._copies.wait_until_done()
        return True

    @property
    def is_only_copied(self) -> bool:
        """Whether nothing is read from ssd for it."""
        return not self._reads and not self._awaited

    def wait(self) -> list[bool]:
        """Wait until all is there; which of the targets could be filled, in their order.

        Raises:
            Exception: as `Restoring.begin`.
        """
        try:
            self._copies.wait()
            self._wait_for_prefetches()
            for at, read in self._reads.items():
                self._found[at] = self._restoring.ended(read)
        except BaseException:
            self.abandon()
            raise
        self._restoring.counters.add("misses", self._found.count(False))
        return self._found

    def abandon(self) -> None:
        """Nobody wants them any more: nothing is copied when this returns. Idempotent.

        A read that has begun goes on, and holds its block until it has ended.
        """
        for read in self._reads.values():
            self._restoring.cancel(read)
        self._copies.end()

    def _wait_for_prefetches(self) -> None:
        copies = Copies(self._restoring.counters)
        try:
            for at, prefetch in self._awaited.items():
                target = self.targets[at]
                if not self._restoring.wait_for_prefetch(prefetch):
                    continue
                among_gpu_blocks, promotions, [is_found] = self._restoring.sources([target])
                for copy in among_gpu_blocks:
                    copies.add(copy)
                copies.add(promotions)
                if is_found:
                    self._found[at] = True
                else:
                    self._reads[at] = self._restoring.read(target)
            copies.start()
            copies.wait()
        finally:
            copies.end()


class Restoring:
    """What fills gpu blocks with stored ones.

    Args:
        condition: guards `residents` and `background`; called without it, but for `num_stuck`.
        residents: users of the gpu blocks.
        background: knows what is still being copied down.
        lower: the tiers below.
        prefetching: what is being read ahead.
        transfer: copies within the gpu pool.
        counters: where restores are counted.
        limit_s: after so long a read from ssd is given up.

    Attributes:
        counters: as given.
    """

    def __init__(
        self,
        condition: threading.Condition,
        residents: Residents,
        background: Background,
        lower: LowerTiers,
        prefetching: Prefetching,
        transfer: Transfer,
        counters: Counters,
        limit_s: float,
    ) -> None:
        self._condition = condition
        self._residents = residents
        self._background = background
        self._lower = lower
        self._prefetching = prefetching
        self._transfer = transfer
        self.counters = counters
        self._limit_s = limit_s
        self._threads = ReadThreads("streamkv-restore", MAX_THREADS)
        self._read_into: set[int] = set()

    @property
    def num_stuck(self) -> int:
        """Blocks without an owner that a read which was given up may still write to."""
        return sum(not self._residents.is_owned(block_id) for block_id in self._read_into)

    def begin(self, targets: Sequence[Target]) -> "Restore":
        """Begin to fill the targets; what is under way then is to be waited for or abandoned.

        Copies from the cpu pool and reads from ssd are under way on return. A copy of another gpu
        block has ended: whoever waits for a free block would otherwise wait for the source of a
        copy that only he himself can see to its end.

        Raises:
            Exception: whatever is wrong other than the ssd; nothing is under way any more, but for
                reads that hold their blocks until they have ended.
        """
        restore = Restore(self, targets)
        restore.begin()
        return restore

    def restore(self, targets: Sequence[Target]) -> list[bool]:
        """Fill the targets; which of them could be, in their order: `begin` and `Restore.wait`."""
        return self.begin(targets).wait()

    def close(self) -> None:
        """End the threads; what is restored from now on is read by the caller. Idempotent."""
        if not self._threads.close(self._limit_s):
            _log.warning("a read has not ended after %g s and is left alone", self._limit_s)

    def sources(self, targets: Sequence[Target]) -> "Sources":
        """How to copy blocks from memory: what is being copied down is found on either side."""
        copies, absent = list[Copy](), list[int]()
        with self._condition:
            copy_of, find = self._background.copy_of, self._residents.find
            for at, (key, block_id) in enumerate(targets):
                job = copy_of(key)
                source = job.block_id if job is not None else find(key)
                if source is None:
                    absent.append(at)
                    continue
                self._residents.hold(source)
                written = job.written if job else None
                copies.append(self._copy_of_resident(source, written, block_id))
        locked = self._lower.lock_many([targets[at].key for at in absent])
        found, promoted = [True] * len(targets), list[Promotion]()
        for at, block in zip(absent, locked, strict=True):
            if block is None:
                found[at] = False
            else:
                promoted.append((block, targets[at].block_id))
        lower = self._lower
        promotions = Promotions(
            promoted,
            lower.promote_many,
            lambda pairs: lower.unlock_many([block for block, _ in pairs]),
        )
        return Sources(copies, promotions, found)

    def _copy_of_resident(self, source: int, written: Completion | None, block_id: int) -> Copy:
        def start() -> Completion:
            if written is not None:
                written.wait()
            return self._transfer.copy(source, block_id)

        return Copy(start, lambda: self._unhold(source), "shared")

    def under_way(self, key: BlockKey) -> Read | None:
        """The prefetch of a block, if it has begun."""
        with self._condition:
            return self._prefetching.take(key)

    def wait_for_prefetch(self, prefetch: Read) -> bool:
        """False: it was given up, which is counted."""
        if self._prefetching.wait(prefetch):
            return True
        self._give_up("a prefetch")
        return False

    def read(self, target: Target) -> Read:
        """Have a block read from ssd."""
        key, block_id = target
        with self._condition:
            self._residents.hold(block_id)
            self._read_into.add(block_id)
        return self._threads.submit(
            lambda: self._lower.read_stored(key, block_id), lambda: self._let_go(block_id)
        )

    def cancel(self, read: Read) -> None:
        """Take a read back, if it has not begun."""
        self._threads.cancel(read)

    def ended(self, read: Read) -> bool:
        """What became of a read from ssd: waits for it."""
        if not self._threads.wait(read, self._limit_s):
            self._give_up("a read")
            return False
        if read.error is not None:
            raise read.error
        if read.found:
            self.counters.add("promotions")
            self.counters.add("ssd_reads")
        return read.found

    def _give_up(self, what: str) -> None:
        _log.error("%s from ssd was given up after %g s and is a miss", what, self._limit_s)
        self.counters.add("reads_given_up")

    def _let_go(self, block_id: int) -> None:
        with self._condition:
            self._read_into.remove(block_id)
            self._unhold(block_id)

    def _unhold(self, block_id: int) -> None:
        with self._condition:
            self._residents.unhold(block_id)
            self._condition.notify_all()
