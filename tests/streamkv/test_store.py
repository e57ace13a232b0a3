"""The directory that outlives an engine: made, refused, listed."""

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from streamkv import Engine
from streamkv.config import EngineConfig
from streamkv.errors import ModelError, StoreError, StoreFormatError, StoreLockedError
from streamkv.store import Store, blocks_path, journal_path, session_names
from streamkv.tiers.spec import KVSpec

SPEC = KVSpec(num_layers=1, num_kv_heads=1, head_dim=2, dtype="float32", block_size=4)


def model(name: str = "tiny", fingerprint: bytes = b"w" * 16) -> Any:
    """What a store asks a model for."""
    return SimpleNamespace(spec=SPEC, name=name, fingerprint=fingerprint)


def config(path: Path | str | None) -> EngineConfig:
    return EngineConfig(store=None if path is None else str(path), ssd_bytes="4MiB")


def test_no_path_is_no_store() -> None:
    assert Store.open(config(None), model()) is None


def test_it_makes_missing_directories_for_its_owner_only(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b"
    store = Store.open(config(path), model())
    assert store is not None
    store.close()
    assert sorted(entry.name for entry in path.iterdir()) == ["blocks", "sessions"]
    for directory in (blocks_path(path), path / "sessions"):
        assert directory.stat().st_mode & 0o777 == 0o700


def test_a_path_may_begin_with_the_home_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    store = Store.open(config("~/kept"), model())
    assert store is not None
    store.close()
    assert store.path == tmp_path / "kept"
    assert blocks_path(tmp_path / "kept").is_dir()


def test_what_cannot_hold_a_store_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("mine")
    with pytest.raises(StoreError, match=r"store='.*file': cannot be made \(Not a directory\)"):
        Store.open(config(path), model())
    assert path.read_text() == "mine"


def test_one_process_opens_it_once(tmp_path: Path) -> None:
    store = Store.open(config(tmp_path), model())
    assert store is not None
    with pytest.raises(StoreLockedError):
        Store.open(config(tmp_path), model())
    store.close()
    again = Store.open(config(tmp_path), model())
    assert again is not None
    again.close()


def test_a_store_in_use_is_refused_before_a_model_is_loaded(tmp_path: Path) -> None:
    nothing_yet = config(tmp_path / "new")
    Store.require_free(nothing_yet)
    assert not (tmp_path / "new").exists()
    store = Store.open(config(tmp_path), model())
    assert store is not None
    with pytest.raises(StoreLockedError, match=f"is open in process {os.getpid()} .* --store"):
        Engine("/no/such/model", config(tmp_path))
    store.close()
    Store.require_free(config(tmp_path))
    with pytest.raises(ModelError):
        Engine("/no/such/model", config(tmp_path))


def test_other_weights_of_the_same_name_are_refused(tmp_path: Path) -> None:
    store = Store.open(config(tmp_path), model())
    assert store is not None
    store.close()
    with pytest.raises(StoreFormatError):
        Store.open(config(tmp_path), model(fingerprint=b"x" * 16))


def test_sessions_are_listed_sorted_and_other_files_are_not(tmp_path: Path) -> None:
    assert session_names(tmp_path) == []
    store = Store.open(config(tmp_path), model())
    assert store is not None
    names = ["zoo", "a b", "my.journal", "Ünder"]
    for name in names:
        assert store.journal_path(name) == journal_path(tmp_path, name)
        store.journal_path(name).touch()
    (tmp_path / "sessions" / "note.txt").touch()
    assert store.session_names() == session_names(tmp_path) == ["a b", "my.journal", "zoo", "Ünder"]
    store.close()
