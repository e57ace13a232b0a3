"""A copy of a session goes on like the original, whatever the original does meanwhile."""

import subprocess
import sys
from pathlib import Path

import crash_child
import pytest
from crash_child import TEXT, config, greedy

from streamkv import Engine, EngineConfig
from streamkv.errors import InputError, JournalError, StoreError, StoreFormatError
from streamkv.journal import Journal
from streamkv.session_copy import SessionCopy, copy_session
from streamkv.store import blocks_path, journal_path
from streamkv.tiers.spec import KVSpec
from streamkv.tiers.ssd import SsdReader, SsdTier, StoreIdentity


def copy_beside_a_feed(model: Path, store: Path, target: Path, retain: str) -> SessionCopy:
    """Copy the session of a child that is feeding, let it feed on, and kill it."""
    command = [sys.executable, crash_child.__file__, str(model), str(store), retain, "feed"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        try:
            said = [int(child.stdout.readline()) for _ in range(20)]
            copied = copy_session(store, target, "victim")
            said += [int(child.stdout.readline()) for _ in range(20)]
        finally:
            child.kill()
    assert said[19] < copied.num_tokens
    assert said[-1] > said[19]
    return copied


def undisturbed(model: Path, text: str) -> list[int | None]:
    """Tokens generated after a text by an engine without a store."""
    calm = EngineConfig(window_size=128, prefill_chunk=64, cpu_bytes=0)
    with Engine(str(model), calm) as engine:
        session = engine.session("calm", system="You keep a diary.")
        session.feed(text).run()
        return [delta.token_id for delta in session.generate(greedy(40))]


@pytest.mark.parametrize("retain", ["all", "window", "none"])
def test_a_copy_taken_beside_a_feed_goes_on_undisturbed(
    tiny_model_dir: Path, tmp_path: Path, retain: str
) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    copied = copy_beside_a_feed(tiny_model_dir, source, target, retain)
    with Engine(str(tiny_model_dir), config(str(target), retain)) as engine:
        session = engine.session("victim")
        stats = session.stats()
        assert session.resumed
        assert (stats.num_tokens, stats.text_chars) == (copied.num_tokens, copied.text_chars)
        assert stats.num_computed == copied.num_stored
        assert (copied.num_blocks > 0) == (retain != "none")
        session.feed(TEXT[copied.text_chars : 9000]).run()
        found = [delta.token_id for delta in session.generate(greedy(40))]
    assert found == undisturbed(tiny_model_dir, TEXT[:9000])


def make_store(model: Path, store: Path, num_chars: int = 3000) -> None:
    """A store with one sleeping session, `victim`."""
    with Engine(str(model), config(str(store), "all")) as engine:
        engine.session("victim", system="You keep a diary.").feed(TEXT[:num_chars]).run()


def test_a_copy_of_a_sleeping_session_computes_nothing_anew(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    make_store(tiny_model_dir, tmp_path / "source")
    copied = copy_session(tmp_path / "source", tmp_path / "target", "victim")
    with Engine(str(tiny_model_dir), config(str(tmp_path / "target"), "all")) as engine:
        stats = engine.session("victim").stats()
        assert stats.num_computed == stats.num_tokens - 1
        assert engine.counters()["promotions"] == copied.num_blocks


def test_a_copy_holds_the_blocks_of_its_checkpoint_and_keeps_them(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    make_store(tiny_model_dir, tmp_path / "source")
    copied = copy_session(tmp_path / "source", tmp_path / "target", "victim")
    with SsdReader(blocks_path(tmp_path / "target")) as reader:
        entries = list(reader.entries())
        spec = reader.format.spec
    assert len(entries) == copied.num_blocks
    assert copied.num_bytes == copied.num_blocks * spec.block_bytes
    assert all(entry.sessions == ("victim",) for entry in entries)


def test_a_torn_record_at_the_end_is_not_copied(tiny_model_dir: Path, tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    make_store(tiny_model_dir, source)
    path = journal_path(source, "victim")
    whole = path.read_bytes()
    path.write_bytes(whole + b"\x20\x00\x00\x00\x04half a rec")
    copy_session(source, target, "victim")
    assert journal_path(target, "victim").read_bytes() == whole
    assert path.read_bytes() != whole, "the source is only read"
    with Journal.open(journal_path(target, "victim")) as journal:
        assert journal.torn_bytes == 0


def test_sessions_of_one_model_may_be_gathered_in_one_store(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    make_store(tiny_model_dir, tmp_path / "source")
    with Engine(str(tiny_model_dir), config(str(tmp_path / "target"), "all")) as engine:
        engine.session("other").feed(TEXT[:2000]).run()
    copy_session(tmp_path / "source", tmp_path / "target", "victim")
    with Engine(str(tiny_model_dir), config(str(tmp_path / "target"), "all")) as engine:
        assert engine.session_names() == ["other", "victim"]
        assert engine.session("other").stats().num_computed > 0
        assert engine.session("victim").stats().num_computed > 0


def test_what_cannot_be_copied_is_refused_and_leaves_no_session(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    make_store(tiny_model_dir, source)
    with pytest.raises(InputError, match="not a valid session name"):
        copy_session(source, target, "../victim")
    with pytest.raises(JournalError, match="no such journal"):
        copy_session(source, target, "nobody")
    with pytest.raises(StoreError, match="holds no store"):
        copy_session(tmp_path / "empty", target, "victim")
    assert not target.exists()
    copy_session(source, target, "victim")
    with pytest.raises(JournalError, match="exists already"):
        copy_session(source, target, "victim")


def test_a_session_whose_blocks_are_gone_is_refused(tiny_model_dir: Path, tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    make_store(tiny_model_dir, source)
    path = blocks_path(source) / "data.mdb"
    data = bytearray(path.read_bytes())
    for place in range(len(data) // 2, len(data), 4096):
        data[place + 100] ^= 0xFF
    path.write_bytes(data)
    with pytest.raises(StoreError, match="can be read"):
        copy_session(source, target, "victim")
    assert not journal_path(target, "victim").exists()


def test_a_store_of_another_model_is_no_target(tiny_model_dir: Path, tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    make_store(tiny_model_dir, source)
    spec = KVSpec(num_layers=3, num_kv_heads=2, head_dim=32, dtype="bfloat16")
    identity = StoreIdentity("another", b"w" * 16)
    SsdTier(blocks_path(target), spec, identity, limit_bytes=1 << 22, codec="raw").close()
    with pytest.raises(StoreFormatError, match="another"):
        copy_session(source, target, "victim")
    assert not journal_path(target, "victim").exists()
