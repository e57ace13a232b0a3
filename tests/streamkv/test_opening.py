"""Opening sessions: what is refused, and that a refusal leaves nothing behind."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest

from streamkv import Engine, EngineConfig
from streamkv.errors import (
    ConfigError,
    InputError,
    JournalError,
    SessionError,
)
from streamkv.journal import Journal
from streamkv.journal_records import SessionHeader
from streamkv.store import journal_path
from streamkv.tiers.faults import inject

SMALL = EngineConfig(
    window_size=128, prefill_chunk=64, cpu_bytes="1MiB", ssd_bytes="16MiB", compile="off"
)
NOTE = "You keep a diary."


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("store")


@pytest.fixture(scope="module")
def engine(tiny_model_dir: Path, store: Path) -> Iterator[Engine]:
    with Engine(str(tiny_model_dir), dataclasses.replace(SMALL, store=str(store))) as engine:
        yield engine


def fail_on_disk() -> None:
    raise OSError(28, "No space left on device")


def test_a_session_belongs_to_its_first_system_prompt(engine: Engine) -> None:
    engine.session("prompted", system=NOTE).close()
    for system in (NOTE, None):
        engine.session("prompted", system=system).close()
    for other in (NOTE + " Daily.", ""):
        with pytest.raises(SessionError, match="created with another system prompt"):
            engine.session("prompted", system=other)
    engine.session("plain").close()
    with pytest.raises(SessionError, match="another system prompt"):
        engine.session("plain", system=NOTE)
    with engine.session("plain") as session:
        assert session.num_tokens == 0


def test_a_system_prompt_is_kept_whole_as_sink_tokens(engine: Engine) -> None:
    with engine.session("sinks", system=NOTE) as session:
        num_tokens = session.num_tokens
        assert num_tokens > 4
        assert session.stats().num_sink_tokens == num_tokens
        session.feed("The dog sleeps. " * 60).run()
        assert session.stats().num_sink_tokens == num_tokens


def test_a_system_prompt_that_leaves_no_room_for_the_window_is_refused(engine: Engine) -> None:
    with pytest.raises(ConfigError, match=r"system='\d+ tokens'.*trained length 4096"):
        engine.session("too long", system="word " * 5000)
    assert "too long" not in engine.session_names()


def test_a_session_of_other_weights_is_refused(engine: Engine, store: Path) -> None:
    header = SessionHeader("other", "00" * 16, 400, 128, 4, "window", "cache", "00" * 16, 0.0)
    Journal.create(journal_path(store, "foreign"), header).close()
    with pytest.raises(SessionError, match="belongs to model 'other' with other weights"):
        engine.session("foreign")
    Journal.open(journal_path(store, "foreign")).close()


def test_a_session_that_could_not_begin_begins_the_next_time(engine: Engine) -> None:
    """The disk is full just when the system prompt is to be written."""
    before = engine.usage()["gpu"].num_blocks
    with inject("journal.write", fail_on_disk), pytest.raises(JournalError):
        engine.session("late", system=NOTE)
    with engine.session("late", system=NOTE) as session:
        expected = engine.session("in time", system=NOTE)
        assert session.num_tokens == expected.num_tokens > 4
        expected.delete()
    assert engine.usage()["gpu"].num_blocks == before


def test_sessions_that_were_refused_take_no_room(engine: Engine) -> None:
    for number in range(50):
        with pytest.raises(SessionError):
            engine.session("plain", system=NOTE)
        with pytest.raises(InputError):
            engine.session("../plain")
        with inject("journal.write", fail_on_disk), pytest.raises(JournalError):
            engine.session(f"begins late {number}", system=NOTE)
    assert engine._opener._entrance._room.owners == set(engine._sessions)
