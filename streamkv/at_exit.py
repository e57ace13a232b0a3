"""What is open when the process ends, and is closed then.

Daemon threads are cut off at the end of a process; one that is in compiled code then takes the
process down with an abort. So whoever owns such threads is closed before. The set of them is module
state, for a process ends but once; it keeps nobody alive.
"""

import atexit
import contextlib
import os
import weakref
from typing import Protocol


class Closable(Protocol):
    """Something with threads."""

    def close(self) -> None:
        """End them."""


_open: "weakref.WeakSet[Closable]" = weakref.WeakSet()
_process_id = os.getpid()


def close_at_exit(owner: Closable) -> None:
    """Have it closed when the process ends, if it still exists; closing twice must be allowed."""
    _open.add(owner)


@atexit.register
def _close_all() -> None:
    if os.getpid() != _process_id:
        return  # a child by fork, which has none of the threads
    for owner in list(_open):
        with contextlib.suppress(Exception):
            owner.close()
