"""What belongs to no session any more is taken away when a store is opened."""

import fcntl
import os
from pathlib import Path

import numpy as np
import pytest

from streamkv import Engine, EngineConfig
from streamkv.errors import StoreError
from streamkv.store import blocks_path, delete_companions, digests_path, notes_path
from streamkv.store_cleaning import drop_superseded
from streamkv.tiers.faults import inject
from streamkv.tiers.keys import partial_key
from streamkv.tiers.spec import BlockKey
from streamkv.tiers.ssd import open_existing

KEYS = [BlockKey(bytes([2 * number]) * 16) for number in range(4)]


@pytest.fixture
def store(tiny_model_dir: Path, tmp_path: Path) -> Path:
    """A store with one sleeping session."""
    store = tmp_path / "store"
    with engine_on(tiny_model_dir, store) as engine, engine.session("kept") as session:
        session.feed("The dog sleeps on in the sun. " * 30).run()
    return store


def engine_on(model: Path, store: Path) -> Engine:
    return Engine(str(model), EngineConfig(window_size=128, store=str(store), ssd_bytes="64MiB"))


def put(store: Path, session: str, keys: list[BlockKey], locked: list[BlockKey]) -> None:
    with open_existing(blocks_path(store)) as tier:
        tier.write([(key, np.zeros(tier.spec.block_bytes, dtype=np.uint8)) for key in keys])
        tier.set_manifest(session, locked)


def test_blocks_that_were_kept_for_a_session_that_is_no_more_go(
    tiny_model_dir: Path, store: Path
) -> None:
    put(store, "gone", KEYS, KEYS)
    digests_path(store, "gone").write_bytes(b"digests")
    digests_path(store, "kept").write_bytes(b"digests")
    with engine_on(tiny_model_dir, store) as engine:
        tier = engine._store.blocks  # type: ignore[union-attr]
        assert not any(tier.contains(key) for key in KEYS)
        assert set(tier.manifests()) == {"kept"}
        assert not digests_path(store, "gone").exists()
        assert digests_path(store, "kept").exists()
        stats = engine.session("kept").stats()
        assert stats.num_computed == stats.num_tokens - 1, "of others nothing is touched"


def test_a_journal_that_was_never_finished_goes_unless_it_is_being_made(
    tiny_model_dir: Path, store: Path
) -> None:
    left, busy = (store / "sessions" / f".new-journal-{name}" for name in ("left", "busy"))
    left.write_bytes(b"half a fork")
    busy.write_bytes(b"half a fork")
    fd = os.open(busy, os.O_RDWR)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        engine_on(tiny_model_dir, store).close()
    finally:
        os.close(fd)
    assert (left.exists(), busy.exists()) == (False, True)


def test_open_blocks_that_no_resume_needs_are_dropped(store: Path) -> None:
    old, new = (partial_key("kept", KEYS[0], [number], b"") for number in (1, 2))
    put(store, "kept", [old, new, KEYS[1]], [new])
    with open_existing(blocks_path(store)) as tier:
        assert drop_superseded(tier) >= 1
        assert [tier.contains(key) for key in (old, new, KEYS[1])] == [False, True, True]
        assert drop_superseded(tier) == 0


def test_what_lies_beside_a_session_goes_with_it(tmp_path: Path) -> None:
    summary = tmp_path / "summaries" / "0f.jsonl"
    paths = [digests_path(tmp_path, "summary-0f"), notes_path(tmp_path, "summary-0f"), summary]
    other = digests_path(tmp_path, "0f")
    for path in (*paths, other):
        path.parent.mkdir(exist_ok=True)
        path.write_text("x")
    delete_companions(tmp_path, "summary-0f")
    assert [path.exists() for path in (*paths, other)] == [False, False, False, True]


def test_a_session_whose_blocks_cannot_be_deleted_is_still_there(
    tiny_model_dir: Path, store: Path
) -> None:
    def fail() -> None:
        raise OSError(5, "Input/output error")

    with engine_on(tiny_model_dir, store) as engine:
        session = engine.session("kept")
        num_tokens = session.num_tokens
        with inject("ssd.commit", fail), pytest.raises(StoreError, match="it is still there"):
            session.delete()
        assert engine.session_names() == ["kept"]
    with engine_on(tiny_model_dir, store) as engine:
        session = engine.session("kept")
        assert session.num_tokens == num_tokens
        session.delete()
        assert engine.session_names() == []
        assert engine.usage()["ssd"].num_blocks == 0
