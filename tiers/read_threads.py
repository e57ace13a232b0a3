"""Threads that read: a few, owned, with a queue, whose reads may be taken back or given up.

Invariant: a read that was submitted runs once or is taken back before it began, and in both cases
its `release` is called once, when it can write nothing any more. An exception out of a read is kept
for whoever waits for it. A thread that hangs in a read costs that thread and no waiter for longer
than the waiter's limit. This module does not know what is read, nor where to.
"""

import os
import threading
import time
from collections import deque
from collections.abc import Callable

NUM_THREADS = 4
"""Cold reads measured: 0.92 GB/s with one thread, 1.35 with four."""

_NUM_CORES = os.cpu_count() or 1

MAX_THREADS = max(NUM_THREADS, min(8, _NUM_CORES), min(16, _NUM_CORES // 2))
"""Where all is waited for and may lie in the page cache: then a core decodes and checks at 0.5 to 4
GB/s, and no disk is kept from anybody."""


class Read:
    """One read, to be waited for with `ReadThreads.wait`.

    Attributes:
        found: what the action returned; False until then.
        error: what it raised.
    """

    __slots__ = ("_action", "_release", "began_s", "ended", "error", "found")

    def __init__(self, action: Callable[[], bool], release: Callable[[], None]) -> None:
        self._action = action
        self._release = release
        self.began_s: float | None = None
        self.ended = False
        self.found = False
        self.error: BaseException | None = None

    def run(self) -> None:
        """Read, then let go of what was read into. Raises nothing."""
        try:
            try:
                self.found = self._action()
            finally:
                self._release()
        except BaseException as error:  # reaches whoever waits
            self.error = error

    def let_go(self) -> None:
        """It will not run: let go of what it would have read into."""
        self._release()


class ReadThreads:
    """Owned daemon threads, started when there is first something to read.

    After `close`, and in a process that was forked from the owner's, which has none of the threads,
    what is submitted is read at once by the caller.

    Args:
        name: of the threads.
        num_threads: at most.
    """

    def __init__(self, name: str, num_threads: int = NUM_THREADS) -> None:
        self._name = name
        self._num_threads = num_threads
        self._process_id = os.getpid()
        # Held for bookkeeping only, and never while another lock is asked for.
        self._condition = threading.Condition()
        self._queue: deque[Read] = deque()
        self._active: set[Read] = set()
        self._threads: list[threading.Thread] = []
        self._closing = False

    def is_running(self) -> bool:
        """Whether reads are left to the threads."""
        return not self._closing and os.getpid() == self._process_id

    def submit(self, action: Callable[[], bool], release: Callable[[], None]) -> Read:
        """Have something read.

        Args:
            action: reads; what it returns or raises is kept.
            release: called once when `action` has ended or will never begin, with no lock held
                that the caller of this or of `cancel` does not hold himself.
        """
        read = Read(action, release)
        if self.is_running():
            with self._condition:
                if not self._closing:
                    self._queue.append(read)
                    self._start_a_thread()
                    self._condition.notify_all()
                    return read
        read.run()
        read.ended = True
        return read

    def cancel(self, read: Read) -> bool:
        """Take back a read that has not begun. False: it has."""
        if not self.is_running():
            return False
        with self._condition:
            if read not in self._queue:
                return False
            self._queue.remove(read)
        read.let_go()
        return True

    def wait(self, read: Read, limit_s: float) -> bool:
        """Wait until a read has ended. False: it was given up.

        That is: it has run for longer than `limit_s`, or it has not begun and every thread has been
        in one read for as long. One that has begun may still end at some time, and its `release`
        tells when; one that has not is taken back.
        """
        while True:
            with self._condition:
                if read.ended:
                    return True
                left_s = self._left_s(read, limit_s)
                if left_s > 0:
                    self._condition.wait(left_s)
                    continue
                begun = read not in self._queue
                if not begun:
                    self._queue.remove(read)
            if not begun:
                read.let_go()
            return False

    def close(self, limit_s: float) -> bool:
        """Read what is queued and end the threads. Idempotent.

        Returns False if one was still reading after `limit_s` without an end; it ends when its read
        does.
        """
        if os.getpid() != self._process_id:
            return True
        with self._condition:
            self._closing = True
            self._condition.notify_all()
        deadline_s = time.monotonic() + limit_s
        for thread in self._threads:
            thread.join(max(deadline_s - time.monotonic(), 0.0))
        return not any(thread.is_alive() for thread in self._threads)

    def _start_a_thread(self) -> None:
        if len(self._threads) < self._num_threads:
            name = f"{self._name}-{len(self._threads)}"
            thread = threading.Thread(target=self._loop, name=name, daemon=True)
            thread.start()
            self._threads.append(thread)

    def _left_s(self, read: Read, limit_s: float) -> float:
        """How much longer to wait for a read, as things stand."""
        began = [each.began_s for each in self._active if each.began_s is not None]
        if read.began_s is not None:
            began = [read.began_s]
        elif len(began) < len(self._threads):
            return limit_s  # a thread is about to take it, or another one
        return max(began, default=0.0) + limit_s - time.monotonic()

    def _loop(self) -> None:
        while (read := self._next()) is not None:
            read.run()
            with self._condition:
                self._active.remove(read)
                read.ended = True
                self._condition.notify_all()

    def _next(self) -> Read | None:
        with self._condition:
            while not self._queue and not self._closing:
                self._condition.wait()
            if not self._queue:
                return None
            read = self._queue.popleft()
            read.began_s = time.monotonic()
            self._active.add(read)
            return read
