"""Bringing a session back from its journal: the window from the tiers, or computed anew.

    journal:   0 ...................... checkpoint .......... num_tokens
    tiers:            [sink] [ window ]
    pending:                             [ all tokens after the checkpoint ]

If a block of the window is missing from every tier, the window is computed anew. Exactness has a
price: layer l of a token depends on l windows before it, so the replay begins num_layers windows
back (or at the start of the stream, whichever is later), and blocks are exact only from one window
before the end.
"""

import logging
import time
from collections import Counter, deque
from collections.abc import Iterator

from streamkv.cost_gate import CostGate
from streamkv.executor import Executor
from streamkv.journal import Journal
from streamkv.sequence import Jump, Sequence, policy_in_force
from streamkv.tiers.keys import child_key, partial_key
from streamkv.tiers.manager import TierManager
from streamkv.tiers.policy import Place
from streamkv.tiers.spec import BlockKey, KVSpec
from streamkv.window import Window
from streamkv.window_blocks import WindowBlocks

HASHED_AT_ONCE = 65_536
"""Tokens read back from the journal at a time to make block keys; a multiple of the block size."""

_log = logging.getLogger(__name__)


def replay_windows(journal: Journal, window: Window) -> list[tuple[int, Window]]:
    """Every window that was in force, with the token index from which it was."""
    windows = [(0, window)]
    for kept in journal.state.kept:
        window = window.with_sinks(kept.token_index, kept.token_index + kept.num_tokens)
        windows.append((kept.token_index, window))
    return windows


