"""Recall in live sessions: what is read is digested, old blocks are chosen and brought back.

    a block is sealed      its digest joins the sequence's index
    a stride has passed    the newest queries choose, for the tokens one stride later
    an answer begins       they choose for the next token on
    a choice is due        blocks that are chosen no more are given back, the others restored

A block that no tier has any more is absent: counted, never an answer. One thread at a time comes
here for a sequence: the engine's, or who holds the session while nothing of it is under way.
"""

import secrets
import time
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from streamkv.device_copies import to_device
from streamkv.digest_index import DigestIndex
from streamkv.kernels.digests import block_digests
from streamkv.kernels.rope import RopeTables
from streamkv.live_blocks import give_back
from streamkv.model import ModelAdapter
from streamkv.observed_queries import ObservedQueries
from streamkv.recall_schedule import Choice, Choosing, RecallSchedule, question_start
from streamkv.recalled import PositionPolicy, farthest
from streamkv.retrieval_heads import RetrievalHeads
from streamkv.sequence import Sequence
from streamkv.tiers.manager import TierManager
from streamkv.tiers.spec import BlockKey


@dataclass(frozen=True, slots=True)
class RecallOptions:
    """How sessions of an engine recall.

    Attributes:
        num_blocks: old blocks attended besides the window.
        stride: tokens between two choices.
        policy: how far away they seem.
    """

    num_blocks: int
    stride: int
    policy: PositionPolicy


@dataclass(slots=True, eq=False)
class _Stream:
    """What recall knows of one sequence."""

    index: DigestIndex
    queries: ObservedQueries
    schedule: RecallSchedule
    is_on: bool = False
    attended: set[int] = field(default_factory=set)


