"""Which modes are asked, and how streams are read for them."""

import pytest

from streamkv.config import EngineConfig, parse_size
from streamkv.errors import ConfigError
from streamkv.recall_bench import modes
from streamkv.recall_bench.modes import Reading, dense_config, readings, require_modes
from streamkv.sizing import blocks_of_session
from streamkv.tiers.spec import KVSpec

ALL = ("window", "recall", "full", "dense")


@pytest.mark.parametrize(
    ("feed_in", "expected"),
    [
        ("window", [Reading("window", ("window", "recall", "full"))]),
        ("recall", [Reading("window", ("window",)), Reading("recall", ("recall", "full"))]),
        ("same", [Reading(mode, (mode,)) for mode in ("window", "recall", "full")]),
    ],
)
def test_a_stream_is_read_once_for_all_modes_that_may_share_it(
    feed_in: str, expected: list[Reading]
) -> None:
    assert readings(ALL, feed_in) == expected
    assert readings(("dense",), feed_in) == []


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ((("window", "sliding"), "window"), "modes='sliding': not a mode. Use some of window,"),
        (((), "window"), "modes='': no mode"),
        ((("window",), "full"), "feed_in='full': not a mode to read in"),
    ],
)
def test_unknown_modes_are_named(given: tuple[tuple[str, ...], str], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        require_modes(*given)


def test_the_gpu_pool_has_room_for_full_beside_another_session() -> None:
    spec = KVSpec(2, 2, 16, "float32")
    roomy = modes.with_room_for_full(EngineConfig(), spec, 6400, 16)
    config = modes.recall_config(roomy, spec, "full", 16, 6400)
    one = blocks_of_session(config, spec, 4, config.window_size)
    assert parse_size("gpu_bytes", config.gpu_bytes or 0) >= (2 * one + 100) * spec.block_bytes
    large = EngineConfig(gpu_bytes="1GiB")
    assert modes.with_room_for_full(large, spec, 6400, 0).gpu_bytes == 2**30


def test_nothing_leaves_the_window_of_dense() -> None:
    config = dense_config(EngineConfig(num_sink_tokens=2), 4096)
    assert (config.window_size, config.num_sink_tokens, config.retain) == (4096, 2, "none")
