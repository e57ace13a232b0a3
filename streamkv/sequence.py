"""Engine-side state of one stream: what is accepted, computed, live. No torch, no I/O.

    0 ............ num_computed ........ num_tokens
    KV exists      pending: accepted, journaled, not yet computed

The last token of the stream stays pending until more follows it: its logits are made when they are
used, so none are ever stored, and a sampled token that was never accepted (an interrupt, a full
disk) is simply sampled again. Its KV may exist already; then it is counted without being computed
anew. Memory is bounded: ids of the window, ids of the open block, live blocks.
"""

from collections import deque
from collections.abc import Sequence as Ids
from functools import lru_cache
from itertools import islice
from typing import NamedTuple

from streamkv.block_keys import BlockKeys
from streamkv.block_table import BlockTable, LiveBlock
from streamkv.recall_schedule import question_start
from streamkv.tiers.keys import AttentionPolicy, Salting, child_key
from streamkv.tiers.spec import BlockKey
from streamkv.window import Window


def policy_in_force(window: Window, first_token: int, num_tokens: int) -> bytes:
    """Canonical bytes of how these tokens attend; part of their block's key."""
    # From there on nothing of it changes, and a stream has many blocks.
    settled = window.last_sink_index + window.window_size
    return _policy_bytes(window, min(first_token, settled), num_tokens)


@lru_cache(maxsize=256)
def _policy_bytes(window: Window, first_token: int, num_tokens: int) -> bytes:
    policy = AttentionPolicy("window", window.window_size, window.sink_ranges, "cache")
    return policy.in_force(first_token, num_tokens)


class Jump(NamedTuple):
    """Tokens that a replay leaves out: `[source, target)`, both at block boundaries.

    Attributes:
        source, target: token indices.
        chain_key: parent of the block that begins at `target`.
    """

    source: int
    target: int
    chain_key: BlockKey


