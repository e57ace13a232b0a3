"""The engine: a model, its pools and store, its own thread, and the sessions that share them."""

import contextlib
import gc
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Self

from prometheus_client import CollectorRegistry

from streamkv.admission import Admission
from streamkv.at_exit import close_at_exit
from streamkv.config import (
    EngineConfig,
    check_priority,
    choose_dtype,
    parse_duration,
    parse_size,
)
from streamkv.cost_gate import CostGate
from streamkv.device import (
    choose_device,
    make_cpu_pool,
    make_full,
    make_recaller,
    make_runner,
    make_transfer,
    plan_memory,
)
from streamkv.digest_pages import DigestUsage
from streamkv.entrance import Entrance
from streamkv.errors import ConfigError, EngineClosedError, SessionError
from streamkv.exchange import Exchange
from streamkv.executor import Executor
from streamkv.expiry import Expiry
from streamkv.live import LiveStream
from streamkv.metered import MeteredRunner
from streamkv.metric_kinds import Snapshot
from streamkv.metrics import exposition, make_registry
from streamkv.model import ModelAdapter
from streamkv.names import validate_session_name
from streamkv.opening import SessionOpener, name_is_taken
from streamkv.pool_room import PoolRoom
from streamkv.quotas import Quotas
from streamkv.session import Session
from streamkv.session_export import SessionExport
from streamkv.session_import import SessionImport
from streamkv.sharing import Sharers, Sharing
from streamkv.sizing import check_window, num_gpu_blocks
from streamkv.sleepers import Sleepers
from streamkv.step_loop import Call, StepLoop
from streamkv.store import Store
from streamkv.tiers.gpu_pool import GpuPool
from streamkv.tiers.manager import TierManager
from streamkv.tiers.ssd import SsdTier
from streamkv.tiers.store_tier import COUNTERS as STORE_COUNTERS
from streamkv.tiers.usage import TierUsage
from streamkv.tokenizer import Tokenizer, load_tokenizer


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
        if not isinstance(model, str) or not model:
            remedy = "Use 'smollm2-135m', a directory, a .gguf file or a hub id."
            raise ConfigError("model", model, "not the name of a model", remedy)
        if not isinstance(config, EngineConfig | None):
            raise ConfigError("config", config, "not an EngineConfig", "Pass EngineConfig(...).")
        self.config = config if config is not None else EngineConfig()
        self._lock = threading.RLock()
        self._sessions: dict[str, Session] = {}
        self._being_opened: set[str] = set()
        self._closed = False
        self._sharing = Sharing()
        self._registry = make_registry(self._snapshot)
        self._loop = StepLoop(
            None,
            self.config.prefill_chunk,
            self.config.num_threads,
            self.config.mixed_chunk,
            mixes=not self.config.batch_invariant,
            instruments=self._sharing.instruments,
        )
        try:
            # On the engine's thread, and nothing here: each thread that computes keeps OpenMP
            # workers, and with more workers than processors none of them waits awake any more.
            # Measured on two cores: 2,900 sleeps in a step of 512 tokens, a quarter of its time.
            self._loop.submit(Call(lambda: self._open(model, on_progress))).result()
            self._keep_from_collector()
            self._begin_expiry()
        except BaseException:
            self._loop.close()
            raise
        close_at_exit(self)

    def _open(self, model: str, on_progress: Callable[[str], None] | None) -> None:
        Store.require_free(self.config)
        device = choose_device(self.config.device)
        self._adapter = ModelAdapter.load(
            model,
            dtype=choose_dtype(self.config.dtype, device),
            device=device,
            trust_remote_code=self.config.trust_remote_code,
            on_progress=on_progress,
        )
        check_window(self.config, self._adapter)
        if device == "cuda":
            plan_memory(self._adapter, self.config)
        self._tokenizer = load_tokenizer(
            self._adapter.tokenizer_dir, trust_remote_code=self.config.trust_remote_code
        )
        self._gpu_pool = GpuPool(
            self._adapter.spec, num_gpu_blocks(self.config, self._adapter.spec), device
        )
        self._store = Store.open(self.config, self._adapter)
        self._open_tiers(on_progress)

    def _begin_expiry(self) -> None:
        self._expiry: Expiry | None = None
        if self._store is None:
            return
        after = self.config.expire_after
        self._expiry = Expiry(
            self._store.path,
            parse_duration("expire_after", after) if after is not None else None,
            self._alone,
            self._exchange.delete,
        )
        self._expiry.look()
        self._expiry.start()

    def _alone(self, name: str) -> AbstractContextManager[bool]:
        """A context in which nobody opens this session; it gives whether it is not open already."""
        return self._exchange.alone(
            name, lambda: name in self._sessions or name in self._being_opened
        )

    def _keep_from_collector(self) -> None:
        """Keep what is loaded now out of Python's garbage collections.

        A full collection looks at every object of torch and of the model; measured with 64 sessions
        it stopped all of them for 350 ms, once in a hundred steps.
        """
        gc.collect()
        gc.freeze()

    def _open_tiers(self, on_progress: Callable[[str], None] | None) -> None:
        with contextlib.ExitStack() as opened:
            # Whatever fails to open leaves no lock and no thread behind.
            if self._store is not None:
                opened.callback(self._store.close)
            spec = self._adapter.spec
            cpu_bytes = parse_size("cpu_bytes", self.config.cpu_bytes)
            self._cpu_pool = make_cpu_pool(spec, cpu_bytes, self._gpu_pool.data.device)
            opened.callback(self._cpu_pool.close)
            self._tiers = TierManager(
                spec,
                self._gpu_pool,
                self._cpu_pool,
                self._ssd_tier(),
                retain=self.config.retain,
                on_pressure=self.config.on_pressure,
                # What one chunk fills: a writer that lags must not spread over the pool.
                max_pending=self.config.prefill_chunk // spec.block_size + 4,
                transfer=make_transfer(self._gpu_pool),
            )
            opened.callback(self._tiers.close)
            self._runner = make_runner(self._adapter, self._gpu_pool, self.config)
            opened.callback(self._runner.close)
            if self.config.batch_invariant:
                # One way for all steps: which rounds how is chosen here, and never again.
                self._runner.wait_until_fast()
            recaller = make_recaller(
                self._adapter,
                self._tokenizer,
                self._gpu_pool,
                self._tiers,
                self.config,
                on_progress,
            )
            metered = MeteredRunner(self._runner, self._sharing.gate, self._sharing.instruments)
            room = PoolRoom(self._gpu_pool.num_blocks)
            full = make_full(self._adapter, self._gpu_pool, self._tiers, room, self.config)
            self._executor = Executor(metered, self._tiers, recaller, full)
            sleepers = self._make_sleepers(room)
            self._loop.drive(self._executor, sleepers)
            self._opener = SessionOpener(
                self.config,
                self._adapter,
                self._tokenizer,
                self._executor,
                self._tiers,
                Entrance(room, self._loop, sleepers),
                self._store,
                self._sharing,
            )
            self._exchange = Exchange(
                self._adapter, self._store, self._tiers, self._opener.check_import
            )
            opened.pop_all()

    def _make_sleepers(self, room: PoolRoom) -> Sleepers | None:
        """What puts sessions to sleep; `None` if no tier could keep their blocks."""
        has_tier = self._store is not None or self._cpu_pool.num_blocks > 0
        if self.config.retain == "none" or not has_tier:
            return None
        sleepers = Sleepers(Admission(room, self.config.turn_tokens), self.config.sleep_after)
        sleepers.queue_s = self._sharing.instruments.wake_s.observe
        return sleepers

    def _ssd_tier(self) -> SsdTier | None:
        """What lies below the cpu pool."""
        return self._store.blocks if self._store else None

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

    @property
    def cost_gate(self) -> CostGate:
        """What chooses whether stored blocks are read or computed again, by measured speeds."""
        return self._sharing.gate

    def session(
        self,
        name: str,
        *,
        system: str | None = None,
        tenant: str | None = None,
        shared_prompt: bool = False,
        session_tokens: int | None = None,
        expire_after: float | str | None = None,
        priority: int = 0,
    ) -> Session:
        """Open a session: it resumes if it exists, else it is created.

        Args:
            name: letters, digits, '-', '_', '.' and ' '.
            system: system prompt, kept whole as sink tokens. Only its first opener's counts; a
                different one later is refused.
            tenant: whose session it is. Sessions of one tenant share blocks: what one of them has
                computed another need not compute. Without it nothing is shared. Kept with the
                session; a different one later is refused.
            shared_prompt: the system prompt is no secret: its blocks are shared with every session
                that was opened so, of any tenant or none.
            session_tokens: most tokens that it may have, in place of the engine's; kept with the
                session, a different one later is refused.
            expire_after: seconds, a text such as `"30d"`, or `"never"`: how long it may sleep until
                it is deleted, likewise.
            priority: from -8 to 8. Where not all sessions have room, higher ones come first; of two
                that compute all the time one with 1 more gets twice the tokens. Not kept.

        Raises:
            QuotaError: there may be no session more, or its system prompt has too many tokens.
            ConfigError: no number of tokens, or no duration.
            InputError: not a name, a system prompt too long to keep, no name of a tenant, or a
                shared prompt that is not given.
            SessionError: open already, or created with another system prompt, another model or
                another tenant.
            PoolFullError: no room for another window.
            JournalError, StoreError: its files cannot be read or written.
        """
        validate_session_name(name)
        sharers = Sharers(tenant, shared_prompt)
        quotas = Quotas(session_tokens, expire_after)
        check_priority(priority)
        with self._lock:
            self._require_open()
            if name in self._sessions or name in self._being_opened:
                raise SessionError(f"session {name!r} is open already. Close it, or use another.")
            self._exchange.require_not_arriving(name)
            self._being_opened.add(name)
        try:
            # Without the lock: it may have to wait until other sessions have made room.
            live = self._opener.open(name, system, sharers, quotas, priority)
            with self._lock:
                if self._closed:
                    live.sleep()
                self._require_open()
                return self._opened(live)
        finally:
            self._being_opened.discard(name)

    def _fork(self, live: LiveStream, name: str) -> Session:
        validate_session_name(name)
        with self._lock:
            self._require_open()
            if name in self._sessions or name in self._being_opened:
                raise name_is_taken(name)
            self._exchange.require_not_arriving(name)
            # After the engine's lock: the engine's end waits for the intake while it has that.
            with live.intake.lock:
                live.intake.require_open()
                return self._opened(self._opener.fork(live, name))

    def _opened(self, live: LiveStream) -> Session:
        session = Session(live, self._loop, self._session_closed, self._fork, self.counters)
        self._sessions[live.name] = session
        return session

    def export_session(
        self,
        name: str,
        path: str | Path,
        *,
        all_blocks: bool = False,
        overwrite: bool = False,
        on_progress: Callable[[int, int], object] | None = None,
    ) -> SessionExport:
        """Write a session, open or asleep, into one file; the session stays as it is.

        An open one is written as its journal and its newest checkpoint tell of it.

        Args:
            name: of the session.
            path: of the file, which appears whole and durable, or not at all.
            all_blocks: old blocks and digests go along, as far as they are stored, so that recall
                and `full` go on elsewhere; else what a resume needs, and the journal.
            overwrite: replace a file of this name.
            on_progress: called with blocks done and blocks in all, now and then.

        Raises:
            ConfigError: the engine has no store.
            InputError: no name of a session, or there is a file of this name.
            JournalError, StoreError: it cannot be read, or the file not be written.
        """
        self._require_open()
        return self._exchange.export(name, path, all_blocks, overwrite, on_progress)

    def import_session(
        self,
        path: str | Path,
        name: str | None = None,
        *,
        tenant: str | None = None,
        on_progress: Callable[[int, int], object] | None = None,
    ) -> SessionImport:
        """Make a session of one that was exported; it sleeps until it is opened by its name.

        What came in the file is shown to no other session, unless a tenant is named.

        Args:
            path: of the file.
            name: of the session; `None`: the name it had.
            tenant: whose it will be: other sessions of that tenant then take its blocks for theirs,
                so the file must be one that you trust.
            on_progress: called with bytes done and bytes in all, now and then.

        Raises:
            ConfigError: the engine has no store.
            InputError: the file is damaged, no export, or of another model; or there is a session
                of this name.
            QuotaError: it has more tokens than one may have, or there may not be another one.
            JournalError, StoreError: the store cannot be written. Nothing is left of it.
        """
        self._require_open()
        return self._exchange.bring(path, name, tenant, on_progress)

    def expire(self, older_than: float | str | None = None) -> list[str]:
        """Delete sessions that have slept for too long, now; returns their names.

        Args:
            older_than: seconds, or a text such as `"30d"`: those that have slept longer, but for
                sessions that never expire; `None`: those whose time is over.

        Raises:
            ConfigError: not a duration.
        """
        older_than_s = parse_duration("older_than", older_than) if older_than is not None else None
        self._require_open()
        return self._expiry.expire(older_than_s) if self._expiry is not None else []

    def wait_until_fast(self) -> bool:
        """Wait until the native decode step is ready or given up; whether there is one.

        Nothing needs this call: steps run on transformers' own code until then.
        """
        return self._runner.wait_until_fast()

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

    def digest_usage(self) -> DigestUsage:
        """Bytes of the digests by which old blocks are chosen; all 0 without `recall_blocks`."""
        return self._executor.digest_usage()

    def counters(self) -> dict[str, int]:
        """What happened since opening, by name; `ssd_` counters are the store's own."""
        stored = dict.fromkeys(STORE_COUNTERS, 0)
        if self._store is not None:
            stored = self._store.blocks.counters
        counted = self._executor.counters() | self._sharing.counters() | self._loop.counters()
        return counted | {f"ssd_{name}": count for name, count in stored.items()}

    def metrics(self) -> str:
        """All metrics in Prometheus' text format; may be called at any time, by any thread.

        Raises:
            EngineClosedError: the engine is closed.
        """
        return exposition(self._registry)

    @property
    def metrics_registry(self) -> CollectorRegistry:
        """The engine's metrics for whoever serves them; reading it raises as `metrics` does."""
        return self._registry

    def _snapshot(self) -> Snapshot:
        self._require_open()
        return Snapshot(
            counters=self.counters(),
            tiers=self.usage(),
            digests=self.digest_usage(),
            states=self.session_states(),
            num_open=len(self._sessions),
            num_running=self._loop.num_running,
            block_bytes=self._adapter.spec.block_bytes,
            histograms=self._sharing.instruments.histograms(),
        )

    def session_states(self) -> dict[str, int]:
        """How many open sessions are awake, asleep, waiting for room, and on the way."""
        states = self._loop.session_states(len(self._sessions))
        return dict.fromkeys(states, 0) if self._closed else states

    def close(self) -> None:
        """Put every session to sleep and release everything. Closing twice is allowed."""
        if self._expiry is not None:
            self._expiry.close()
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
                self._cpu_pool.close()
                if self._store is not None:
                    self._store.close()
                gc.unfreeze()

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

    def _session_closed(self, session: Session) -> None:
        with self._lock:
            self._sessions.pop(session.name, None)
            self._opener.release(session.name)
