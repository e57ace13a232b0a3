"""Asks the kernel for pages of a mapped file before they are touched.

The store's map is opened without read-ahead: the kernel's guess reads up to the disk's
`read_ahead_kb` around every page that is touched, which is megabytes on many machines, for a piece
of a few KiB. Without it a page that is touched is read by itself, and waited for. So what will be
copied is asked for as a whole.

Invariant: an advice changes no byte and raises nothing. This module does not know what the pages
hold.
"""

import ctypes
import mmap
from collections.abc import Callable
from functools import cache


def will_need(address: int, num_bytes: int) -> None:
    """Ask for memory from an address on; nothing happens for none."""
    if num_bytes > 0:
        _ask()(address, num_bytes)


@cache
def _ask() -> Callable[[int, int], None]:
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
