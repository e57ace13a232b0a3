"""A fork has the past of its session, and nothing else in common with it."""

import dataclasses
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import crash_child
import pytest
from stream_oracle import (
    SEEDED,
    Stream,
    assert_goes_on_like,
    check_integrity,
    config,
    generated,
    ids_of,
)
from test_recovery import kill_after

from streamkv import Engine, EngineConfig
from streamkv.errors import EngineClosedError, InputError, JournalError, PoolFullError, SessionError
from streamkv.store import journal_path
from streamkv.tiers.faults import inject
from streamkv.tiers.spec import BlockKey


@pytest.fixture
def engine(tiny_model_dir: Path, tmp_path: Path) -> Iterator[Engine]:
    with Engine(str(tiny_model_dir), config(tmp_path / "store")) as engine:
        yield engine
        check_integrity(engine)


@pytest.mark.parametrize("num_tokens", [1, 2, 63, 64, 65, 66, 127, 128, 129, 400, 449, 450])
@pytest.mark.parametrize("has_store", [True, False], ids=["store", "memory"])
def test_both_go_on_as_if_the_other_did_not_exist(
    tiny_model_dir: Path, tmp_path: Path, has_store: bool, num_tokens: int
) -> None:
    options = config(tmp_path / "store" if has_store else None)
    ids = [5 + 7 * index % 200 for index in range(num_tokens)]
    with Engine(str(tiny_model_dir), options) as engine:
        session = engine.session("first")
        session.feed([ids]).run()
        fork = session.fork("second")
        assert (fork.name, fork.num_tokens, fork.resumed) == ("second", num_tokens, False)
        fork.feed([[9, 8, 7]]).run()
        session.feed([[6] * 70]).run()
        check_integrity(engine)
        assert_goes_on_like(fork, engine, [*ids, 9, 8, 7])
        assert_goes_on_like(session, engine, [*ids, *[6] * 70])
        check_integrity(engine)


def test_full_blocks_are_shared_and_the_open_block_is_not(engine: Engine) -> None:
    session = engine.session("first")
    session.feed([[5] * 200]).run()
    before = engine.usage()["gpu"].num_blocks
    fork = session.fork("second")
    assert engine.usage()["gpu"].num_blocks == before + 1
    assert fork.stats().num_blocks == session.stats().num_blocks == before


def test_text_that_is_held_back_is_part_of_the_past(engine: Engine) -> None:
    session = engine.session("first")
    session.feed("the do").run()
    fork = session.fork("second")
    assert fork.text_chars == 6
    fork.feed("g sleeps").run()
    session.feed("or").run()
    for each in (fork, session):
        generated(each)
    whole = engine.tokenizer.encode("the dog sleeps")
    assert ids_of(fork)[: len(whole)] == whole
    whole = engine.tokenizer.encode("the door")
    assert ids_of(session)[: len(whole)] == whole


def test_a_fork_outlives_its_session(tiny_model_dir: Path, tmp_path: Path) -> None:
    for doomed, other in (("first", "second"), ("second", "first")):
        options = config(tmp_path / doomed)
        with Engine(str(tiny_model_dir), options) as engine:
            session = engine.session("first")
            session.feed([[5 + 7 * index % 200 for index in range(1000)]]).run()
            session.fork("second")
        with Engine(str(tiny_model_dir), options) as engine:
            engine.session(doomed).delete()
            assert engine.session_names() == [other]
        with Engine(str(tiny_model_dir), options) as engine:
            kept = engine.session(other)
            assert kept.num_tokens - kept.stats().num_computed <= 64
            assert engine.counters()["misses"] == 0
            assert_goes_on_like(kept, engine, ids_of(kept))


def some_ids(num_tokens: int) -> list[int]:
    return [5 + 7 * index % 200 for index in range(num_tokens)]


def test_a_fork_of_a_fork(engine: Engine) -> None:
    session = engine.session("first")
    session.feed([some_ids(300)]).run()
    second = session.fork("second")
    second.feed([[9] * 70]).run()
    third = second.fork("third")
    session.delete()
    third.feed([[6] * 70]).run()
    second.delete()
    assert_goes_on_like(third, engine, [*some_ids(300), *[9] * 70, *[6] * 70])
    assert engine.session_names() == ["third"]


