"""A session told from its journal alone, beside whoever has it."""

import os
from pathlib import Path

import pytest
from small_tiers import new_journal

from streamkv.cli.session_view import SessionView, file_owner, view_session, view_sessions
from streamkv.journal_records import Checkpoint, Fed, Given, GivenKind
from streamkv.store import journal_path


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "sessions").mkdir()
    return journal_path(tmp_path, "diary")


def test_a_sleeping_session_is_told_from_its_journal(path: Path, tmp_path: Path) -> None:
    with new_journal(path) as journal:
        journal.append(Given(GivenKind.SYSTEM, (1, 2)))
        journal.append(Fed("The dog", 3, (7, 8, 9)))
        journal.append(Checkpoint(4, b"k" * 16))
    status = path.stat()
    assert view_session(tmp_path, "diary") == SessionView(
        name="diary",
        journal=path,
        journal_bytes=status.st_size,
        changed_s=status.st_mtime,
        owner=None,
        model="tiny",
        num_tokens=5,
        text_chars=7,
        window_size=8,
        num_sink_tokens=2,
        checkpoint_token_index=4,
        created_s=0.0,
    )


def test_a_session_that_is_open_names_its_process(path: Path, tmp_path: Path) -> None:
    with new_journal(path) as journal:
        journal.append(Given(GivenKind.CALLER, (1,)))
        view = view_session(tmp_path, "diary")
        assert (view.owner, view.num_tokens, view.checkpoint_token_index) == (os.getpid(), 1, 0)
    assert file_owner(path) is None
    assert file_owner(tmp_path / "nothing") is None


def test_damage_is_told_and_hides_no_other_session(path: Path, tmp_path: Path) -> None:
    new_journal(path).close()
    with new_journal(journal_path(tmp_path, "torn")) as journal:
        journal.append(Given(GivenKind.CALLER, (1, 2, 3)))
    whole = journal_path(tmp_path, "torn").read_bytes()
    journal_path(tmp_path, "torn").write_bytes(whole[:-2])
    journal_path(tmp_path, "broken").write_bytes(b"no journal at all")
    views = {view.name: view for view in view_sessions(tmp_path)}
    assert list(views) == ["broken", "diary", "torn"]
    assert "not a journal" in views["broken"].problem
    assert views["broken"].journal_bytes == 17
    assert [views[name].problem for name in ("diary", "torn")] == ["", ""]
    assert (views["torn"].num_tokens, views["torn"].torn_bytes > 0) == (0, True)


def test_a_session_that_is_not_there_is_an_error_of_its_own(path: Path, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        view_session(tmp_path, "nobody")
