"""Reads from a store that take until a test lets them go on."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from streamkv.tiers.spec import BlockKey


class HeldReads:
    """Reads of a store that have got their bytes, or are about to, and return only when told to."""

    def __init__(self) -> None:
        self._arrived = threading.Semaphore(0)
        self._released = threading.Event()

    def stop(self) -> None:
        """Called by the reading thread."""
        self._arrived.release()
        self._released.wait()

    def arrive(self, num_reads: int = 1) -> None:
        """Wait until so many more reads stand still."""
        for _ in range(num_reads):
            self._arrived.acquire()

    def go(self) -> None:
        """Let them return, and all that follow."""
        self._released.set()


@contextmanager
def held_reads(rig: Any, num_reads: int = 1, *, before: bool = False) -> Iterator[HeldReads]:
    """Hold the next reads from ssd up once they have read, or `before` they do."""
    held, read, left = HeldReads(), rig.ssd.read, iter(range(num_reads))

    def late(key: BlockKey, out: NDArray[np.uint8]) -> bool:
        is_held = next(left, None) is not None
        if is_held and before:
            held.stop()
        found = read(key, out)
        if is_held and not before:
            held.stop()
        return found

    rig.ssd.read = late
    try:
        yield held
    finally:
        held.go()
        rig.ssd.read = read
