"""Runs command lines in this process, so that torch is imported once."""

import io
import sys
from pathlib import Path
from typing import IO

import pytest
from cli_runner import Ran, Run

from streamkv.cli.app import execute


@pytest.fixture
def data_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where default stores go in this test."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    return tmp_path / "data" / "streamkv"


@pytest.fixture
def run(
    data_home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Run:
    """`run("chat", "diary", stdin="hello\\n")`: one command line."""

    def command(*args: object, stdin: str | IO[str] = "") -> Ran:
        given = io.StringIO(stdin) if isinstance(stdin, str) else stdin
        monkeypatch.setattr(sys, "stdin", given)
        capsys.readouterr()
        code = execute([str(arg) for arg in args])
        printed = capsys.readouterr()
        return Ran(code, printed.out, printed.err)

    return command


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """The store of this test."""
    return tmp_path / "store"


@pytest.fixture
def where(tiny_model_dir: Path, store: Path) -> list[str]:
    """Options that name the tiny model and the store of this test."""
    return ["--model", str(tiny_model_dir), "--store", str(store)]


@pytest.fixture
def small(where: list[str]) -> list[str]:
    """The same, with a window of two blocks."""
    return [*where, "--window", "128"]
