"""Exit statuses, and what an error looks like."""

import subprocess
import sys
from pathlib import Path

import pytest
from cli_runner import Run

from streamkv.cli import app
from streamkv.cli.exit_codes import ExitCode, exit_code_of
from streamkv.errors import (
    ConfigError,
    InputError,
    JournalError,
    ModelError,
    PoolFullError,
    ServerError,
    SessionError,
    StoreFormatError,
    StoreLockedError,
    StreamKVError,
    UnsupportedModelError,
)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("a", 1, "bad", "Do."), 2),
        (InputError("a", 1, "bad", "Do."), 2),
        (SessionError("x"), 2),
        (PoolFullError("x"), 2),
        (ModelError("x"), 3),
        (UnsupportedModelError("x"), 3),
        (StoreLockedError("x"), 4),
        (StoreFormatError("x"), 4),
        (JournalError("x"), 4),
        (ServerError("x"), 5),
    ],
)
def test_every_error_has_its_exit_status(error: StreamKVError, code: int) -> None:
    assert exit_code_of(error) == code


def test_help_needs_neither_torch_nor_transformers() -> None:
    program = (
        "import sys; from streamkv.cli.app import execute; assert execute(['--help']) == 0; "
        "sys.exit(bool({'torch', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "chat" in done.stdout


def test_python_m_streamkv_is_the_command_line() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "streamkv", "--version"], capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (0, "streamkv 0.1.0\n")


@pytest.mark.parametrize(
    ("args", "line"),
    [
        (["chat", "--wat"], "error: No such option: --wat. See: streamkv chat --help\n"),
        (["frob"], "error: No such command 'frob'. See: streamkv --help\n"),
        ([], "error: Missing command. See: streamkv --help\n"),
    ],
)
def test_a_wrong_command_line_is_one_line_and_2(run: Run, args: list[str], line: str) -> None:
    ran = run(*args)
    assert (ran.code, ran.out, ran.err) == (2, "", line)


@pytest.mark.parametrize(
    ("args", "field"),
    [
        (["--cpu-bytes", "10GBB"], "--cpu-bytes='10GBB': not a size."),
        (["--ssd-bytes", "lots"], "--ssd-bytes='lots': not a size."),
        (["--window", "10"], "--window=10: smaller than one block (64 tokens)."),
        (["--window", "100000"], "--window=100000: with 4 sink tokens beyond the trained"),
        (["--codec", "gzip"], "--codec='gzip': not a choice."),
        (["--dtype", "int3"], "--dtype='int3': not a choice."),
        (["--temperature", "-1"], "--temperature=-1.0: out of range."),
    ],
)
def test_a_bad_option_names_field_and_value(
    run: Run, where: list[str], store: Path, args: list[str], field: str
) -> None:
    ran = run("chat", *where, *args)
    assert ran.code == ExitCode.USAGE
    assert ran.err.startswith(f"error: {field}")
    assert ran.err.count("\n") == 1
    assert not store.exists()


def test_an_unknown_model_is_3(run: Run, tmp_path: Path) -> None:
    ran = run("chat", "--model", tmp_path / "no such model.gguf")
    assert ran.code == ExitCode.MODEL
    assert "no such file" in ran.err


def test_a_store_that_cannot_be_made_is_4(run: Run, tiny_model_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    ran = run("chat", "--model", tiny_model_dir, "--store", tmp_path / "file" / "store")
    assert ran.code == ExitCode.STORE
    assert "Use a directory that you may write." in ran.err


def test_a_store_of_another_model_is_4(
    run: Run, small: list[str], tiny_model_dir: Path, tmp_path: Path
) -> None:
    assert run("chat", "a", *small).code == 0
    other = tmp_path / "other"
    other.mkdir()
    for file in tiny_model_dir.iterdir():
        text = file.read_bytes()
        if file.name == "config.json":
            text = text.replace(b"10000.0", b"20000.0")
        (other / file.name).write_bytes(text)
    ran = run("chat", "a", "--model", other, *small[2:])
    assert ran.code == ExitCode.STORE
    assert "holds model" in ran.err


def test_a_bug_shows_its_traceback_and_70(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: object, **kwargs: object) -> None:
        raise ZeroDivisionError("ours")

    monkeypatch.setattr(app, "make_app", lambda: broken)
    ran = run("chat")
    assert ran.code == 70
    assert "ZeroDivisionError: ours" in ran.err
    assert "bug of streamkv" in ran.err


def test_the_default_store_is_named_after_the_model(
    run: Run, tiny_model_dir: Path, data_home: Path
) -> None:
    assert run("chat", "a", "--model", tiny_model_dir, "--window", "64").code == 0
    [made] = data_home.iterdir()
    assert made.name.startswith(tiny_model_dir.name + "-")
    assert (made / "sessions" / "a.journal").is_file()
