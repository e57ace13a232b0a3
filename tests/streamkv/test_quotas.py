"""How much a session may have, and how many sessions a store: refused whole, with a way out."""

import os
from pathlib import Path

import pytest
from recall_child import some_ids

from streamkv import Engine, EngineConfig, SamplingParams
from streamkv.config import parse_duration
from streamkv.errors import ConfigError, QuotaError, SessionError, StreamKVError
from streamkv.journal import read_header
from streamkv.quotas import Quotas
from streamkv.store import journal_path

TEXT = "The dog sleeps on in the sun, and the fox jumps over it once more. "


def engine_on(model: Path, store: Path | None, **others: object) -> Engine:
    given = {"window_size": 128, "prefill_chunk": 64, "ssd_bytes": "64MiB", "compile": "off"}
    config = EngineConfig(store=str(store) if store else None, **(given | others))  # type: ignore[arg-type]
    return Engine(str(model), config)


def journal_bytes(store: Path, name: str) -> bytes:
    return journal_path(store, name).read_bytes()


@pytest.mark.parametrize("with_store", [True, False])
def test_what_would_be_more_tokens_than_allowed_is_refused_whole(
    tiny_model_dir: Path, tmp_path: Path, with_store: bool
) -> None:
    store = tmp_path if with_store else None
    with engine_on(tiny_model_dir, store, session_tokens=200) as engine:
        session = engine.session("one")
        session.feed([some_ids(150)]).run()
        before = journal_bytes(tmp_path, "one") if with_store else b""
        with pytest.raises(
            QuotaError, match=r"^session_tokens=200: .*'one' would have 201"
        ) as told:
            session.feed([some_ids(51)]).run()
        assert isinstance(told.value, StreamKVError) and "rewind" in told.value.remedy
        with pytest.raises(QuotaError):
            session.keep(TEXT * 20)
        with pytest.raises(QuotaError):
            session.say(TEXT * 20)
        assert session.num_tokens == 150
        if with_store:
            assert journal_bytes(tmp_path, "one") == before
        session.feed([some_ids(45)]).run()
        deltas = []
        with pytest.raises(QuotaError, match="would have 201 tokens"):
            for delta in session.generate(SamplingParams(max_tokens=20, ignore_eos=True)):
                deltas.append(delta.token_id)
        assert (len(deltas), session.num_tokens) == (5, 200)
        session.rewind(190)
        session.feed([some_ids(10)]).run()
        assert session.num_tokens == 200


def test_a_list_of_ids_has_room_whole_or_not_at_all(tiny_model_dir: Path, tmp_path: Path) -> None:
    with engine_on(tiny_model_dir, tmp_path, session_tokens=10_000) as engine:
        session = engine.session("one")
        for read in (session.feed, session.score, session.score_chunks):
            with pytest.raises(QuotaError):
                read([some_ids(10_001)]).run()
            assert session.num_tokens == 0
        session.feed([some_ids(10_000)]).run()
        assert session.num_tokens == 10_000


@pytest.mark.parametrize("size", [1, 3, 17, 400])
def test_text_that_was_accepted_always_has_room_for_its_tokens(
    tiny_model_dir: Path, tmp_path: Path, size: int
) -> None:
    """Also the text that is held back, however the input is cut."""
    with engine_on(tiny_model_dir, tmp_path, session_tokens=60) as engine:
        session = engine.session("one")
        pieces = [(TEXT * 6)[at : at + size] for at in range(0, len(TEXT) * 6, size)]
        with pytest.raises(QuotaError):
            session.feed(pieces).run()
        accepted = session.text_chars
        assert accepted < len(TEXT * 6) and accepted % size == 0
    with engine_on(tiny_model_dir, tmp_path, session_tokens=60) as engine:
        session = engine.session("one")
        assert session.text_chars == accepted
        session._live.intake.flush()
        whole = engine.count_tokens((TEXT * 6)[:accepted])
        assert session.num_tokens == whole <= 60
        assert engine.count_tokens((TEXT * 6)[: accepted + size]) > 60, "no more had room"


