"""Room in the gpu pool for sessions that open and close; for every thread but the engine's.

Where sessions can sleep there is always room for one more: it begins asleep, or waits until another
one has made room for it. Where they cannot, because no tier keeps their blocks, an engine is full
when its pool is promised.
"""

import contextlib
from concurrent.futures import Future

from streamkv.errors import EngineClosedError, PoolFullError
from streamkv.operations import Call
from streamkv.pool_room import PoolRoom
from streamkv.sequence import Sequence
from streamkv.sleepers import Sleepers
from streamkv.sleeping import Sleeper
from streamkv.step_loop import StepLoop


class Entrance:
    """How sessions come in and go.

    Args:
        room: of the gpu pool.
        loop: the engine's thread.
        sleepers: what that thread puts to sleep; `None` where nobody can sleep.

    Attributes:
        open_names: sessions that have entered and not left.
    """

    def __init__(self, room: PoolRoom, loop: StepLoop, sleepers: Sleepers | None) -> None:
        self._room = room
        self._loop = loop
        self._sleepers = sleepers
        self.open_names: set[str] = set()

    @property
    def can_sleep(self) -> bool:
        """Whether sessions may have their blocks elsewhere."""
        return self._sleepers is not None

    def enter(self, name: str, num_blocks: int, priority: int, *, has_blocks: bool) -> bool:
        """Have room for a session that is being opened; waits for it if it has blocks.

        Args:
            name: the session's name.
            num_blocks: that it needs while it is awake.
            priority: higher ones come first.
            has_blocks: it needs them now.

        Returns:
            Whether it has room; else it begins asleep.

        Raises:
            PoolFullError: more than the pool has, or nobody can make room.
            EngineClosedError: the engine was closed meanwhile.
        """
        if num_blocks > self._room.num_blocks:
            raise PoolFullError(
                f"session {name!r} needs {num_blocks} blocks at once, and the gpu pool has "
                f"{self._room.num_blocks}. Open the engine with a larger gpu_bytes, or the "
                "session with a smaller window."
            )
        self.open_names.add(name)
        if self._sleepers is None:
            if self._room.reserve(name, num_blocks):
                return True
            self.open_names.discard(name)
            raise PoolFullError(
                f"session {name!r} needs room for {num_blocks} blocks, {self._room.num_free} of "
                f"{self._room.num_blocks} are left, and without a tier below nobody can sleep. "
                "Close a session, or open the engine with a larger max_sessions or gpu_bytes, or "
                "with a store or cpu_bytes and retain other than 'none'."
            )
        sleepers = self._sleepers

        def begin() -> Future[None]:
            return sleepers.enter(name, num_blocks, priority, has_blocks=has_blocks)

        entered: Future[None] = self._loop.submit(Call(begin, is_aside=True)).result()
        try:
            entered.result()
        except BaseException:
            self.leave(name)
            raise
        return self._room.promised(name) > 0

    def opened(self, name: str, sequence: Sequence, sleeper: Sleeper) -> None:
        """A session that has entered is open."""
        if self._sleepers is not None:
            sleepers = self._sleepers
            add = Call(lambda: sleepers.add(name, sequence, sleeper), is_aside=True)
            self._loop.submit(add).result()

    def leave(self, name: str) -> None:
        """A session has ended, or is not opened after all."""
        self.open_names.discard(name)
        if self._sleepers is not None:
            sleepers = self._sleepers
            with contextlib.suppress(EngineClosedError):
                self._loop.submit(Call(lambda: sleepers.remove(name), is_aside=True)).result()
                return
        self._room.release(name)
