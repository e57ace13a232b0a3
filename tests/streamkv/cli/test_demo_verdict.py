"""The verdict says what was checked, and how to go on."""

import sys
from pathlib import Path

import pytest

from streamkv.cli.console import Output
from streamkv.cli.demo_checks import Continuation, JournalCheck
from streamkv.cli.demo_job import Reading, Ready, Tier, Wrote
from streamkv.cli.demo_kill import Killed
from streamkv.cli.demo_plan import Pace
from streamkv.cli.demo_settings import DemoSettings
from streamkv.cli.demo_story import Outcome, Resumed
from streamkv.cli.demo_verdict import program_name, say_verdict, summary
from streamkv.cli.text_file import TextFile
from streamkv.session_copy import SessionCopy

TEXT = TextFile(Path("text.txt"), 400_000)
SETTINGS = DemoSettings("tiny", "a text", TEXT, 500, 4, 1 << 29, 240.0, Path("demo"))


def outcome(continuation: Continuation) -> Outcome:
    reading = Reading(70_000, 70_000, 280_000, 4, 500, {"ssd": Tier(10, 1_000, 2_000)})
    killed = Killed(
        1, Ready(2, 1.0, 0.1, False, 0, 0, 0), reading, SessionCopy(66_000, 264_000, 65_984, 9, 1),
        Pace(80.0, 6.0, 70_000, 280_000, 1_000.0),
    )  # fmt: skip
    resumed = Resumed(
        Ready(2, 1.0, 0.25, True, 70_500, 69_952, 282_000), 282_500,
        [Wrote("so", 5, 70_600, 0.5)], reading, 900.0, ["Yes.", "No.", "Perhaps."],
    )  # fmt: skip
    journal = JournalCheck(70_500, 282_000, 17)
    whole = JournalCheck(100_000, 400_000, 0)
    return Outcome(killed, journal, 4_500, resumed, whole, continuation, 185.0)


def test_equal_tokens_and_near_ties_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    say_verdict(outcome(Continuation(50, 0, None, 0.12)), SETTINGS, Output())
    said = capsys.readouterr().out
    assert "the session holds 100,000 tokens, 200 times the window." in said
    assert "Killed with SIGKILL after 70,000 tokens" in said
    assert "The 50 tokens after the resume are those of the undisturbed run; near ties" in said
    assert "among them: 0, smallest distance 0.12." in said
    assert "All of it took 3 min 5 s." in said
    for command in ("chat", "serve", "summarize FILE", "doctor"):
        assert f"streamkv {command}" in said


def test_a_difference_at_a_near_tie_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    say_verdict(outcome(Continuation(50, 1, 31, 3e-5)), SETTINGS, Output())
    said = capsys.readouterr().out
    assert "The first 31 of 50 tokens after the resume are those of the undisturbed run" in said
    assert "then they part at a near tie" in said


def test_the_summary_has_the_figures() -> None:
    found = summary(outcome(Continuation(50, 0, None, 0.12)), SETTINGS)
    assert found["ok"] is True
    assert found["tokens_per_s"] == 1_000.0
    assert found["killed"] == {
        "acknowledged_tokens": 70_000,
        "journaled_tokens": 70_500,
        "journaled_chars": 282_000,
        "torn_bytes": 17,
        "tokens_since_copy": 4_500,
    }
    assert found["resumed"] == {"engine_s": 1.0, "session_s": 0.25, "stored_tokens": 69_952}
    assert found["continuation"]["text"] == "so"
    assert found["tiers"] == {"ssd": {"num_blocks": 10, "num_bytes": 1_000}}


def test_commands_are_shown_as_they_can_be_typed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "argv", [".venv/bin/streamkv", "demo"])
    assert program_name() == ".venv/bin/streamkv"
    program = tmp_path / "streamkv"
    program.touch(mode=0o755)
    assert program_name() == "streamkv"
    monkeypatch.setattr(sys, "argv", ["/x/streamkv/__main__.py", "demo"])
    assert program_name() == "streamkv"