def test_a_quota_of_its_own_stays_with_a_session(tiny_model_dir: Path, tmp_path: Path) -> None:
    with engine_on(tiny_model_dir, tmp_path, session_tokens=100) as engine:
        with engine.session("large", session_tokens=300, expire_after="30d") as session:
            session.feed([some_ids(250)]).run()
            with session.fork("twin") as twin, pytest.raises(QuotaError):
                twin.feed([some_ids(60)]).run()
        header = read_header(journal_path(tmp_path, "large"))
        assert (header.session_tokens, header.expire_after_s) == (300, 30 * 86_400.0)
    with engine_on(tiny_model_dir, tmp_path) as engine:
        with pytest.raises(SessionError, match="created with another session_tokens"):
            engine.session("large", session_tokens=400)
        with pytest.raises(SessionError, match="created with another expire_after"):
            engine.session("large", expire_after="never")
        for name in ("large", "twin"):
            session = engine.session(name, session_tokens=300, expire_after=30 * 86_400)
            with pytest.raises(QuotaError, match="session_tokens=300"):
                session.feed([some_ids(51)]).run()


def test_a_system_prompt_beyond_the_quota_makes_no_session(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    with engine_on(tiny_model_dir, tmp_path, session_tokens=30) as engine:
        with pytest.raises(QuotaError, match="session_tokens=30"):
            engine.session("one", system=TEXT * 3)
        assert engine.session_names() == []
        engine.session("one")


def test_one_session_more_than_allowed_is_refused_and_the_oldest_named(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    with engine_on(tiny_model_dir, tmp_path, max_stored_sessions=3) as engine:
        for age, name in ((300, "middle"), (900, "oldest"), (9000, "open")):
            session = engine.session(name)
            session.feed(TEXT).run()
            if name != "open":
                session.close()
            os.utime(journal_path(tmp_path, name), (1_000_000 - age,) * 2)
        engine.export_session("middle", tmp_path / "file.skv")
        for make in (
            lambda: engine.session("more"),
            lambda: session.fork("more"),
            lambda: engine.import_session(tmp_path / "file.skv", "more"),
        ):
            with pytest.raises(QuotaError, match=r"max_stored_sessions=3.*'oldest' has slept"):
                make()
            assert engine.session_names() == ["middle", "oldest", "open"]
        engine.session("oldest").delete()
        engine.session("more")


def test_an_import_of_too_many_tokens_is_refused(tiny_model_dir: Path, tmp_path: Path) -> None:
    with engine_on(tiny_model_dir, tmp_path / "a") as engine:
        engine.session("one").feed([some_ids(300)]).run()
        engine.export_session("one", tmp_path / "one.skv")
    with engine_on(tiny_model_dir, tmp_path / "b", session_tokens=299) as engine:
        with pytest.raises(QuotaError, match="would have 300 tokens"):
            engine.import_session(tmp_path / "one.skv")
        assert engine.session_names() == []
        assert engine.usage()["ssd"].num_blocks == 0


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        (90, 90.0),
        (0.5, 0.5),
        ("30d", 2_592_000.0),
        ("1.5 h", 5400.0),
        ("90min", 5400.0),
        ("2w", 1_209_600.0),
    ],
)
def test_durations(value: float | str, seconds: float) -> None:
    assert parse_duration("expire_after", value) == seconds


@pytest.mark.parametrize("value", [0, -1, True, "", "30 parsecs", "d", "-3d", float("nan"), 1e12])
def test_what_is_no_duration_is_refused(value: float | str) -> None:
    with pytest.raises(ConfigError, match="not a duration"):
        parse_duration("expire_after", value)
    with pytest.raises(ConfigError, match=r"^expire_after="):
        EngineConfig(expire_after=value)


def test_bad_quotas_are_refused() -> None:
    for bad in (0, -1, 1.5, True):
        with pytest.raises(ConfigError):
            Quotas(session_tokens=bad)  # type: ignore[arg-type]
        with pytest.raises(ConfigError):
            EngineConfig(session_tokens=bad)  # type: ignore[arg-type]
        with pytest.raises(ConfigError):
            EngineConfig(max_stored_sessions=bad)  # type: ignore[arg-type]
    with pytest.raises(ConfigError):
        Quotas(expire_after="soon")
    assert Quotas(expire_after="never").expire_after_s == 0.0
