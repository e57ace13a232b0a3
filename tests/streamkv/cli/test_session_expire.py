"""Listing when sessions expire, and deleting those that have slept for long."""

import os
import time
from pathlib import Path

import pytest
from cli_runner import Run

from streamkv import Engine, EngineConfig
from streamkv.store import journal_path

DAY = 86_400.0


@pytest.fixture
def ages(tiny_model_dir: Path, store: Path) -> None:
    """Sessions that have slept for 40 and 2 days, and one of 40 that is kept for ever."""
    config = EngineConfig(window_size=128, store=str(store))
    with Engine(str(tiny_model_dir), config) as engine:
        for name, days, after in (("old", 40, None), ("young", 2, "30d"), ("kept", 40, "never")):
            with engine.session(name, expire_after=after) as session:
                session.feed("The dog sleeps on in the sun.").run()
            written_s = time.time() - days * DAY
            os.utime(journal_path(store, name), (written_s, written_s))


@pytest.mark.usefixtures("ages")
def test_it_is_shown_when_each_expires(run: Run, where: list[str]) -> None:
    rows = [line.split() for line in run("session", "ls", *where).out.splitlines()]
    assert rows[0][-1] == "expires"
    assert [row[-1] for row in rows[1:3]] == ["-", "-"]
    assert rows[3][-5:-3] == ["in", "671"] or rows[3][-5:-3] == ["in", "672"]
    listed = run("session", "ls", *where, "--expire-after", "90d", "--json").json["sessions"]
    expiry = {view["name"]: view["expires_s"] for view in listed}
    assert expiry["kept"] is None
    assert expiry["old"] == pytest.approx(time.time() + 50 * DAY, abs=1000)
    assert expiry["young"] == pytest.approx(time.time() + 28 * DAY, abs=1000)
    assert "never" in run("session", "show", "kept", *where).out


@pytest.mark.usefixtures("ages")
def test_what_has_slept_for_long_is_deleted_when_it_is_said(
    run: Run, small: list[str], where: list[str]
) -> None:
    expire = ("session", "expire", "--older-than", "30d", *small)
    ran = run(*expire, "--dry-run", "--json")
    assert ran.json == {"due": ["old"], "deleted": []}
    refused = run(*expire)
    assert refused.code == 2 and "Add --yes." in refused.err
    assert run(*expire, "--yes", "--json").json == {"due": ["old"], "deleted": ["old"]}
    assert "No session has slept" in run(*expire).out
    names = [view["name"] for view in run("session", "ls", *where, "--json").json["sessions"]]
    assert names == ["kept", "young"]
    assert run("session", "expire", "--older-than", "soon", *small).code == 2


@pytest.mark.usefixtures("ages")
def test_quotas_are_options_of_every_command_with_an_engine(
    run: Run, small: list[str], tmp_path: Path
) -> None:
    book = tmp_path / "book.txt"
    book.write_text("The dog sleeps on in the sun. " * 30)
    refused = run("session", "feed", "new", book, *small, "--max-stored-sessions", "3")
    assert refused.code == 2 and "'old' has slept longest" in refused.err
    refused = run("session", "feed", "new", book, *small, "--session-tokens", "50")
    assert refused.code == 2 and "--session-tokens=50" in refused.err
    ran = run("session", "feed", "young", book, *small, "--expire-after", "39d", "--json")
    assert ran.code == 0
    names = [view["name"] for view in run("session", "ls", *small[:4], "--json").json["sessions"]]
    assert names == ["kept", "new", "young"], "the engine deleted what had expired"
