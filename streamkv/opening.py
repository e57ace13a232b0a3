"""Opens a session's live stream: its journal, its room in the pool, its window restored.

Invariant: what was reserved or opened for a session that could not be opened is given back. This
module knows nothing of handles and locks; the engine calls it with its lock held.
"""

import hashlib
import itertools
import threading
import time
from pathlib import Path

from streamkv.checkpoint import Checkpointer
from streamkv.config import EngineConfig
from streamkv.digest_file import DigestFile, copy_digests
from streamkv.entrance import Entrance
from streamkv.errors import ConfigError, InputError, PoolFullError, QuotaError, SessionError
from streamkv.executor import Executor
from streamkv.forking import share_blocks
from streamkv.intake import Intake
from streamkv.journal import Journal
from streamkv.journal_records import SessionHeader
from streamkv.live import LiveStream
from streamkv.model import ModelAdapter
from streamkv.past import MemoryPast
from streamkv.quotas import UNLIMITED, Quotas, require_tokens, tokens_allowed
from streamkv.recall_log import RecallLog
from streamkv.reuse import PrefixReuse
from streamkv.sequence import Sequence
from streamkv.sharing import PRIVATE, Sharers, Sharing, salting_of
from streamkv.sizing import blocks_of_session
from streamkv.sleeping import Sleeper
from streamkv.store import Store, delete_digests
from streamkv.tiers.keys import root_key
from streamkv.tiers.manager import TierManager
from streamkv.tokenizer import Tokenizer
from streamkv.window import Window


