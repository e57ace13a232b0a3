"""An open session behind the scenes: its sequence, its journal, its text and its way to sleep."""

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from streamkv.checkpoint import Checkpointer
from streamkv.deletion import num_shared_blocks
from streamkv.detokenizer import IncrementalDecoder
from streamkv.errors import JournalError
from streamkv.executor import Executor
from streamkv.intake import Intake
from streamkv.journal import Journal
from streamkv.journal_records import Closed
from streamkv.outputs import FinishReason, SessionStats
from streamkv.recovery import open_block_key, stream_keys
from streamkv.reuse import PrefixReuse
from streamkv.sampling import SamplingParams
from streamkv.sequence import Sequence
from streamkv.tiers.manager import TierManager
from streamkv.tokenizer import Tokenizer
from streamkv.window import Window

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class LiveStream:
    """What belongs to one open session.

    Attributes:
        name: the session's name.
        sequence: its tokens and live blocks.
        created_window: the window of the session's creation.
        intake: where tokens come in.
        journal: `None` without a store.
        checkpointer: `None` without a store.
        tokenizer: of the model.
        tiers: owner of the blocks.
        executor: gives blocks back.
        reuse: takes stored blocks for tokens to come.
        other_journals: files of the other sessions of its store.
        engine_counters: what the engine counts itself, all sessions together.
        prefill_chunk: tokens of a feed computed in one step.
        resumed: the session existed before.
    """

    name: str
    sequence: Sequence
    created_window: Window
    intake: Intake
    journal: Journal | None
    checkpointer: Checkpointer | None
    tokenizer: Tokenizer
    tiers: TierManager
    executor: Executor
    reuse: PrefixReuse
    other_journals: Callable[[], Iterator[Path]]
    engine_counters: Callable[[], dict[str, int]]
    prefill_chunk: int
    resumed: bool

    @property
    def eos_ids(self) -> frozenset[int]:
        """Tokens by which the model ends a turn."""
        return self.tokenizer.stop_ids

    def decoder(self) -> IncrementalDecoder:
        """Turns the ids that follow into text."""
        return self.tokenizer.decoder(previous=list(self.sequence.recent_ids)[-8:])

    def next_chunk(self) -> int:
        """Tokens up to the next absolute multiple of the prefill chunk."""
        return self.prefill_chunk - self.sequence.num_computed % self.prefill_chunk

    def after_step(self) -> None:
        """Called on the engine's thread after each step."""
        if self.checkpointer is not None:
            self.checkpointer.after_step()

    def end_turn(self, params: SamplingParams, reason: FinishReason | None) -> None:
        """Journal that a generation ended, and wait until all of it is on disk."""
        shown = reason.value if reason else "abandoned"
        self.intake.end_turn({"reason": shown, "seed": params.seed})

    def stats(self) -> SessionStats:
        """Where the session stands."""
        sequence = self.sequence
        window = sequence.window
        return SessionStats(
            name=self.name,
            num_tokens=sequence.num_tokens,
            num_computed=sequence.num_computed,
            num_sink_tokens=min(window.num_sink_tokens, sequence.num_tokens),
            num_window_tokens=min(window.window_size, sequence.num_tokens),
            text_chars=self.intake.text_chars,
            num_blocks=len(sequence.table),
            tiers=self.tiers.usage(),
            counters=self.tiers.counters() | self.engine_counters(),
            num_reused=self.reuse.num_tokens,
        )

    def sleep(self) -> None:
        """Store the window and the open block, journal it, and give the blocks back."""
        with self.intake.lock:
            self.intake.close()
            try:
                # Else a resume would compute it anew, in a chunk, which rounds otherwise than a
                # decode step did.
                self.executor.count_written_head(self.sequence)
                if self.journal is not None and self.checkpointer is not None:
                    self._store_all(self.journal, self.checkpointer)
            finally:
                self.executor.release(self.sequence)
                if self.journal is not None:
                    self.journal.close()

    def _store_all(self, journal: Journal, checkpointer: Checkpointer) -> None:
        partial = checkpointer.finish_with_open_block(open_block_key(self.name, self.sequence))
        try:
            journal.append(Closed(self.sequence.num_computed, partial or b""))
            journal.sync()
        except JournalError as error:
            # All tokens are in it; only the shortcut to the open block is missing.
            _log.warning("session %r: went to sleep without its last record (%s)", self.name, error)

    def delete(self) -> None:
        """Forget the session: its unshared blocks in every tier, then the journal."""
        with self.intake.lock:
            self.intake.close()
            self.executor.release(self.sequence)
            keys, num_shared = [], 0
            if self.journal is not None:
                keys = stream_keys(self.sequence, self.journal, self.created_window)
                num_shared = num_shared_blocks(self.sequence, self.journal, self.other_journals())
            doomed, spared = keys[num_shared:], keys[:num_shared]
            self.tiers.forget(self.name, doomed, spared=spared).wait()
            if self.journal is not None:
                self.journal.delete()
