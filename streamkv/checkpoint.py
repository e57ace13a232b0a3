"""Checkpoints of one session: sink and window blocks reach the ssd tier, then the journal says so.

The order keeps a kill harmless: blocks are written and synced, then the CHECKPOINT record names
them. The tier manager keeps the blocks of the checkpoint before until the one after this is done.
"""

import logging
import time
from collections.abc import Callable, Iterable

from streamkv.errors import JournalError, StoreError
from streamkv.journal import Journal
from streamkv.journal_records import Checkpoint
from streamkv.sequence import Sequence
from streamkv.tiers.jobs import CheckpointTicket, Wanted
from streamkv.tiers.manager import TierManager
from streamkv.tiers.spec import BlockKey
from streamkv.window_blocks import WindowBlocks

_log = logging.getLogger(__name__)

HALF_SECOND = 0.5


class Checkpointer:
    """Writes checkpoints of one sequence as it moves on.

    Args:
        name: the session's name.
        sequence: the sequence.
        journal: its journal.
        tiers: owner of the blocks.
        every: tokens between checkpoints; `None`: half a second of work, so that a resume computes
            about that much anew.
        before: called before a checkpoint is journaled: writes what it relies on, or raises
            JournalError.
        keys_of: names of sealed blocks by a range of block indices, if old ones may be recalled;
            then those that came and went since the checkpoint before are stored, too.
        old_blocks: those that a resume needs besides the window: they are part of the checkpoint.
    """

    def __init__(
        self,
        name: str,
        sequence: Sequence,
        journal: Journal,
        tiers: TierManager,
        every: int | None = None,
        before: Callable[[], None] | None = None,
        keys_of: Callable[[int, int], list[BlockKey]] | None = None,
        old_blocks: Callable[[], list[Wanted]] = list,
    ) -> None:
        self._name = name
        self._sequence = sequence
        self._journal = journal
        self._tiers = tiers
        self._every = every
        self._before = before
        self._keys_of = keys_of
        self._old_blocks = old_blocks
        self._begun_at, self._begun_s = 0, time.monotonic()
        self._not_before = 0
        self._journaled: WindowBlocks | None = None
        self._pending: tuple[CheckpointTicket, WindowBlocks] | None = None

    def resumed_from(self, blocks: WindowBlocks) -> None:
        """The journal's newest checkpoint, from which the sequence was restored."""
        self._journaled = blocks
        self._begun_at = blocks.token_index

    def declined(self, token_index: int) -> None:
        """The journal's newest checkpoint is good, but its tokens are computed anew.

        Nothing older replaces it meanwhile.
        """
        self._not_before = token_index

    def void(self, token_index: int) -> None:
        """Tokens from `token_index` on are computed anew: forget what was about them."""
        if self._pending is not None and self._pending[1].token_index > token_index:
            self._pending = None
        if self._not_before > token_index:
            self._not_before = 0
        self._begun_at = min(self._begun_at, token_index)

    def rewind(self, token_index: int) -> None:
        """The stream ends earlier now: forget what was about later tokens, and begin anew."""
        if self._pending is not None and self._pending[1].token_index >= token_index:
            self._pending = None
        if self._not_before >= token_index:
            self._not_before = 0
        self._journaled = None
        self._begun_at, self._begun_s = 0, time.monotonic()
        if self._pending is None:
            self.begin()

    def write_now(self, old_blocks: Iterable[Wanted] = ()) -> None:
        """Write a checkpoint and wait for it; one that fails is logged.

        Args:
            old_blocks: to be stored with it.
        """
        self.finish_or_log()
        self.begin(old_blocks)
        self.finish_or_log()

    def after_step(self) -> None:
        """Journal a checkpoint that has been written, begin one that is due.

        One that still waits for the tiers' leisure is given up for it.
        """
        waits = self.journal_if_done()
        if self._is_due() and (not waits or self._gives_way()):
            self.begin()

    def _gives_way(self) -> bool:
        """Whether the checkpoint in hand has waited for leisure, and is given up for a new one."""
        return self._pending is not None and self._pending[0].is_kept() and self.may_begin()

    def _is_due(self) -> bool:
        """Whether a block was filled since the last one, and enough tokens or time went by."""
        num_tokens = self._sequence.num_computed - self._begun_at
        if self._every is not None:
            return num_tokens >= self._every
        has_block = num_tokens >= self._sequence.block_size
        return has_block and time.monotonic() - self._begun_s >= HALF_SECOND

    def begin(self, old_blocks: Iterable[Wanted] = ()) -> None:
        """Hand the window to the writer, and `old_blocks` with it; returns at once."""
        window = self._window_blocks()
        if window is None:
            return
        blocks = self._blocks(window, old_blocks)
        self._begun_at, self._begun_s = window.token_index, time.monotonic()
        self._pending = (self._tiers.checkpoint(self._name, blocks), window)

    def _blocks(self, window: WindowBlocks, old_blocks: Iterable[Wanted] = ()) -> list[Wanted]:
        """What a checkpoint consists of; what only recall may want is stored beside it."""
        table, live = self._sequence.table, {key for _, key in window.blocks}
        needed = [*old_blocks, *self._old_blocks()]
        if not needed:
            self._store_old(window)
        recent = [(key, table[index].block_id) for index, key in window.blocks]
        return [*recent, *(wanted for wanted in needed if wanted[0] not in live)]

    def _store_old(self, window: WindowBlocks) -> None:
        """Store what was sealed since the checkpoint before and has left the window by now."""
        if self._keys_of is None:
            return
        live = {index for index, _ in window.blocks}
        size = self._sequence.block_size
        first, end = self._begun_at // size, window.token_index // size
        if gone := [index for index in range(first, end) if index not in live]:
            self._tiers.write_down(self._keys_of(gone[0], gone[-1] + 1))

    @property
    def is_pending(self) -> bool:
        """Whether a checkpoint was begun that is not journaled yet."""
        return self._pending is not None

    def may_begin(self) -> bool:
        """Whether none is being made right now; one that has only been asked for is given up."""
        if self._pending is None:
            return True
        ticket = self._pending[0]
        if not ticket.done() and not self._tiers.give_up_checkpoint(ticket):
            return False
        self.finish_or_log()
        return True

    def journal_if_done(self) -> bool:
        """Journal a checkpoint that has been made; whether one is still being waited for."""
        if self._pending is not None and self._pending[0].done():
            self.finish_or_log()
        return self._pending is not None

    def begin_at_leisure(self, open_block: Wanted | None) -> CheckpointTicket | None:
        """Hand the window to the tiers, and the open block with it, which no record names.

        The caller wants the gpu blocks back: the ticket tells when memory holds them.
        `journal_if_done` journals it once all is stored.

        Returns:
            What tells how it goes; `None` if no checkpoint can be made of what there is.
        """
        assert self._pending is None, "may_begin was not asked"
        window = self._window_blocks()
        if window is None:
            return None
        blocks = self._blocks(window)
        if open_block is not None:
            blocks.append(open_block)
        self._begun_at, self._begun_s = window.token_index, time.monotonic()
        ticket = self._tiers.checkpoint(self._name, blocks, at_leisure=True)
        self._pending = (ticket, window)
        return ticket

    def finish_or_log(self) -> None:
        """A checkpoint that fails costs time at a resume, never tokens: the session goes on."""
        try:
            self.finish()
        except (StoreError, JournalError, OSError) as error:
            _log.warning(
                "session %r: no checkpoint at token %d (%s); a resume will compute more anew",
                self._name,
                self._sequence.num_computed,
                error,
            )

    def finish(self) -> None:
        """Wait for the checkpoint in hand and journal it.

        Raises:
            StoreError: the writer failed; the session goes on from the checkpoint before.
            JournalError: the record cannot be written.
        """
        if self._pending is None:
            return
        ticket, window = self._pending
        self._pending = None
        if self._tiers.wait_for_checkpoint(ticket):
            if self._before is not None:
                self._before()
            self._journal.append(Checkpoint(window.token_index, window.encode()))
            self._journal.sync()
            self._journaled = window

    def finish_with_open_block(self, open_key: BlockKey) -> BlockKey | None:
        """Write a last checkpoint that includes the open block, and wait for it.

        Returns:
            `open_key` if the open block is stored, `None` if there is none or it is not.
        """
        window = self._window_blocks()
        if window is None:
            return None
        self.finish_or_log()
        table, blocks = self._sequence.table, self._blocks(window)
        open_index = window.token_index // self._sequence.block_size
        has_open = window.token_index < self._sequence.num_computed and open_index in table
        if has_open:
            blocks.append((open_key, table[open_index].block_id))
        self._pending = (self._tiers.checkpoint(self._name, blocks), window)
        self.finish_or_log()
        return open_key if has_open and self._journaled is window else None

    def _window_blocks(self) -> WindowBlocks | None:
        """The live blocks, if all that a resume needs are full and exact, and worth writing."""
        sequence = self._sequence
        token_index = sequence.num_computed - sequence.num_computed % sequence.block_size
        if sequence.num_computed == 0 or token_index < self._not_before:
            return None
        end, first = token_index // sequence.block_size, sequence.window.first_visible(token_index)
        full = [block for block in sequence.table if block.block_index < end]
        sealed = tuple((block.block_index, block.key) for block in full if block.key is not None)
        if len(sealed) < len(full) or sequence.table.missing(first, token_index):
            return None
        return WindowBlocks(token_index, sequence.chain_key, sealed)
