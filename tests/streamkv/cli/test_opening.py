"""Opening an engine for a command, and an interrupt that says how to go on."""

from pathlib import Path

import pytest

from streamkv.cli.console import Output
from streamkv.cli.opening import open_engine, resumable
from streamkv.cli.options import EngineOptions
from streamkv.config import EngineConfig
from streamkv.errors import EngineClosedError


def test_the_engine_is_closed_also_after_an_error(tiny_model_dir: Path) -> None:
    config = EngineConfig(window_size=128, cpu_bytes=0, compile="off")
    options = EngineOptions(str(tiny_model_dir), config)
    with (
        pytest.raises(ZeroDivisionError),
        open_engine(options, Output(as_json=True)) as engine,
    ):
        assert (engine.model_name, engine.config) == (str(tiny_model_dir), config)
        raise ZeroDivisionError
    with pytest.raises(EngineClosedError):
        engine.session("late")


def test_an_interrupt_says_how_to_go_on_and_stays_one(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(KeyboardInterrupt), resumable(Output(), "streamkv chat diary"):
        raise KeyboardInterrupt
    printed = capsys.readouterr()
    assert printed.err.splitlines()[-1] == (
        "Interrupted; nothing is lost. Go on with: streamkv chat diary"
    )
    with pytest.raises(ValueError, match="x"), resumable(Output(), "streamkv chat diary"):
        raise ValueError("x")
    assert capsys.readouterr().err == ""
