"""The modes that are compared, and how an engine and a session are put into one.

The only place that knows the modes; what they answer is not known here.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

from streamkv.config import EngineConfig, parse_size
from streamkv.errors import ConfigError
from streamkv.session import Session
from streamkv.sizing import blocks_of_session
from streamkv.tiers.spec import KVSpec

WINDOW, RECALL, FULL, DENSE = "window", "recall", "full", "dense"
MODES = (WINDOW, RECALL, FULL, DENSE)
FEED_IN = (WINDOW, RECALL, "same")


class Reading(NamedTuple):
    """A stream read once in one mode, and the modes that answer from it."""

    fed_in: str
    modes: tuple[str, ...]


def require_modes(modes: Sequence[str], feed_in: str) -> None:
    """Raise unless these are modes.

    Raises:
        ConfigError: an unknown mode, or none.
    """
    remedy = f"Use some of {', '.join(MODES)}."
    if not modes:
        raise ConfigError("modes", "", "no mode", remedy)
    for mode in modes:
        if mode not in MODES:
            raise ConfigError("modes", mode, "not a mode", remedy)
    if feed_in not in FEED_IN:
        remedy = f"Use one of {', '.join(FEED_IN)}."
        raise ConfigError("feed_in", feed_in, "not a mode to read in", remedy)


def readings(modes: Sequence[str], feed_in: str) -> list[Reading]:
    """In which modes a stream is read, and which modes answer from each reading.

    `dense` is not among them: it has an engine of its own.
    """
    found: dict[str, list[str]] = {}
    for mode in modes:
        if mode != DENSE:
            is_plain = mode == WINDOW or feed_in == WINDOW
            fed_in = WINDOW if is_plain else mode if feed_in == "same" else feed_in
            found.setdefault(fed_in, []).append(mode)
    return [Reading(fed_in, tuple(answering)) for fed_in, answering in found.items()]


def window_config(config: EngineConfig, is_forking: bool) -> EngineConfig:
    """Options of an engine that only has a window: nothing is kept that has left it."""
    num_sessions = 2 if is_forking else 1
    return dataclasses.replace(
        config, cpu_bytes=0, retain="none", max_sessions=num_sessions, recall_blocks=0
    )


def recall_config(
    config: EngineConfig, spec: KVSpec, attention: str, recall_blocks: int, longest: int
) -> EngineConfig:
    """Options of an engine that attends to what left the window.

    Args:
        attention: `recall` or `full`; sessions may change it.
        recall_blocks: old blocks recalled into attention.
        longest: tokens of the longest stream, which the cpu pool has room for, twice for a fork;
            for `full` the gpu pool, too.
    """
    needed = 2 * (longest // spec.block_size + 8) * spec.block_bytes
    options: dict[str, Any] = {
        "attention": attention,
        "recall_blocks": recall_blocks,
        "cpu_bytes": max(parse_size("cpu_bytes", config.cpu_bytes), needed),
        "max_sessions": 2,
        "retain": "all",
    }
    return dataclasses.replace(config, **options)


def with_room_for_full(
    config: EngineConfig, spec: KVSpec, longest: int, recall_blocks: int
) -> EngineConfig:
    """The same options with a gpu pool in which one of two sessions attends to everything.

    Args:
        longest: tokens of the longest stream.
        recall_blocks: old blocks recalled into attention.
    """
    one = blocks_of_session(config, spec, config.num_sink_tokens, config.window_size)
    num_blocks = 2 * (one + recall_blocks) + longest // spec.block_size + 8
    given = 0 if config.gpu_bytes is None else parse_size("gpu_bytes", config.gpu_bytes)
    return dataclasses.replace(config, gpu_bytes=max(given, num_blocks * spec.block_bytes))


def dense_config(config: EngineConfig, num_tokens: int) -> EngineConfig:
    """Options of an engine whose window holds `num_tokens`: nothing ever leaves it."""
    return dataclasses.replace(
        config,
        window_size=num_tokens,
        cpu_bytes=0,
        retain="none",
        max_sessions=1,
        recall_blocks=0,
    )


def switch(session: Session, mode: str, recall_blocks: int) -> None:
    """Put a session into a mode; one of a `dense` engine stays as it is."""
    if mode == RECALL:
        session.set_mode("recall", recall_blocks)
    elif mode == FULL:
        session.set_mode("full")
    elif mode == WINDOW:
        session.set_mode("window")
