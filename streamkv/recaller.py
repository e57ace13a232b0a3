"""Recall in live sessions: what is read is digested, old blocks are chosen and brought back.

    a block is sealed      its digest joins the sequence's index
    a stride has passed    the newest queries choose, for the tokens one stride later
    an answer begins       they choose, and what was asked is computed again with the choice
    a choice is due        blocks that are chosen no more are given back, the others restored
    a session is resumed   modes and choices are those of its records, new ones are made behind them

What is decided is written to the session's `RecallLog` before a token is computed with it. A block
that no tier has any more is absent: counted, never an answer. One thread at a time comes here for a
sequence: the engine's, or who holds the session while nothing of it is under way.
"""

import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from streamkv.device_copies import to_device
from streamkv.digest_file import DigestRow
from streamkv.digest_index import DigestIndex, digest_dtype
from streamkv.digest_memory import DigestMemory
from streamkv.errors import JournalError
from streamkv.journal_records import Chosen, ModeSet
from streamkv.kernels.digests import block_digests
from streamkv.kernels.rope import RopeTables
from streamkv.live_blocks import give_back, read_block
from streamkv.model import ModelAdapter
from streamkv.observed_queries import ObservedQueries
from streamkv.recall_log import RecallLog
from streamkv.recall_schedule import (
    QUESTION_TOKENS,
    Choice,
    Choosing,
    Known,
    RecallSchedule,
    question_start,
)
from streamkv.recall_stream import RecallStream, new_salt, policy_of, under_other_salts
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


