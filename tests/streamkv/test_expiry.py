"""Sessions that have slept for too long are deleted, and no others; by a clock that is set."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from recall_child import some_ids

from streamkv import Engine, EngineConfig
from streamkv.expiry import EVERY_S, Expiry
from streamkv.journal import Journal
from streamkv.store import journal_path

DAY = 86_400.0
NOW = 1_800_000_000.0


class Desk:
    """An engine with sessions of some ages, and an expiry with a clock of its own."""

    def __init__(self, engine: Engine, store: Path, otherwise_s: float | None) -> None:
        self.engine = engine
        self.store = store
        self.now_s = NOW
        self.expiry = Expiry(
            store, otherwise_s, engine._alone, engine._exchange.delete, lambda: self.now_s
        )

    def sleep(self, name: str, days: float, expire_after: float | str | None = None) -> None:
        with self.engine.session(name, expire_after=expire_after) as session:
            session.feed([some_ids(200)]).run()
        self.set_age(name, days)

    def set_age(self, name: str, days: float) -> None:
        written_s = self.now_s - days * DAY
        os.utime(journal_path(self.store, name), (written_s, written_s))


@pytest.fixture
def engine(tiny_model_dir: Path, tmp_path: Path) -> Iterator[Engine]:
    with Engine(str(tiny_model_dir), config(tmp_path)) as engine:
        yield engine


def config(store: Path, **others: object) -> EngineConfig:
    given = {"window_size": 128, "ssd_bytes": "64MiB", "compile": "off"} | others
    return EngineConfig(store=str(store), **given)  # type: ignore[arg-type]


def test_what_slept_longer_than_it_may_is_deleted_with_all_of_it(
    engine: Engine, tmp_path: Path
) -> None:
    desk = Desk(engine, tmp_path, 30 * DAY)
    desk.sleep("old", 31)
    desk.sleep("young", 29)
    desk.sleep("short-lived", 2, expire_after="1d")
    desk.sleep("long-lived", 31, expire_after="40d")
    desk.sleep("kept", 3000, expire_after="never")
    assert sorted(desk.expiry.look()) == ["old", "short-lived"]
    assert engine.session_names() == ["kept", "long-lived", "young"]
    for name in engine.session_names():
        engine.session(name).delete()
    assert engine.usage()["ssd"].num_blocks == 0, "blocks of those that expired are gone, too"


def test_without_a_time_nothing_expires_but_what_says_so(engine: Engine, tmp_path: Path) -> None:
    desk = Desk(engine, tmp_path, None)
    desk.sleep("old", 5000)
    desk.sleep("short-lived", 2, expire_after=DAY)
    assert desk.expiry.look() == ["short-lived"]


def test_an_open_session_is_never_deleted(engine: Engine, tmp_path: Path) -> None:
    desk = Desk(engine, tmp_path, DAY)
    desk.sleep("old", 9)
    session = engine.session("old")
    assert desk.expiry.expire() == []
    assert desk.expiry.expire(older_than_s=60.0) == []
    session.feed([some_ids(10)]).run()
    session.close()
    desk.set_age("old", 0.5)
    assert desk.expiry.expire() == [], "it was awake meanwhile"
    desk.set_age("old", 1.5)
    assert desk.expiry.expire() == ["old"]


def test_it_is_looked_for_at_most_once_an_hour(engine: Engine, tmp_path: Path) -> None:
    desk = Desk(engine, tmp_path, DAY)
    assert desk.expiry.look() == []
    desk.sleep("old", 9)
    desk.now_s += EVERY_S - 1
    assert desk.expiry.look() == []
    desk.now_s += 1
    assert desk.expiry.look() == ["old"]


def test_a_clock_that_is_set_back_deletes_nothing_and_ends_nothing(
    engine: Engine, tmp_path: Path
) -> None:
    desk = Desk(engine, tmp_path, DAY)
    desk.sleep("young", 0.5)
    desk.now_s -= 1000 * DAY
    assert desk.expiry.look() == []
    desk.sleep("old", 9)
    desk.now_s += EVERY_S
    assert desk.expiry.look() == ["old"]


def test_a_session_that_wakes_while_it_is_looked_at_stays(engine: Engine, tmp_path: Path) -> None:
    desk = Desk(engine, tmp_path, DAY)
    desk.sleep("old", 9)

    @contextmanager
    def woken(name: str) -> Iterator[bool]:
        os.utime(journal_path(tmp_path, name), (desk.now_s, desk.now_s))
        yield True

    deleted: list[str] = []

    def delete(name: str, journal: Journal) -> None:
        deleted.append(name)

    assert Expiry(tmp_path, DAY, woken, delete, lambda: desk.now_s).look() == []
    assert deleted == []


def test_blocks_of_the_tenant_that_others_use_stay(engine: Engine, tmp_path: Path) -> None:
    desk = Desk(engine, tmp_path, DAY)
    for name in ("old", "young"):
        with engine.session(name, tenant="acme") as session:
            session.feed([some_ids(200)]).run()
        desk.set_age(name, 9 if name == "old" else 0)
    assert desk.expiry.look() == ["old"]
    stats = engine.session("young").stats()
    assert stats.num_computed == stats.num_tokens - 1


def test_a_damaged_journal_is_left_and_said(
    engine: Engine, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    desk = Desk(engine, tmp_path, DAY)
    desk.sleep("old", 9)
    desk.sleep("damaged", 9)
    journal_path(tmp_path, "damaged").write_bytes(b"nonsense")
    desk.set_age("damaged", 9)
    assert desk.expiry.look() == ["old"]
    assert "'damaged' is not looked at" in caplog.text
    assert journal_path(tmp_path, "damaged").exists()


def test_an_engine_deletes_what_has_expired_when_it_opens(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    with Engine(str(tiny_model_dir), config(tmp_path)) as engine:
        for name in ("old", "young"):
            engine.session(name).feed([some_ids(200)]).run()
    os.utime(journal_path(tmp_path, "old"), (NOW - 2000 * DAY,) * 2)
    with Engine(str(tiny_model_dir), config(tmp_path)) as engine:
        assert engine.session_names() == ["old", "young"]
    with Engine(str(tiny_model_dir), config(tmp_path, expire_after="600d")) as engine:
        assert engine.session_names() == ["young"]
        os.utime(journal_path(tmp_path, "young"), (NOW - 2000 * DAY,) * 2)
        assert engine.expire("900d") == ["young"]
        assert engine.session_names() == []
