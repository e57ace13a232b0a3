import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from streamkv.errors import ModelError
from streamkv.model_cache import (
    MAX_NOTES,
    build_directory,
    cache_root,
    file_stamp,
    read_note,
    write_note,
)

KILLED_WHILE_BUILDING = """
import sys
from pathlib import Path
from streamkv.model_cache import build_directory

def build(made):
    (made / "half.bin").write_bytes(b"half")
    print("building", flush=True)
    sys.stdin.read()

build_directory(Path(sys.argv[1]), build)
"""

BUILD_WHEN_TOLD = """
import sys
from pathlib import Path
from streamkv.model_cache import build_directory

def build(made):
    (made / "model.bin").write_text("whole")
    print("built")

print("ready", flush=True)
sys.stdin.readline()
print((build_directory(Path(sys.argv[1]), build) / "model.bin").read_text())
"""


def build_whole(made: Path) -> None:
    (made / "model.bin").write_text("whole")


def test_cache_root_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/ada")
    monkeypatch.delenv("STREAMKV_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_root() == Path("/home/ada/.cache/streamkv")
    monkeypatch.setenv("XDG_CACHE_HOME", "/scratch")
    assert cache_root() == Path("/scratch/streamkv")
    monkeypatch.setenv("STREAMKV_CACHE", "~/models")
    assert cache_root() == Path("/home/ada/models")


def test_directory_is_built_once(tmp_path: Path) -> None:
    target = tmp_path / "models" / "a"
    build_directory(target, build_whole)
    (target / "model.bin").write_text("kept")
    assert (build_directory(target, build_whole) / "model.bin").read_text() == "kept"


def test_failed_build_leaves_nothing_and_can_be_repeated(tmp_path: Path) -> None:
    target = tmp_path / "a"

    def fail(made: Path) -> None:
        (made / "half.bin").write_text("half")
        raise ModelError("the source is damaged")

    with pytest.raises(ModelError, match="the source is damaged"):
        build_directory(target, fail)
    assert [path.name for path in tmp_path.iterdir()] == ["a.lock"]
    assert (build_directory(target, build_whole) / "model.bin").read_text() == "whole"


def test_two_processes_at_once_build_once(tmp_path: Path) -> None:
    command = [sys.executable, "-c", BUILD_WHEN_TOLD, str(tmp_path / "models" / "a")]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes) as first, subprocess.Popen(command, **pipes) as second:
        for process in (first, second):
            assert process.stdout.readline() == "ready\n"
        for process in (first, second):
            process.stdin.write("go\n")
            process.stdin.flush()
        said = sorted(process.communicate()[0] for process in (first, second))
    assert said == ["built\nwhole\n", "whole\n"]


def test_process_killed_while_building_leaves_no_directory_and_no_remains(tmp_path: Path) -> None:
    target = tmp_path / "a"
    command = [sys.executable, "-c", KILLED_WHILE_BUILDING, str(target)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"building\n"
        process.send_signal(signal.SIGKILL)
    assert not target.exists()
    assert len(list(tmp_path.glob(".a.making-*"))) == 1
    build_directory(target, build_whole)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "a.lock"]


def test_cache_that_cannot_be_written_is_named_with_a_remedy(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a directory")
    with pytest.raises(ModelError, match=r"cannot be written .* set STREAMKV_CACHE"):
        build_directory(tmp_path / "file" / "a", build_whole)


def test_stamp_changes_with_size_time_and_inode(tmp_path: Path) -> None:
    path = tmp_path / "model.bin"
    path.write_text("one")
    os.utime(path, ns=(1, 1))
    stamps = {file_stamp([path])}
    os.utime(path, ns=(2, 2))
    stamps.add(file_stamp([path]))
    path.write_text("three")
    os.utime(path, ns=(2, 2))
    stamps.add(file_stamp([path]))
    other = tmp_path / "other"
    other.write_text("three")
    os.utime(other, ns=(2, 2))
    os.replace(other, path)
    stamps.add(file_stamp([path]))
    assert len(stamps) == 4
    assert file_stamp([path]) in stamps


def test_stamp_of_a_missing_file_is_a_model_error(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"gone\.bin: cannot be read"):
        file_stamp([tmp_path / "gone.bin"])


def test_note_is_read_back_and_a_damaged_one_is_absent(own_cache: Path) -> None:
    assert read_note("fingerprint-1") is None
    write_note("fingerprint-1", {"value": 7})
    assert read_note("fingerprint-1") == {"value": 7}
    (own_cache / "notes" / "fingerprint-1.json").write_text('{"val')
    assert read_note("fingerprint-1") is None


def test_note_that_cannot_be_written_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("STREAMKV_CACHE", str(tmp_path / "file"))
    write_note("a", 1)
    assert read_note("a") is None


def test_oldest_notes_are_forgotten(own_cache: Path) -> None:
    notes = own_cache / "notes"
    notes.mkdir(parents=True)
    for number in range(MAX_NOTES):
        path = notes / f"old-{number}.json"
        path.write_text(json.dumps(number))
        os.utime(path, ns=(number, number))
    write_note("new", 1)
    assert read_note("new") == 1
    assert read_note("old-0") is None
    assert read_note("old-1") == 1
    assert len(list(notes.iterdir())) == MAX_NOTES