class Sequence:
    """One stream of tokens and its live blocks.

    Attributes:
        seq_id: which sequence of the engine.
        window: in force for the next token to compute.
        block_size: tokens per block.
        table: live blocks.
        num_tokens: tokens accepted.
        num_computed: tokens whose KV was computed.
        pending: tokens accepted and not yet computed.
        head_is_written: the KV of the first pending token exists, because logits after it were
            made.
        recent_ids: the newest ids, as many as the window has.
        exact_from: blocks that start before it, and not before what a jump left out, were computed
            without their whole past, on the way to an exact window; they get no key.
        recall_boundary: the next token index at which other old blocks may be attended.
        mode_boundary: the next token index at which another mode begins, or a step of `full` ends.
        recall_salt: names blocks apart that may have been computed under recall, or in `full`.
        keys: names of all blocks, in mode `full`.
        look_back: tokens before the end, and up to a block's more, that may be computed again: what
            they see stays live.
        root_key: root of the chain of block keys.
        priority: of two sequences with work, one with 1 more gets twice the tokens.
        holds: who has blocks in hand that are about to become live, or are being looked at.
        served: tokens of its steps over 2 ** priority, on the scheduler's scale.
        attends_to_all: every block of the stream is recalled, and none is chosen.
        salting: where the salt enters it.
        was_computed_until: tokens before it were computed once, in an earlier run or before they
            were lost; who computes them does so again.
    """

    def __init__(
        self,
        seq_id: int,
        window: Window,
        block_size: int,
        root: BlockKey,
        salting: Salting = Salting(),  # noqa: B008  # immutable
    ) -> None:
        self.seq_id = seq_id
        self.window = window
        self.block_size = block_size
        self.table = BlockTable(block_size)
        self.num_tokens = 0
        self.num_computed = 0
        self.pending: deque[int] = deque()
        self.recent_ids: deque[int] = deque(maxlen=window.window_size)
        self.head_is_written = False
        self.exact_from = 0
        self.recall_boundary: int | None = None
        self.mode_boundary: int | None = None
        self.recall_salt = b""
        self.attends_to_all = False
        self.keys: BlockKeys | None = None
        self.look_back = 0
        self.priority = 0
        self.holds = 0
        self.served = 0.0
        self.was_computed_until = 0
        self._window_changes: deque[tuple[int, Window]] = deque()
        self._jump: Jump | None = None
        self._inexact_from = 0
        self.root_key = root
        self.salting = salting
        self._chain_key = self.first_parent
        self._open_ids: list[int] = []

    @property
    def first_parent(self) -> BlockKey:
        """Parent of the first block: the root, unless the salt enters right behind it."""
        return self.salting.after(-1, self.root_key)

    @property
    def num_pending(self) -> int:
        """Tokens accepted and not yet computed."""
        return len(self.pending)

    @property
    def open_ids(self) -> list[int]:
        """Computed ids of the open block."""
        return self._open_ids

    @property
    def chain_key(self) -> BlockKey:
        """Parent of the open block: key of the last full block, or the root."""
        return self._chain_key

    @property
    def is_exact(self) -> bool:
        """Whether nothing is left out and all live blocks that are full have their key."""
        num_full = self.num_computed // self.block_size
        full = (block for block in self.table if block.block_index < num_full)
        return self._jump is None and all(block.key is not None for block in full)

    @property
    def final_window(self) -> Window:
        """The window in force after every change that is announced."""
        return self._window_changes[-1][1] if self._window_changes else self.window

    @property
    def next_boundary(self) -> int | None:
        """Token index at which a step has to end: the window changes, or tokens are left out."""
        changes = [self._window_changes[0][0]] if self._window_changes else []
        jumps = [self._jump.source] if self._jump else []
        others = [self.recall_boundary, self.mode_boundary]
        known = [boundary for boundary in others if boundary is not None]
        return min(changes + jumps + known, default=None)

    def set_window(self, window: Window) -> None:
        """Begin with `window`; only before anything is computed or live."""
        assert len(self.table) == 0
        self.window = window
        self._window_changes.clear()

    def change_window(self, token_index: int, window: Window) -> None:
        """Compute the tokens from `token_index` on with `window`."""
        assert token_index >= self.num_computed
        self._window_changes.append((token_index, window))
        self._apply_window_change()

    def _apply_window_change(self) -> None:
        while self._window_changes and self._window_changes[0][0] <= self.num_computed:
            self.window = self._window_changes.popleft()[1]

    def append(self, ids: Ids[int]) -> None:
        """Accept tokens: they are pending from now on."""
        self.pending.extend(ids)
        self.recent_ids.extend(ids)
        self.num_tokens += len(ids)

    def next_ids(self, query_len: int) -> list[int]:
        """The first `query_len` pending ids."""
        assert query_len <= len(self.pending)
        return list(islice(self.pending, query_len))

    def ids_from(self, token_index: int, num_tokens: int) -> list[int]:
        """Ids from the start of the open block, or from a pending token, on."""
        skipped = token_index - self.num_computed
        if skipped >= 0:
            return list(islice(self.pending, skipped, skipped + num_tokens))
        assert skipped == -len(self._open_ids)
        return [*self._open_ids, *self.next_ids(num_tokens + skipped)]

    def advance_blocks(self, keys: Ids[BlockKey]) -> None:
        """Count the tokens of whole blocks as computed, the open block first.

        Args:
            keys: those that `advance` would find, as they were made from the same ids.
        """
        self.head_is_written = False
        first = self.num_computed // self.block_size
        end = first + len(keys)
        for index, key in enumerate(keys, first):
            if self.keys is not None:
                self.keys.put(index, key if self._is_exact_from(index * self.block_size) else None)
        query_len = end * self.block_size - self.num_computed
        assert keys and query_len <= len(self.pending)
        self.pending = deque(islice(self.pending, query_len, None))
        self.num_computed += query_len
        self._open_ids = []
        self._chain_key = self.salting.after(end - 1, keys[-1])
        self._apply_window_change()
        self._apply_jump()

    def advance(self, query_len: int) -> list[tuple[int, BlockKey]]:
        """Count `query_len` pending tokens as computed.

        Returns:
            (block_id, key) of each block that became full and is exact.
        """
        self.head_is_written = False
        sealed = []
        end = self.num_computed + query_len
        while self.num_computed < end:
            self._take_pending(end)
            if len(self._open_ids) == self.block_size:
                block = self._seal()
                if block is not None:
                    sealed.append(block)
        if self._window_changes:
            self._apply_window_change()
        if self._jump is not None:
            self._apply_jump()
        return sealed

    def _take_pending(self, end: int) -> None:
        """Move pending ids to the open block until it is full or `end` is reached."""
        popleft = self.pending.popleft
        if self.num_computed + 1 == end:
            # Nearly always: the token of a step that decodes.
            self._open_ids.append(popleft())
            self.num_computed = end
            return
        room = self.block_size - len(self._open_ids)
        taken = min(room, end - self.num_computed)
        self._open_ids += [popleft() for _ in range(taken)]
        self.num_computed += taken

    def _apply_jump(self) -> None:
        if self._jump is not None and self.num_computed == self._jump.source:
            assert not self._open_ids
            self.num_computed = self._jump.target
            self._chain_key = self._jump.chain_key
            self._jump = None

    def _seal(self) -> tuple[int, BlockKey] | None:
        index = self.num_computed // self.block_size - 1
        start = index * self.block_size
        policy = policy_in_force(self.window, start, self.block_size) + self.recall_salt
        key = child_key(self._chain_key, self._open_ids, policy)
        self._chain_key = self.salting.after(index, key)
        self._open_ids = []
        is_exact = self._is_exact_from(start)
        if self.keys is not None:
            self.keys.put(index, key if is_exact else None)
        if not is_exact or index not in self.table:
            return None
        block = self.table[index]
        block.key = key
        return block.block_id, key

    def _is_exact_from(self, token_index: int) -> bool:
        return not self._inexact_from <= token_index < self.exact_from

    def take_expired(self) -> list[tuple[int, BlockKey | None]]:
        """Remove blocks that neither the next query nor a resume at the last full block needs."""
        resume_at = self.num_computed - self.num_computed % self.block_size
        if self.look_back:
            resume_at = question_start(self.num_computed, self.block_size)
        expired = self.table.take_expired(self.window, resume_at)
        return [(block.block_id, block.key) for block in expired]

    def give_up_shared(self, num_tokens: int) -> None:
        """Only the first tokens are still those of a prompt that is shared; then `restart_at`."""
        self.salting = self.salting.cut(num_tokens // self.block_size)

    def restart_at(
        self, token_index: int, chain_key: BlockKey, pending: Ids[int], jump: Jump | None = None
    ) -> None:
        """Go on from a block boundary whose window was restored, or from the start.

        Args:
            token_index: first token that is not computed; a multiple of the block size.
            chain_key: parent of the block that begins there.
            pending: all accepted ids from `token_index` on that are to be computed.
            jump: tokens to leave out on the way.
        """
        assert token_index % self.block_size == 0
        skipped = jump.target - jump.source if jump else 0
        self.head_is_written = False
        self.num_computed = token_index
        self.num_tokens = token_index + len(pending) + skipped
        if self.keys is not None:
            self.keys.truncate(self.num_tokens // self.block_size)
        self.pending = deque(pending)
        self._open_ids = []
        self._chain_key = chain_key
        self._jump = jump
        self._inexact_from = jump.target if jump else 0
        self._apply_jump()

    def can_go_back(self, token_index: int) -> bool:
        """Whether the tokens from a block boundary on can be computed again: `go_back`."""
        first_seen = self.window.first_visible(token_index) // self.block_size
        before = range(first_seen, token_index // self.block_size)
        is_there = all(index in self.table for index in before)
        is_named = bool(before) and is_there and self.table[before[-1]].key is not None
        num_known = len(self.recent_ids)
        return is_named and self._jump is None and self.num_tokens - token_index <= num_known

    def go_back(self, token_index: int) -> list[LiveBlock]:
        """Have the tokens from a block boundary on computed again.

        Returns:
            the live blocks from there on, which are no longer this sequence's.
        """
        assert token_index % self.block_size == 0 and self.can_go_back(token_index)
        assert token_index <= self.num_computed
        before = token_index // self.block_size - 1
        key = self.table[before].key
        assert key is not None
        recent = list(self.recent_ids)
        self._chain_key = self.salting.after(before, key)
        self._open_ids = []
        self.pending = deque(recent[len(recent) - (self.num_tokens - token_index) :])
        self.num_computed = token_index
        self.head_is_written = False
        if self.keys is not None:
            self.keys.truncate(before + 1)
        return self.table.take_from(before + 1)

    def mark_exact(self, token_index: int) -> None:
        """All that a query from `token_index` on sees is exact: blocks from there on get keys."""
        if token_index > self._inexact_from:
            self.exact_from = min(self.exact_from, token_index)

    def copy(self, seq_id: int) -> "Sequence":
        """The same stream as another sequence, without any live block."""
        copied = Sequence(seq_id, self.window, self.block_size, self.root_key, self.salting)
        copied.num_tokens, copied.num_computed = self.num_tokens, self.num_computed
        copied.pending = self.pending.copy()
        copied.recent_ids = self.recent_ids.copy()
        copied.exact_from, copied._inexact_from = self.exact_from, self._inexact_from
        copied._window_changes = self._window_changes.copy()
        copied._jump = self._jump
        copied._chain_key = self._chain_key
        copied._open_ids = list(self._open_ids)
        copied.recall_boundary, copied.recall_salt = self.recall_boundary, self.recall_salt
        copied.keys = self.keys.copy() if self.keys is not None else None
        copied.look_back = self.look_back
        copied.priority = self.priority
        copied.was_computed_until = self.was_computed_until
        return copied

    def restore_open(self, num_computed: int) -> None:
        """Count the pending ids up to `num_computed` as computed: their open block was restored."""
        if self.num_computed < num_computed:
            self._take_pending(num_computed)
        assert self.num_computed >= num_computed and len(self._open_ids) < self.block_size
        self._apply_window_change()
