import pytest

from streamkv.errors import ConfigError
from streamkv.summarize.plan import Plan, make_plan


def four_chars_a_token(text: str) -> int:
    return (len(text) + 3) // 4


def test_the_sizes_follow_the_window() -> None:
    assert make_plan(four_chars_a_token, 2048, None) == Plan(segment=320, answer=120)
    small = make_plan(four_chars_a_token, 256, None)
    assert small.answer == 32
    assert small.segment + small.answer < 256


def test_what_does_not_fit_is_refused_with_what_would() -> None:
    with pytest.raises(ConfigError, match=r"window_size=64: no room .* Use at least \d+"):
        make_plan(four_chars_a_token, 64, None)
    with pytest.raises(ConfigError, match=r"segment_tokens=2000: out of range. Use 16 to \d+"):
        make_plan(four_chars_a_token, 2048, 2000)
    with pytest.raises(ConfigError, match="segment_tokens=0"):
        make_plan(four_chars_a_token, 2048, 0)


def test_the_window_that_is_advised_is_enough() -> None:
    with pytest.raises(ConfigError) as caught:
        make_plan(four_chars_a_token, 64, None)
    advised = int(caught.value.remedy.split()[-1].rstrip("."))
    assert make_plan(four_chars_a_token, advised, None).segment >= 16
