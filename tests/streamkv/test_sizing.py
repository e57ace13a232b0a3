"""How many blocks an engine needs, counted by hand."""

from types import SimpleNamespace
from typing import Any

import pytest

from streamkv.config import EngineConfig
from streamkv.errors import ConfigError
from streamkv.sizing import blocks_of_session, check_window, num_gpu_blocks
from streamkv.tiers.spec import KVSpec

SPEC = KVSpec(num_layers=1, num_kv_heads=1, head_dim=8, dtype="float32")  # 4 KiB a block
CONFIG = EngineConfig(window_size=128, num_sink_tokens=4, prefill_chunk=64, max_sessions=3)


def model(trained_length: int, *sliding_windows: int | None) -> Any:
    """What is asked of a model."""
    return SimpleNamespace(
        name="tiny", trained_length=trained_length, sliding_windows=sliding_windows
    )


@pytest.mark.parametrize(
    ("num_sink_tokens", "window_size", "num_blocks"),
    [
        (0, 64, 2 + 2),  # window and chunk, and two blocks that these begin and end in
        (0, 65, 3 + 2),
        (1, 64, 2 + 2 + 1),
        (64, 64, 2 + 2 + 1),
        (65, 64, 2 + 2 + 2),
    ],
)
def test_a_session_needs_its_window_a_chunk_and_its_sinks(
    num_sink_tokens: int, window_size: int, num_blocks: int
) -> None:
    assert blocks_of_session(CONFIG, SPEC, num_sink_tokens, window_size) == num_blocks


def test_unless_told_there_is_room_for_all_sessions_and_their_system_prompts() -> None:
    assert num_gpu_blocks(CONFIG, SPEC) == 3 * (6 + 512 // 64)


def test_a_given_size_has_to_hold_one_session() -> None:
    def sized(num_bytes: int) -> int:
        return num_gpu_blocks(
            EngineConfig(window_size=128, prefill_chunk=64, gpu_bytes=num_bytes), SPEC
        )

    assert sized(6 * 4096) == 6
    assert sized(100 * 4096 + 4095) == 100
    with pytest.raises(ConfigError, match=r"room for 5 blocks, one session needs 6.*24\.0 KiB"):
        sized(6 * 4096 - 1)


def test_sinks_and_window_fit_in_what_the_model_sees() -> None:
    check_window(CONFIG, model(132, None, 132))
    with pytest.raises(ConfigError, match=r"window_size=128.*trained length 131.*most 127"):
        check_window(CONFIG, model(131))
    with pytest.raises(ConfigError, match=r"layer 1 of 'tiny' sees only 131 tokens.*most 127"):
        check_window(CONFIG, model(4096, None, 131))