class Recaller:
    """Old blocks of all sequences of an engine.

    Args:
        adapter: the model.
        pool: the gpu pool's blocks.
        tiers: where blocks are.
        heads: that choose.
        options: how sessions recall.
        digest_memory: where digests lie.

    Attributes:
        options, digest_memory: as given.
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
        digest_memory: DigestMemory,
    ) -> None:
        self.options = options
        self.digest_memory = digest_memory
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
        self._streams: dict[Sequence, RecallStream] = {}

    @property
    def digest_bytes(self) -> int:
        """Of the digest of a block."""
        spec = self._adapter.spec
        return 2 * len(self._heads.kv_heads) * spec.block_size * spec.head_dim

    @property
    def digest_identity(self) -> str:
        """Differs for digests of another kind."""
        return f"{self._heads.kv_heads} {digest_dtype(self._adapter.spec)}"

    def open(self, sequence: Sequence, log: RecallLog) -> ObservedQueries:
        """Begin with a sequence, to be resumed next; returns who is to see its queries."""
        adapter, options = self._adapter, self.options
        shape = (adapter.spec.num_layers, adapter.num_q_heads, adapter.head_dim)
        queries = ObservedQueries(*shape, self._pool.device, self._pool.dtype)
        schedule = RecallSchedule(options.stride, options.num_blocks, sequence.block_size)
        index = DigestIndex(len(self._heads.kv_heads), adapter.spec, self.digest_memory)
        self._streams[sequence] = RecallStream(index, queries, schedule, log, self._unset())
        sequence.look_back = QUESTION_TOKENS
        if log.digests is not None:
            for row in log.digests.rows(log.past.state.rewinds, sequence.block_size):
                self._take_row(index, row)
        return queries

    def _take_row(self, index: DigestIndex, row: DigestRow) -> None:
        if row.key is None or row.digest is None:
            index.put_missing(len(index))
            return
        spec = self._adapter.spec
        bits = torch.from_numpy(row.digest.view(np.int16)).view(digest_dtype(spec))
        shape = (len(self._heads.kv_heads), 1, spec.block_size, spec.head_dim)
        index.put(len(index), [row.key], bits.view(shape))

    def resume(self, sequence: Sequence, recalls: bool) -> None:
        """Go on by the log, from where the sequence stands: what is in force is restored.

        Args:
            sequence: new, or brought back.
            recalls: the mode of a session that never had one.

        Raises:
            JournalError: its first mode could not be written.
            PoolFullError: the gpu pool has no room.
        """
        stream = self._streams[sequence]
        self._go_on(sequence, stream)
        newest, options = stream.log.history.newest, self.options
        if newest is None:
            if recalls:
                self.turn(sequence, "recall", options.num_blocks)
        elif (newest.policy, newest.stride) != (options.policy, options.stride):
            # Opened with other options: they hold for what is accepted from now on.
            self.turn(sequence, newest.mode, newest.num_blocks)

    def fork(self, sequence: Sequence, forked: Sequence, log: RecallLog) -> ObservedQueries:
        """Digests and choices of a sequence for another one with the same past.

        Raises:
            JournalError: what the fork goes on with could not be written to its log.
        """
        stream = self._streams[sequence]
        copied = replace(
            stream,
            index=stream.index.copy(),
            queries=stream.queries.copy(),
            schedule=stream.schedule.copy(),
            log=log,
            due=deque(stream.due),
            unwritten=list(stream.unwritten),
            unfiled=set(stream.unfiled),
            attended=set(stream.attended),
        )
        self._streams[forked] = copied
        copied.write()
        log.write(*under_other_salts(log.history, forked.num_computed))
        attended = set(copied.attended)
        self._go_on(forked, copied)
        copied.attended = attended
        return copied.queries

    def records_after_rewind(self, sequence: Sequence, num_tokens: int) -> list[ModeSet | Chosen]:
        """What is to be written with the record that the stream ends at `num_tokens` again.

        What was decided before goes on under another salt, in the mode that the session is in.
        """
        stream = self._streams[sequence]
        stream.write()
        left, newest, last = stream.log.history.copy(), stream.newest, num_tokens - 1
        lost = left.rewind(num_tokens)
        records = under_other_salts(left, last if lost is None else min(last, lost))
        mode = left.newest or self._unset()
        if (newest.mode, newest.num_blocks) != (mode.mode, mode.num_blocks):
            records.append(replace(newest, token_index=last, salt=new_salt()))
        return records

    def rewind(self, sequence: Sequence) -> None:
        """The stream ends earlier now; what was recalled may lie beyond that."""
        stream = self._streams[sequence]
        stream.unwritten.clear()
        stream.queries.clear()
        self._go_on(sequence, stream)
        stream.attended.clear()

    def is_on(self, sequence: Sequence) -> bool:
        """Whether the sequence recalls."""
        return sequence in self._streams and self._streams[sequence].newest.mode == "recall"

    def turn(
        self, sequence: Sequence, mode: str, num_blocks: int, *, is_apart: bool = False
    ) -> None:
        """Attend by `mode`, to up to `num_blocks` old blocks, from the next token on.

        Tokens that are accepted and not yet computed, but for the last, are still computed as
        before, so that it does not matter how far the engine has come.

        Args:
            sequence: nothing of it is under way.
            mode: `window` or `recall`.
            num_blocks: for `recall`.
            is_apart: what was computed last may differ from what others compute, whatever the mode.

        Raises:
            JournalError: it could not be written; nothing has changed.
        """
        stream, options = self._streams[sequence], self.options
        at = max(sequence.num_computed, sequence.num_tokens - 1)
        # What is computed from there on may differ from what others compute from the same tokens.
        is_apart = is_apart or mode != "window" or bool(stream.newest.salt)
        salt = new_salt() if is_apart else b""
        stream.write()
        turned = ModeSet(at, mode, num_blocks, options.stride, options.policy, salt)
        stream.log.write(turned)
        stream.due = deque([due for due in stream.due if due.token_index < at])
        stream.due.append(turned)
        self._enter_due(sequence, stream)
        self._set_boundary(sequence, stream)

    def stop(self, sequence: Sequence) -> None:
        """Recall nothing any more: from now on another mode has the sequence's old blocks.

        Raises:
            JournalError: it could not be written; nothing has changed.
        """
        self.turn(sequence, "window", self.options.num_blocks)
        self._install(sequence, self._streams[sequence], ())

    def choose_now(self, sequence: Sequence) -> None:
        """An answer begins: choose, and have what was asked computed again with the choice.

        A step that was launched ahead with other blocks is told by their version.

        Raises:
            JournalError: the choice could not be written; nothing has changed.
            PoolFullError: the gpu pool has no room; the choice stays due.
        """
        stream = self._streams.get(sequence)
        if stream is None or not stream.is_on:
            return
        num_computed = sequence.num_computed
        token_index = question_start(num_computed, sequence.block_size)
        if not sequence.can_go_back(token_index):
            token_index = num_computed
        # Blocks of the question itself are about to be others.
        choosing = self._chosen(sequence, stream, num_computed, token_index // sequence.block_size)
        if choosing is None:
            return
        blocks = self._awaited(choosing)
        if not blocks:
            token_index = num_computed
        # The same tokens after the same tokens: only the salt tells what attended to what.
        anew = replace(stream.mode, token_index=token_index, salt=new_salt())
        records: list[ModeSet | Chosen] = [Chosen(token_index, num_computed, blocks)]
        if token_index < num_computed:
            records.insert(0, anew)
        stream.write()
        stream.log.write(*records)
        stream.attended.clear()
        stream.last_made_at = num_computed
        if token_index < num_computed:
            stream.mode, sequence.recall_salt = anew, anew.salt
            give_back(self._tiers, sequence.go_back(token_index))
            stream.truncate(token_index // sequence.block_size)
            stream.num_digested = token_index // sequence.block_size
        stream.schedule.put(Choice(token_index, Known(blocks)))
        self.before_step(sequence, token_index)
        self._set_boundary(sequence, stream)

    def before_step(self, sequence: Sequence, start: int) -> None:
        """Bring back what the tokens from `start` on attend to.

        Raises:
            JournalError: the choice could not be written; it stays due.
            PoolFullError: the gpu pool has no room; the choice stays due.
        """
        stream = self._streams.get(sequence)
        if stream is None or sequence.attends_to_all or not stream.schedule.is_due(start):
            return
        for _, _, choosing in stream.unwritten:
            self._awaited(choosing)
        stream.write()
        choice = stream.schedule.take(start)
        assert choice is not None
        try:
            self._install(sequence, stream, choice.choosing.blocks())
        except BaseException:
            stream.schedule.put_back(choice)
            raise

    def after_step(self, sequence: Sequence) -> None:
        """Digest what was sealed and choose if a stride has passed; nothing has expired yet."""
        stream = self._streams.get(sequence)
        if stream is None:
            return
        self._digest(sequence, stream)
        self._enter_due(sequence, stream)
        num_computed = sequence.num_computed
        if stream.chooses_at(num_computed) and not sequence.attends_to_all:
            self._choose(sequence, stream, num_computed + stream.schedule.stride)
        self._set_boundary(sequence, stream)

    def before_checkpoint(self, sequence: Sequence) -> None:
        """Write what a restart behind this point relies on.

        Raises:
            JournalError: it could not be written.
        """
        stream = self._streams.get(sequence)
        if stream is not None:
            stream.write()
            stream.file_digests()

    def keys(self, sequence: Sequence, first_block: int, end_block: int) -> list[BlockKey]:
        """Names of the sealed blocks of a range that can be recalled."""
        index = self._streams[sequence].index
        found = (index.key(at) for at in range(first_block, min(end_block, len(index))))
        return [key for key in found if key is not None]

    def attended(self, sequence: Sequence) -> list[int]:
        """Block indices that were attended since the last answer began, ascending."""
        stream = self._streams.get(sequence)
        return sorted(stream.attended) if stream is not None else []

    def give_back(self, sequence: Sequence) -> None:
        """Give back what is recalled now; the next choice brings blocks again."""
        stream = self._streams.get(sequence)
        if stream is not None and not sequence.attends_to_all:
            self._install(sequence, stream, ())

    def forget(self, sequence: Sequence) -> None:
        """The sequence has ended; it holds nothing any more."""
        stream = self._streams.pop(sequence, None)
        if stream is not None:
            stream.index.close()
        if stream is not None and stream.log.digests is not None:
            stream.log.digests.close()

    def _unset(self) -> ModeSet:
        """The mode of a sequence that never had one."""
        options = self.options
        return ModeSet(0, "window", options.num_blocks, options.stride, options.policy, b"")

    def _go_on(self, sequence: Sequence, stream: RecallStream) -> None:
        """Take modes and choices from the log, from where the sequence stands."""
        history, num_computed = stream.log.history, sequence.num_computed
        # Rows of blocks that the stream has, or will have once its tokens are computed anew.
        stream.truncate(sequence.num_tokens // sequence.block_size)
        stream.num_digested = num_computed // sequence.block_size
        self._digest(sequence, stream)
        stream.last_made_at = history.last_made_at
        stream.due = deque(history.modes(num_computed + 1))
        self._enter(sequence, stream, history.mode_at(num_computed) or self._unset())
        in_force = history.choice_at(num_computed)
        if in_force is not None and not sequence.attends_to_all:
            self._install(sequence, stream, in_force.blocks)
            stream.schedule.take(num_computed)
        self._set_boundary(sequence, stream)

    def _enter_due(self, sequence: Sequence, stream: RecallStream) -> None:
        while stream.due and stream.due[0].token_index <= sequence.num_computed:
            self._enter(sequence, stream, stream.due.popleft())

    def _enter(self, sequence: Sequence, stream: RecallStream, mode: ModeSet) -> None:
        """A mode begins: with nothing recalled, and the choices that are known for it."""
        stream.mode = mode
        if not sequence.attends_to_all:
            self._install(sequence, stream, ())
            recalled = sequence.table.recalled
            recalled.trained_length = self._adapter.trained_length
            recalled.set_policy(policy_of(mode) if stream.is_on else "far")
            sequence.recall_salt = mode.salt
        # What a step may have left there was computed in the mode before.
        sequence.head_is_written = False
        schedule = stream.schedule
        schedule.stride, schedule.num_blocks = mode.stride, mode.num_blocks
        schedule.clear()
        end = stream.due[0].token_index if stream.due else None
        for chosen in stream.log.history.choices(mode.token_index, end):
            schedule.put(Choice(chosen.token_index, Known(chosen.blocks)))

    def _set_boundary(self, sequence: Sequence, stream: RecallStream) -> None:
        if not sequence.attends_to_all:
            sequence.recall_boundary = stream.next_boundary(sequence.num_computed)

    def _digest(self, sequence: Sequence, stream: RecallStream) -> None:
        """Digest blocks that were sealed, and those of the window that have no digest yet.

        As few launches as there can be: one for each run of blocks.
        """
        index, num_sealed = stream.index, sequence.num_computed // sequence.block_size
        run: list[tuple[int, BlockKey]] = []
        for at in range(min(stream.num_digested, len(index)), num_sealed):
            key = sequence.table[at].key if at in sequence.table else None
            # One that is computed anew, or was left out, has the digest that it had.
            if at < len(index) and key in (None, index.key(at)):
                continue
            if key is None:
                self._digest_run(sequence, stream, run)
                run = []
                index.put_missing(at)
                stream.unfiled.add(at)
                continue
            if run and run[-1][0] != at - 1:
                self._digest_run(sequence, stream, run)
                run = []
            run.append((at, key))
        self._digest_run(sequence, stream, run)
        stream.num_digested = num_sealed

    def _digest_run(
        self, sequence: Sequence, stream: RecallStream, run: list[tuple[int, BlockKey]]
    ) -> None:
        if not run:
            return
        blocks = [sequence.table[at].block_id for at, _ in run]
        places = to_device(torch.tensor(blocks), self._pool.device)
        digests = block_digests(self._pool, places, self._kv_heads)
        stream.index.put(run[0][0], [key for _, key in run], digests)
        stream.unfiled.update(at for at, _ in run)

    def _choose(self, sequence: Sequence, stream: RecallStream, token_index: int) -> None:
        choosing = self._chosen(sequence, stream, token_index, len(stream.index))
        if choosing is None:
            return
        stream.schedule.put(Choice(token_index, choosing))
        stream.last_made_at = sequence.num_computed
        stream.unwritten.append((token_index, sequence.num_computed, choosing))
        if all(each.is_known() for _, _, each in stream.unwritten):
            # Without room on the disk it is written later, at the latest before it is used.
            with suppress(JournalError):
                stream.write()

    def _chosen(
        self, sequence: Sequence, stream: RecallStream, token_index: int, num_blocks: int
    ) -> Choosing | None:
        """What the newest queries choose for `token_index` and later, of the first `num_blocks`."""
        queries = stream.queries.before(sequence.num_computed)
        if queries is None:
            return None
        chosen_by = torch.stack([queries[head.layer, :, head.q_head] for head in self._heads.heads])
        schedule, window, size = stream.schedule, sequence.window, sequence.block_size
        policy, first_block = policy_of(stream.mode), 0
        if policy == "absolute":
            first_block = schedule.first_within(token_index, self._adapter.trained_length)
            # True distances differ by block; all are scored as just beyond the window.
            policy = "far"
        distance = farthest(policy, window.window_size, schedule.num_blocks, size)
        return stream.index.choose(
            chosen_by,
            first_block,
            schedule.candidates(window, token_index, num_blocks),
            schedule.num_blocks,
            self._heads.rows,
            self._angles_of(distance),
            self._scales,
            window.num_sink_tokens,
        )

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

    def _install(self, sequence: Sequence, stream: RecallStream, blocks: tuple[int, ...]) -> None:
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

    def _restored(self, sequence: Sequence, stream: RecallStream, block_index: int) -> int | None:
        """The block in the gpu pool, with one more owner; `None` if it is absent."""
        key = stream.index.key(block_index) if block_index < len(stream.index) else None
        if key is None:
            # Chosen before a restart that has lost its digest.
            self.num_absent += 1
            return None
        if block_index in sequence.table and sequence.table[block_index].key == key:
            block_id = sequence.table[block_index].block_id
            self._tiers.share(block_id)
            return block_id
        read = read_block(self._tiers, key)
        self.num_absent += read is None
        return read
