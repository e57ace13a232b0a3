"""A very old session, made honestly: every one of its tokens is fed and computed.

`memory.py` feeds it and measures meanwhile; what it leaves under the cache directory serves
`sessions.py`, which feeds it itself if there is none. Invariant: what appears under its final name
was fed to the end and closed. This module knows nothing of what is measured.
"""

import itertools
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from common import MODEL, every, pieces, say, topics_ids

from streamkv import Engine, EngineConfig, Session
from streamkv.model_cache import cache_root

NAME = "old"
NUM_SINKS = 4
WINDOW_SIZE = 508
ITEM = 512
"""Tokens of one item of a feed."""


def config(store: Path, dtype: str, retain: str) -> EngineConfig:
    """The engine's options; the cpu pool has the 256 MiB that the figures are stated for."""
    return EngineConfig(
        window_size=WINDOW_SIZE,
        num_sink_tokens=NUM_SINKS,
        dtype=dtype,  # type: ignore[arg-type]  # checked by the engine
        cpu_bytes="256MiB",
        store=str(store),
        ssd_bytes="1GiB",
        retain=retain,  # type: ignore[arg-type]  # checked by the engine
        max_sessions=3,
    )


def prepared_path(num_tokens: int, dtype: str) -> Path:
    """Where the store of a session of that age is kept."""
    return cache_root() / "benchmarks" / f"old-{num_tokens}-{dtype}-window-{WINDOW_SIZE}"


def feed_old_session(
    store: Path,
    dtype: str,
    retain: str,
    stops: Sequence[int],
    on_stop: Callable[[Engine, Session, int], None],
) -> None:
    """Feed the session `NAME` of a new store up to the last of `stops` (tokens, ascending).

    Args:
        on_stop: called at each of them.
    """
    with Engine(MODEL, config(store, dtype, retain), on_progress=say) as engine:
        ids = topics_ids(engine.tokenizer, stops[-1])
        session = engine.session(NAME)
        show = every(10_000)
        for begin, end in itertools.pairwise([0, *stops]):
            for progress in session.feed(pieces(ids[begin:end], ITEM)):
                show(progress.token_index, progress.tokens_per_s)
            on_stop(engine, session, end)


def keep_prepared(store: Path, num_tokens: int, dtype: str) -> Path:
    """Keep a closed store for later benchmarks; returns where."""
    target = prepared_path(num_tokens, dtype)
    shutil.rmtree(target, ignore_errors=True)
    target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    shutil.move(store, target)
    return target
