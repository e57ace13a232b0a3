"""Sequence bookkeeping meets tiers: blocks live before a step, sealed and dropped after."""

from collections.abc import Callable
from typing import Protocol

from streamkv.attention_modes import switch_attention
from streamkv.batch import Batch, Flight, SequenceStep, StepResult, Wanted
from streamkv.config import Attention
from streamkv.digest_pages import DigestUsage
from streamkv.full_attention import FullAttention
from streamkv.journal_records import Chosen, ModeSet
from streamkv.live_blocks import give_back
from streamkv.mode_records import under_other_salts
from streamkv.observed_queries import ObservedQueries
from streamkv.recall_log import RecallLog
from streamkv.recaller import RECALL_COUNTERS, Recaller
from streamkv.sequence import Sequence
from streamkv.tiers.jobs import Wanted as WantedBlock
from streamkv.tiers.manager import TierManager
from streamkv.tiers.spec import BlockKey
from streamkv.window import Window


class StepRunner(Protocol):
    """What runs a batch: one for each kind of device."""

    @property
    def max_sequences(self) -> int:
        """Sequences of one step, at most."""

    def launch(self, batch: Batch) -> Flight:
        """Start computing the batch."""

    def observe(self, seq_id: int, queries: ObservedQueries | None) -> None:
        """Show the queries of a sequence to `queries` from now on; to nobody with `None`."""

    def wait_until_fast(self) -> bool:
        """Wait until the fastest way is ready or given up; whether there is one."""

    def close(self) -> None:
        """End what the runner has begun in the background."""


