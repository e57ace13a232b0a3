"""The write-behind worker: one owned thread, its queues, and its error for whoever waits.

Invariant: a job that was accepted is performed once, or discarded once with the error that says
why; so nobody waits for ever. Jobs are performed in order, those that can wait when there is no
other. An exception out of a job stops the worker for good: it is logged, kept, and raised to every
waiter. This module does not know what a job does.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

from streamkv.errors import EngineClosedError, StoreError
from streamkv.tiers.faults import fault_point

_log = logging.getLogger(__name__)

Job = TypeVar("Job")


class WriteBehind(Generic[Job]):
    """A worker thread and its queue.

    The condition is shared with the owner, whose waits it wakes: `has_room`, `submit`,
    `submit_later`, `hurry`, `cancel`, `wait_for` and `raise_if_stopped` are called with it held,
    the callbacks as said.

    Args:
        condition: guards the queue; notified whenever a job ended.
        perform: does a job; on the worker, condition not held.
        discard: a job will not be done, and why; condition held.
        idle: does a piece of work when the queue is empty, returns whether there may be more; on
            the worker, condition not held.
        max_pending: jobs that `has_room` lets wait.
    """

    def __init__(
        self,
        condition: threading.Condition,
        *,
        perform: Callable[[Job], None],
        discard: Callable[[Job, BaseException], None],
        idle: Callable[[], bool],
        max_pending: int,
    ) -> None:
        self._condition = condition
        self._perform = perform
        self._discard = discard
        self._idle = idle
        self._max_pending = max_pending
        self._queue: deque[Job] = deque()
        self._later: deque[Job] = deque()
        self._active: Job | None = None
        self._busy = True
        self._closing = False
        self._error: BaseException | None = None
        self.waits = 0
        self.wait_ms = 0
        self._thread = threading.Thread(target=self._loop, name="streamkv-tiers", daemon=True)
        self._thread.start()

    def has_room(self) -> bool:
        """Whether the queue is below its bound."""
        return len(self._queue) < self._max_pending

    def is_running(self) -> bool:
        """Whether jobs are still accepted."""
        return not self._closing and self._error is None

    def submit(self, job: Job, *, first: bool = False) -> None:
        """Queue a job, behind all others or before them.

        The bound is the caller's to respect, by `has_room`.
        """
        assert self.is_running(), "the worker has stopped"
        if first:
            self._queue.appendleft(job)
        else:
            self._queue.append(job)
        self._condition.notify_all()

    def submit_later(self, job: Job) -> None:
        """Have a job done when nothing else is to be done; also from within a job."""
        self._later.append(job)
        self._condition.notify_all()

    def hurry(self, matches: Callable[[Job], bool]) -> None:
        """Have the jobs that match and could wait done before all others."""
        for job in [job for job in self._later if matches(job)]:
            self._later.remove(job)
            self._queue.appendleft(job)
        self._condition.notify_all()

    def has(self, matches: Callable[[Job], bool]) -> bool:
        """Whether a job that matches is queued and cannot wait."""
        return any(matches(job) for job in self._queue)

    def cancel(self, matches: Callable[[Job], bool]) -> Job | None:
        """Take back the oldest queued job that matches. None: there is none, or it has begun."""
        for queue in (self._queue, self._later):
            for job in queue:
                if matches(job):
                    queue.remove(job)
                    self._condition.notify_all()
                    return job
        return None

    def perform_later(self) -> bool:
        """Do the oldest job that could wait, within another one; False: there is none.

        For the worker's thread, condition not held.
        """
        with self._condition:
            if not self._later:
                return False
            job = self._later.popleft()
        try:
            self._perform(job)
        except BaseException:
            with self._condition:
                self._later.appendleft(job)
            raise
        return True

    def raise_if_stopped(self) -> None:
        """Raise if no job will be done any more.

        Raises:
            StoreError: an unexpected exception stopped the worker; it is the cause.
            EngineClosedError: closed.
        """
        if self._error is not None:
            raise StoreError(f"the tiers' worker stopped: {self._error!r}") from self._error
        if self._closing:
            raise EngineClosedError("the tiers are closed")

    def wait_for(self, ready: Callable[[], bool]) -> None:
        """Wait until `ready()`; raises as `raise_if_stopped` if the worker stops before."""
        if ready():
            return
        begin = time.monotonic()
        self.waits += 1
        try:
            while not ready():
                self.raise_if_stopped()
                self._condition.wait()
        finally:
            self.wait_ms += int(1000 * (time.monotonic() - begin))

    def is_quiet(self) -> bool:
        """Whether nothing is queued, under way or left to do in idle time."""
        is_empty = not self._queue and not self._later
        return is_empty and self._active is None and not self._busy

    def close(self, *, drain: bool) -> None:
        """Stop the thread after all queued jobs, or after the one under way. Idempotent."""
        with self._condition:
            self._closing = True
            if not drain:
                self._discard_all(EngineClosedError("closed before this was written"))
            self._condition.notify_all()
        self._thread.join()

    def _loop(self) -> None:
        try:
            while self._step():
                pass
        except BaseException as error:
            # Whatever it is, it must reach the waiters: a silent thread is a hang.
            _log.exception("the tiers' worker stopped; nothing is written to lower tiers any more")
            with self._condition:
                self._error = error
                if self._active is not None:
                    self._queue.appendleft(self._active)
                self._discard_all(error)
        finally:
            with self._condition:
                self._active, self._busy = None, False
                self._condition.notify_all()

    def _step(self) -> bool:
        with self._condition:
            while not (self._queue or self._later or self._busy or self._closing):
                self._condition.wait()
            if self._queue or self._later:
                self._active = (self._queue or self._later).popleft()
                self._busy = True
            elif self._closing:
                return False
        if self._active is None:
            more = self._idle()
        else:
            fault_point("worker")
            self._perform(self._active)
            more = True
        with self._condition:
            self._active, self._busy = None, more
            self._condition.notify_all()
        return True

    def _discard_all(self, error: BaseException) -> None:
        while self._queue or self._later:
            self._discard((self._queue or self._later).popleft(), error)