def chain_keys(
    sequence: Sequence, journal: Journal, windows: list[tuple[int, Window]], end: int
) -> Iterator[BlockKey]:
    """Keys of the full blocks before `end`, made anew by hashing the journal from its start."""
    size, key = sequence.block_size, sequence.root_key
    end -= end % size
    for first in range(0, end, HASHED_AT_ONCE):
        ids = journal.ids(first, min(first + HASHED_AT_ONCE, end)).tolist()
        for offset in range(0, len(ids), size):
            start = first + offset
            # A block is named by the window in force when its last token was computed.
            window = [window for since, window in windows if since < start + size][-1]
            policy = policy_in_force(window, start, size)
            sealed = child_key(key, ids[offset : offset + size], policy)
            yield sealed
            key = sequence.salting.after(start // size, sealed)


class Recovery:
    """Restores one sequence.

    Args:
        name: the session's name.
        sequence: new and empty, with the window of the session's creation.
        journal: open.
        tiers: owner of the blocks.
        executor: gives blocks back.
        spec: layout of the model's blocks.
        gate: chooses between reading the window and computing it anew.

    Attributes:
        declined: token index of the checkpoint that is sooner computed than read; 0 if none is.
    """

    def __init__(
        self,
        name: str,
        sequence: Sequence,
        journal: Journal,
        tiers: TierManager,
        executor: Executor,
        spec: KVSpec,
        gate: CostGate,
    ) -> None:
        self._name = name
        self._sequence = sequence
        self._journal = journal
        self._tiers = tiers
        self._executor = executor
        self._spec = spec
        self._gate = gate
        self.declined = 0
        self._windows = replay_windows(journal, sequence.window)

    def run(self) -> WindowBlocks | None:
        """Restore the sequence; what remains to be computed is pending.

        Returns:
            The checkpoint it was restored from; `None` if the window is computed anew.
        """
        num_tokens = self._journal.state.num_tokens
        newest = max(0, num_tokens - self._sequence.window.window_size)
        self._sequence.recent_ids.extend(self._journal.ids(newest, num_tokens).tolist())
        window_blocks = self._newest_checkpoint()
        if window_blocks is not None:
            if not self._is_worth_reading(window_blocks):
                self.declined = window_blocks.token_index
            elif self._restore_window(window_blocks):
                self._restore_open_block()
                return window_blocks
            else:
                _log.warning(
                    "session %r: its window is not stored any more and is computed anew",
                    self._name,
                )
        self._replay()
        return None

    def _newest_checkpoint(self) -> WindowBlocks | None:
        checkpoint = self._journal.state.last_checkpoint
        if checkpoint is None:
            return None
        return WindowBlocks.decode(checkpoint.token_index, checkpoint.digest)

    def _is_worth_reading(self, stored: WindowBlocks) -> bool:
        """Whether the window is sooner read than computed anew, wherever its blocks are now."""
        num_bytes: Counter[Place] = Counter()
        for _, key in stored.blocks:
            if (place := self._tiers.where(key)) is not None:
                num_bytes[place] += self._spec.block_bytes
        head, start = self._replay_span()
        num_tokens = head + stored.token_index - start
        return num_tokens <= 0 or self._gate.chooses_reading(num_tokens, num_bytes)

    def _restore_window(self, stored: WindowBlocks) -> bool:
        sequence = self._sequence
        self._set_windows(stored.token_index)
        pending = self._journal.ids(stored.token_index, self._journal.state.num_tokens)
        sequence.restart_at(stored.token_index, stored.chain_key, pending.tolist())
        size, window = sequence.block_size, sequence.window
        wanted = [
            (index, key)
            for index, key in stored.blocks
            if not window.is_expired(index * size, (index + 1) * size, stored.token_index)
        ]
        block_ids = [self._tiers.allocate() for _ in wanted]
        places = {self._tiers.where(key) for _, key in wanted}
        pairs = [(key, block_id) for (_, key), block_id in zip(wanted, block_ids, strict=True)]
        begun_s = time.monotonic()
        restored = self._tiers.restore_many(pairs)
        self._note_read(places, sum(restored), time.monotonic() - begun_s)
        for (index, key), block_id, found in zip(wanted, block_ids, restored, strict=True):
            sequence.table.add(index, block_id, key if found else None)
        if not all(restored):
            self._executor.release(sequence)
        return all(restored)

    def _note_read(self, places: set[Place | None], num_blocks: int, seconds: float) -> None:
        """Tell the gate, if all blocks came from one tier."""
        if len(places) == 1 and (place := places.pop()) is not None:
            self._gate.note_read(place, num_blocks * self._spec.block_bytes, seconds)

    def _restore_open_block(self) -> None:
        closed = self._journal.state.last_closed
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
            sequence.restore_open(closed.token_index)
        else:
            self._tiers.free(block_id)

    def _replay(self) -> None:
        sequence, num_tokens = self._sequence, self._journal.state.num_tokens
        sequence.restart_at(0, sequence.root_key, [])
        self._set_windows(0)
        head, start = self._replay_span()
        ids = self._journal.ids(0, head).tolist() + self._journal.ids(start, num_tokens).tolist()
        jump = None
        if start > head:
            jump = Jump(head, start, self._chain_key_at(start))
            sequence.exact_from = start + (self._spec.num_layers - 1) * sequence.window.window_size
        sequence.restart_at(0, sequence.root_key, ids, jump)

    def _replay_span(self) -> tuple[int, int]:
        """(head, start): tokens `[head, start)` need not be computed anew."""
        window, size = self._windows[0][1], self._sequence.block_size
        head = -(-window.last_sink_index // size) * size
        newest = self._journal.state.num_tokens - 1
        start = newest - self._spec.num_layers * window.window_size
        start -= start % size
        # Sink tokens kept in mid-stream need their own past: then the whole stream is replayed.
        if len(self._windows) > 1 or window.first_visible(start) <= head:
            return 0, 0
        return head, start

    def _chain_key_at(self, token_index: int) -> BlockKey:
        """Parent of the block that begins at `token_index`."""
        sequence = self._sequence
        keys = chain_keys(sequence, self._journal, self._windows, token_index)
        [newest] = deque(keys, maxlen=1)
        return sequence.salting.after(token_index // sequence.block_size - 1, newest)

    def _set_windows(self, token_index: int) -> None:
        in_force = [window for start, window in self._windows if start <= token_index]
        self._sequence.set_window(in_force[-1])
        for start, window in self._windows[1:]:
            if start > token_index:
                self._sequence.change_window(start, window)


def open_block_key(name: str, sequence: Sequence) -> BlockKey:
    """Key of the record of the sequence's open block as it is now."""
    start = sequence.num_computed - sequence.num_computed % sequence.block_size
    policy = policy_in_force(sequence.window, start, sequence.block_size)
    return partial_key(name, sequence.chain_key, sequence.open_ids, policy)


def stream_keys(sequence: Sequence, journal: Journal, created: Window) -> list[BlockKey]:
    """Keys of all full blocks of a stream; `created` is the window of its creation."""
    windows = replay_windows(journal, created)
    return list(chain_keys(sequence, journal, windows, sequence.num_computed))
