"""Sessions sleep in memory at once, and on the disk when the disk comes to it."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
from sleepy import begin_to_leave, greedy, open_asleep, options, put_to_sleep
from stream_oracle import assert_goes_on_like, check_integrity, ids_of

from streamkv import Engine, Session
from streamkv.step_loop import Call
from streamkv.tiers.faults import inject

IDS = [5 + 7 * index % 200 for index in range(333)]


@contextmanager
def busy_disk() -> Iterator[Callable[[], None]]:
    """Nothing is committed to the store before the end, or before what it yields is called."""
    goes_on = threading.Event()
    with inject("ssd.commit", goes_on.wait):
        try:
            yield goes_on.set
        finally:
            goes_on.set()


@contextmanager
def slow_disk() -> Iterator[None]:
    """Each commit takes far longer than a step."""
    with inject("ssd.commit", lambda: time.sleep(0.03)):
        yield


def computed_to(session: Session) -> int:
    """How far the newest checkpoint of the journal goes."""
    assert session._live.journal is not None
    newest = session._live.journal.state.last_checkpoint
    return newest.token_index if newest is not None else 0


@pytest.fixture
def engine(tiny_model_dir: Path, tmp_path: Path) -> Iterator[Engine]:
    config = options("both", tmp_path, max_sessions=4, checkpoint_tokens=10**9)
    with Engine(str(tiny_model_dir), config) as engine:
        yield engine
        engine._tiers.flush()
        check_integrity(engine)


def test_a_busy_disk_keeps_nobody_awake_or_asleep(engine: Engine) -> None:
    with engine.session("awake") as awake:
        awake.feed([IDS]).run()
        expected = greedy(awake)
    with busy_disk():
        session = open_asleep(engine, "first", IDS)
        assert engine.usage()["gpu"].num_blocks == 0
        assert greedy(session) == expected
        assert computed_to(session) == 0


def test_all_who_sleep_again_and_again_go_on_while_the_disk_is_slow(engine: Engine) -> None:
    with slow_disk():
        sessions = [open_asleep(engine, f"session {number}", IDS) for number in range(6)]
        assert engine.usage()["gpu"].num_blocks == 0
        for _ in range(2):
            for session in sessions:
                stream = ids_of(session)
                assert_goes_on_like(session, engine, stream)
            put_to_sleep(engine, *sessions)


def test_it_is_journaled_once_it_is_stored_though_nothing_else_happens(engine: Engine) -> None:
    session = open_asleep(engine, "first", IDS)
    while engine._loop._sleepers._unstored:  # type: ignore[union-attr]
        threading.Event().wait(0.01)
    assert computed_to(session) == 320
    assert session.stats().state == "asleep"


@pytest.mark.parametrize("what", ["close", "delete", "rewind", "keep", "fork", "feed"])
def test_what_is_done_to_it_before_it_is_stored(engine: Engine, what: str) -> None:
    session, stream = engine.session("first"), IDS
    session.feed([IDS]).run()
    with busy_disk() as go_on:
        put_to_sleep(engine, session)
        threading.Timer(0.3, go_on).start()
        match what:
            case "close":
                session.close()
                session = engine.session("first")
                assert session._live.sequence.num_computed == len(stream) - 1
                assert engine.counters()["absent"] == 0
            case "delete":
                session.delete()
                assert engine.session_names() == []
                engine._tiers.flush()
                assert engine.usage()["ssd"].num_blocks == 0
                return
            case "rewind":
                session.rewind(200)
                stream = stream[:200]
            case "keep":
                session.keep(" Keep this.")
                stream = ids_of(session)
                assert greedy(session, 5) and ids_of(session)[: len(stream)] == stream
                return
            case "fork":
                fork = session.fork("second")
                assert_goes_on_like(fork, engine, stream)
            case "feed":
                session.feed([IDS]).run()
                stream = stream + IDS
        assert_goes_on_like(session, engine, stream)


def test_the_newest_of_many_sleeps_is_what_a_resume_finds(engine: Engine) -> None:
    """Each sleep takes the place of the one before, which the disk had not come to."""
    session = engine.session("first")
    with slow_disk():
        for _ in range(5):
            session.feed([IDS[:70]]).run()
            put_to_sleep(engine, session)
    while computed_to(session) < 320:
        threading.Event().wait(0.01)
    assert computed_to(session) == 320
    stored = engine._store.blocks.manifest("first")
    asleep = session._live.sleeper.asleep
    assert asleep is not None and stored == [key for _, key in asleep.all_blocks]


def test_a_checkpoint_that_waits_gives_way_to_one_that_is_due(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    config = options("both", tmp_path, max_sessions=4, checkpoint_tokens=64)
    with Engine(str(tiny_model_dir), config) as engine:
        sessions = [engine.session(name) for name in ("first", "second")]
        for session in sessions:
            session.feed([IDS]).run()
        engine._tiers.flush()
        begun = threading.Event()
        with busy_disk():
            # Both are taken into memory before the disk begins with one of them.
            with inject("worker", begun.wait):
                for session in sessions:
                    leave = partial(begin_to_leave, engine, session._live.sequence)
                    engine._loop.submit(Call(leave)).result()
                while not all(map(is_leaving, sessions)):
                    time.sleep(0.001)
                begun.set()
                while any(session.stats().state != "asleep" for session in sessions):
                    time.sleep(0.001)
            [waits] = [each for each in sessions if is_waiting(engine, each)]
            before = computed_to(waits)
            # Little enough for the worker's queue, which the engine would else wait for.
            waits.feed([IDS[:70]]).run()
            assert computed_to(waits) == before
            assert not is_waiting(engine, waits)
        engine._tiers.flush()
        waits.feed([IDS[:1]]).run()
        assert computed_to(waits) == 384
        assert_goes_on_like(waits, engine, IDS + IDS[:70] + IDS[:1])


def is_leaving(session: Session) -> bool:
    """Whether the tiers have been asked to keep its blocks."""
    leaving = session._live.sleeper._leaving
    return leaving is not None and leaving[0] is not None


def is_waiting(engine: Engine, session: Session) -> bool:
    """Whether the tiers are to store it when there is leisure."""
    later = list(engine._tiers._writer._later)
    return any(getattr(job, "session", None) == session.name for job in later)