class Executor:
    """What the step loop drives.

    Args:
        runner: runs a batch.
        tiers: owner of the blocks.
        recaller: brings old blocks back, if the engine does so.
        full: brings all of them back.
    """

    def __init__(
        self,
        runner: StepRunner,
        tiers: TierManager,
        recaller: Recaller | None = None,
        full: FullAttention | None = None,
    ) -> None:
        self._runner = runner
        self._tiers = tiers
        self.recaller = recaller
        self.full = full

    def open(self, sequence: Sequence, log: RecallLog, created: Window) -> None:
        """A new sequence begins, or one that is brought back next.

        Args:
            sequence: it.
            log: where its modes and choices are.
            created: the window of the session's creation.
        """
        if self.recaller is not None:
            self._runner.observe(sequence.seq_id, self.recaller.open(sequence, log))
        if self.full is not None:
            self.full.open(sequence, log, created)

    def switch(
        self, sequence: Sequence, attention: Attention, recall_blocks: int | None = None
    ) -> None:
        """Have a sequence attend otherwise; see `switch_attention`."""
        # What a step has left behind was computed in the mode before.
        self.count_written_head(sequence)
        switch_attention(sequence, attention, recall_blocks, self.recaller, self.full)

    def attention(self, sequence: Sequence) -> Attention:
        """What a sequence attends to."""
        if self.full is not None and self.full.is_on(sequence):
            return "full"
        return "recall" if self.recalls(sequence) else "window"

    def resume(self, sequence: Sequence, attention: Attention) -> None:
        """Have a sequence attend as its log says, or by `attention` if that says nothing.

        Raises:
            JournalError: its first mode could not be written.
            PoolFullError: the gpu pool has no room for what it recalls.
        """
        if attention == "full" and self.full is not None:
            self.full.set_first_mode(sequence)
        if self.recaller is not None:
            self.recaller.resume(sequence, attention == "recall")
        if self.full is not None:
            self.full.follow(sequence)

    def fork(self, sequence: Sequence, forked: Sequence, log: RecallLog) -> None:
        """A sequence with the same past begins."""
        if self.recaller is not None:
            self._runner.observe(forked.seq_id, self.recaller.fork(sequence, forked, log))
        else:
            log.write(*under_other_salts(log.history, forked.num_computed))
        if self.full is not None:
            self.full.fork(sequence, forked, log)

    def keys_of(self, sequence: Sequence) -> Callable[[int, int], list[BlockKey]] | None:
        """Names of sealed blocks by a range of block indices; `None` if none are recalled."""
        recaller = self.recaller
        if recaller is None:
            return None
        return lambda first, end: recaller.keys(sequence, first, end)

    def old_blocks(self, sequence: Sequence) -> list[WantedBlock]:
        """What a resume needs besides the window: in mode `full` all that left it."""
        return self.full.old_blocks(sequence) if self.full is not None else []

    def before_checkpoint(self, sequence: Sequence) -> None:
        """Write what a restart needs besides blocks. Raises JournalError."""
        if self.recaller is not None:
            self.recaller.before_checkpoint(sequence)

    def counters(self) -> dict[str, int]:
        """What happened since opening, by name."""
        counted = dict.fromkeys(RECALL_COUNTERS, 0)
        if self.recaller is not None:
            counted = self.recaller.counters()
        return {**self._tiers.counters(), **counted}

    def digest_usage(self) -> DigestUsage:
        """Bytes of digests of all sequences, by place."""
        return self.recaller.digester.memory.usage() if self.recaller is not None else DigestUsage()

    def recalls(self, sequence: Sequence) -> bool:
        """Whether a sequence attends to old blocks."""
        return self.recaller is not None and self.recaller.is_on(sequence)

    def choose_blocks(self, sequence: Sequence) -> None:
        """An answer begins: choose the old blocks that it attends to."""
        if self.recaller is not None:
            self.recaller.choose_now(sequence)
        is_anew = self.full is not None and self.full.ask_again(sequence)
        if is_anew and self.recaller is not None:
            self.recaller.follow(sequence)

    def records_after_rewind(self, sequence: Sequence, num_tokens: int) -> list[ModeSet | Chosen]:
        """What is to be written with the record that the stream ends at `num_tokens` again."""
        if self.recaller is not None:
            return self.recaller.records_after_rewind(sequence, num_tokens)
        if self.full is not None:
            return self.full.records_after_rewind(sequence, num_tokens)
        return []

    def has_all(self, sequence: Sequence, num_tokens: int) -> bool:
        """Whether a stream that ends at `num_tokens` goes on with what is in the gpu pool now."""
        return self.full is not None and self.full.has_all(sequence, num_tokens)

    def rewind(self, sequence: Sequence) -> None:
        """The stream of a sequence ends earlier now."""
        if self.full is not None:
            self.full.rewound(sequence)
        if self.recaller is not None:
            self.recaller.rewind(sequence)

    def close(self, sequence: Sequence) -> None:
        """Give back every block of a sequence that ends."""
        self.release(sequence)
        if self.recaller is not None:
            self.recaller.forget(sequence)
            self._runner.observe(sequence.seq_id, None)
        if self.full is not None:
            self.full.forget(sequence)

    def fall_asleep(self, sequence: Sequence) -> None:
        """Give back the old blocks of a sequence whose window leaves the gpu pool.

        Raises:
            JournalError: what was chosen could not be written; nothing has changed.
        """
        if self.recaller is not None:
            self.recaller.fall_asleep(sequence)

    def wake(self, sequence: Sequence) -> None:
        """Bring back the old blocks of a sequence whose window is there again.

        Raises:
            PoolFullError: the gpu pool has no room.
        """
        if self.recaller is not None:
            self.recaller.wake(sequence)

    def prepare(self, step: SequenceStep) -> None:
        """Allocate the blocks that a part of a step writes.

        Raises:
            PoolFullError: the gpu pool has no room; what was allocated stays with its sequence.
        """
        sequence = step.sequence
        if self.recaller is not None:
            self.recaller.before_step(sequence, step.start)
        if self.full is not None:
            self.full.before_step(sequence, step.start + step.query_len)
        for index in sequence.table.missing(step.start, step.start + step.query_len):
            sequence.table.add(index, self._tiers.allocate())

    @property
    def max_sequences(self) -> int:
        """Sequences of one step, at most."""
        return self._runner.max_sequences

    def launch(self, batch: Batch) -> Flight:
        """Start computing the batch."""
        return self._runner.launch(batch)

    def run(self, batch: Batch) -> list[StepResult]:
        """Compute the batch."""
        return self.launch(batch).results()

    def between_steps(self, idle: bool) -> bool:
        """A piece of what the tiers do when no step waits; whether there is more."""
        return self._tiers.between_steps(idle=idle)

    def postprocess(self, step: SequenceStep) -> None:
        """Count a part's tokens as computed; seal full blocks, then drop what no query needs."""
        if step.wanted is Wanted.LOGITS:
            self.advance(step.sequence, step.query_len - 1)
            step.sequence.head_is_written = True
        else:
            self.advance(step.sequence, step.query_len)

    def advance(self, sequence: Sequence, num_tokens: int) -> None:
        """Count tokens whose KV exists as computed; seal full blocks, then drop expired ones."""
        before = sequence.num_computed // sequence.block_size
        if num_tokens > 0:
            for block_id, key in sequence.advance(num_tokens):
                self._tiers.seal(block_id, key)
        # What recall makes of a new mode depends on whether everything is attended.
        if self.full is not None:
            self.full.after_step(sequence)
        if self.recaller is not None:
            self.recaller.after_step(sequence)
        if sequence.num_computed // sequence.block_size > before:
            self.drop_expired(sequence)

    def count_written_head(self, sequence: Sequence) -> None:
        """Count the first pending token as computed if its KV exists and others follow it."""
        if sequence.head_is_written and sequence.num_pending > 1:
            self.advance(sequence, 1)

    def drop_expired(self, sequence: Sequence) -> None:
        """Give back the blocks that left the window of a sequence."""
        for block_id, key in sequence.take_expired():
            if key is None:
                self._tiers.free(block_id)
            else:
                self._tiers.drop(block_id)

    def release(self, sequence: Sequence) -> None:
        """Give back every block of a sequence."""
        if self.recaller is not None:
            self.recaller.give_back(sequence)
        if self.full is not None:
            self.full.give_back(sequence)
        give_back(self._tiers, sequence.table.take_all())
