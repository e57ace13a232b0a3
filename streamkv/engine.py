"""The engine: a model, its pools and store, its own thread, and the sessions that share them."""

import hashlib
import secrets
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

import torch

from streamkv.checkpoint import Checkpointer
from streamkv.config import EngineConfig, format_size, parse_size
from streamkv.errors import ConfigError, EngineClosedError, PoolFullError, SessionError
from streamkv.executor import Executor
from streamkv.intake import Intake
from streamkv.journal import Journal
from streamkv.journal_records import SessionHeader
from streamkv.live import LiveStream
from streamkv.model import ModelAdapter
from streamkv.names import validate_session_name
from streamkv.recovery import Recovery
from streamkv.runner import Runner
from streamkv.sequence import Sequence
from streamkv.session import Session
from streamkv.step_loop import StepLoop
from streamkv.store import Store
from streamkv.tiers.cpu_pool import CpuPool
from streamkv.tiers.gpu_pool import GpuPool
from streamkv.tiers.keys import root_key
from streamkv.tiers.manager import TierManager
from streamkv.tiers.usage import TierUsage
from streamkv.tokenizer import Tokenizer, load_tokenizer
from streamkv.window import Window

SYSTEM_PROMPT_TOKENS = 512
"""Length of system prompt that the default gpu pool has room for in each session."""


