"""Host memory that a GPU copies from fast, used again and again: room for one block per reader.

Fresh memory costs a page fault for every page, and memory that is not page-locked is copied by the
driver through a buffer of its own while the caller waits. Invariant: a buffer has one user at a
time, and there are never more of them than the limit. If the system refuses to page-lock one, plain
memory takes its place, which is said once: slower, and just as right. This module does not know
what is read, nor where to.
"""

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch

from streamkv.tiers.host_memory import Bytes

_log = logging.getLogger(__name__)


def pinned_memory(num_bytes: int) -> Bytes:
    """Page-locked memory, uint8 `[num_bytes]`.

    Raises:
        RuntimeError: the system refuses it.
    """
    memory: Bytes = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True).numpy()
    return memory


class Staging:
    """A few buffers of one size. Safe to use from several threads.

    Args:
        num_bytes: of each.
        limit: buffers at most; whoever comes when all are used waits.
        make: makes a page-locked one.
    """

    def __init__(
        self, num_bytes: int, limit: int, make: Callable[[int], Bytes] = pinned_memory
    ) -> None:
        assert limit > 0
        self._num_bytes = num_bytes
        self._make = make
        self._room = threading.Semaphore(limit)
        self._mutex = threading.Lock()
        self._free: list[Bytes] = []
        self._was_refused = False

    @contextmanager
    def buffer(self) -> Iterator[Bytes]:
        """Room `[num_bytes]` that nobody else uses meanwhile; what it holds is undefined."""
        with self._room:
            with self._mutex:
                found = self._free.pop() if self._free else None
            buffer = found if found is not None else self._made()
            try:
                yield buffer
            finally:
                # The newest first: it is the likeliest to lie in the processor's caches.
                with self._mutex:
                    self._free.append(buffer)

    def _made(self) -> Bytes:
        if not self._was_refused:
            try:
                return self._make(self._num_bytes)
            except RuntimeError as error:
                self._refused(error)
        return np.empty(self._num_bytes, dtype=np.uint8)

    def _refused(self, error: RuntimeError) -> None:
        with self._mutex:
            is_first, self._was_refused = not self._was_refused, True
        if is_first:
            _log.warning(
                "memory for reading from ssd could not be page-locked, so it is copied more "
                "slowly (%s). Free memory of the host, or raise its limit of locked memory "
                "(ulimit -l).",
                error,
            )
