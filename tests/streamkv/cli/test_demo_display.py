"""What a person sees of a reading, on a terminal and elsewhere."""

import io
from dataclasses import replace

import pytest
from rich.console import Console

from streamkv.cli.console import Output
from streamkv.cli.demo_display import ReadingDisplay, reading_line
from streamkv.cli.demo_job import Reading, Tier

TIERS = {
    "gpu": Tier(11, 11 << 20, 20 << 20),
    "cpu": Tier(22, 64 << 20, 64 << 20),
    "ssd": Tier(180, 300 << 20, 512 << 20),
}
READING = Reading(1_000, 10_000, 40_000, 4, 508, TIERS)
LINE = (
    " 40%  10,000 tokens, 500 tokens/s, 30 s left; attends to 4 sink + 508 window tokens of 10,000;"
    " gpu 11 blocks 11.0 MiB, cpu 22 blocks 64.0 MiB, ssd 180 blocks 300.0 MiB"
)


def test_a_line_has_rate_time_left_sinks_window_and_tiers() -> None:
    assert reading_line(READING, 100_000, 500.0) == LINE


def test_elsewhere_it_is_a_line_now_and_then_and_one_at_the_end(
    capsys: pytest.CaptureFixture[str],
) -> None:
    later = replace(READING, token_index=10_001)
    times = iter([0.0, 1.0, 11.0, 11.0, 12.0])
    with ReadingDisplay(Output(), "reading", lambda: next(times)) as display:
        display.update(READING, 100_000, 500.0)
        assert capsys.readouterr().out == ""
        display.update(READING, 100_000, 500.0)
        assert capsys.readouterr().out == f"  {LINE}\n"
        display.update(READING, 100_000, 500.0)
        display.end(READING, 100_000, 500.0)
        assert capsys.readouterr().out == ""
        display.end(later, 100_000, 500.0)
        assert "10,001 tokens" in capsys.readouterr().out


def test_with_json_nothing_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    with ReadingDisplay(Output(as_json=True), "reading") as display:
        display.end(READING, 100_000, 500.0)
    assert capsys.readouterr() == ("", "")


def test_on_a_terminal_it_is_a_picture() -> None:
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=100, color_system=None)
    with ReadingDisplay(Output(), "reading", console=console) as display:
        display.end(READING, 100_000, 500.0)
    last = screen.getvalue()
    assert "reading" in last
    assert "40%  10,000 tokens  500 tokens/s  30 s left" in last
    assert "attends to 4 sink + 508 window tokens of 10,000" in last
    assert [word for word in last.split() if word in TIERS][-3:] == ["gpu", "cpu", "ssd"]
    assert "300.0 MiB    512.0 MiB" in last
