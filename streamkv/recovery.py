"""Bringing a session back from its journal: the window from the tiers, or computed anew.

    journal:   0 ...................... checkpoint .......... num_tokens
    tiers:            [sink] [ window ]
    pending:                             [ all tokens after the checkpoint ]

If a block of the window is missing from every tier, the window is computed anew. Exactness has a
price: layer l of a token depends on l windows before it, so the replay begins num_layers windows
back (or at the start of the stream, whichever is later), and blocks are exact only from one window
before the end.

A stream that was rewound behind its newest checkpoint has none. The names of its window's blocks
are then made anew by hashing its tokens, and the tiers asked for these. A rewind of an open session
does the same, and takes from its own window what stays in it.

A stream that can recall goes back a little further (`Sequence.look_back`), so that the queries by
which old blocks are chosen are seen again, and never beyond a choice that came after what is stored
(`computed_until`). A stream that attends to everything is replayed whole. Modes and choices are
the business of `Recaller` and `FullAttention`.
"""

import logging
import time
from collections import Counter, deque
from collections.abc import Container

from streamkv.cost_gate import CostGate
from streamkv.errors import PoolFullError
from streamkv.executor import Executor
from streamkv.past import Past
from streamkv.past_keys import chain_keys, replay_windows
from streamkv.sequence import Jump, Sequence, policy_in_force
from streamkv.tiers.keys import partial_key
from streamkv.tiers.manager import TierManager
from streamkv.tiers.policy import Place
from streamkv.tiers.spec import BlockKey, KVSpec
from streamkv.window import Window
from streamkv.window_blocks import WindowBlocks

_log = logging.getLogger(__name__)


