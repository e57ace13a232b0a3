"""How one session's blocks leave the gpu pool, and come back. Mechanism; who sleeps is not known.

    begin_leaving -> is_settled -> leave   window and open block are kept in the tiers below:
                                           in memory, until there is leisure to store them
                                   stay    they could not be, or the session is wanted again
    begin_waking  -> is_there   -> wake    all is in the gpu pool as it was, bit for bit

Only blocks go: tokens, text, modes and choices of the stream stay in memory, so that waking is a
copy. Invariant: a block is given back only once the tiers vouch for it, until the session is awake
again. If it is lost all the same, by a damaged disk, the window is computed anew as at a resume.

Only the engine's thread comes here, and nothing of the session is under way.
"""

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

from streamkv.block_table import LiveBlock
from streamkv.checkpoint import Checkpointer
from streamkv.errors import PoolFullError, StreamKVError
from streamkv.executor import Executor
from streamkv.live_blocks import give_back
from streamkv.sequence import Sequence, policy_in_force
from streamkv.tiers.jobs import CheckpointTicket
from streamkv.tiers.keys import is_partial, partial_key
from streamkv.tiers.manager import TierManager
from streamkv.tiers.restoring import Restore
from streamkv.tiers.spec import BlockKey
from streamkv.window import Window

_log = logging.getLogger(__name__)

Named = tuple[int, BlockKey]
"""Index of a block in its stream, and the name under which the tiers keep it."""


@dataclass(frozen=True, slots=True)
class Asleep:
    """What a sleeping session had in the gpu pool.

    Attributes:
        blocks: sealed ones, ascending.
        open_block: that of the tokens after them, if any of them is computed.
    """

    blocks: tuple[Named, ...] = ()
    open_block: Named | None = None

    @property
    def all_blocks(self) -> tuple[Named, ...]:
        """All of them, ascending."""
        return self.blocks if self.open_block is None else (*self.blocks, self.open_block)


