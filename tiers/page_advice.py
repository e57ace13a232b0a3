"""Asks the kernel for pages of a mapped file before they are touched.

The store's map is opened without read-ahead: the kernel's guess reads up to the disk's
`read_ahead_kb` around every page that is touched, which is megabytes on many machines, for a piece
of a few KiB. Without it a page that is touched is read by itself, and waited for. So the pieces of
a record, which mostly lie one behind the other, are asked for ahead.

Invariant: an advice changes no byte and raises nothing; a wrong one costs what it reads, and that
is never more than was rightly asked for, plus a few pieces a record. This module does not know what
the pages hold.
"""

import ctypes
import mmap
from collections.abc import Callable
from functools import cache

_FIRST_REACH = 4
"""Pieces asked for before one was found where it was expected."""


class ReadAhead:
    """Follows the pieces of one record in the order in which they are read.

    Args:
        num_pieces: that will be read.
        step: bytes from one piece to the next where they lie one behind the other.
        ask: asks for `num_bytes` of memory from an address on.
    """

    def __init__(
        self, num_pieces: int, step: int, ask: Callable[[int, int], None] | None = None
    ) -> None:
        self._num_left = num_pieces
        self._step = step
        self._ask = ask if ask is not None else _will_need()
        self._expected: int | None = None
        self._asked_to = 0
        self._reach = _FIRST_REACH

    def follow(self, address: int) -> None:
        """A piece at `address` is about to be read: ask for those that are likely to follow."""
        self._num_left -= 1
        if self._expected is not None:
            if address == self._expected:
                self._reach += 1
            else:
                self._asked_to, self._reach = 0, 1
        self._expected = address + self._step
        first = max(self._asked_to, self._expected)
        num_bytes = self._expected + min(self._reach, self._num_left) * self._step - first
        # In growing portions, because each is a request to the disk.
        is_portion = num_bytes >= self._reach // 2 * self._step
        if num_bytes > 0 and (is_portion or self._reach >= self._num_left):
            self._ask(first, num_bytes)
            self._asked_to = first + num_bytes


@cache
def _will_need() -> Callable[[int, int], None]:
    """Asks the kernel, where it can be asked."""
    advice = getattr(mmap, "MADV_WILLNEED", None)
    madvise = getattr(ctypes.CDLL(None), "madvise", None)
    if advice is None or madvise is None:
        return lambda address, num_bytes: None
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)

    def ask(address: int, num_bytes: int) -> None:
        begin = address // mmap.PAGESIZE * mmap.PAGESIZE
        madvise(begin, address + num_bytes - begin, advice)

    return ask
