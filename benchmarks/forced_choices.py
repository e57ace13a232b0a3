"""Choices of old blocks of which a given share differs from the choice before.

The recaller's own choice is made and waited for, so that what it costs is in what is measured; then
others take its place: `share` of the blocks before give way to blocks drawn from the old ones that
are in the cpu pool. What is chosen and brought back is noted with its times.
"""

import random
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple, Self
from unittest import mock

from streamkv import Engine
from streamkv.recall_schedule import Choosing

STILL_LIVE = 4
"""Blocks before the window that a session may still hold, to compute a question again."""


class Forced(NamedTuple):
    """A choice that is known when the real one is."""

    real: Choosing
    indices: tuple[int, ...]

    def is_known(self) -> bool:
        """Whether nothing has to be waited for."""
        return self.real.is_known()

    def blocks(self) -> tuple[int, ...]:
        """Block indices, ascending; waits for the real ones."""
        self.real.blocks()
        return self.indices

    def weights(self) -> tuple[float, ...]:
        """Of each the same: nothing looked at them."""
        return (1 / len(self.indices),) * len(self.indices)


class Event(NamedTuple):
    """A choice that was made, or one that was brought back.

    Attributes:
        begun_s: by `time.perf_counter`.
        seconds: how long the engine's thread was at it.
        sequence: whose.
        num_new: blocks that differ from those before.
        num_blocks: of the choice.
    """

    begun_s: float
    seconds: float
    sequence: Any
    num_new: int
    num_blocks: int


def changed(
    before: Sequence[int],
    first: int,
    end: int,
    num_blocks: int,
    share: float,
    is_there: Callable[[int], bool],
    rng: random.Random,
) -> tuple[int, ...]:
    """A choice of which so many blocks are not in the one before, ascending.

    Args:
        before: the choice before; another number of blocks, or one that is not there any more,
            makes all of them new.
        first, end: blocks that may be chosen.
        num_blocks: of the choice.
        share: of them that are new, 0 to 1.
        is_there: whether a block can be brought back, a stride later, too.
        rng: by which they are drawn.

    Raises:
        RuntimeError: there are not enough blocks.
    """
    kept: list[int] = []
    if len(before) == num_blocks and all(first <= each < end and is_there(each) for each in before):
        kept = rng.sample(list(before), num_blocks - round(share * num_blocks))
    excluded, found = {*before, *kept}, list(kept)
    for _ in range(1000 * num_blocks):
        if len(found) == num_blocks:
            return tuple(sorted(found))
        drawn = rng.randrange(first, end) if first < end else first
        if drawn < end and drawn not in excluded and is_there(drawn):
            excluded.add(drawn)
            found.append(drawn)
    raise RuntimeError(f"of the blocks {first} to {end} there are not {num_blocks} in the cpu pool")


class ForcedChoices:
    """Forces the choices of all sessions of an engine while it is entered.

    Args:
        engine: that can recall.
        seed: of what is drawn.

    Attributes:
        share: of the chosen that changes at each choice from now on.
        made: choices, in their order.
        installed: choices that were brought back, in their order.
    """

    def __init__(self, engine: Engine, seed: int = 0) -> None:
        recaller = engine._executor.recaller
        assert recaller is not None
        self._recaller = recaller
        self._cpu_pool = engine._cpu_pool
        self._rng = random.Random(seed)
        self._before: dict[Any, tuple[int, ...]] = {}
        self._patches = ExitStack()
        self.share = 1.0
        self.made: list[Event] = []
        self.installed: list[Event] = []

    def __enter__(self) -> Self:
        chooser, installer = self._recaller.chooser, self._recaller.installer
        self._choose, self._install = chooser.choose, installer.install
        self._patches.enter_context(mock.patch.object(chooser, "choose", self.choose))
        self._patches.enter_context(mock.patch.object(installer, "install", self.install))
        return self

    def __exit__(self, *_: object) -> None:
        self._patches.close()

    def choose(
        self, sequence: Any, stream: Any, token_index: int, num_blocks: int
    ) -> Choosing | None:
        """What the recaller chooses, and then others instead of it."""
        begun_s = time.perf_counter()
        real = self._choose(sequence, stream, token_index, num_blocks)
        seconds = time.perf_counter() - begun_s
        if real is None:
            return None
        index, window, size = stream.index, sequence.window, sequence.block_size

        def is_there(block: int) -> bool:
            key = index.key(block)
            locked = None if key is None else self._cpu_pool.lock(key)
            if locked is None:
                return False
            # From now on it is the last to be evicted: it is brought back only a stride later.
            self._cpu_pool.unlock(locked)
            return True

        # Sink tokens are attended in any case, and what the window still has would not be moved.
        first = -(-window.num_sink_tokens // size)
        end = window.first_visible(sequence.num_computed) // size - STILL_LIVE
        before = self._before.get(sequence, ())
        wanted = stream.schedule.num_blocks
        indices = changed(before, first, end, wanted, self.share, is_there, self._rng)
        self._before[sequence] = indices
        num_new = len(set(indices) - set(before))
        self.made.append(Event(begun_s, seconds, sequence, num_new, len(indices)))
        return Forced(real, indices)

    def install(self, sequence: Any, stream: Any, choosing: Choosing) -> None:
        """Bring them back, and note how long that took."""
        recalled = sequence.table.recalled
        before, begun_s = set(recalled), time.perf_counter()
        self._install(sequence, stream, choosing)
        seconds = time.perf_counter() - begun_s
        num_new = len(set(recalled) - before)
        self.installed.append(Event(begun_s, seconds, sequence, num_new, len(recalled)))

    def between(
        self, events: Sequence[Event], sequence: Any, begin_s: float, end_s: float
    ) -> list[Event]:
        """Those of a sequence in some time."""
        return [e for e in events if e.sequence is sequence and begin_s <= e.begun_s < end_s]