def test_forked_and_deleted_while_copies_are_pending(
    tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Engine(str(tiny_model_dir), config()) as engine:
        lower, may_copy = engine._tiers._lower, threading.Event()
        put = lower.put

        def put_later(key: BlockKey, block_id: int) -> bool:
            may_copy.wait()
            return put(key, block_id)

        monkeypatch.setattr(lower, "put", put_later)
        session = engine.session("first")
        session.feed([some_ids(200)]).run()
        fork = session.fork("second")
        fork.feed([[9] * 10]).run()
        with engine._tiers._condition:
            assert engine._tiers._residents.num_holds == 3
            engine._tiers._residents.check_integrity()
        may_copy.set()
        session.delete()
        check_integrity(engine)
        assert_goes_on_like(fork, engine, [*some_ids(200), *[9] * 10])


def test_a_fork_in_the_middle_of_a_generation_draws_what_its_session_would(
    engine: Engine,
) -> None:
    session = engine.session("first")
    session.feed([some_ids(190)]).run()
    answer = session.generate(SEEDED)
    first = [next(answer).token_id for _ in range(4)]
    fork = session.fork("second")
    with pytest.raises(SessionError, match="stale"):
        next(answer)
    assert ids_of(fork) == [*some_ids(190), *first]
    assert generated(fork) == generated(session)


def test_a_fork_with_tokens_that_are_not_computed_yet(engine: Engine) -> None:
    session = engine.session("first")
    feeding = session.feed([some_ids(1000)])
    next(feeding)
    fork = session.fork("second")
    assert fork.stats().num_computed == 64
    assert_goes_on_like(fork, engine, some_ids(1000))
    assert_goes_on_like(session, engine, some_ids(1000))


def test_a_fork_while_a_window_is_computed_anew(tiny_model_dir: Path, tmp_path: Path) -> None:
    options = config(tmp_path, retain="none")
    with Engine(str(tiny_model_dir), options) as engine:
        engine.session("first").feed([some_ids(1000)]).run()
    for num_fed in (0, 150, 300):
        with Engine(str(tiny_model_dir), options) as engine:
            session = engine.session("first")
            assert session.stats().num_computed == 0
            session.rewind(1000)
            feeding = session.feed([[9]])
            for _ in range(num_fed // 64):
                next(feeding)
            fork = session.fork("second")
            assert_goes_on_like(fork, engine, [*some_ids(1000), *[9] * bool(num_fed // 64)])
            check_integrity(engine)
            fork.delete()


def test_kept_text_is_kept_in_both(engine: Engine) -> None:
    session = engine.session("first")
    session.feed([some_ids(300)]).run()
    session.keep("The number is seven. ")
    stream = Stream(ids_of(session), [(300, session.num_tokens - 300)])
    fork = session.fork("second")
    fork.keep("The number is nine. " * 5)
    other = Stream(
        ids_of(fork), [*stream.kept, (session.num_tokens, fork.num_tokens - session.num_tokens)]
    )
    for each, expected in ((session, stream), (fork, other)):
        each.feed([[9] * 300]).run()
        expected.ids += [9] * 300
        assert_goes_on_like(each, engine, expected)


def test_turns_go_on_in_both(engine: Engine) -> None:
    session = engine.session("first", system="You keep a diary.")
    session.say("How are you?")
    generated(session)
    fork = session.fork("second")
    for each in (session, fork):
        each.say("And now?")
    assert ids_of(session) == ids_of(fork)
    assert generated(session) == generated(fork)


def test_blocks_of_the_common_past_outlive_either(tiny_model_dir: Path, tmp_path: Path) -> None:
    """Also those that left both windows, and after a restart that opens one of them only."""
    for doomed, other in (("first", "second"), ("second", "first")):
        options = config(tmp_path / doomed)
        with Engine(str(tiny_model_dir), options) as engine:
            session = engine.session("first")
            session.feed([some_ids(600)]).run()
            fork = session.fork("second")
            fork.feed([[9] * 400]).run()
            session.feed([[6] * 400]).run()
        with Engine(str(tiny_model_dir), options) as engine:
            engine.session(doomed).delete()
        with Engine(str(tiny_model_dir), options) as engine:
            kept = engine.session(other)
            kept.rewind(400)
            assert engine.counters()["misses"] == 0
            assert_goes_on_like(kept, engine, some_ids(400))
            kept.delete()
            assert engine.usage()["ssd"].num_blocks == 0


def test_the_last_of_a_family_leaves_no_block_of_what_was_given_up(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    with Engine(str(tiny_model_dir), config(tmp_path)) as engine:
        session = engine.session("first")
        for _ in range(3):
            session.feed([some_ids(400)]).run()
            session.keep("The number is seven. " * 20)
            session.rewind(session.num_tokens - 350)
        fork = session.fork("second")
        fork.rewind(100)
        session.delete()
        assert_goes_on_like(fork, engine, ids_of(fork))
        fork.delete()
        engine._tiers.flush()
        usage = engine.usage()
        assert [usage[tier].num_blocks for tier in ("gpu", "cpu", "ssd")] == [0, 0, 0]


def test_resumed_from_its_own_files_alone(tiny_model_dir: Path, tmp_path: Path) -> None:
    with Engine(str(tiny_model_dir), config(tmp_path)) as engine:
        session = engine.session("first")
        session.feed([some_ids(500)]).run()
        session.fork("second").close()
    journal_path(tmp_path, "first").write_bytes(b"nonsense")
    with Engine(str(tiny_model_dir), config(tmp_path)) as engine:
        fork = engine.session("second")
        assert fork.resumed
        assert fork.num_tokens - fork.stats().num_computed <= 64
        assert_goes_on_like(fork, engine, some_ids(500))
        fork.delete()


@pytest.mark.parametrize("retain", ["all", "window"])
@pytest.mark.parametrize("num_lines", [1, 4, 9])
def test_killed_at_any_moment_every_fork_is_whole(
    tiny_model_dir: Path, tmp_path: Path, retain: str, num_lines: int
) -> None:
    said = kill_after(tiny_model_dir, tmp_path, retain, "fork", num_lines)
    options = dataclasses.replace(crash_child.config(str(tmp_path), retain), compile="off")
    calm = EngineConfig(window_size=128, prefill_chunk=64, cpu_bytes=0, compile="off")
    with Engine(str(tiny_model_dir), options) as engine, Engine(str(tiny_model_dir), calm) as other:
        names = engine.session_names()
        assert len(names) >= len(said) // 2
        for name in names:
            with engine.session(name) as session:
                stream = ids_of(session)
                fed = other.session(name, system="You keep a diary.")
                if len(stream) > fed.num_tokens:
                    fed.feed([stream[fed.num_tokens :]]).run()
                assert ids_of(fed) == stream
                assert generated(session) == generated(fed)
                fed.close()


def nothing_is_left(engine: Engine, tmp_path: Path) -> None:
    assert sorted(path.name for path in (tmp_path / "store" / "sessions").iterdir()) == [
        "first.journal"
    ]
    assert engine.session_names() == ["first"]
    check_integrity(engine)
    assert engine._opener._entrance._room.owners == {"first"}
    assert_goes_on_like(engine._sessions["first"], engine, some_ids(200))


@pytest.mark.parametrize("name", ["", "a/b", " a", "x" * 101, "grün", 5])
def test_a_name_that_is_none_is_refused(engine: Engine, tmp_path: Path, name: Any) -> None:
    session = engine.session("first")
    session.feed([some_ids(200)]).run()
    with pytest.raises(InputError, match="name="):
        session.fork(name)
    nothing_is_left(engine, tmp_path)


def test_a_name_that_is_taken_is_refused(engine: Engine) -> None:
    session = engine.session("first")
    session.feed([some_ids(200)]).run()
    engine.session("open")
    engine.session("asleep").close()
    for name in ("first", "open", "asleep"):
        with pytest.raises(InputError, match=r"there is a session of this name.*another name"):
            session.fork(name)
    assert engine.session("asleep").num_tokens == 0
    session.fork("free")


def test_without_room_for_another_window_nothing_is_left(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    options = config(tmp_path / "store", max_sessions=2, gpu_bytes=None, retain="none")
    with Engine(str(tiny_model_dir), options) as engine:
        session = engine.session("first")
        session.feed([some_ids(200)]).run()
        num_forks = 0
        with pytest.raises(PoolFullError, match=r"'fork \d+' needs room for \d+ blocks"):
            while True:
                session.fork(f"fork {num_forks}")
                num_forks += 1
        for number in range(num_forks):
            engine._sessions[f"fork {number}"].delete()
        nothing_is_left(engine, tmp_path)


@pytest.mark.parametrize("has_store", [True, False], ids=["store", "memory"])
def test_a_pool_that_is_full_of_kept_text_takes_no_fork(
    tiny_model_dir: Path, tmp_path: Path, has_store: bool
) -> None:
    """What is reserved counts no kept text, so the open block may find no room."""
    options = config(tmp_path / "store" if has_store else None)
    with Engine(str(tiny_model_dir), options) as engine:
        session = engine.session("first")
        session.feed([some_ids(200)]).run()
        free = [engine._tiers.allocate() for _ in range(engine._tiers._free_list.num_free)]
        with pytest.raises(PoolFullError):
            session.fork("second")
        for block_id in free:
            engine._tiers.free(block_id)
        assert engine.session_names() == ["first"]
        assert engine._opener._entrance._room.owners == {"first"}
        check_integrity(engine)
        assert_goes_on_like(session, engine, some_ids(200))


def test_a_full_disk_leaves_nothing(engine: Engine, tmp_path: Path) -> None:
    session = engine.session("first")
    session.feed([some_ids(200)]).run()
    sessions = tmp_path / "store" / "sessions"
    sessions.rename(tmp_path / "away")
    with pytest.raises(JournalError, match="cannot be created"):
        session.fork("second")
    (tmp_path / "away").rename(sessions)
    nothing_is_left(engine, tmp_path)


def test_a_checkpoint_that_fails_costs_the_fork_nothing_but_time(
    engine: Engine, tmp_path: Path
) -> None:
    session = engine.session("first")
    session.feed([some_ids(200)]).run()

    def broken() -> None:
        raise OSError(5, "Input/output error")

    with inject("journal.fsync", broken):
        fork = session.fork("second")
    assert_goes_on_like(fork, engine, some_ids(200))


def test_a_closed_session_and_a_closed_engine_cannot_be_forked(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    with Engine(str(tiny_model_dir), config(tmp_path)) as engine:
        session, other = engine.session("first"), engine.session("other")
        session.feed([some_ids(20)]).run()
        session.close()
        with pytest.raises(SessionError, match="is closed"):
            session.fork("second")
    with pytest.raises((SessionError, EngineClosedError)):
        other.fork("second")