class Sleeper:
    """The blocks of one session.

    Args:
        name: the session's name.
        sequence: its stream.
        tiers: owner of the blocks.
        executor: knows of old blocks that are recalled.
        checkpointer: of its journal; `None` without one.
        replay: has the window computed anew.
        need: blocks that a session with such a window needs while it is awake.
        at_hand: keeps others from the journal; False: it is in other hands, or closed.

    Attributes:
        asleep: what was there; `None` while the session is awake.
    """

    def __init__(
        self,
        name: str,
        sequence: Sequence,
        tiers: TierManager,
        executor: Executor,
        checkpointer: Checkpointer | None,
        replay: Callable[[], None],
        need: Callable[[Window], int],
        at_hand: Callable[[], AbstractContextManager[bool]],
    ) -> None:
        self._name = name
        self._sequence = sequence
        self._tiers = tiers
        self._executor = executor
        self._checkpointer = checkpointer
        self._replay = replay
        self._need = need
        self._at_hand = at_hand
        self.asleep: Asleep | None = None
        self._leaving: tuple[CheckpointTicket | None, Asleep] | None = None
        self._waking: tuple[Restore, list[LiveBlock]] | None = None

    @property
    def num_blocks(self) -> int:
        """Blocks that the session needs while it is awake; text that is kept counts."""
        return self._need(self._sequence.final_window)

    def begin_asleep(self) -> None:
        """The session is new and has nothing in the gpu pool."""
        assert len(self._sequence.table) == 0
        self.asleep = Asleep()

    def begin_asleep_as(self, source: Sequence) -> None:
        """The session is a fork of one that is awake, and begins with what that has, asleep.

        Waits until the tiers below have it; for the thread that holds both.

        Raises:
            PoolFullError: they have no room for it.
            StoreError, OSError: the store failed.
        """
        found = self._live_blocks(source)
        table = source.table
        wanted = [(key, table[index].block_id) for index, key in found.all_blocks]
        ticket = self._tiers.checkpoint(self._name, wanted)
        if not ticket.wait() and ticket.missing:
            raise PoolFullError(
                f"no room for session {self._name!r}: neither in the gpu pool nor in the tiers "
                "below. Use a larger cpu_bytes or gpu_bytes, or close a session."
            )
        self.asleep = found

    def begin_leaving(self) -> bool:
        """Have the tiers below keep what is live. False: that cannot be now."""
        assert self.asleep is None and self._leaving is None
        sequence = self._sequence
        if self._executor.attention(sequence) == "full" or not sequence.is_exact:
            return False
        self._leaving = None, self._live_blocks(sequence)
        return True

    def is_settled(self) -> bool:
        """Whether it is known if what is live is kept below."""
        assert self._leaving is not None
        ticket, found = self._leaving
        if ticket is None:
            if self._checkpointer is not None and not self._may_begin(self._checkpointer):
                return False  # the disk is busy with what was live some time ago
            ticket = self._keep(found)
            self._leaving = ticket, found
        return ticket.is_kept() or ticket.done()

    def leave(self) -> bool:
        """Give the blocks back. False: the tiers could not keep them, and the session stays."""
        assert self._leaving is not None
        ticket, found = self._leaving
        self._leaving = None
        assert ticket is not None
        try:
            is_kept = ticket.is_kept() or ticket.wait() or ticket.missing == 0
            if is_kept:
                self._executor.fall_asleep(self._sequence)
        # Whatever has stopped the tiers' worker: the session goes on with what it has.
        except Exception as error:
            _log.warning("session %r cannot sleep now: %s", self._name, error)
            return False
        if not is_kept:
            return False
        give_back(self._tiers, self._sequence.table.take_all())
        self.asleep = found
        return True

    def journal_if_stored(self) -> bool:
        """Journal what is stored by now; whether there is more to come."""
        if self._checkpointer is None or not self._checkpointer.is_pending:
            return False
        with self._at_hand() as is_at_hand:
            return not is_at_hand or self._checkpointer.journal_if_done()

    def stay(self) -> None:
        """Leave nothing: the session is wanted again, or it ends."""
        self._leaving = None

    def begin_waking(self) -> None:
        """Have the blocks brought back.

        Raises:
            PoolFullError: the gpu pool has no room; nothing has changed.
            StoreError, EngineClosedError: the tiers' worker stopped or was closed.
        """
        assert self.asleep is not None and self._waking is None
        blocks = self.asleep.all_blocks
        keys = [key for _, key in blocks]
        block_ids = self._tiers.allocate_many(len(keys))
        try:
            restore = self._tiers.begin_restore(list(zip(keys, block_ids, strict=True)))
            # Made while blocks are copied: whoever waits for them need not wait for this, too.
            live = [
                LiveBlock(index, block_id, None if is_partial(key) else key)
                for (index, key), block_id in zip(blocks, block_ids, strict=True)
            ]
            self._waking = restore, live
        except BaseException:
            for block_id in block_ids:
                self._tiers.free(block_id)
            raise

    def is_there(self) -> bool:
        """Whether the blocks have come, or it is known that they will not."""
        assert self._waking is not None
        return self._waking[0].is_done()

    def wait_for_copies(self) -> bool:
        """Wait for blocks that come from memory; False: they do not come from there alone."""
        return self._waking is not None and self._waking[0].wait_for_copies()

    def wake(self) -> None:
        """Make the blocks live again, as they were.

        Raises:
            PoolFullError, JournalError: recalled blocks could not be brought back; the session is
                awake, and its next step tries again.
        """
        assert self.asleep is not None and self._waking is not None
        restore, live = self._waking
        self._waking = None
        found = self._tiers.end_restore(restore)
        self.asleep = None
        if all(found):
            self._sequence.table.add_all(live)
        else:
            self._give_back(restore, found)
            _log.warning(
                "session %r: %d blocks of its window were lost while it slept; it is computed anew",
                self._name,
                found.count(False),
            )
            self._replay()
        if self._checkpointer is None:
            # The tiers held the blocks for the one reason that they were nowhere else.
            self._tiers.forget(self._name)
        self._executor.wake(self._sequence)

    def give_up_waking(self) -> None:
        """Stop what was begun: the session is asleep as before."""
        if self._waking is not None:
            (restore, _), self._waking = self._waking, None
            restore.abandon()
            for target in restore.targets:
                self._tiers.free(target.block_id)

    def _give_back(self, restore: Restore, found: list[bool]) -> None:
        for target, is_there in zip(restore.targets, found, strict=True):
            if is_there and not is_partial(target.key):
                self._tiers.drop(target.block_id)
            else:
                self._tiers.free(target.block_id)

    def _live_blocks(self, source: Sequence) -> Asleep:
        """What the session, or the one that it is a fork of, has live."""
        sequence = self._sequence
        size = sequence.block_size
        sealed = [(block.block_index, block.key) for block in source.table]
        blocks = tuple((index, key) for index, key in sealed if key is not None)
        index = sequence.num_computed // size
        # What is written behind the last full block: tokens that count, and maybe the one whose
        # logits were made.
        written = [*sequence.open_ids]
        if sequence.head_is_written:
            written += sequence.next_ids(1)
        if not written or index not in source.table:
            sequence.head_is_written = False
            return Asleep(blocks)
        policy = policy_in_force(sequence.window, index * size, size) + sequence.recall_salt
        key = partial_key(self._name, sequence.chain_key, written, policy)
        return Asleep(blocks, (index, key))

    def _may_begin(self, checkpointer: Checkpointer) -> bool:
        with self._at_hand() as is_at_hand:
            return is_at_hand and checkpointer.may_begin()

    def _keep(self, found: Asleep) -> CheckpointTicket:
        table = self._sequence.table
        wanted = [(key, table[index].block_id) for index, key in found.all_blocks]
        refused = CheckpointTicket()
        refused.resolve(durable=not wanted, missing=len(wanted))
        if not wanted:
            return refused
        open_block = wanted[-1] if found.open_block is not None else None
        try:
            if self._checkpointer is None:
                return self._tiers.checkpoint(self._name, wanted)
            return self._checkpointer.begin_at_leisure(open_block) or refused
        except StreamKVError as error:
            _log.warning("session %r cannot sleep now: %s", self._name, error)
            return refused
