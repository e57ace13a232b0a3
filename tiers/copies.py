"""Copies from memory into gpu blocks, issued together and waited for together.

Invariant: the source of a copy is let go of once, and not while it is still being copied, also
after an error. This module does not know where sources lie, nor what holds them.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from streamkv.tiers.cpu_pool import CpuBlock
from streamkv.tiers.transfer import Completion
from streamkv.tiers.usage import Counters


@dataclass(slots=True, eq=False)
class Copy:
    """A copy from a gpu block to a target; its source stays as it is until `release`.

    Attributes:
        start: issues the copy.
        release: lets go of the source, whose id is kept from reuse until then.
        counted_as: counter.
        completion: of the copy while it is under way.
    """

    start: Callable[[], Completion]
    release: Callable[[], None]
    counted_as: str
    completion: Completion | None = None


Promotion = tuple[CpuBlock, int]
"""A locked block of the cpu pool, and the gpu block that it goes to."""


class Promotions:
    """Copies from the cpu pool that are issued, waited for and let go of together.

    A session that wakes has dozens, and whoever waits for it waits for what is done for each.

    Args:
        pairs: what goes where.
        promote: issues them all.
        release: unlocks the blocks.
    """

    def __init__(
        self,
        pairs: Sequence[Promotion],
        promote: Callable[[Sequence[Promotion]], Completion],
        release: Callable[[Sequence[Promotion]], None],
    ) -> None:
        self._pairs = pairs
        self._promote = promote
        self._release = release
        self._completion: Completion | None = None

    def __len__(self) -> int:
        return len(self._pairs)

    def start(self) -> None:
        """Issue all of them, if they are not issued."""
        if self._pairs and self._completion is None:
            self._completion = self._promote(self._pairs)

    def are_done(self) -> bool:
        """Whether `wait` would return at once."""
        return self._completion is None or self._completion.done()

    def wait(self) -> None:
        """Wait for all; their sources stay locked."""
        if self._completion is not None:
            self._completion.wait()

    def end(self) -> None:
        """Unlock the sources; what is still being copied is waited for. Idempotent."""
        if self._completion is not None:
            with suppress(Exception):
                self._completion.wait()
            self._completion = None
        pairs, self._pairs = self._pairs, ()
        if pairs:
            # The last that is let go of is evicted last: that is the first of a stream.
            self._release(pairs[::-1])


class Copies:
    """Copies from memory that were issued together, and are let go of together.

    Args:
        counters: where those that have ended are counted.
    """

    def __init__(self, counters: Counters) -> None:
        self._counters = counters
        self._copies: list[Copy] = []
        self._promotions: list[Promotions] = []

    def add(self, copy: Copy | Promotions) -> None:
        """Take a copy on, or several, that are not issued yet."""
        if isinstance(copy, Copy):
            self._copies.append(copy)
        else:
            self._promotions.append(copy)

    def start(self) -> None:
        """Issue those that are not issued."""
        for promotions in self._promotions:
            promotions.start()
        for copy in self._copies:
            if copy.completion is None:
                copy.completion = copy.start()

    def are_done(self) -> bool:
        """Whether `wait` would return at once."""
        return all(each.are_done() for each in self._promotions) and all(
            copy.completion is None or copy.completion.done() for copy in self._copies
        )

    def wait_until_done(self) -> None:
        """Wait for all."""
        for promotions in self._promotions:
            promotions.wait()
        for copy in self._copies:
            if copy.completion is not None:
                copy.completion.wait()

    def wait(self) -> None:
        """Wait for all, and let go of their sources."""
        self.wait_until_done()
        counted = {}
        if num_promoted := sum(map(len, self._promotions)):
            counted = {"promotions": num_promoted, "cpu_reads": num_promoted}
        for copy in self._copies:
            assert copy.completion is not None
            copy.completion = None
            counted[copy.counted_as] = counted.get(copy.counted_as, 0) + 1
        if counted:
            self._counters.add_all(counted)
        self.end()

    def end(self) -> None:
        """Let go of the sources. Nothing is let go of that is still being copied. Idempotent."""
        while self._promotions:
            self._promotions.pop().end()
        while self._copies:
            copy = self._copies.pop()
            if copy.completion is not None:
                with suppress(Exception):
                    copy.completion.wait()
            copy.release()
