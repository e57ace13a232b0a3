"""The demo passes when nothing is lost, and fails when something is."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from cli_runner import Run
from demo_runs import TEXT, DemoRun, run_demo

from streamkv.cli.console import Output
from streamkv.cli.demo_checks import CheckFailed
from streamkv.cli.demo_settings import COPY_STORE, READER_STORE
from streamkv.cli.demo_undisturbed import Undisturbed
from streamkv.journal import Journal
from streamkv.journal_records import Fed
from streamkv.store import blocks_path
from streamkv.tiers.ssd import open_existing


@pytest.fixture(scope="module")
def demo_run(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> DemoRun:
    """A demo that passed."""
    return run_demo(tiny_model_dir, tmp_path_factory.mktemp("demo"))


def test_it_reads_all_of_the_text_and_is_killed_in_the_middle(demo_run: DemoRun) -> None:
    outcome = demo_run.outcome
    assert outcome.whole.text_chars == len(TEXT)
    assert outcome.killed.acknowledged.text_chars <= outcome.journal.text_chars < len(TEXT)
    assert outcome.journal.num_tokens >= outcome.killed.acknowledged.token_index
    assert 0 < outcome.distance <= 8192
    assert outcome.killed.acknowledged.num_window_tokens == 128


def test_the_resumed_session_stands_where_the_journal_ends(demo_run: DemoRun) -> None:
    ready, journal = demo_run.outcome.resumed.ready, demo_run.outcome.journal
    assert ready.resumed
    assert (ready.num_tokens, ready.text_chars) == (journal.num_tokens, journal.text_chars)
    assert 0 < demo_run.outcome.killed.copied.num_stored <= ready.num_computed
    assert ready.num_computed < journal.num_tokens


def test_it_compares_fifty_tokens_and_asks_three_questions(demo_run: DemoRun) -> None:
    assert demo_run.outcome.continuation.num_tokens == 50
    assert demo_run.outcome.continuation.num_near_ties == 0
    assert demo_run.outcome.continuation.first_difference is None
    assert len({token.token_id for token in demo_run.outcome.resumed.written}) > 5
    assert len(demo_run.outcome.resumed.answers) == 3


def test_the_journal_holds_the_text_the_tokens_and_the_turns(demo_run: DemoRun) -> None:
    with Journal.open(demo_run.settings.journal(READER_STORE)) as journal:
        fed = "".join(record.text for record in journal.scan() if isinstance(record, Fed))
        assert journal.state.has_turns
    assert fed == TEXT


def compare_again(demo_run: DemoRun) -> None:
    """Let the undisturbed run go on from the copy once more."""
    resumed = demo_run.outcome.resumed
    undisturbed = Undisturbed(demo_run.settings, Output(as_json=True))
    undisturbed.compare(resumed.written, resumed.compared_at)


def test_a_copy_with_other_text_fails(demo_run: DemoRun) -> None:
    demo_run.renew_copy()
    with Journal.open(demo_run.settings.journal(COPY_STORE)) as journal:
        journal.append(Fed(" ", len(journal.state.tail) + 1, ()))
    with pytest.raises(CheckFailed, match="the two streams differ from token"):
        compare_again(demo_run)


def test_a_copy_with_other_kv_fails(demo_run: DemoRun) -> None:
    store = demo_run.renew_copy()
    with open_existing(blocks_path(store)) as tier:
        [(session, keys)] = tier.manifests().items()
        tier.set_manifest(session, [])
        for key in keys:
            block = np.empty(tier.spec.block_bytes, dtype=np.uint8)
            assert tier.read(key, block)
            tier.delete([key])
            tier.write([(key, (block.view(np.float32) * 1.5).view(np.uint8))])
        tier.set_manifest(session, keys)
    with pytest.raises(CheckFailed, match="of 50 differs"):
        compare_again(demo_run)


def test_a_text_that_is_no_more_than_a_few_windows_is_refused(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "short.txt"
    path.write_text("Too short.")
    ran = run("demo", path)
    assert ran.code == 2
    assert "10 characters are not many times a window of 508 tokens" in ran.err
    assert "at least 16,256 characters" in ran.err


def test_a_bad_option_found_by_the_process_is_one_line_and_its_status(
    run: Run, tmp_path: Path
) -> None:
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    ran = run("demo", path, "--model", str(tmp_path / "nothing"), "--window", 128)
    assert ran.code == 3
    assert ran.err.startswith("error: model=")
    assert run("demo", path, "--seconds", 0).code == 2


def demo_process(model: Path, tmp_path: Path, *more: str) -> "subprocess.Popen[str]":
    """The demo as a process of its own, with an own temporary directory."""
    path, directory = tmp_path / "text.txt", tmp_path / "tmp"
    path.write_text(TEXT)
    directory.mkdir()
    command = [sys.executable, "-m", "streamkv", "demo", str(path), "--window", "128"]
    return subprocess.Popen(
        [*command, "--model", str(model), *more],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"TMPDIR": str(directory)},
    )


def test_as_a_command_it_prints_one_line_of_json_and_leaves_nothing(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    with demo_process(tiny_model_dir, tmp_path, "--json", "--seconds", "100000") as process:
        out, _ = process.communicate()
    assert process.returncode == 0
    [line] = out.splitlines()
    summary = json.loads(line)
    assert summary["ok"] is True
    assert summary["continuation"]["num_tokens"] == 50
    assert summary["text_chars"] == summary["text_chars_available"]
    assert list((tmp_path / "tmp").iterdir()) == []


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_interrupted_it_ends_its_process_and_leaves_nothing(
    tiny_model_dir: Path, tmp_path: Path, number: signal.Signals, code: int
) -> None:
    with demo_process(tiny_model_dir, tmp_path) as process:
        assert process.stdout is not None
        said = ""
        while "A process (id " not in said:
            said = process.stdout.readline()
        child = int(said.partition("(id ")[2].partition(")")[0])
        process.send_signal(number)
        process.stdout.read()
    assert process.returncode == code
    with pytest.raises(ProcessLookupError):
        os.kill(child, 0)
    assert list((tmp_path / "tmp").iterdir()) == []
