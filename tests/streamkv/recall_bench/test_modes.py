"""Which modes are asked, and how streams are read for them."""

import pytest

from streamkv.config import EngineConfig
from streamkv.errors import ConfigError
from streamkv.recall_bench import modes
from streamkv.recall_bench.modes import Reading, dense_config, readings, require_modes

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


@pytest.mark.skipif(modes.has_recall(), reason="this build has these modes")
@pytest.mark.parametrize("given", [(("recall",), "window"), (("window",), "recall")])
def test_modes_that_a_build_does_not_have_are_refused(given: tuple[tuple[str, ...], str]) -> None:
    with pytest.raises(ConfigError, match="modes='recall': this build has no such mode"):
        require_modes(*given)
    assert modes.modes_of_build() == ("window", "dense")


def test_nothing_leaves_the_window_of_dense() -> None:
    config = dense_config(EngineConfig(num_sink_tokens=2), 4096)
    assert (config.window_size, config.num_sink_tokens, config.retain) == (4096, 2, "none")
