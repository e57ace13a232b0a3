"""What the tiers' worker is asked to do, and the ticket by which a caller learns how it went.

Plain data, but for the ticket's event. This module does not know how a job is done.
"""

import threading
from dataclasses import dataclass, field

from streamkv.tiers.spec import BlockKey
from streamkv.tiers.transfer import Completion

Wanted = tuple[BlockKey, int | None]
"""A block that must be kept, and the gpu block that holds it if there is one."""


class CheckpointTicket:
    """The outcome of a checkpoint, to be had later.

    Attributes:
        missing: how many of the named blocks no tier could be made to hold; valid once done.
        is_awaited: somebody waits for the outcome; set and read with the tiers' condition held.
    """

    def __init__(self) -> None:
        self._event = threading.Event()
        self._durable = False
        self._kept = False
        self._error: BaseException | None = None
        self.missing = 0
        self.is_awaited = False

    def done(self) -> bool:
        """Whether the outcome is known; never waits."""
        return self._event.is_set()

    def is_kept(self) -> bool:
        """Whether memory holds every named block until the outcome is known; never waits."""
        return self._kept

    def wait(self) -> bool:
        """Wait for the outcome.

        Returns:
            True: every named block and the manifest are on ssd, synced. False: they are not,
                because
            there is no ssd tier (any more), `retain` stores nothing, or a block was nowhere to be
            had.

        Raises:
            StoreError, OSError: what made the ssd tier fail during this checkpoint.
            EngineClosedError: closed before the checkpoint was done.
            Exception: whatever stopped the worker.
        """
        self._event.wait()
        if self._error is not None:
            raise self._error
        return self._durable

    def keep(self) -> None:
        """Say that memory holds all of it until the outcome is known, and beyond if it is bad."""
        self._kept = True

    def resolve(self, *, durable: bool, missing: int = 0) -> None:
        """Set the outcome."""
        self._durable = durable
        self.missing = missing
        self._event.set()

    def fail(self, error: BaseException) -> None:
        """Set the error that `wait` raises."""
        self._error = error
        self._event.set()


@dataclass(slots=True, eq=False)
class Demote:
    """Copy a sealed block, which the job holds, one tier down once it is written."""

    key: BlockKey
    block_id: int
    written: Completion


@dataclass(slots=True, eq=False)
class Checkpoint:
    """Make blocks durable, as a session's manifest if a session is named; holds the gpu blocks.

    Attributes:
        session: its name.
        wanted: the blocks.
        written: when they have been written.
        at_leisure: only take them into memory, and do the rest when there is nothing else to do.
        ticket: of the caller.
    """

    session: str | None
    wanted: list[Wanted]
    written: Completion
    at_leisure: bool = False
    ticket: CheckpointTicket = field(default_factory=CheckpointTicket)

    def keys(self) -> list[BlockKey]:
        """Names of all blocks."""
        return [key for key, _ in self.wanted]

    def held(self) -> list[int]:
        """Gpu blocks that the job holds."""
        return [block_id for _, block_id in self.wanted if block_id is not None]


@dataclass(slots=True, eq=False)
class Forget:
    """Forget a session, and delete those of its blocks that nobody else needs.

    Attributes:
        session: its name.
        keys: blocks to be deleted besides those of its manifests.
        spared: blocks that stay all the same.
        ticket: done when it is over; `wait` tells whether they are gone from the ssd, too.
    """

    session: str
    keys: list[BlockKey]
    spared: frozenset[BlockKey] = frozenset()
    ticket: CheckpointTicket = field(default_factory=CheckpointTicket)


@dataclass(slots=True, eq=False)
class Collect:
    """Delete the blocks that were found to be needed no more."""


Job = Demote | Checkpoint | Forget | Collect