class SessionOpener:
    """Opens live streams of one engine.

    Args:
        config: the engine's options.
        adapter, tokenizer: the model and what reads its texts.
        executor, tiers: what runs the sequences and owns their blocks.
        entrance: where sessions have room in the pool that they share.
        store: where sessions last; `None` if they do not.
        sharing: the engine's cost gate and counts.
    """

    def __init__(
        self,
        config: EngineConfig,
        adapter: ModelAdapter,
        tokenizer: Tokenizer,
        executor: Executor,
        tiers: TierManager,
        entrance: Entrance,
        store: Store | None,
        sharing: Sharing,
    ) -> None:
        self._config = config
        self._adapter = adapter
        self._tokenizer = tokenizer
        self._executor = executor
        self._tiers = tiers
        self._entrance = entrance
        self._store = store
        self._sharing = sharing
        self._ids = itertools.count(1)
        self._building = threading.Lock()

    def open(
        self,
        name: str,
        system: str | None,
        asked: Sharers = PRIVATE,
        quotas: Quotas = UNLIMITED,
        priority: int = 0,
    ) -> LiveStream:
        """The live stream of a session, new or resumed; one that is resumed waits for room.

        Raises:
            ConfigError: a system prompt too long to keep.
            QuotaError: there may be no session more, or its system prompt is too long.
            InputError: a shared prompt that is not given.
            SessionError: created with another system prompt, another model or other sharers, or it
                recalls more than the engine has room for.
            PoolFullError: no room for another window.
            EngineClosedError: the engine was closed while this waited.
            JournalError, StoreError: its files cannot be read or written.
        """
        journal = self._existing_journal(name, system)
        try:
            resumed = journal is not None
            if journal is not None:
                asked.check(name, journal.header)
                quotas.check(name, journal.header)
                self._check_recall(name, journal)
            else:
                self._require_one_more(name)
            header = (
                journal.header
                if journal is not None
                else self._new_header(name, system, asked, quotas)
            )
            need = self._blocks_of(header.num_sink_tokens, header.window_size)
            self._entrance.enter(name, need, priority, has_blocks=resumed)
            if journal is None and self._store is not None:
                journal = Journal.create(self._store.journal_path(name), header)
            with self._building:
                live = self._build_live(name, journal, header, resumed, need)
            live.sequence.priority = priority
            self._let_sleep(live)
            if live.sequence.num_tokens == 0 and live.intake.text_chars == 0:
                live.intake.begin(self._opening_ids(system))
            return live
        except BaseException:
            self.release(name)
            if journal is not None:
                journal.close()
            raise

    def fork(self, live: LiveStream, name: str) -> LiveStream:
        """A live stream with the same past, which shares the full blocks of `live`.

        Nothing of `live` may be under way, and its intake is held.

        Raises:
            InputError: there is a session of this name already.
            QuotaError: there may be no session more.
            PoolFullError: no room for another window.
            JournalError: its journal cannot be made.
        """
        if self._store is not None and self._store.journal_path(name).exists():
            raise name_is_taken(name)
        self._require_one_more(name)
        journal: Journal | None = None
        sequence = live.sequence.copy(next(self._ids))
        try:
            need = self._blocks_of(
                live.created_window.num_sink_tokens, live.sequence.window.window_size
            )
            is_awake = self._entrance.enter(name, need, sequence.priority, has_blocks=False)
            if is_awake:
                share_blocks(live.sequence, sequence, self._tiers)
            elif self._executor.attention(live.sequence) != "window":
                raise PoolFullError(
                    f"no room in the gpu pool for session {name!r}, which attends to old blocks. "
                    "Close a session, or open the engine with a larger gpu_bytes."
                )
            if live.journal is not None and self._store is not None:
                journal = live.journal.fork(self._store.journal_path(name))
                if self._config.recall_blocks > 0:
                    paths = self._store.digests_path(live.name), self._store.digests_path(name)
                    copy_digests(*paths)
            memory = live.memory.fork()
            log = self._recall_log(name, journal, memory)
            self._executor.fork(live.sequence, sequence, log)
            forked = self._assemble(
                name,
                sequence,
                live.created_window,
                journal,
                memory,
                log,
                resumed=False,
                num_blocks=need,
                allowed=live.intake.tokens_allowed,
            )
            live.intake.fork_into(forked.intake)
            self._let_sleep(forked, None if is_awake else live.sequence)
        except BaseException:
            self._executor.close(sequence)
            self.release(name)
            if journal is not None:
                journal.delete()
            if self._store is not None:
                delete_digests(self._store.path, name)
            raise
        if forked.checkpointer is not None and is_awake:
            forked.checkpointer.write_now()
        return forked

    def check_import(self, name: str, journal: Journal) -> None:
        """Raise `QuotaError` unless a session of this name and journal may come in."""
        self._require_one_more(name)
        allowed = tokens_allowed(journal.header, self._config)
        require_tokens(name, journal.state.num_tokens, allowed)

    def release(self, name: str) -> None:
        """Give back the room of a session."""
        self._entrance.leave(name)

    def _require_one_more(self, name: str) -> None:
        """Raise `QuotaError` if the store has as many sessions as it may."""
        most, store = self._config.max_stored_sessions, self._store
        if most is None or store is None:
            return
        names = store.session_names()
        if len(names) < most:
            return
        asleep = [each for each in names if each not in self._entrance.open_names] or names
        oldest = min(asleep, key=lambda each: _written_s(store.journal_path(each)))
        raise QuotaError(
            "max_stored_sessions",
            most,
            f"there are {len(names)} sessions, so {name!r} cannot be made",
            f"Delete one: {oldest!r} has slept longest (streamkv session rm '{oldest}'). Or open "
            "the engine with a larger max_stored_sessions.",
        )

    def _existing_journal(self, name: str, system: str | None) -> Journal | None:
        if self._store is None or not self._store.journal_path(name).exists():
            return None
        journal = Journal.open(self._store.journal_path(name))
        try:
            self._check_header(name, journal.header, system)
        except BaseException:
            journal.close()
            raise
        return journal

    def _check_header(self, name: str, header: SessionHeader, system: str | None) -> None:
        weights = self._adapter.fingerprint.hex()
        if header.weights != weights:
            raise SessionError(
                f"session {name!r} belongs to model {header.model!r} with other weights. "
                "Open it with that model, or delete it."
            )
        if system is not None and header.system_digest != _digest(system):
            raise SessionError(
                f"session {name!r} was created with another system prompt. "
                "Open it without one, or delete it first."
            )

    def _opening_ids(self, system: str | None) -> list[int]:
        """What a new stream begins with: the tokenizer's prefix, then the system prompt."""
        ids = list(self._tokenizer.prefix_ids)
        if system:
            segments = self._tokenizer.chat.render_system(system)
            ids += self._tokenizer.encode_segments(segments, at_start=True)
        return ids

    def _check_recall(self, name: str, journal: Journal) -> None:
        """Raise unless the engine can go on with what the session has attended to."""
        need, most = journal.state.recall.most_blocks, self._config.recall_blocks
        if need > most:
            raise SessionError(
                f"session {name!r} has recalled old blocks, up to {need} at once, and the engine "
                f"has room for {most}. Open it with recall_blocks={need}; on the command line "
                f"--recall-blocks {need}."
            )

    def _recall_log(self, name: str, journal: Journal | None, memory: MemoryPast) -> RecallLog:
        """Where what a session recalls is written."""
        if journal is None or self._store is None:
            return RecallLog(memory)
        digests = None
        if self._config.recall_blocks > 0:
            path = self._store.digests_path(name)
            recaller = self._executor.recaller
            assert recaller is not None
            digests = DigestFile.open(
                path, recaller.digester.digest_bytes, recaller.digester.identity, journal.header
            )
        return RecallLog(journal, digests)

    def _new_header(
        self, name: str, system: str | None, asked: Sharers, quotas: Quotas
    ) -> SessionHeader:
        config = self._config
        num_opening = len(self._opening_ids(system)) if system else 0
        num_sinks = max(config.num_sink_tokens, num_opening)
        if num_sinks + config.window_size > self._adapter.trained_length:
            raise ConfigError(
                "system",
                f"{num_sinks} tokens",
                f"with a window of {config.window_size} beyond the trained length "
                f"{self._adapter.trained_length}",
                "Use a shorter system prompt or a smaller window_size.",
            )
        header = SessionHeader(
            model=self._adapter.name,
            weights=self._adapter.fingerprint.hex(),
            vocab_size=self._adapter.vocab_size,
            window_size=config.window_size,
            num_sink_tokens=num_sinks,
            mode="window",
            position_policy="cache",
            salt=asked.new_salt().hex(),
            created_s=time.time(),
            system_digest=_digest(system) if system is not None else "",
            num_shared_tokens=asked.num_shared(num_opening),
            session_tokens=quotas.session_tokens,
            expire_after_s=quotas.expire_after_s,
        )
        require_tokens(name, num_opening, tokens_allowed(header, config))
        return header

    def _blocks_of(self, num_sink_tokens: int, window_size: int) -> int:
        """Blocks that a session may need at once."""
        return blocks_of_session(self._config, self._adapter.spec, num_sink_tokens, window_size)

    def _blocks_of_window(self, window: Window) -> int:
        """The same of one whose sink tokens may lie anywhere."""
        size = self._adapter.spec.block_size
        sinks = {
            index
            for start, end in window.sink_ranges
            for index in range(start // size, (end - 1) // size + 1)
        }
        return self._blocks_of(0, window.window_size) + len(sinks)

    def _let_sleep(self, live: LiveStream, source: Sequence | None = None) -> None:
        """The session is open: its blocks may leave the gpu pool from now on.

        Args:
            live: the session.
            source: what it is a fork of, if it begins asleep.
        """
        if not self._entrance.can_sleep:
            return
        sleeper = Sleeper(
            live.name,
            live.sequence,
            self._tiers,
            self._executor,
            live.checkpointer,
            live.recompute,
            self._blocks_of_window,
            live.intake.at_hand,
        )
        live.sleeper = sleeper
        if source is not None:
            sleeper.begin_asleep_as(source)
        self._entrance.opened(live.name, live.sequence, sleeper)

    def _build_live(
        self,
        name: str,
        journal: Journal | None,
        header: SessionHeader,
        resumed: bool,
        num_blocks: int,
    ) -> LiveStream:
        adapter = self._adapter
        sinks = ((0, header.num_sink_tokens),) if header.num_sink_tokens else ()
        window = Window(header.window_size, sinks)
        fewest_left = journal.state.fewest_left if journal is not None else None
        salting = salting_of(header, adapter.spec.block_size, fewest_left)
        root = root_key(adapter.fingerprint, adapter.spec, adapter.rope_identity, salting.root_salt)
        sequence = Sequence(next(self._ids), window, adapter.spec.block_size, root, salting)
        memory = MemoryPast()
        log = self._recall_log(name, journal, memory)
        try:
            self._executor.open(sequence, log, window)
            allowed = tokens_allowed(header, self._config)
            live = self._assemble(
                name, sequence, window, journal, memory, log, resumed, num_blocks, allowed
            )
            if journal is not None and resumed:
                self._recover(live, journal)
            self._executor.resume(sequence, self._config.attention)
        except BaseException:
            self._executor.close(sequence)
            raise
        return live

    def _assemble(
        self,
        name: str,
        sequence: Sequence,
        created_window: Window,
        journal: Journal | None,
        memory: MemoryPast,
        log: RecallLog,
        resumed: bool,
        num_blocks: int,
        allowed: int | None,
    ) -> LiveStream:
        adapter, config, tokenizer = self._adapter, self._config, self._tokenizer
        checkpointer = None
        if journal is not None and config.retain != "none":
            every = config.checkpoint_tokens
            checkpointer = Checkpointer(
                name,
                sequence,
                journal,
                self._tiers,
                every,
                before=lambda: self._executor.before_checkpoint(sequence),
                keys_of=self._executor.keys_of(sequence),
                old_blocks=lambda: self._executor.old_blocks(sequence),
            )
            log.on_void, log.on_keep = checkpointer.void, checkpointer.write_now
        intake = Intake(
            sequence,
            tokenizer,
            journal,
            adapter.vocab_size,
            adapter.trained_length,
            memory,
            name,
            allowed,
            self._sharing.instruments.counted,
        )
        return LiveStream(
            name=name,
            sequence=sequence,
            created_window=created_window,
            intake=intake,
            journal=journal,
            store=self._store,
            memory=memory,
            checkpointer=checkpointer,
            tokenizer=tokenizer,
            tiers=self._tiers,
            executor=self._executor,
            reuse=PrefixReuse(
                sequence,
                self._tiers,
                self._executor,
                self._sharing,
                num_blocks,
                adapter.spec.block_bytes,
            ),
            sharing=self._sharing,
            spec=adapter.spec,
            prefill_chunk=config.prefill_chunk,
            resumed=resumed,
        )

    def _recover(self, live: LiveStream, journal: Journal) -> None:
        recovery = live.recovery()
        checkpoint = recovery.run()
        if live.checkpointer is not None:
            live.checkpointer.declined(recovery.declined)
            if checkpoint is not None:
                live.checkpointer.resumed_from(checkpoint)
            elif journal.state.was_rewound:
                live.checkpointer.begin()
        state = journal.state
        live.intake.restore(state.text_chars, state.tail, state.has_turns)


def name_is_taken(name: str) -> InputError:
    """The error for a new session whose name another one has."""
    remedy = "Use another name, or delete that session first."
    return InputError("name", name, "there is a session of this name", remedy)


def _written_s(path: Path) -> float:
    """When a journal was written last; one that is gone by now, just now."""
    try:
        return path.stat().st_mtime
    except OSError:
        return float("inf")


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
