"""Lets many threads use a resource, and one thread replace or close it when nobody is inside.

Invariant: while one thread is in `exclusive` no other is in `enter`. This module does not know
what the resource is.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Condition

from streamkv.errors import StoreError


class Gate:
    """Shared entry, exclusive replacement, and closing for good.

    Args:
        name: what is behind the gate, for the message once it is closed.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._condition = Condition()
        self._num_inside = 0
        self._exclusive = False
        self._closed = False

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._closed

    def check_open(self) -> None:
        """Raise `StoreError` once the gate is closed."""
        if self._closed:
            raise StoreError(f"{self._name} is closed.")

    @contextmanager
    def enter(self) -> Iterator[None]:
        """Be inside, together with others. Waits while a thread is in `exclusive`.

        Raises:
            StoreError: the gate is closed.
        """
        with self._condition:
            self._condition.wait_for(lambda: not self._exclusive)
            self.check_open()
            self._num_inside += 1
        try:
            yield
        finally:
            with self._condition:
                self._num_inside -= 1
                self._condition.notify_all()

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Be inside alone; waits for those inside, who must not call this."""
        with self._condition:
            self._condition.wait_for(lambda: not self._exclusive)
            self._exclusive = True
            self._condition.wait_for(lambda: self._num_inside == 0)
        try:
            yield
        finally:
            with self._condition:
                self._exclusive = False
                self._condition.notify_all()

    def close(self) -> None:
        """Let nobody in from now on; those inside stay until they leave."""
        with self._condition:
            self._closed = True
