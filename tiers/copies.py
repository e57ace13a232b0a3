"""Copies from memory into gpu blocks, issued together and waited for together.

Invariant: the source of a copy is let go of once, and not while it is still being copied, also
after an error. This module does not know where sources lie, nor what holds them.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from streamkv.tiers.cpu_pool import CpuBlock
from streamkv.tiers.transfer import Completion
from streamkv.tiers.usage import Counters


@dataclass(slots=True, eq=False)
class Copy:
    """A copy from memory to a target; its source stays as it is until `release`.

    Attributes:
        start: issues the copy; or a promotion, to be issued with others.
        release: lets go of the source.
        counted_as: counters.
        holds_gpu_block: the source is a gpu block, whose id is kept from reuse.
        completion: of the copy while it is under way.
    """

    start: "Callable[[], Completion] | Promotion"
    release: Callable[[], None]
    counted_as: tuple[str, ...]
    holds_gpu_block: bool
    completion: Completion | None = None


Promotion = tuple[CpuBlock, int]
"""A locked block of the cpu pool, and the gpu block that it goes to."""


class Copies:
    """Copies from memory that were issued together, and are let go of together.

    Args:
        counters: where those that have ended are counted.
        promote: issues promotions, all at once.
    """

    def __init__(
        self, counters: Counters, promote: Callable[[Sequence[Promotion]], Completion]
    ) -> None:
        self._counters = counters
        self._promote = promote
        self._copies: list[Copy] = []

    def add(self, copy: Copy) -> None:
        """Take a copy on, that is not issued yet."""
        self._copies.append(copy)

    def start(self) -> None:
        """Issue all of them."""
        promoting = [copy for copy in self._copies if isinstance(copy.start, tuple)]
        if promoting:
            pairs = [copy.start for copy in promoting if isinstance(copy.start, tuple)]
            completion = self._promote(pairs)
            for copy in promoting:
                copy.completion = completion
        for copy in self._copies:
            if not isinstance(copy.start, tuple):
                copy.completion = copy.start()

    def are_done(self) -> bool:
        """Whether `wait` would return at once."""
        return all(completion.done() for completion in self._under_way())

    def wait_until_done(self) -> None:
        """Wait for all."""
        for completion in self._under_way():
            completion.wait()

    def wait(self) -> None:
        """Wait for all, and let go of their sources."""
        self.wait_until_done()
        counted: Counter[str] = Counter()
        for copy in self._copies:
            assert copy.completion is not None
            copy.completion = None
            counted.update(copy.counted_as)
        for name, number in counted.items():
            self._counters.add(name, number)
        self.end()

    def _under_way(self) -> list[Completion]:
        """Each completion once: promotions have one together."""
        found = {
            id(copy.completion): copy.completion
            for copy in self._copies
            if copy.completion is not None
        }
        return list(found.values())

    def end(self) -> None:
        """Let go of the sources. Nothing is let go of that is still being copied. Idempotent."""
        while self._copies:
            copy = self._copies.pop()
            if copy.completion is not None:
                with suppress(Exception):
                    copy.completion.wait()
            copy.release()