class Engine:
    """Runs endless sessions of one model. A context manager.

    Args:
        model: `smollm2-135m`, a directory, a `.gguf` file or a hub id.
        config: options; every one has a default.
        on_progress: called with a line for people before anything that takes seconds.

    Raises:
        ConfigError: options that contradict each other or the model.
        ModelError: the model cannot be found, read or supported.
        StoreError: the store cannot be opened; names the owner if another process has it.
    """

    def __init__(
        self,
        model: str,
        config: EngineConfig | None = None,
        *,
        on_progress: Callable[[str], None] | None = None,
    ) -> None:
        self.config = config if config is not None else EngineConfig()
        self._adapter = _load_model(model, self.config, on_progress)
        self._check_window()
        self._tokenizer = load_tokenizer(
            self._adapter.tokenizer_dir, trust_remote_code=self.config.trust_remote_code
        )
        self._lock = threading.RLock()
        self._sessions: dict[str, Session] = {}
        self._reserved: dict[str, int] = {}
        self._num_opened = 0
        self._closed = False
        self._gpu_pool = GpuPool(self._adapter.spec, self._num_gpu_blocks())
        self._store = Store.open(self.config, self._adapter)
        self._open_tiers()

    def _open_tiers(self) -> None:
        try:
            spec = self._adapter.spec
            cpu_bytes = parse_size("cpu_bytes", self.config.cpu_bytes)
            self._tiers = TierManager(
                spec,
                self._gpu_pool,
                CpuPool(spec, cpu_bytes),
                self._store.blocks if self._store else None,
                retain=self.config.retain,
                on_pressure=self.config.on_pressure,
                # What one chunk fills: a writer that lags must not spread over the pool.
                max_pending=self.config.prefill_chunk // spec.block_size + 4,
            )
        except BaseException:
            if self._store is not None:
                self._store.close()
            raise
        threads = self.config.num_threads or torch.get_num_threads()
        self._runner = Runner(
            self._adapter,
            self._gpu_pool.data,
            self._adapter.trained_length,
            native_threads=threads if self.config.compile == "auto" else 0,
        )
        self._executor = Executor(self._runner, self._tiers)
        self._loop = StepLoop(self._executor, self.config.prefill_chunk, self.config.num_threads)

    @property
    def model_name(self) -> str:
        """The model, as given."""
        return self._adapter.name

    @property
    def model(self) -> ModelAdapter:
        """The loaded model."""
        return self._adapter

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self._tokenizer

    def session(self, name: str, *, system: str | None = None) -> Session:
        """Open a session: it resumes if it exists, else it is created.

        Args:
            name: letters, digits, '-', '_', '.' and ' '.
            system: system prompt, kept whole as sink tokens. Only its first opener's counts; a
                different one later is refused.

        Raises:
            InputError: not a name, or a system prompt too long to keep.
            SessionError: open already, or created with another system prompt or another model.
            PoolFullError: no room for another window.
            JournalError, StoreError: its files cannot be read or written.
        """
        validate_session_name(name)
        with self._lock:
            self._require_open()
            if name in self._sessions:
                raise SessionError(f"session {name!r} is open already. Close it, or use another.")
            live = self._open_live(name, system)
            session = Session(live, self._loop, self._session_closed)
            self._sessions[name] = session
            return session

    def wait_until_fast(self) -> bool:
        """Wait until the native decode step is ready or given up; whether there is one.

        Nothing needs this call: steps run on transformers' own code until then.
        """
        native = self._runner.native
        return native is not None and native.wait()

    def session_names(self) -> list[str]:
        """Names of all sessions, open and sleeping."""
        with self._lock:
            stored = self._store.session_names() if self._store else []
            return sorted({*stored, *self._sessions})

    def count_tokens(self, text: str) -> int:
        """Tokens of a text by itself.

        Raises:
            InputError: invalid Unicode.
        """
        return len(self._tokenizer.encode(text))

    def usage(self) -> dict[str, TierUsage]:
        """Blocks and bytes of each tier."""
        return self._tiers.usage()

    def counters(self) -> dict[str, int]:
        """What happened since opening, by name; `ssd_` counters are the store's own."""
        counted = self._tiers.counters()
        if self._store is not None:
            counted |= {f"ssd_{name}": n for name, n in self._store.blocks.counters.items()}
        return counted

    def close(self) -> None:
        """Put every session to sleep and release everything. Closing twice is allowed."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._loop.close()
            self._runner.close()
            try:
                for session in list(self._sessions.values()):
                    session.engine_closes()
            finally:
                self._tiers.close()
                if self._store is not None:
                    self._store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _require_open(self) -> None:
        if self._closed:
            raise EngineClosedError("The engine is closed. Open a new Engine.")

    def _check_window(self) -> None:
        config, trained = self.config, self._adapter.trained_length
        total = config.window_size + config.num_sink_tokens
        if total > trained:
            raise ConfigError(
                "window_size",
                config.window_size,
                f"with {config.num_sink_tokens} sink tokens beyond the trained length {trained}",
                f"Use at most {trained - config.num_sink_tokens}.",
            )
        for layer, window in enumerate(self._adapter.sliding_windows):
            if window is not None and window < total:
                raise ConfigError(
                    "window_size",
                    config.window_size,
                    f"layer {layer} of {self._adapter.name!r} sees only {window} tokens",
                    f"Use at most {window - config.num_sink_tokens}.",
                )

    def _blocks_of(self, num_sink_tokens: int, window_size: int) -> int:
        """Gpu blocks that one session may need at once."""
        size = self._adapter.spec.block_size
        recent = window_size + self.config.prefill_chunk
        return -(-recent // size) + 2 + -(-num_sink_tokens // size)

    def _num_gpu_blocks(self) -> int:
        config, spec = self.config, self._adapter.spec
        one = self._blocks_of(config.num_sink_tokens, config.window_size)
        if config.gpu_bytes is None:
            return (one + SYSTEM_PROMPT_TOKENS // spec.block_size) * config.max_sessions
        num_blocks = parse_size("gpu_bytes", config.gpu_bytes) // spec.block_bytes
        if num_blocks < one:
            raise ConfigError(
                "gpu_bytes",
                config.gpu_bytes,
                f"room for {num_blocks} blocks, one session needs {one}",
                f"Use at least {format_size(one * spec.block_bytes)}, or a smaller window_size.",
            )
        return num_blocks

    def _open_live(self, name: str, system: str | None) -> LiveStream:
        journal, resumed = self._open_journal(name, system)
        try:
            header = journal.header if journal is not None else self._new_header(system)
            self._reserve(name, header)
            live = self._build_live(name, journal, header, resumed)
            if live.sequence.num_tokens == 0 and live.intake.text_chars == 0:
                live.intake.begin(self._opening_ids(system))
            return live
        except BaseException:
            self._reserved.pop(name, None)
            if journal is not None:
                journal.close()
            raise

    def _open_journal(self, name: str, system: str | None) -> tuple[Journal | None, bool]:
        if self._store is None:
            return None, False
        path = self._store.journal_path(name)
        if not path.exists():
            return Journal.create(path, self._new_header(system)), False
        journal = Journal.open(path)
        try:
            self._check_header(name, journal.header, system)
        except BaseException:
            journal.close()
            raise
        return journal, True

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

    def _new_header(self, system: str | None) -> SessionHeader:
        config = self.config
        num_sinks = max(config.num_sink_tokens, len(self._opening_ids(system)) if system else 0)
        if num_sinks + config.window_size > self._adapter.trained_length:
            raise ConfigError(
                "system",
                f"{num_sinks} tokens",
                f"with a window of {config.window_size} beyond the trained length "
                f"{self._adapter.trained_length}",
                "Use a shorter system prompt or a smaller window_size.",
            )
        return SessionHeader(
            model=self._adapter.name,
            weights=self._adapter.fingerprint.hex(),
            vocab_size=self._adapter.vocab_size,
            window_size=config.window_size,
            num_sink_tokens=num_sinks,
            mode="window",
            position_policy="cache",
            salt=secrets.token_hex(16),
            created_s=time.time(),
            system_digest=_digest(system) if system is not None else "",
        )

    def _reserve(self, name: str, header: SessionHeader) -> None:
        """Count the blocks that the session may need against the pool."""
        need = self._blocks_of(header.num_sink_tokens, header.window_size)
        free = self._gpu_pool.num_blocks - sum(self._reserved.values())
        if need > free:
            raise PoolFullError(
                f"session {name!r} needs room for {need} blocks, {free} of "
                f"{self._gpu_pool.num_blocks} are left. Close a session, or open the engine with a "
                "larger max_sessions or gpu_bytes."
            )
        self._reserved[name] = need

    def _build_live(
        self, name: str, journal: Journal | None, header: SessionHeader, resumed: bool
    ) -> LiveStream:
        adapter, config = self._adapter, self.config
        sinks = ((0, header.num_sink_tokens),) if header.num_sink_tokens else ()
        window = Window(header.window_size, sinks)
        salt = bytes.fromhex(header.salt)
        root = root_key(adapter.fingerprint, adapter.spec, adapter.rope_identity, salt)
        self._num_opened += 1
        sequence = Sequence(self._num_opened, window, adapter.spec.block_size, root)
        checkpointer = None
        if journal is not None and config.retain != "none":
            every = config.checkpoint_tokens
            checkpointer = Checkpointer(name, sequence, journal, self._tiers, every)
        tokenizer = self._tokenizer
        intake = Intake(sequence, tokenizer, journal, adapter.vocab_size, adapter.trained_length)
        live = LiveStream(
            name=name,
            sequence=sequence,
            created_window=window,
            intake=intake,
            journal=journal,
            checkpointer=checkpointer,
            tokenizer=tokenizer,
            tiers=self._tiers,
            executor=self._executor,
            prefill_chunk=config.prefill_chunk,
            resumed=resumed,
        )
        if journal is not None and resumed:
            self._recover(live, journal)
        return live

    def _recover(self, live: LiveStream, journal: Journal) -> None:
        num_layers = self._adapter.spec.num_layers
        recovery = Recovery(
            live.name, live.sequence, journal, self._tiers, self._executor, num_layers
        )
        checkpoint = recovery.run()
        if checkpoint is not None and live.checkpointer is not None:
            live.checkpointer.resumed_from(checkpoint)
        state = journal.state
        live.intake.restore(state.text_chars, state.tail, state.has_turns)

    def _session_closed(self, session: Session) -> None:
        with self._lock:
            self._sessions.pop(session.name, None)
            self._reserved.pop(session.name, None)


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _load_model(
    name: str, config: EngineConfig, on_progress: Callable[[str], None] | None
) -> ModelAdapter:
    if config.device == "cuda":
        raise ConfigError(
            "device", "cuda", "this version computes on the CPU", 'Use device="auto" or "cpu".'
        )
    dtype = "float32" if config.dtype == "auto" else config.dtype
    return ModelAdapter.load(
        name,
        dtype=dtype,
        device="cpu",
        trust_remote_code=config.trust_remote_code,
        on_progress=on_progress,
    )
