"""Reading is timed as far as it is known how long it took."""

import pytest

from streamkv.read_pace import ReadPace


class Clock:
    """Seconds that a test lets pass."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_a_lap_is_what_has_passed_since_the_one_before() -> None:
    clock = Clock()
    pace = ReadPace(clock)
    with pace:
        clock.now_s += 1.0
    clock.now_s += 0.5  # the caller asks for the next piece
    with pace:
        clock.now_s += 2.0
        assert pace.lap_s() == pytest.approx(3.5)
        clock.now_s += 0.25
        assert pace.lap_s() == pytest.approx(0.25)
        assert pace.lap_s() == 0.0
        assert pace.is_known()


def test_what_others_took_their_steps_in_tells_nothing() -> None:
    clock = Clock()
    pace = ReadPace(clock)
    with pace:
        clock.now_s += 1.0
    clock.now_s += 5.0
    with pace:
        clock.now_s += 1.0
        assert pace.lap_s() == pytest.approx(7.0)
        assert not pace.is_known()
        clock.now_s += 2.9
        assert not pace.is_known()
        clock.now_s += 0.2
        assert pace.is_known(), "others took less than half of it"


def test_a_short_lap_between_two_steps_does_not_make_the_whole_unknown() -> None:
    clock = Clock()
    pace = ReadPace(clock)
    with pace:
        clock.now_s += 1.0
        pace.lap_s()
    clock.now_s += 0.1
    with pace:
        clock.now_s += 0.01
        assert pace.lap_s() == pytest.approx(0.11)
        assert pace.is_known()
