"""Following a process: notes until it is ready, then one step after the other."""

from collections.abc import Iterator

import pytest

from streamkv.cli.console import Output
from streamkv.cli.demo_follow import Follower, Speed
from streamkv.cli.demo_job import Event, Note, Reading, Ready, StepDone, Wrote

READY = Ready(2, 1.0, 0.1, False, 0, 0, 0)


def reading(num_tokens: int) -> Reading:
    return Reading(num_tokens, num_tokens, 4 * num_tokens, 4, 128, {})


def events() -> Iterator[Event]:
    yield Note("Converting ...")
    yield READY
    yield reading(512)
    yield reading(700)
    yield StepDone(0)
    yield Wrote("one\n", 1, 700, 2.0)
    yield Wrote(" two", 2, 701, 2.0)
    yield StepDone(1)
    yield StepDone(2)


def test_each_step_is_followed_to_its_end(capsys: pytest.CaptureFixture[str]) -> None:
    ticks = iter(range(100))
    follower = Follower(events(), Output(), lambda: float(next(ticks)))
    assert follower.ready() == READY
    assert capsys.readouterr().out == "   Converting ...\n"
    last, rate = follower.read("reading", 4_000)
    assert last == reading(700)
    assert rate > 0
    capsys.readouterr()
    assert [token.token_id for token in follower.quote()] == [1, 2]
    assert capsys.readouterr().out == "   > one  two\n"
    assert follower.read("reading", 4_000) == (None, 0.0)


def test_a_speed_is_that_of_the_last_ten_seconds() -> None:
    times = iter([10.0, 14.0, 20.0, 24.0, 60.0])
    speed = Speed(lambda: next(times))
    assert speed.tokens_per_s(reading(2_000)) == 500.0
    assert speed.tokens_per_s(reading(2_600)) == 260.0
    assert speed.tokens_per_s(reading(2_700)) == 70.0
    assert speed.tokens_per_s(reading(3_060)) == 10.0
