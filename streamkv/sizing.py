"""How much an engine needs: its window against the model, and blocks of the gpu pool.

Pure arithmetic over options and layout; nothing is allocated here.
"""

from collections.abc import Sequence
from typing import Protocol

from streamkv.config import EngineConfig, format_size, parse_size
from streamkv.digest_pages import page_bytes
from streamkv.errors import ConfigError
from streamkv.recall_schedule import question_tokens
from streamkv.recalled import farthest
from streamkv.retrieval_heads import NUM_HEADS
from streamkv.tiers.spec import BLOCK_SIZE, KVSpec

PLANNED_TOKENS = 1 << 17
"""Tokens of a session whose digests have room on a GPU by default."""

SYSTEM_PROMPT_TOKENS = 512
"""Length of system prompt that the default gpu pool has room for in each session."""


class SeesTokens(Protocol):
    """What a model says of how far it sees; see `ModelAdapter`."""

    @property
    def name(self) -> str: ...
    @property
    def trained_length(self) -> int: ...
    @property
    def sliding_windows(self) -> Sequence[int | None]: ...


def check_window(config: EngineConfig, adapter: SeesTokens) -> None:
    """Raise unless the model can see sinks and window at once.

    Raises:
        ConfigError: beyond the trained length, or beyond what one of its layers sees.
    """
    trained = adapter.trained_length
    total = config.window_size + config.num_sink_tokens
    if total > trained:
        raise ConfigError(
            "window_size",
            config.window_size,
            f"with {config.num_sink_tokens} sink tokens beyond the trained length {trained}",
            f"Use at most {trained - config.num_sink_tokens}.",
        )
    reach = farthest(config.position_policy, config.window_size, config.recall_blocks, BLOCK_SIZE)
    if config.recall_blocks > 0 and reach + config.num_sink_tokens > trained:
        raise ConfigError(
            "recall_blocks",
            config.recall_blocks,
            f"under position_policy={config.position_policy!r} blocks would seem {reach} tokens "
            f"away, with {config.num_sink_tokens} sink tokens beyond the trained length {trained}",
            "Use fewer recall_blocks, a smaller window_size, or another position_policy.",
        )
    if config.attention == "full" and (problem := full_problem(adapter.sliding_windows)):
        raise ConfigError("attention", "full", problem, "Use attention='window'.")
    for layer, window in enumerate(adapter.sliding_windows):
        if window is not None and window < total:
            raise ConfigError(
                "window_size",
                config.window_size,
                f"layer {layer} of {adapter.name!r} sees only {window} tokens",
                f"Use at most {window - config.num_sink_tokens}.",
            )


def full_problem(sliding_windows: Sequence[int | None]) -> str:
    """Why a model cannot attend to everything; empty if it can.

    Args:
        sliding_windows: of its layers; `None` for one that sees everything.
    """
    limited = [layer for layer, window in enumerate(sliding_windows) if window is not None]
    if not limited:
        return ""
    return f"layer {limited[0]} of the model sees only {sliding_windows[limited[0]]} tokens"


def blocks_of_session(
    config: EngineConfig, spec: KVSpec, num_sink_tokens: int, window_size: int
) -> int:
    """Gpu blocks that one session may need at once."""
    recent = window_size + config.prefill_chunk
    sinks = -(-num_sink_tokens // spec.block_size)
    blocks = -(-recent // spec.block_size) + 2 + sinks
    if config.recall_blocks == 0:
        return blocks
    # A question is computed again with what its first token saw.
    behind = question_tokens(spec.block_size) // spec.block_size
    return blocks + behind + config.recall_blocks


def table_capacity(config: EngineConfig, spec: KVSpec) -> int:
    """Entries of a sequence that a captured decode step has room for.

    The blocks of a window, those of a system prompt as the default pool expects it, recalled ones,
    and some for text that is kept; a sequence with more is decoded without a graph.
    """
    window = -(-config.window_size // spec.block_size) + 2 + config.recall_blocks
    sinks = -(-max(config.num_sink_tokens, SYSTEM_PROMPT_TOKENS) // spec.block_size)
    # A recalled block that begins with sink tokens may have an entry more.
    recalled = config.recall_blocks + 1 if config.recall_blocks else 0
    return -(-(window + sinks + 8 + recalled) // 16) * 16


def digest_bytes(spec: KVSpec) -> int:
    """Bytes of the digest of one block, by which it is chosen for recall, at most."""
    return 2 * NUM_HEADS * spec.block_size * spec.head_dim


def digest_budget(config: EngineConfig, spec: KVSpec) -> int:
    """Bytes of a GPU for digests; 0 without recall.

    Raises:
        ConfigError: `digest_bytes` has no room for a page of them, and is not 0.
    """
    if config.recall_blocks == 0:
        return 0
    one = digest_bytes(spec)
    if config.digest_bytes is None:
        return config.max_sessions * (PLANNED_TOKENS // spec.block_size) * one
    budget = parse_size("digest_bytes", config.digest_bytes)
    least = page_bytes(0, one)
    if 0 < budget < least:
        raise ConfigError(
            "digest_bytes",
            config.digest_bytes,
            f"the first page of a session's digests takes {format_size(least)}",
            f"Use at least {format_size(least)}, or 0 for digests in host memory only.",
        )
    return budget


def num_gpu_blocks(config: EngineConfig, spec: KVSpec) -> int:
    """Blocks of the gpu pool.

    Raises:
        ConfigError: `gpu_bytes` has no room for one session.
    """
    one = blocks_of_session(config, spec, config.num_sink_tokens, config.window_size)
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