class Recaller:
    """Old blocks of all sequences of an engine.

    Args:
        adapter: the model.
        pool: the gpu pool's blocks.
        tiers: where blocks are.
        heads: that choose.
        options: how sessions recall.

    Attributes:
        options: as given.
        num_absent: chosen blocks that no tier had.
        num_waits: choices that had to be waited for.
        waited_s: how long.
    """

    def __init__(
        self,
        adapter: ModelAdapter,
        pool: Tensor,
        tiers: TierManager,
        heads: RetrievalHeads,
        options: RecallOptions,
    ) -> None:
        self.options = options
        self.num_absent = 0
        self.num_waits = 0
        self.waited_s = 0.0
        self._adapter = adapter
        self._pool = pool
        self._tiers = tiers
        self._heads = heads
        self._kv_heads = torch.tensor(heads.kv_heads, device=pool.device)
        self._scales = [adapter.scales[head.layer] for head in heads.heads]
        # One distance at a time is asked for, and kept on the device.
        self._rope = RopeTables(adapter.inv_freq.cpu(), 1)
        self._angles: dict[int, tuple[Tensor, Tensor]] = {}
        self._streams: dict[Sequence, _Stream] = {}

    def open(self, sequence: Sequence) -> ObservedQueries:
        """Digest a new sequence from its first block on; returns who is to see its queries."""
        adapter, options = self._adapter, self.options
        shape = (adapter.spec.num_layers, adapter.num_q_heads, adapter.head_dim)
        queries = ObservedQueries(*shape, self._pool.device, self._pool.dtype)
        schedule = RecallSchedule(options.stride, options.num_blocks, sequence.block_size)
        index = DigestIndex(len(self._heads.kv_heads), adapter.spec, self._pool.device)
        self._streams[sequence] = _Stream(index, queries, schedule)
        sequence.goes_back = True
        return queries

    def fork(self, sequence: Sequence, forked: Sequence) -> ObservedQueries:
        """Digests and choices of a sequence for another one with the same past."""
        stream = self._streams[sequence]
        copied = replace(
            stream,
            index=stream.index.copy(),
            queries=stream.queries.copy(),
            schedule=stream.schedule.copy(),
            attended=set(stream.attended),
        )
        self._streams[forked] = copied
        if forked.recall_salt:
            self._name_apart(forked)
        self._place(forked, copied.is_on)
        # What is attended now is due at once for the fork, which has none of it yet.
        now = tuple(sequence.table.recalled)
        if now and copied.is_on:
            self._install(forked, copied, now)
        return copied.queries

    def rewind(self, sequence: Sequence) -> None:
        """The stream ends earlier now; what was recalled may lie beyond that."""
        stream = self._streams[sequence]
        if stream.is_on:
            self._install(sequence, stream, ())
        stream.attended.clear()
        stream.index.truncate(sequence.num_computed // sequence.block_size)
        stream.queries.clear()
        stream.schedule.clear(sequence.num_computed)
        if sequence.recall_salt:
            self._name_apart(sequence)
        self._set_boundary(sequence, stream)

    def is_on(self, sequence: Sequence) -> bool:
        """Whether the sequence recalls."""
        return sequence in self._streams and self._streams[sequence].is_on

    def turn(self, sequence: Sequence, on: bool, num_blocks: int) -> None:
        """Begin or end recalling up to `num_blocks` from the next token on."""
        stream = self._streams[sequence]
        stream.schedule.num_blocks = num_blocks
        self._place(sequence, on)
        stream.is_on = on
        if on or sequence.recall_salt:
            self._name_apart(sequence)
        stream.schedule.clear()
        self._set_boundary(sequence, stream)
        if not on:
            self._install(sequence, stream, ())

    def choose_now(self, sequence: Sequence) -> None:
        """An answer begins: choose, and have what was asked computed again with the choice.

        A step that was launched ahead with other blocks is told by their version.

        Raises:
            PoolFullError: the gpu pool has no room.
        """
        stream = self._streams.get(sequence)
        if stream is None or not stream.is_on:
            return
        stream.attended.clear()
        token_index = question_start(sequence.num_computed, sequence.block_size)
        if not sequence.can_go_back(token_index):
            token_index = sequence.num_computed
        self._choose(sequence, stream, token_index)
        choice = stream.schedule.take(token_index)
        blocks = self._awaited(choice.choosing) if choice is not None else ()
        if blocks and token_index < sequence.num_computed:
            self._go_back(sequence, stream, token_index)
        if choice is not None:
            self._install(sequence, stream, blocks)

    def _go_back(self, sequence: Sequence, stream: _Stream, token_index: int) -> None:
        """Compute the tokens from `token_index` on again."""
        give_back(self._tiers, sequence.go_back(token_index))
        stream.index.truncate(token_index // sequence.block_size)
        # The same tokens after the same tokens: only the salt tells what attended to what.
        self._name_apart(sequence)
        self._set_boundary(sequence, stream)

    def before_step(self, sequence: Sequence, start: int) -> None:
        """Bring back what the tokens from `start` on attend to.

        Raises:
            PoolFullError: the gpu pool has no room.
        """
        stream = self._streams.get(sequence)
        choice = stream.schedule.take(start) if stream is not None else None
        if stream is not None and choice is not None:
            self._install(sequence, stream, self._awaited(choice.choosing))

    def after_step(self, sequence: Sequence) -> None:
        """Digest what was sealed and choose if a stride has passed; nothing has expired yet."""
        stream = self._streams.get(sequence)
        if stream is None:
            return
        self._digest(sequence, stream)
        if stream.is_on and sequence.num_computed == sequence.recall_boundary:
            self._choose(sequence, stream, sequence.num_computed + stream.schedule.stride)
        self._set_boundary(sequence, stream)

    def attended(self, sequence: Sequence) -> list[int]:
        """Block indices that were attended since the last answer began, ascending."""
        stream = self._streams.get(sequence)
        return sorted(stream.attended) if stream is not None else []

    def give_back(self, sequence: Sequence) -> None:
        """Give back what is recalled now; the next choice brings blocks again."""
        stream = self._streams.get(sequence)
        if stream is not None:
            self._install(sequence, stream, ())

    def forget(self, sequence: Sequence) -> None:
        """The sequence has ended; it holds nothing any more."""
        self._streams.pop(sequence, None)

    def _place(self, sequence: Sequence, on: bool) -> None:
        """Put recalled blocks and sink tokens where the policy has them."""
        recalled = sequence.table.recalled
        recalled.trained_length = self._adapter.trained_length
        recalled.set_policy(self.options.policy if on else "far")

    def _name_apart(self, sequence: Sequence) -> None:
        """What is computed from now on may differ from what others compute from the same tokens."""
        sequence.recall_salt = secrets.token_bytes(16)

    def _set_boundary(self, sequence: Sequence, stream: _Stream) -> None:
        boundary = stream.schedule.next_boundary(sequence.num_computed)
        sequence.recall_boundary = boundary if stream.is_on else None

    def _digest(self, sequence: Sequence, stream: _Stream) -> None:
        """Digests of what was sealed in a step, as few launches as there can be."""
        num_sealed = sequence.num_computed // sequence.block_size
        keys: list[BlockKey] = []
        block_ids: list[int] = []
        for block_index in range(len(stream.index), num_sealed):
            is_live = block_index in sequence.table
            block = sequence.table[block_index] if is_live else None
            if block is not None and block.key is not None:
                keys.append(block.key)
                block_ids.append(block.block_id)
                continue
            self._extend(stream, keys, block_ids)
            keys, block_ids = [], []
            stream.index.append_missing()
        self._extend(stream, keys, block_ids)

    def _extend(self, stream: _Stream, keys: list[BlockKey], block_ids: list[int]) -> None:
        if keys:
            places = to_device(torch.tensor(block_ids), self._pool.device)
            stream.index.extend(keys, block_digests(self._pool, places, self._kv_heads))

    def _choose(self, sequence: Sequence, stream: _Stream, token_index: int) -> None:
        queries = stream.queries.before(sequence.num_computed)
        if queries is None:
            return
        chosen_by = torch.stack([queries[head.layer, :, head.q_head] for head in self._heads.heads])
        schedule, window, size = stream.schedule, sequence.window, sequence.block_size
        policy, first_block = self.options.policy, 0
        if policy == "absolute":
            first_block = schedule.first_within(token_index, self._adapter.trained_length)
            # True distances differ by block; all are scored as just beyond the window.
            policy = "far"
        distance = farthest(policy, window.window_size, schedule.num_blocks, size)
        choosing = stream.index.choose(
            chosen_by,
            first_block,
            schedule.candidates(window, token_index, len(stream.index)),
            schedule.num_blocks,
            self._heads.rows,
            self._angles_of(distance),
            self._scales,
        )
        schedule.put(Choice(token_index, choosing))

    def _angles_of(self, distance: int) -> tuple[Tensor, Tensor]:
        """cos and sin of a distance, on the device."""
        if distance not in self._angles:
            cos, sin = self._rope.rows(torch.tensor(distance))
            device = self._pool.device
            self._angles[distance] = to_device(cos, device), to_device(sin, device)
        return self._angles[distance]

    def _awaited(self, choosing: Choosing) -> tuple[int, ...]:
        """The blocks of a choice; what has to be waited for is counted."""
        if choosing.is_known():
            return choosing.blocks()
        begin = time.monotonic()
        blocks = choosing.blocks()
        self.num_waits += 1
        self.waited_s += time.monotonic() - begin
        return blocks

    def _install(self, sequence: Sequence, stream: _Stream, blocks: tuple[int, ...]) -> None:
        recalled = sequence.table.recalled
        wanted = set(blocks)
        kept = {index: recalled[index] for index in recalled if index in wanted}
        for index in list(recalled):
            if index not in wanted:
                self._tiers.drop(recalled[index])
        # What is given back must not be read, whatever goes wrong from here on.
        recalled.set(kept)
        for index in blocks:
            if index not in kept:
                block_id = self._restored(sequence, stream, index)
                if block_id is not None:
                    kept[index] = block_id
                    recalled.set(kept)
        stream.attended.update(kept)

    def _restored(self, sequence: Sequence, stream: _Stream, block_index: int) -> int | None:
        """The block in the gpu pool, with one more owner; `None` if it is absent."""
        key = stream.index.key(block_index)
        assert key is not None
        if block_index in sequence.table and sequence.table[block_index].key == key:
            block_id = sequence.table[block_index].block_id
            self._tiers.share(block_id)
            return block_id
        block_id = self._tiers.allocate()
        try:
            if self._tiers.restore(key, block_id):
                return block_id
        except BaseException:
            self._tiers.free(block_id)
            raise
        self._tiers.free(block_id)
        self.num_absent += 1
        return None
