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

from collections import deque
from contextlib import suppress
from dataclasses import dataclass, replace

from torch import Tensor

from streamkv.digest_memory import DigestMemory
from streamkv.errors import JournalError
from streamkv.journal_records import Chosen, ModeSet
from streamkv.live_blocks import give_back
from streamkv.mode_records import after_rewind, new_salt, under_other_salts
from streamkv.model import ModelAdapter
from streamkv.observed_queries import ObservedQueries
from streamkv.recall_chooser import Chooser
from streamkv.recall_digester import Digester
from streamkv.recall_installer import Installer
from streamkv.recall_log import RecallLog
from streamkv.recall_schedule import (
    QUESTION_TOKENS,
    Choice,
    Known,
    RecallSchedule,
    question_start,
)
from streamkv.recall_stream import RecallStream, policy_of
from streamkv.recalled import PositionPolicy
from streamkv.retrieval_heads import RetrievalHeads
from streamkv.sequence import Sequence
from streamkv.tiers.manager import TierManager
from streamkv.tiers.spec import BlockKey

RECALL_COUNTERS = ("absent", "digests_lost", "choice_waits", "choice_wait_ms")


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
        options: as given.
        digester: that digests what was sealed.
        chooser: that chooses.
        installer: that brings back what was chosen.
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
        self.digester = Digester(adapter.spec, pool, heads, digest_memory)
        self.chooser = Chooser(adapter, heads, pool.device)
        self.installer = Installer(tiers)
        self._adapter = adapter
        self._pool = pool
        self._tiers = tiers
        self._streams: dict[Sequence, RecallStream] = {}

    def counters(self) -> dict[str, int]:
        """What happened since opening, by name."""
        return {
            "absent": self.installer.num_absent,
            "digests_lost": self.digester.memory.usage().num_lost,
            "choice_waits": self.chooser.num_waits,
            "choice_wait_ms": int(1000 * self.chooser.waited_s),
        }

    def open(self, sequence: Sequence, log: RecallLog) -> ObservedQueries:
        """Begin with a sequence, to be resumed next; returns who is to see its queries."""
        adapter, options = self._adapter, self.options
        shape = (adapter.spec.num_layers, adapter.num_q_heads, adapter.head_dim)
        queries = ObservedQueries(*shape, self._pool.device, self._pool.dtype)
        schedule = RecallSchedule(options.stride, options.num_blocks, sequence.block_size)
        index = self.digester.open(log, sequence.block_size)
        self._streams[sequence] = RecallStream(index, queries, schedule, log, self._unset())
        sequence.look_back = QUESTION_TOKENS
        return queries

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
            attended=dict(stream.attended),
        )
        self._streams[forked] = copied
        copied.write()
        log.write(*under_other_salts(log.history, forked.num_computed))
        attended = dict(copied.attended)
        self._go_on(forked, copied)
        copied.attended = attended
        return copied.queries

    def records_after_rewind(self, sequence: Sequence, num_tokens: int) -> list[ModeSet | Chosen]:
        """What is to be written with the record that the stream ends at `num_tokens` again."""
        stream = self._streams[sequence]
        stream.write()
        return after_rewind(stream.log.history, self._unset(), num_tokens)

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

    def turn(self, sequence: Sequence, mode: str, num_blocks: int) -> None:
        """Attend by `mode`, to up to `num_blocks` old blocks, from the next token on.

        Tokens that are accepted and not yet computed, but for the last, are still computed as
        before, so that it does not matter how far the engine has come.

        Args:
            sequence: nothing of it is under way.
            mode: `window` or `recall`.
            num_blocks: for `recall`.

        Raises:
            JournalError: it could not be written; nothing has changed.
        """
        stream, options = self._streams[sequence], self.options
        at = max(sequence.num_computed, sequence.num_tokens - 1)
        # What is computed from there on may differ from what others compute from the same tokens.
        salt = new_salt() if mode != "window" or stream.newest.salt else b""
        stream.write()
        turned = ModeSet(at, mode, num_blocks, options.stride, options.policy, salt)
        stream.log.write(turned)
        stream.due = deque([due for due in stream.due if due.token_index < at])
        stream.due.append(turned)
        self._enter_due(sequence, stream)
        self._set_boundary(sequence, stream)

    def follow(self, sequence: Sequence) -> None:
        """Attend by a mode that somebody else has written; what it leaves undecided is void."""
        stream = self._streams[sequence]
        stream.unwritten.clear()
        self._go_on(sequence, stream)

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
        first_anew = token_index // sequence.block_size
        choosing = self.chooser.choose(sequence, stream, num_computed, first_anew)
        if choosing is None:
            return
        blocks = self.chooser.awaited(choosing)
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
        stream.schedule.put(Choice(token_index, Known(blocks, choosing.weights())))
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
            self.chooser.awaited(choosing)
        stream.write()
        choice = stream.schedule.take(start)
        assert choice is not None
        try:
            self.installer.install(sequence, stream, choice.choosing)
        except BaseException:
            stream.schedule.put_back(choice)
            raise

    def after_step(self, sequence: Sequence) -> None:
        """Digest what was sealed and choose if a stride has passed; nothing has expired yet."""
        stream = self._streams.get(sequence)
        if stream is None:
            return
        self.digester.digest(sequence, stream)
        self._enter_due(sequence, stream)
        num_computed = sequence.num_computed
        if stream.chooses_at(num_computed) and not sequence.attends_to_all:
            self._choose(sequence, stream, num_computed + stream.schedule.stride)
        self._settle(sequence, stream)
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

    def attended(self, sequence: Sequence) -> list[tuple[int, float | None]]:
        """Block indices that were attended since the last answer began, ascending, and weights."""
        stream = self._streams.get(sequence)
        return sorted(stream.attended.items()) if stream is not None else []

    def give_back(self, sequence: Sequence) -> None:
        """Give back what is recalled now; the next choice brings blocks again."""
        stream = self._streams.get(sequence)
        if stream is not None and not sequence.attends_to_all:
            self.installer.install(sequence, stream, Known(()))

    def fall_asleep(self, sequence: Sequence) -> None:
        """Give back what is recalled, to be brought back by `wake`.

        Raises:
            JournalError: a choice could not be written; nothing has changed.
        """
        stream = self._streams.get(sequence)
        if stream is None:
            return
        for _, _, choosing in stream.unwritten:
            self.chooser.awaited(choosing)
        stream.write()
        self.give_back(sequence)

    def wake(self, sequence: Sequence) -> None:
        """Recall again what was recalled.

        Raises:
            PoolFullError: the gpu pool has no room.
        """
        stream = self._streams.get(sequence)
        if stream is None or not stream.is_on or sequence.attends_to_all:
            return
        in_force = stream.log.history.choice_at(sequence.num_computed)
        if in_force is not None:
            attended = dict(stream.attended)
            self.installer.install(sequence, stream, Known(in_force.blocks))
            stream.attended = attended

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
        self.digester.digest(sequence, stream)
        stream.last_made_at = history.last_made_at
        stream.due = deque(history.modes(num_computed + 1))
        self._enter(sequence, stream, history.mode_at(num_computed) or self._unset())
        in_force = history.choice_at(num_computed)
        if in_force is not None and not sequence.attends_to_all:
            self.installer.install(sequence, stream, Known(in_force.blocks))
            stream.schedule.take(num_computed)
        self._settle(sequence, stream)
        self._set_boundary(sequence, stream)

    def _enter_due(self, sequence: Sequence, stream: RecallStream) -> None:
        while stream.due and stream.due[0].token_index <= sequence.num_computed:
            self._enter(sequence, stream, stream.due.popleft())

    def _enter(self, sequence: Sequence, stream: RecallStream, mode: ModeSet) -> None:
        """A mode begins: with nothing recalled, and the choices that are known for it."""
        stream.mode = mode
        if not sequence.attends_to_all:
            self.installer.install(sequence, stream, Known(()))
            recalled = sequence.table.recalled
            recalled.trained_length = self._adapter.trained_length
            recalled.set_policy(policy_of(mode) if stream.is_on else "far")
            sequence.recall_salt = mode.salt
        # What a step may have left there was computed in the mode before.
        sequence.head_is_written = False
        schedule = stream.schedule
        schedule.stride, schedule.num_blocks = mode.stride, mode.num_blocks
        made = schedule.clear()
        end = stream.due[0].token_index if stream.due else None
        for chosen in stream.log.history.choices(mode.token_index, end):
            # What is not written down, weights, is known of choices that were made in this life.
            same = next(
                (each for each in made if each.is_of(chosen.token_index, chosen.blocks)), None
            )
            schedule.put(same or Choice(chosen.token_index, Known(chosen.blocks)))

    def _set_boundary(self, sequence: Sequence, stream: RecallStream) -> None:
        if not sequence.attends_to_all:
            sequence.recall_boundary = stream.next_boundary(sequence.num_computed)

    def _choose(self, sequence: Sequence, stream: RecallStream, token_index: int) -> None:
        choosing = self.chooser.choose(sequence, stream, token_index, len(stream.index))
        if choosing is None:
            return
        stream.schedule.put(Choice(token_index, choosing))
        stream.last_made_at = sequence.num_computed
        stream.unwritten.append((token_index, sequence.num_computed, choosing))

    def _settle(self, sequence: Sequence, stream: RecallStream) -> None:
        """Write what is known now of what was chosen, and have its blocks come nearer."""
        if stream.unwritten and all(each.is_known() for _, _, each in stream.unwritten):
            # Without room on the disk it is written later, at the latest before it is used.
            with suppress(JournalError):
                stream.write()
        ahead = stream.schedule.next_choice()
        if ahead is not None and ahead is not stream.staged and ahead.choosing.is_known():
            stream.staged = ahead
            self.installer.stage(sequence, stream, ahead.choosing.blocks())
