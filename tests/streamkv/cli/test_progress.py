import pytest

from streamkv.cli.console import Output
from streamkv.cli.progress import ProgressDisplay, format_duration


class HandClock:
    """Seconds that only the test moves."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_nothing_is_shown_within_two_seconds(capsys: pytest.CaptureFixture[str]) -> None:
    clock = HandClock()
    with ProgressDisplay(Output(), "reading", clock) as display:
        display.update(0.0, "0 tokens")
        clock.now_s += 1.9
        display.update(0.9, "9 tokens")
    assert capsys.readouterr().err == ""


def test_lines_say_amount_rate_and_time_left(capsys: pytest.CaptureFixture[str]) -> None:
    clock = HandClock()
    with ProgressDisplay(Output(), "reading", clock) as display:
        for fraction in (0.5, 0.6, 0.7, 0.75):
            display.update(fraction, "9 tokens, 3 tokens/s")
            clock.now_s += 3
    assert capsys.readouterr().err == (
        "reading: 60% 9 tokens, 3 tokens/s, 12 s left\n"
        "reading: 75% 9 tokens, 3 tokens/s, 9 s left\n"
    ).replace("%", "%,")


def test_an_unknown_end_has_no_fraction_and_no_time_left(
    capsys: pytest.CaptureFixture[str],
) -> None:
    clock = HandClock()
    with ProgressDisplay(Output(), "reading", clock) as display:
        display.update(None, "1 tokens")
        clock.now_s += 3
        display.update(None, "2 tokens")
    assert capsys.readouterr().err == "reading: 2 tokens\n"


def test_json_has_no_progress(capsys: pytest.CaptureFixture[str]) -> None:
    clock = HandClock()
    with ProgressDisplay(Output(as_json=True), "reading", clock) as display:
        clock.now_s += 10
        display.update(0.5, "1 token")
    assert capsys.readouterr().err == ""


def test_a_terminal_shows_a_bar_that_goes_away(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    clock = HandClock()
    with ProgressDisplay(Output(), "reading", clock) as display:
        display.update(0.0, "0 tokens")
        clock.now_s += 4
        display.update(0.5, "9 tokens")
    shown = capsys.readouterr().err
    assert "reading" in shown and "9 tokens, 4 s left" in shown
    assert shown.rstrip().endswith("\x1b[2K")


@pytest.mark.parametrize(
    ("seconds", "shown"), [(0.4, "0 s"), (59.4, "59 s"), (200, "3 min 20 s"), (7500, "2 h 5 min")]
)
def test_durations_for_people(seconds: float, shown: str) -> None:
    assert format_duration(seconds) == shown
