"""An open session behind the scenes: its sequence, its journal, its text and its way to sleep."""

import logging
from dataclasses import dataclass

from streamkv.checkpoint import Checkpointer
from streamkv.config import Attention
from streamkv.detokenizer import IncrementalDecoder
from streamkv.errors import InputError, JournalError, SessionError
from streamkv.executor import Executor
from streamkv.full_rewind import FullRewind
from streamkv.intake import Intake
from streamkv.journal import Journal
from streamkv.journal_records import Closed, Rewound
from streamkv.outputs import Attended, FinishReason, SessionStats
from streamkv.past import MemoryPast, Past, TextMarks, text_chars_at
from streamkv.recovery import Recovery, open_block_key
from streamkv.reuse import PrefixReuse
from streamkv.sampling import SamplingParams
from streamkv.sequence import Sequence
from streamkv.session_deletion import delete_stored
from streamkv.sharing import Sharing
from streamkv.sleeping import Sleeper
from streamkv.store import Store
from streamkv.tiers.manager import TierManager
from streamkv.tiers.spec import KVSpec
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
        store: where it lasts; `None` if it does not.
        memory: what remembers the stream without a store.
        checkpointer: `None` without a store.
        tokenizer: of the model.
        tiers: owner of the blocks.
        executor: gives blocks back.
        reuse: takes stored blocks for tokens to come.
        sharing: the engine's cost gate and counts.
        spec: layout of the model's blocks.
        prefill_chunk: tokens of a feed computed in one step.
        resumed: the session existed before.
        sleeper: how its blocks leave the gpu pool and come back; `None` where they cannot.
    """

    name: str
    sequence: Sequence
    created_window: Window
    intake: Intake
    journal: Journal | None
    store: Store | None
    memory: MemoryPast
    checkpointer: Checkpointer | None
    tokenizer: Tokenizer
    tiers: TierManager
    executor: Executor
    reuse: PrefixReuse
    sharing: Sharing
    spec: KVSpec
    prefill_chunk: int
    resumed: bool
    sleeper: Sleeper | None = None

    @property
    def eos_ids(self) -> frozenset[int]:
        """Tokens by which the model ends a turn."""
        return self.tokenizer.stop_ids

    @property
    def past(self) -> Past:
        """All tokens of the stream."""
        return self.journal if self.journal is not None else self.memory

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

    def goes_on_answering(self) -> bool:
        """Whether the stream ends with a generated token: who generates goes on with an answer."""
        return self.past.state.in_answer

    def end_turn(self, params: SamplingParams, reason: FinishReason | None) -> None:
        """Journal that a generation ended, and wait until all of it is on disk."""
        shown = reason.value if reason else "abandoned"
        self.intake.end_turn({"reason": shown, "seed": params.seed})

    def stats(
        self, counters: dict[str, int], state: str, queue_position: int | None
    ) -> SessionStats:
        """Where the session stands.

        Args:
            counters: of the engine.
            state: where its blocks are.
            queue_position: its place among those that wait for room.
        """
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
            counters=counters,
            num_reused=self.reuse.num_tokens,
            digests=self.executor.digest_usage(),
            state=state,
            queue_position=queue_position,
        )

    def set_mode(self, mode: Attention, recall_blocks: int | None) -> None:
        """Attend by `mode` from the next token on; nothing of it may be under way.

        Raises:
            ConfigError: the engine cannot, or more blocks than it has room for.
            PoolFullError, AbsentBlockError: `full` cannot be had; nothing has changed.
            JournalError: it could not be written; nothing has changed.
        """
        self.executor.switch(self.sequence, mode, recall_blocks)

    def attended(self) -> list[Attended]:
        """Old blocks that were recalled since the last answer began, or since a restart in it."""
        recaller = self.executor.recaller
        if recaller is None:
            return []
        size, found = self.sequence.block_size, []
        for index, weight in recaller.attended(self.sequence):
            start, end = index * size, (index + 1) * size
            found.append(Attended(start, end, self._text(start, end), weight))
        return found

    def _text(self, start: int, end: int) -> str:
        try:
            return self._decoded(start, end)
        except SessionError:
            # Too long for a session without a store to remember.
            return ""

    def _decoded(self, start: int, end: int) -> str:
        """The text of some tokens of the stream."""
        past = self.past
        decoder = self.tokenizer.decoder(previous=past.ids(max(0, start - 8), start).tolist())
        return "".join(decoder.push(token_id) for token_id in past.ids(start, end).tolist())

    def rewind(self, token_index: int) -> None:
        """End the stream at `token_index` again; nothing of it may be under way.

        Raises:
            InputError: not a whole number from 1 to the number of tokens.
            JournalError: it could not be written, and nothing has changed; or it could not be made
                durable.
            SessionError: nothing remembers the stream.
        """
        with self.intake.lock:
            self.intake.require_open()
            self._check_index(token_index)
            rewound = self._rewound(token_index)
            full_rewind = self._full_rewind(token_index)
            more = self.executor.records_after_rewind(self.sequence, token_index)
            self.intake.rewind(rewound, *more)
            if full_rewind is not None:
                full_rewind.run()
            else:
                self.recovery().rewind()
            self.executor.rewind(self.sequence)
            self.intake.restore(rewound.text_chars, "", rewound.has_turns)
            if self.checkpointer is not None:
                self.checkpointer.rewind(token_index)
            if self.journal is not None:
                self.journal.sync()

    def _full_rewind(self, token_index: int) -> FullRewind | None:
        """How a session that attends to everything goes back; `None`: as every other."""
        if not self.executor.has_all(self.sequence, token_index):
            return None
        past, window = self.past, self.created_window
        return FullRewind(self.sequence, past, window, self.tiers, token_index)

    def _check_index(self, token_index: int) -> None:
        is_int = isinstance(token_index, int) and not isinstance(token_index, bool)
        num_tokens = self.sequence.num_tokens
        if not is_int or not 0 < token_index <= num_tokens:
            problem = "outside the stream" if is_int else "not a whole number"
            remedy = f"Use a whole number from 1 to {num_tokens}."
            if num_tokens == 0:
                remedy = "The session is empty: there is nothing to go back to."
            raise InputError("token_index", token_index, problem, remedy)

    def _rewound(self, token_index: int) -> Rewound:
        marks = self.memory.marks
        if self.journal is not None:
            marks = TextMarks.of(self.journal.scan())
        mark = marks.at(token_index)
        text_chars = text_chars_at(mark, token_index, self._decoded)
        return Rewound(token_index, text_chars, mark.has_turns)

    def recovery(self) -> Recovery:
        """What brings the sequence to where its past ends."""
        return Recovery(
            self.name,
            self.sequence,
            self.past,
            self.created_window,
            self.tiers,
            self.executor,
            self.spec,
            self.sharing.gate,
        )

    def sleep(self) -> None:
        """Store the window and the open block, journal it, and give the blocks back."""
        with self.intake.lock:
            self.intake.close()
            try:
                if not self.is_asleep:
                    # Else a resume would compute it anew, in a chunk, which rounds otherwise than a
                    # decode step did.
                    self.executor.count_written_head(self.sequence)
                if self.journal is not None and self.checkpointer is not None:
                    self._store_all(self.journal, self.checkpointer)
            finally:
                self.executor.close(self.sequence)
                if self.journal is not None:
                    self.journal.close()
                elif self.is_asleep:
                    self.tiers.forget(self.name)

    @property
    def is_asleep(self) -> bool:
        """Whether the blocks are in the tiers below."""
        return self.sleeper is not None and self.sleeper.asleep is not None

    def recompute(self) -> None:
        """Have the window computed anew; nothing of it is live or under way."""
        self.recovery().rewind()
        self.executor.rewind(self.sequence)

    def _store_all(self, journal: Journal, checkpointer: Checkpointer) -> None:
        if self.sleeper is not None and self.sleeper.asleep is not None:
            # All of it was stored when it fell asleep.
            open_block = self.sleeper.asleep.open_block
            partial = open_block[1] if open_block is not None else None
            checkpointer.finish_or_log()
        else:
            partial = checkpointer.finish_with_open_block(open_block_key(self.name, self.sequence))
        try:
            self.executor.before_checkpoint(self.sequence)
            journal.append(Closed(self.sequence.num_computed, partial or b""))
            journal.sync()
        except JournalError as error:
            # All tokens are in it; only the shortcut to the open block is missing.
            _log.warning("session %r: went to sleep without its last record (%s)", self.name, error)

    def delete(self) -> None:
        """Forget the session: its unshared blocks in every tier, then the journal.

        Raises:
            StoreError: blocks or files cannot be deleted. The session sleeps, and is still there.
            JournalError: the journal cannot be deleted; likewise.
        """
        with self.intake.lock:
            self.intake.close()
            self.executor.close(self.sequence)
            if self.journal is None or self.store is None:
                self.tiers.forget(self.name).wait()
                return
            with self.journal:
                root, size = self.sequence.root_key, self.sequence.block_size
                delete_stored(self.name, self.journal, root, size, self.store, self.tiers)
