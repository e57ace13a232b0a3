"""Copies from memory into gpu blocks, issued together and waited for together.

Invariant: the source of a copy is let go of once, and not while it is still being copied, also
after an error. This module does not know where sources lie, nor what holds them.
"""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from streamkv.tiers.transfer import Completion
from streamkv.tiers.usage import Counters


@dataclass(slots=True, eq=False)
class Copy:
    """A copy from memory to a target; its source stays as it is until `release`.

    Attributes:
        start: issues the copy.
        release: lets go of the source.
        counted_as: counters.
        holds_gpu_block: the source is a gpu block, whose id is kept from reuse.
        completion: of the copy while it is under way.
    """

    start: Callable[[], Completion]
    release: Callable[[], None]
    counted_as: tuple[str, ...]
    holds_gpu_block: bool
    completion: Completion | None = None


class Copies:
    """Copies from memory that were issued together, and are let go of together.

    Args:
        counters: where those that have ended are counted.
    """

    def __init__(self, counters: Counters) -> None:
        self._counters = counters
        self._copies: list[Copy] = []

    def add(self, copy: Copy) -> None:
        """Take a copy on, that is not issued yet."""
        self._copies.append(copy)

    def start(self) -> None:
        """Issue all of them."""
        for copy in self._copies:
            copy.completion = copy.start()

    def are_done(self) -> bool:
        """Whether `wait` would return at once."""
        return all(copy.completion is None or copy.completion.done() for copy in self._copies)

    def wait(self) -> None:
        """Wait for all, and let go of their sources."""
        for copy in self._copies:
            assert copy.completion is not None
            copy.completion.wait()
            copy.completion = None
            for name in copy.counted_as:
                self._counters.add(name)
        self.end()

    def end(self) -> None:
        """Let go of the sources. Nothing is let go of that is still being copied. Idempotent."""
        while self._copies:
            copy = self._copies.pop()
            if copy.completion is not None:
                with suppress(Exception):
                    copy.completion.wait()
            copy.release()
