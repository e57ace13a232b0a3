"""Blocks come back into the gpu pool: from a gpu block of the same name, the cpu pool, or ssd.

What is in memory is copied on the calling thread, every copy issued before the first is waited for;
what only the ssd holds is read by threads meanwhile. Invariant: a block that is read into is held
until the read has ended, also if nobody waits for it any more. A read that takes longer than the
limit is therefore given up safely: it counts as a miss, the caller frees the block as after any
miss, and the hold keeps the block's id from being given out before the late read has written the
last of its bytes; whoever owns the block next can be written over by nobody.

This module does not know who wants the blocks, nor when they are written down.
"""

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import NamedTuple

from streamkv.tiers.background import Background
from streamkv.tiers.cpu_pool import CpuBlock
from streamkv.tiers.lower import LowerTiers
from streamkv.tiers.prefetch import Prefetching
from streamkv.tiers.read_threads import Read, ReadThreads
from streamkv.tiers.residents import Residents
from streamkv.tiers.spec import BlockKey
from streamkv.tiers.transfer import Completion, Transfer
from streamkv.tiers.usage import Counters

_log = logging.getLogger(__name__)


class Target(NamedTuple):
    """A block that is wanted, and the allocated gpu block that it goes to."""

    key: BlockKey
    block_id: int


@dataclass(slots=True, eq=False)
class _Copy:
    """A copy from memory to a target; its source stays as it is until `release`.

    Attributes:
        start: issues the copy.
        release: lets go of the source.
        counted_as: counters.
        completion: of the copy while it is under way.
    """

    start: Callable[[], Completion]
    release: Callable[[], None]
    counted_as: tuple[str, ...]
    completion: Completion | None = None


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
        self._counters = counters
        self._limit_s = limit_s
        self._threads = ReadThreads("streamkv-restore")
        self._read_into: set[int] = set()

    @property
    def num_stuck(self) -> int:
        """Blocks without an owner that a read which was given up may still write to."""
        return sum(not self._residents.is_owned(block_id) for block_id in self._read_into)

    def restore(self, targets: Sequence[Target]) -> list[bool]:
        """Fill the targets; which of them could be, in their order.

        The others' contents are undefined, and such a block may be written to only after it was
        given back and allocated anew. Nothing counts as sealed yet.

        Raises:
            Exception: whatever is wrong other than the ssd; no target is copied to any more, and
                one that is still being read into is held until that has ended.
        """
        reads: dict[int, Read] = {}
        awaited: dict[int, Read] = {}
        found = [False] * len(targets)
        try:
            with self._copying() as copies:
                for at, target in enumerate(targets):
                    # The ssd takes longest, so it is asked first, and reads while all else is done.
                    if (copy := self._source(target)) is not None:
                        copies.append(copy)
                        found[at] = True
                    elif (read := self._under_way(target.key)) is not None:
                        awaited[at] = read
                    else:
                        reads[at] = self._read(target)
            with self._copying() as copies:
                for at, prefetch in awaited.items():
                    if not self._prefetching.wait(prefetch):
                        self._give_up("a prefetch")
                    elif (copy := self._source(targets[at])) is not None:
                        copies.append(copy)
                        found[at] = True
                    else:
                        reads[at] = self._read(targets[at])
            for at, read in reads.items():
                found[at] = self._ended(read)
        except BaseException:
            for read in reads.values():
                self._threads.cancel(read)
            raise
        self._counters.add("misses", found.count(False))
        return found

    def close(self) -> None:
        """End the threads; what is restored from now on is read by the caller. Idempotent."""
        if not self._threads.close(self._limit_s):
            _log.warning("a read has not ended after %g s and is left alone", self._limit_s)

    @contextmanager
    def _copying(self) -> Iterator[list[_Copy]]:
        """Collects copies; on leaving all are issued, then all waited for, then all let go of."""
        copies: list[_Copy] = []
        try:
            yield copies
            for copy in copies:
                copy.completion = copy.start()
            for copy in copies:
                assert copy.completion is not None
                copy.completion.wait()
                copy.completion = None
                for name in copy.counted_as:
                    self._counters.add(name)
        finally:
            for copy in copies:
                # Also after an error nothing may be let go of that is still being copied.
                if copy.completion is not None:
                    with suppress(Exception):
                        copy.completion.wait()
                copy.release()

    def _source(self, target: Target) -> _Copy | None:
        """How to copy a block from memory: what is being copied down is found on either side."""
        with self._condition:
            job = self._background.copy_of(target.key)
            source = job.block_id if job is not None else self._residents.find(target.key)
            if source is not None:
                self._residents.hold(source)
        if source is not None:
            return self._copy_of_resident(source, job.written if job else None, target.block_id)
        block = self._lower.lock(target.key)
        return self._copy_of_demoted(block, target.block_id) if block is not None else None

    def _copy_of_resident(self, source: int, written: Completion | None, block_id: int) -> _Copy:
        def start() -> Completion:
            if written is not None:
                written.wait()
            return self._transfer.copy(source, block_id)

        return _Copy(start, lambda: self._unhold(source), ("shared",))

    def _copy_of_demoted(self, block: CpuBlock, block_id: int) -> _Copy:
        return _Copy(
            lambda: self._lower.promote(block, block_id),
            lambda: self._lower.unlock(block),
            ("promotions", "cpu_reads"),
        )

    def _under_way(self, key: BlockKey) -> Read | None:
        with self._condition:
            return self._prefetching.take(key)

    def _read(self, target: Target) -> Read:
        key, block_id = target
        with self._condition:
            self._residents.hold(block_id)
            self._read_into.add(block_id)
        return self._threads.submit(
            lambda: self._lower.read_stored(key, block_id), lambda: self._let_go(block_id)
        )

    def _ended(self, read: Read) -> bool:
        """What became of a read from ssd."""
        if not self._threads.wait(read, self._limit_s):
            self._give_up("a read")
            return False
        if read.error is not None:
            raise read.error
        if read.found:
            self._counters.add("promotions")
            self._counters.add("ssd_reads")
        return read.found

    def _give_up(self, what: str) -> None:
        _log.error("%s from ssd was given up after %g s and is a miss", what, self._limit_s)
        self._counters.add("reads_given_up")

    def _let_go(self, block_id: int) -> None:
        with self._condition:
            self._read_into.remove(block_id)
            self._unhold(block_id)

    def _unhold(self, block_id: int) -> None:
        with self._condition:
            self._residents.unhold(block_id)
            self._condition.notify_all()
