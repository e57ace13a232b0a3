"""Ending a stream earlier while it attends to everything: nothing has to be computed anew.

    0 ........ open block ..... num_tokens before
    [recalled] [ window ]  |  given up
                        ^ its first tokens are copied

All blocks are in the gpu pool (`FullAttention.has_all`; else `Recovery` takes the stream back), by
the names under which they were computed, in whatever mode that was. What a resume at the last block
boundary needs becomes live, the block that the stream ends in is copied, and the rest is given
back. This module knows neither journals nor text.
"""

from streamkv.block_table import LiveBlock
from streamkv.errors import AbsentBlockError, PoolFullError
from streamkv.live_blocks import give_back
from streamkv.past import Past
from streamkv.past_keys import replay_windows
from streamkv.prefix import blocks_seen
from streamkv.sequence import Sequence
from streamkv.tiers.manager import TierManager
from streamkv.tiers.spec import BlockKey
from streamkv.window import Window


class FullRewind:
    """Takes one sequence back.

    Args:
        sequence: attends to everything; nothing of it may be under way.
        past: of the session.
        created: the window of the session's creation.
        tiers: owner of the blocks.
        num_tokens: that are to be left.

    Raises:
        AbsentBlockError: the block of a token that the window will hold is not what its tokens
            name. Nothing has changed.
    """

    def __init__(
        self, sequence: Sequence, past: Past, created: Window, tiers: TierManager, num_tokens: int
    ) -> None:
        self._sequence = sequence
        self._past = past
        self._tiers = tiers
        self._num_tokens = num_tokens
        self._num_kept = min(num_tokens - 1, sequence.num_computed)
        size = sequence.block_size
        self._open_index = self._num_kept // size
        self._start = self._open_index * size
        self._windows = replay_windows(past, created)
        self._needed = blocks_seen(self._window_at(self._start), size, self._start)
        for index in self._needed:
            if self._key(index) is None or not self._is_held(index):
                problem = "it was not computed with its whole past"
                raise AbsentBlockError(index * size, (index + 1) * size, problem)

    def run(self) -> None:
        """The past ends earlier now: the sequence does, too. What is to be computed is pending."""
        sequence = self._sequence
        keys = {index: self._key(index) for index in self._needed}
        live = self._take_needed()
        open_block = self._take_open_block()
        self._restart()
        for index in self._needed:
            sequence.table.add(index, live[index], keys[index])
        if open_block is not None:
            sequence.table.add(self._open_index, open_block)
            sequence.restore_open(self._num_kept)

    def _take_needed(self) -> dict[int, int]:
        """The table is empty but for the open block; what will be live, with an owner each."""
        sequence, live = self._sequence, dict[int, int]()
        table, recalled = sequence.table, sequence.table.recalled
        for block in table.take_all():
            if block.block_index in self._needed:
                live[block.block_index] = block.block_id
            elif block.block_index == self._open_index:
                table.add(block.block_index, block.block_id, block.key)
            else:
                self._give_back(block)
        for index in self._needed:
            if index not in live:
                self._tiers.share(recalled[index])
                live[index] = recalled[index]
        return live

    def _take_open_block(self) -> int | None:
        """A block with the kept tokens of the open block, which nobody else has; `None`: none.

        What the stream gives up is given back by then.
        """
        sequence = self._sequence
        table, recalled = sequence.table, sequence.table.recalled
        source = table.take(self._open_index) if self._open_index in table else None
        if source is None and self._open_index in recalled:
            block_id = recalled[self._open_index]
            self._tiers.share(block_id)
            source = LiveBlock(self._open_index, block_id, self._key(self._open_index))
        gone = [recalled[index] for index in recalled if index >= self._open_index]
        recalled.set({index: recalled[index] for index in recalled if index < self._open_index})
        for block_id in gone:
            self._tiers.drop(block_id)
        if source is None:
            return None
        if self._num_kept == self._start:
            self._give_back(source)
            return None
        # Nobody else has a block that is not full yet.
        return source.block_id if source.key is None else self._copied(source)

    def _copied(self, source: LiveBlock) -> int | None:
        try:
            block_id = self._tiers.allocate()
            self._tiers.copy(source.block_id, block_id)
            return block_id
        except PoolFullError:
            # Less than a block is soon computed.
            return None
        finally:
            self._give_back(source)

    def _restart(self) -> None:
        sequence, past = self._sequence, self._past
        parent = sequence.first_parent
        sequence.give_up_shared(self._num_tokens)
        if self._open_index > 0:
            newest = self._key(self._open_index - 1)
            assert newest is not None
            parent = sequence.salting.after(self._open_index - 1, newest)
        pending = past.ids(self._start, self._num_tokens).tolist()
        sequence.restart_at(self._start, parent, pending)
        sequence.exact_from = 0
        sequence.recent_ids.clear()
        first_recent = max(0, self._num_tokens - sequence.window.window_size)
        sequence.recent_ids.extend(past.ids(first_recent, self._num_tokens).tolist())
        sequence.set_window(self._window_at(self._start))
        for since, window in self._windows:
            if self._start < since < self._num_tokens:
                sequence.change_window(since, window)

    def _window_at(self, token_index: int) -> Window:
        return [window for since, window in self._windows if since <= token_index][-1]

    def _key(self, index: int) -> BlockKey | None:
        keys = self._sequence.keys
        return keys.get(index) if keys is not None else None

    def _is_held(self, index: int) -> bool:
        table = self._sequence.table
        return index in table.recalled or (index in table and table[index].key is not None)

    def _give_back(self, block: LiveBlock) -> None:
        give_back(self._tiers, [block])
