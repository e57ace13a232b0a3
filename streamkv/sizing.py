"""How much an engine needs: its window against the model, and blocks of the gpu pool.

Pure arithmetic over options and layout; nothing is allocated here.
"""

from typing import TYPE_CHECKING

from streamkv.config import EngineConfig, format_size, parse_size
from streamkv.errors import ConfigError
from streamkv.recall_schedule import LOOK_BACK
from streamkv.recalled import farthest
from streamkv.tiers.spec import BLOCK_SIZE, KVSpec

if TYPE_CHECKING:
    from streamkv.model import ModelAdapter

SYSTEM_PROMPT_TOKENS = 512
"""Length of system prompt that the default gpu pool has room for in each session."""


def check_window(config: EngineConfig, adapter: "ModelAdapter") -> None:
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
    for layer, window in enumerate(adapter.sliding_windows):
        if window is not None and window < total:
            raise ConfigError(
                "window_size",
                config.window_size,
                f"layer {layer} of {adapter.name!r} sees only {window} tokens",
                f"Use at most {window - config.num_sink_tokens}.",
            )


def blocks_of_session(
    config: EngineConfig, spec: KVSpec, num_sink_tokens: int, window_size: int
) -> int:
    """Gpu blocks that one session may need at once."""
    recent = window_size + config.prefill_chunk
    sinks = -(-num_sink_tokens // spec.block_size)
    look_back = LOOK_BACK // spec.block_size if config.recall_blocks else 0
    return -(-recent // spec.block_size) + 2 + sinks + look_back + config.recall_blocks


def table_capacity(config: EngineConfig, spec: KVSpec) -> int:
    """Entries of a sequence that a captured decode step has room for.

    The blocks of a window, those of a system prompt as the default pool expects it, and some for
    text that is kept; a sequence with more is decoded without a graph.
    """
    window = -(-config.window_size // spec.block_size) + 2
    sinks = -(-max(config.num_sink_tokens, SYSTEM_PROMPT_TOKENS) // spec.block_size)
    return -(-(window + sinks + 8) // 16) * 16


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