class Recovery:
    """Restores one sequence.

    Args:
        name: the session's name.
        sequence: new and empty, or one whose past ends earlier now.
        past: of the session.
        created: the window of the session's creation.
        tiers: owner of the blocks.
        executor: gives blocks back.
        spec: layout of the model's blocks.
        gate: chooses between reading the window and computing it anew.

    Attributes:
        declined: token index of the checkpoint behind which tokens are computed anew although it is
            good; 0 if none are.
    """

    def __init__(
        self,
        name: str,
        sequence: Sequence,
        past: Past,
        created: Window,
        tiers: TierManager,
        executor: Executor,
        spec: KVSpec,
        gate: CostGate,
    ) -> None:
        self._name = name
        self._sequence = sequence
        self._past = past
        self._tiers = tiers
        self._executor = executor
        self._spec = spec
        self._gate = gate
        self.declined = 0
        self._windows = replay_windows(past, created)

    def run(self) -> WindowBlocks | None:
        """Restore the sequence; what remains to be computed is pending.

        Returns:
            The checkpoint it was restored from; `None` if it was not.
        """
        self._restore_recent_ids()
        self._sequence.was_computed_until = self._newest()
        window_blocks = self._newest_checkpoint()
        if window_blocks is None:
            state = self._past.state
            is_named = state.was_rewound or state.computed_until is not None
            if not is_named or not self._restore_known(self._window_at_end()):
                self._replay()
            return None
        if not self._is_worth_reading(window_blocks):
            self.declined = window_blocks.token_index
        elif self._restore_window(self._looking_back(window_blocks)):
            if self._sequence.num_computed < window_blocks.token_index:
                self.declined = window_blocks.token_index
            self._restore_open_block()
            return window_blocks
        else:
            num_tokens = self._replay()
            _log.warning(
                "session %r: its window is not stored any more and is computed anew, for which "
                "%d tokens are read again before the next one",
                self._name,
                num_tokens,
            )
            return None
        self._replay()
        return None

    def _restore_known(self, named: WindowBlocks) -> bool:
        """Make a window live that no checkpoint vouches for, if it is sooner read than computed."""
        return self._is_worth_reading(named) and self._restore_window(named)

    def rewind(self) -> None:
        """Take the sequence back to where its past ends now; what is to be computed is pending.

        Nothing of it may be under way. What stays in its window is neither copied nor read.
        """
        sequence, size = self._sequence, self._sequence.block_size
        sequence.give_up_shared(self._past.state.num_tokens)
        newest = sequence.was_computed_until = self._newest()
        num_kept = min(newest, sequence.num_computed) if sequence.is_exact else newest
        stored = self._live_window(num_kept) if sequence.is_exact else None
        self._restore_recent_ids()
        open_block = self._take_open_block(num_kept)
        restored = self._restore_window(stored or self._window_at_end())
        if not restored:
            self._replay()
        if open_block is None:
            return
        if restored and sequence.num_computed == num_kept - num_kept % size:
            sequence.table.add(num_kept // size, open_block)
            sequence.restore_open(num_kept)
        else:
            self._tiers.free(open_block)

    def _restore_recent_ids(self) -> None:
        num_tokens, recent_ids = self._past.state.num_tokens, self._sequence.recent_ids
        newest = max(0, num_tokens - self._sequence.window.window_size)
        recent_ids.clear()
        recent_ids.extend(self._past.ids(newest, num_tokens).tolist())

    def _newest_checkpoint(self) -> WindowBlocks | None:
        checkpoint = self._past.state.last_checkpoint
        if checkpoint is None:
            return None
        stored = WindowBlocks.decode(checkpoint.token_index, checkpoint.digest)
        # Not as it was written: a rewind may have moved the salt to right behind it since.
        newest = max(stored.blocks)[1] if stored.blocks else self._sequence.root_key
        chain_key = self._parent_after(stored.token_index, newest)
        return WindowBlocks(stored.token_index, chain_key, stored.blocks)

    def _newest(self) -> int:
        """The last token that may be taken as computed."""
        state = self._past.state
        newest = max(0, state.num_tokens - 1 - self._sequence.look_back)
        return newest if state.computed_until is None else min(newest, state.computed_until)

    def _looking_back(self, stored: WindowBlocks) -> WindowBlocks:
        """The window at an earlier block boundary, so that the last queries are seen again."""
        size = self._sequence.block_size
        end = self._newest() // size * size
        keys = dict(stored.blocks)
        if end >= stored.token_index or any(index not in keys for index in self._needed(end)):
            return stored
        newest = keys[end // size - 1] if end else self._sequence.root_key
        blocks = tuple((index, key) for index, key in stored.blocks if index * size < end)
        return WindowBlocks(end, self._parent_after(end, newest), blocks)

    def _is_worth_reading(self, stored: WindowBlocks) -> bool:
        """Whether the window is sooner read than computed anew, wherever its blocks are now."""
        num_bytes: Counter[Place] = Counter()
        for _, key in stored.blocks:
            if (place := self._tiers.where(key)) is not None:
                num_bytes[place] += self._spec.block_bytes
        head, start = self._replay_span()
        num_tokens = head + stored.token_index - start
        return num_tokens <= 0 or self._gate.chooses_reading(num_tokens, num_bytes)

    def _window_at_end(self) -> WindowBlocks:
        """What a resume at the last block boundary needs, by names made anew."""
        size, newest = self._sequence.block_size, self._newest()
        end, key, blocks = newest - newest % size, self._sequence.root_key, []
        needed = set(self._needed(end))
        keys = chain_keys(self._sequence, self._past, self._windows, end)
        for index, key in enumerate(keys):
            if index in needed:
                blocks.append((index, key))
        return WindowBlocks(end, self._parent_after(end, key), tuple(blocks))

    def _parent_after(self, end: int, newest: BlockKey) -> BlockKey:
        """Parent of the block that begins at `end`; `newest` is the key of the one before it."""
        return self._sequence.salting.after(end // self._sequence.block_size - 1, newest)

    def _needed(self, end: int) -> list[int]:
        """Blocks that a resume at the block boundary `end` needs."""
        size, window = self._sequence.block_size, self._window_in_force(end)
        needed = set(range(window.first_visible(end) // size, end // size))
        for first, last in window.sinks_in(0, end):
            needed.update(range(first // size, (last - 1) // size + 1))
        return sorted(needed)

    def _live_window(self, token_index: int) -> WindowBlocks | None:
        """The same at the block boundary before `token_index`, if all of it is live."""
        table = self._sequence.table
        end = token_index - token_index % self._sequence.block_size
        needed = self._needed(end)
        if any(index not in table for index in needed):
            return None
        blocks = [(index, key) for index in needed if (key := table[index].key) is not None]
        key = blocks[-1][1] if blocks else self._sequence.root_key
        return WindowBlocks(end, self._parent_after(end, key), tuple(blocks))

    def _take_open_block(self, num_kept: int) -> int | None:
        """A block with the tokens of the block that `num_kept` lies in, if it is live: no one
        else's, and out of the table.
        """
        index, offset = divmod(num_kept, self._sequence.block_size)
        if not offset or index not in self._sequence.table or not self._sequence.is_exact:
            return None
        block = self._sequence.table.take(index)
        if block.key is None:
            return block.block_id
        try:
            block_id = self._tiers.allocate()
        except PoolFullError:
            self._tiers.drop(block.block_id)
            return None
        self._tiers.copy(block.block_id, block_id)
        self._tiers.drop(block.block_id)
        return block_id

    def _restore_window(self, stored: WindowBlocks) -> bool:
        """Make the blocks of a window live; False, and none of them is, if one cannot be had."""
        sequence = self._sequence
        size, window = sequence.block_size, self._window_in_force(stored.token_index)
        wanted = {
            key: index
            for index, key in stored.blocks
            if not window.is_expired(index * size, (index + 1) * size, stored.token_index)
        }
        found = self._keep_live(wanted)
        pending = self._past.ids(stored.token_index, self._past.state.num_tokens)
        sequence.restart_at(stored.token_index, stored.chain_key, pending.tolist())
        self._set_windows(stored.token_index)
        sequence.exact_from = 0
        is_whole = self._fetch([key for key in wanted if key not in found], found)
        for key, index in wanted.items():
            if key in found:
                sequence.table.add(index, found[key], key)
        if not is_whole:
            self._executor.release(sequence)
        return is_whole

    def _keep_live(self, wanted: Container[BlockKey]) -> dict[BlockKey, int]:
        """Empty the table; the wanted of its blocks, the others are given back."""
        found: dict[BlockKey, int] = {}
        for block in self._sequence.table.take_all():
            if block.key is None:
                self._tiers.free(block.block_id)
            elif block.key in wanted and block.key not in found:
                found[block.key] = block.block_id
            else:
                self._tiers.drop(block.block_id)
        return found

    def _fetch(self, keys: list[BlockKey], found: dict[BlockKey, int]) -> bool:
        """Add the blocks of `keys` to `found`; whether all could be had."""
        pairs: list[tuple[BlockKey, int]] = []
        try:
            for key in keys:
                pairs.append((key, self._tiers.allocate()))
        except PoolFullError:
            for _, block_id in pairs:
                self._tiers.free(block_id)
            return False
        begun_s = time.monotonic()
        places = {self._tiers.where(key) for key in keys}
        restored = self._tiers.restore_many(pairs)
        self._note_read(places, sum(restored), time.monotonic() - begun_s)
        for (key, block_id), is_there in zip(pairs, restored, strict=True):
            if is_there:
                found[key] = block_id
            else:
                self._tiers.free(block_id)
        return all(restored)

    def _note_read(self, places: set[Place | None], num_blocks: int, seconds: float) -> None:
        """Tell the gate, if all blocks came from one tier."""
        if len(places) == 1 and (place := places.pop()) is not None:
            self._gate.note_read(place, num_blocks * self._spec.block_bytes, seconds)

    def _restore_open_block(self) -> None:
        closed = self._past.state.last_closed
        sequence = self._sequence
        size = sequence.block_size
        if closed is None or not closed.partial_key:
            return
        start = closed.token_index - closed.token_index % size
        if start != sequence.num_computed or closed.token_index >= sequence.num_tokens:
            return
        block_id = self._tiers.allocate()
        if self._tiers.restore(BlockKey(closed.partial_key), block_id):
            sequence.table.add(start // size, block_id)
            sequence.restore_open(min(closed.token_index, max(start, self._newest())))
        else:
            self._tiers.free(block_id)

    def _replay(self) -> int:
        """Have the window computed anew; returns how many tokens that takes."""
        sequence, num_tokens = self._sequence, self._past.state.num_tokens
        self._executor.release(sequence)
        sequence.exact_from = 0
        sequence.restart_at(0, sequence.first_parent, [])
        self._set_windows(0)
        head, start = self._replay_span()
        ids = self._past.ids(0, head).tolist() + self._past.ids(start, num_tokens).tolist()
        jump = None
        if start > head:
            jump = Jump(head, start, self._chain_key_at(start))
            sequence.exact_from = start + (self._spec.num_layers - 1) * sequence.window.window_size
        sequence.restart_at(0, sequence.first_parent, ids, jump)
        return len(ids)

    def _replay_span(self) -> tuple[int, int]:
        """(head, start): tokens `[head, start)` need not be computed anew."""
        window, size = self._windows[0][1], self._sequence.block_size
        head = -(-window.last_sink_index // size) * size
        newest = self._past.state.num_tokens - 1
        start = newest - self._spec.num_layers * window.window_size
        start -= start % size
        # Sink tokens kept in mid-stream need their own past, and `full` needs all of it: then the
        # whole stream is replayed.
        if len(self._windows) > 1 or window.first_visible(start) <= head or self._is_full(start):
            return 0, 0
        return head, start

    def _is_full(self, start: int) -> bool:
        """Whether a token from `start` on attends to everything."""
        history = self._past.state.recall
        in_force = history.mode_at(start) if start >= 0 else None
        modes = [in_force, *history.modes(max(0, start + 1))]
        return any(mode is not None and mode.mode == "full" for mode in modes)

    def _chain_key_at(self, token_index: int) -> BlockKey:
        """Parent of the block that begins at `token_index`."""
        keys = chain_keys(self._sequence, self._past, self._windows, token_index)
        [newest] = deque(keys, maxlen=1)
        return self._parent_after(token_index, newest)

    def _window_in_force(self, token_index: int) -> Window:
        return [window for start, window in self._windows if start <= token_index][-1]

    def _set_windows(self, token_index: int) -> None:
        self._sequence.set_window(self._window_in_force(token_index))
        for start, window in self._windows[1:]:
            if start > token_index:
                self._sequence.change_window(start, window)


def open_block_key(name: str, sequence: Sequence) -> BlockKey:
    """Key of the record of the sequence's open block as it is now."""
    start = sequence.num_computed - sequence.num_computed % sequence.block_size
    policy = policy_in_force(sequence.window, start, sequence.block_size)
    return partial_key(name, sequence.chain_key, sequence.open_ids, policy + sequence.recall_salt)
