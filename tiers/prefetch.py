"""Reading ahead: blocks of the ssd are brought into the cpu pool before they are due.

Invariant: a key is read once at a time, whoever asks. What is read is listed in the cpu pool only
if the tiers keep that block and it was not deleted since the read began; both are decided with the
shared condition held, as deletions are. Nobody waits behind the prefetches of others: one that is
due and has not begun is taken back. This module does not know who asks, nor what happens at the
end of a stride.
"""

import logging
import threading
import time
from collections.abc import Callable, Collection

from streamkv.tiers.cpu_pool import CpuPool
from streamkv.tiers.host_memory import Bytes
from streamkv.tiers.read_threads import Read, ReadThreads
from streamkv.tiers.spec import BlockKey
from streamkv.tiers.usage import Counters

_log = logging.getLogger(__name__)

MAX_PENDING = 256
"""Prefetches that may be queued or under way: eight choices of 32 blocks."""


class Prefetching:
    """Prefetches of a tier manager, on threads of their own.

    `ask`, `take`, `bar` and `unbar` are called with the shared condition held, which takes a lock
    twice on one thread; the others without.

    Args:
        condition: guards what is here.
        cpu_pool: where blocks go; None or without room: none do.
        read: fills an array from ssd; whether it could, faults of the ssd included.
        keeps: whether the tiers go on holding a block; asked with the condition held.
        counters: where `prefetched` and `prefetch_skipped` are counted.
        limit_s: how long anybody waits for one read.

    Attributes:
        waits: restores that had to wait for a prefetch.
        waited_s: how long, together.
    """

    def __init__(
        self,
        condition: threading.Condition,
        cpu_pool: CpuPool | None,
        read: Callable[[BlockKey, Bytes], bool],
        keeps: Callable[[BlockKey], bool],
        counters: Counters,
        limit_s: float,
    ) -> None:
        self._condition = condition
        self._cpu = cpu_pool
        self._read = read
        self._keeps = keeps
        self._counters = counters
        self._limit_s = limit_s
        self._threads = ReadThreads("streamkv-prefetch")
        self._reads: dict[BlockKey, Read] = {}
        self._barred: set[BlockKey] = set()
        self._revoked: set[BlockKey] = set()
        self._closed = False
        self.waits = 0
        self.waited_s = 0.0

    def ask(self, key: BlockKey) -> None:
        """Have a block read that is in no memory; counted as skipped if that cannot be."""
        if key in self._reads:
            return
        has_room = self._cpu is not None and self._cpu.num_blocks > 0
        may_begin = has_room and len(self._reads) < MAX_PENDING and not self._closed
        if not may_begin or key in self._barred or not self._threads.is_running():
            self._counters.add("prefetch_skipped")
            return
        self._reads[key] = self._threads.submit(
            lambda: self._perform(key), lambda: self._forget(key)
        )

    def take(self, key: BlockKey) -> Read | None:
        """A block is due: the read of it that is under way, which the caller has to `wait` for.

        One that has not begun is taken back; the caller reads for himself.
        """
        read = self._reads.get(key)
        if read is None or not self._threads.is_running():
            return None
        if self._threads.cancel(read):
            self._counters.add("prefetch_skipped")
            return None
        return read

    def wait(self, read: Read) -> bool:
        """Wait for a prefetch that is under way. False: it takes too long."""
        if read.ended:
            return True
        begin_s = time.monotonic()
        with self._condition:
            self.waits += 1
        ended = self._threads.wait(read, self._limit_s)
        with self._condition:
            self.waited_s += time.monotonic() - begin_s
        return ended

    def bar(self, keys: Collection[BlockKey]) -> None:
        """Blocks are about to be deleted: none of them is listed, nor read again, until `unbar`."""
        self._barred.update(keys)
        for key in keys:
            read = self._reads.get(key)
            if read is not None and not self._threads.cancel(read):
                self._revoked.add(key)

    def unbar(self, keys: Collection[BlockKey]) -> None:
        """They are deleted. A read that began before is still not listed."""
        self._barred.difference_update(keys)

    def close(self) -> None:
        """Take back what has not begun, and end the threads. Idempotent."""
        if not self._threads.is_running():
            return
        with self._condition:
            self._closed = True
            for read in list(self._reads.values()):
                self._threads.cancel(read)
        if not self._threads.close(self._limit_s):
            _log.warning("a prefetch has not ended after %g s and is left alone", self._limit_s)

    def is_quiet(self) -> bool:
        """Whether nothing is queued or under way."""
        return not self._reads

    def check_integrity(self) -> None:
        """Assert that nothing is remembered of reads that have ended."""
        assert len(self._reads) <= MAX_PENDING
        assert self._revoked <= self._reads.keys(), "a read that has ended is still revoked"

    def _perform(self, key: BlockKey) -> bool:
        assert self._cpu is not None
        try:
            block = self._cpu.reserve(key)
            if block is None:
                self._counters.add("prefetch_skipped")
                return False
            try:
                listed = self._read(key, self._cpu.data(block))
                with self._condition:
                    deleted = key in self._barred or key in self._revoked
                    listed = listed and not deleted and self._keeps(key)
                    # False if the block was sealed anew meanwhile, and came down from the gpu pool.
                    listed = listed and self._cpu.publish(block)
            finally:
                self._cpu.unlock(block)
        except Exception:
            # Who needs the block reads for himself, and gets the error then.
            _log.exception("a prefetch failed")
            return False
        self._counters.add("prefetched", int(listed))
        return listed

    def _forget(self, key: BlockKey) -> None:
        with self._condition:
            del self._reads[key]
            self._revoked.discard(key)
