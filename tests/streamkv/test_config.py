"""Bad options are refused before any work, by field, value and remedy."""

import pytest

from streamkv.config import EngineConfig, format_size, parse_size
from streamkv.errors import ConfigError, StreamKVError, UnknownOptionError


@pytest.mark.parametrize(
    ("text", "expected"),
    [("10GiB", 10 * 2**30), ("1.5 MiB", 3 * 2**19), ("2GB", 2 * 10**9), ("4K", 4096), (7, 7)],
)
def test_sizes_are_read(text: int | str, expected: int) -> None:
    assert parse_size("cpu_bytes", text) == expected


@pytest.mark.parametrize("bad", ["10GBB", "", "GiB", "-1", -1, True, "1e9"])
def test_what_is_no_size_is_refused_by_name(bad: int | str) -> None:
    with pytest.raises(ConfigError, match=r"ssd_bytes=.*not a size.*10GiB"):
        parse_size("ssd_bytes", bad)


def test_sizes_are_shown_for_people() -> None:
    assert [format_size(n) for n in (12, 1536, 2**40)] == ["12 B", "1.5 KiB", "1.0 TiB"]


def test_an_unknown_option_names_the_nearest_one() -> None:
    with pytest.raises(UnknownOptionError, match="Did you mean window_size"):
        EngineConfig(windowsize=3)  # type: ignore[call-arg]  # that is the point


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("window_size", 63),
        ("num_sink_tokens", -1),
        ("dtype", "int8"),
        ("codec", "gzip"),
        ("retain", "some"),
        ("on_pressure", "panic"),
        ("checkpoint_tokens", 1),
        ("prefill_chunk", 0),
        ("num_threads", 0),
        ("num_threads", 10**9),
        ("ssd_bytes", "99999999TiB"),
        ("store", ""),
        ("store", 5),
        ("store", "a\0b"),
        ("trust_remote_code", "yes"),
        ("max_sessions", 0),
        ("compile", True),
        ("recall_blocks", -1),
    ],
)
def test_a_bad_value_is_a_value_error_that_names_it(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=field) as caught:
        EngineConfig(**{field: value})  # type: ignore[arg-type]  # that is the point
    assert isinstance(caught.value, StreamKVError)
    assert repr(value) in str(caught.value)
