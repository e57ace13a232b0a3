"""Compiling the C sources: once, under a name of its own, and with a reason when it cannot be.

The compilers here are scripts; `tests/streamkv` runs what a real one makes.
"""

import shutil
from pathlib import Path

import pytest

from streamkv.kernels import native_build
from streamkv.kernels.native_build import NativeUnavailableError, build, find_compiler

WRITES_ITS_ARGUMENTS = """
if [ "$1" = --version ]; then echo "VERSION"; exit; fi
arguments="$*"
while [ "$1" != -o ]; do shift; done
echo "$arguments" > "$2"
"""


def script(path: Path, text: str) -> Path:
    """An executable shell script."""
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o700)
    return path


def test_what_was_compiled_is_taken_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second build asks the compiler for its version only."""
    log, made = tmp_path / "log", tmp_path / "new" / "directory"
    counting = script(tmp_path / "counting", f'echo "$1" >> {log}\n{WRITES_ITS_ARGUMENTS}')
    monkeypatch.setenv("CC", str(counting))
    target = build(made)
    calls, content = log.read_text().split(), target.read_bytes()
    assert build(made) == target
    assert log.read_text().split() == [*calls, "--version"]
    assert target.read_bytes() == content
    assert list(made.iterdir()) == [target]


def test_another_version_of_the_compiler_makes_another_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    targets = set()
    for version in ("13.1", "13.2", "13.1"):
        text = WRITES_ITS_ARGUMENTS.replace("VERSION", version)
        monkeypatch.setenv("CC", str(script(tmp_path / "cc", text)))
        targets.add(build(tmp_path / "made"))
    assert len(targets) == 2


def test_flags_that_a_compiler_does_not_know_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refusing = 'for arg in "$@"; do case "$arg" in *=native) exit 1;; esac; done\n'
    compiler = script(tmp_path / "refusing", refusing + WRITES_ITS_ARGUMENTS)
    monkeypatch.setenv("CC", str(compiler))
    arguments = build(tmp_path / "made").read_text().split()
    assert "-fopenmp" in arguments and "-march=native" not in arguments
    sources = Path(native_build.__file__).parent.glob("*.c")
    assert sorted(arg for arg in arguments if arg.endswith(".c")) == sorted(map(str, sources))


def test_a_compiler_that_fails_is_named_with_its_last_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing = script(tmp_path / "failing", "echo first >&2; echo no such header >&2; exit 1")
    monkeypatch.setenv("CC", str(failing))
    with pytest.raises(NativeUnavailableError, match=r"failing cannot compile.*no such header$"):
        build(tmp_path / "made")
    assert list((tmp_path / "made").iterdir()) == []


def test_without_a_compiler_the_remedy_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    assert find_compiler() is None
    with pytest.raises(NativeUnavailableError, match="Install gcc or clang, or set CC"):
        build(tmp_path)


def test_the_first_compiler_that_exists_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CC", "is-not-there")
    clang = script(tmp_path / "clang", "exit 0")
    assert find_compiler() == str(clang) == shutil.which("clang")
    gcc = script(tmp_path / "gcc", "exit 0")
    assert find_compiler() == str(gcc)
