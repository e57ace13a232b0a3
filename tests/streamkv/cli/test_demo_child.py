"""A reading process is on a leash, and gone when its block is left."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from demo_runs import TEXT

from streamkv.cli.demo_child import Child, ChildError
from streamkv.cli.demo_job import Job, Read, Reading, Ready, StepDone, encode_job


def job(model: Path, tmp_path: Path, until_chars: int, window_size: int = 128) -> Job:
    text = tmp_path / "text.txt"
    text.write_text(TEXT, encoding="utf-8", newline="")
    store = str(tmp_path / "store")
    return Job(str(model), store, str(text), window_size, 4, 64 << 20, (Read(until_chars),))


def test_it_says_what_it_does_and_then_ends(tiny_model_dir: Path, tmp_path: Path) -> None:
    with Child(job(tiny_model_dir, tmp_path, 6_000)) as child:
        ready, *reading, done = list(child.events())
        with pytest.raises(ChildError, match="had ended before it was killed"):
            child.kill()
    assert isinstance(ready, Ready)
    assert not ready.resumed
    assert all(isinstance(event, Reading) for event in reading)
    assert isinstance(reading[-1], Reading)
    assert reading[-1].text_chars == 6_000
    assert done == StepDone(0)


def test_killed_it_has_computed_little_more_than_was_answered(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    with Child(job(tiny_model_dir, tmp_path, len(TEXT))) as child:
        first = next(event for event in child.events() if isinstance(event, Reading))
        unread = child.kill()
    assert first.token_index == 512
    assert len(unread) <= 1
    with pytest.raises(ProcessLookupError):
        os.kill(child.process_id, 0)


def test_an_error_of_the_process_is_one_of_the_demo(tiny_model_dir: Path, tmp_path: Path) -> None:
    with (
        Child(job(tiny_model_dir, tmp_path, 6_000, window_size=5_000)) as child,
        pytest.raises(ChildError, match="beyond the trained length 4096") as caught,
    ):
        list(child.events())
    assert caught.value.exit_code == 2


def test_a_process_that_dies_is_an_error(tiny_model_dir: Path, tmp_path: Path) -> None:
    with (
        Child(job(tiny_model_dir, tmp_path, len(TEXT))) as child,
        pytest.raises(ChildError, match=f"process {child.process_id} ended with -9"),
    ):
        for event in child.events():
            if isinstance(event, Reading):
                os.kill(child.process_id, signal.SIGKILL)


def test_it_does_not_outlive_whoever_started_it(tiny_model_dir: Path, tmp_path: Path) -> None:
    line = encode_job(job(tiny_model_dir, tmp_path, len(TEXT)))
    done = subprocess.run(
        [sys.executable, "-m", "streamkv.cli.demo_reader", line],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0
    assert len(done.stdout.splitlines()) == 2
