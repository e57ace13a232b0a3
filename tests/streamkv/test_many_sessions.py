"""More sessions than the gpu pool has room for: each is as it would be alone."""

import asyncio
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest
from sleepy import begin_to_leave, greedy, open_asleep, options, put_to_sleep
from stream_oracle import assert_goes_on_like, check_integrity, ids_of

from streamkv import Engine, SamplingParams, Session
from streamkv.errors import EngineClosedError, PoolFullError
from streamkv.step_loop import Call

NUM_SESSIONS = 5
NUM_TOKENS = 150
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
TIERS = ["cpu", "ssd", "both"]


def prompt(number: int) -> list[int]:
    return [5 + (7 * index + 11 * number) % 200 for index in range(90 + 40 * number)]


async def answer(session: Session, number: int) -> list[int]:
    async for _ in session.afeed([prompt(number)]):
        pass
    found = [delta.token_id async for delta in session.agenerate(GREEDY)]
    return [token_id for token_id in found if token_id is not None]


@pytest.fixture(scope="module")
def alone(
    tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[list[list[int]]]:
    """What each session answers with an engine of its own."""
    found = []
    for number in range(NUM_SESSIONS):
        config = options("cpu", tmp_path_factory.mktemp("alone"))
        with Engine(str(tiny_model_dir), config) as engine:
            found.append(asyncio.run(answer(engine.session("only"), number)))
    assert len({tuple(each) for each in found}) == NUM_SESSIONS
    yield found


@pytest.mark.parametrize("tier", TIERS)
def test_sessions_take_turns_and_answer_as_alone(
    tiny_model_dir: Path, tmp_path: Path, alone: list[list[int]], tier: str
) -> None:
    async def all_of_them(engine: Engine) -> list[list[int]]:
        sessions = [engine.session(f"session {number}") for number in range(NUM_SESSIONS)]
        return await asyncio.gather(*map(answer, sessions, range(NUM_SESSIONS)))

    with Engine(str(tiny_model_dir), options(tier, tmp_path)) as engine:
        assert asyncio.run(all_of_them(engine)) == alone
        counted = engine.counters()
        assert counted["sessions_slept"] > 2 * NUM_SESSIONS
        assert counted["sessions_woken"] >= counted["sessions_slept"] - NUM_SESSIONS
        engine._tiers.flush()
        check_integrity(engine)


LENGTHS = [1, 2, 63, 64, 65, 66, 127, 128, 129, 130, 300, 321]


@pytest.mark.parametrize("tier", TIERS)
def test_what_slept_goes_on_as_what_did_not(
    tiny_model_dir: Path, tmp_path: Path, tier: str
) -> None:
    with Engine(str(tiny_model_dir), options(tier, tmp_path, max_sessions=4)) as engine:
        for length in LENGTHS:
            ids = [5 + 7 * index % 200 for index in range(length)]
            awake = engine.session("awake")
            awake.feed([ids]).run()
            asleep = open_asleep(engine, "asleep", ids)
            for _ in range(3):
                assert greedy(asleep) == greedy(awake)
                put_to_sleep(engine, asleep)
            scores = [[each.logprob for each in s.score([[7, 8, 9] * 30])] for s in (asleep, awake)]
            assert scores[0] == pytest.approx(scores[1], abs=1e-4)
            awake.delete()
            asleep.delete()
        engine._tiers.flush()
        check_integrity(engine)
        assert engine.usage()["gpu"].num_blocks == 0


@pytest.mark.parametrize("tier", TIERS)
def test_a_sleeping_session_is_forked_rewound_kept_to_and_closed(
    tiny_model_dir: Path, tmp_path: Path, tier: str
) -> None:
    ids = [5 + 7 * index % 200 for index in range(333)]
    with Engine(str(tiny_model_dir), options(tier, tmp_path, max_sessions=4)) as engine:
        session = open_asleep(engine, "first", ids)
        fork = session.fork("fork")
        put_to_sleep(engine, session, fork)
        assert_goes_on_like(fork, engine, ids)
        put_to_sleep(engine, session)
        session.rewind(200)
        assert_goes_on_like(session, engine, ids[:200])
        put_to_sleep(engine, session)
        session.keep(" Keep this.")
        stream = ids_of(session)
        put_to_sleep(engine, session)
        assert greedy(session, 5) and ids_of(session)[: len(stream)] == stream
        put_to_sleep(engine, session)
        session.close()
        put_to_sleep(engine, fork)
        fork.delete()
        engine._tiers.flush()
        check_integrity(engine)
        assert engine.usage()["gpu"].num_blocks == 0


@pytest.mark.parametrize("tier", ["ssd", "both"])
@pytest.mark.parametrize("length", [64, 70, 333])
def test_what_was_closed_asleep_resumes_with_its_open_block(
    tiny_model_dir: Path, tmp_path: Path, tier: str, length: int
) -> None:
    ids = [5 + 7 * index % 200 for index in range(length)]
    config = options(tier, tmp_path, max_sessions=4)
    with Engine(str(tiny_model_dir), config) as engine:
        session = open_asleep(engine, "first", ids)
        greedy(session, 3)
        put_to_sleep(engine, session)
        stream = ids_of(session)
        session.close()
        assert engine.usage()["gpu"].num_blocks == 0
    with Engine(str(tiny_model_dir), config) as engine:
        session = engine.session("first")
        # The token before the last was not counted yet when it fell asleep.
        assert session._live.sequence.num_computed == len(stream) - 2
        assert_goes_on_like(session, engine, stream)


def test_a_fork_for_which_the_pool_has_no_room_begins_asleep(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    ids = [5 + 7 * index % 200 for index in range(333)]
    with Engine(str(tiny_model_dir), options("cpu", tmp_path)) as engine:
        others = [engine.session(f"other {number}") for number in range(10)]
        session = engine.session("first")
        session.feed([ids]).run()
        forks = [session.fork(f"fork {number}") for number in range(4)]
        states = [fork.stats().state for fork in forks]
        assert states.count("asleep") == 4
        for other in others:
            other.close()
        for fork in forks:
            assert_goes_on_like(fork, engine, ids)


def test_a_block_that_is_lost_while_its_session_sleeps_is_computed_anew(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    ids = [5 + 7 * index % 200 for index in range(333)]
    with Engine(str(tiny_model_dir), options("ssd", tmp_path, max_sessions=4)) as engine:
        session = open_asleep(engine, "first", ids)
        asleep = session._live.sleeper.asleep
        assert asleep is not None
        engine._tiers.flush()
        engine._store.blocks.delete([asleep.blocks[-1][1]])
        assert_goes_on_like(session, engine, ids)
        check_integrity(engine)


def test_where_the_tiers_below_are_full_who_waits_is_told(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    """Not even one window fits the cpu pool, so nobody can give way."""
    config = options("cpu", tmp_path, cpu_bytes="32KiB", retain="window")
    with Engine(str(tiny_model_dir), config) as engine:
        sessions = [engine.session(f"session {number}") for number in range(12)]
        states = [session.stats().state for session in sessions]
        awake = [each for each, state in zip(sessions, states, strict=True) if state == "awake"]
        asleep = [each for each, state in zip(sessions, states, strict=True) if state == "asleep"]
        for session in awake:
            session.feed([[5] * 200]).run()
        with pytest.raises(PoolFullError, match="tiers below have no room"):
            asleep[0].feed([[5] * 200]).run()
        awake[0].close()
        asleep[0].feed([[6] * 200]).run()
        assert greedy(asleep[0], 3)


def test_a_session_larger_than_the_pool_is_refused(tiny_model_dir: Path, tmp_path: Path) -> None:
    config = options("cpu", tmp_path, max_sessions=1, gpu_bytes="4MiB")
    with (
        Engine(str(tiny_model_dir), config) as engine,
        pytest.raises(PoolFullError, match="larger gpu_bytes"),
    ):
        engine._opener._entrance.enter("large", 10**6, 0, has_blocks=False)


def test_who_gives_up_waiting_leaves_the_queue(tiny_model_dir: Path, tmp_path: Path) -> None:
    async def play(engine: Engine) -> None:
        sessions = [engine.session(f"session {number}") for number in range(8)]
        awake = [each for each in sessions if each.stats().state == "awake"]
        [waiting, next_one] = [each for each in sessions if each.stats().state == "asleep"][:2]
        with ExitStack() as held:
            for session in awake:
                session.feed([prompt(0)]).run()
                held.enter_context(engine._loop.held(session._live.sequence, awake=True))
            tasks = [
                asyncio.ensure_future(answer(each, number))
                for number, each in enumerate((waiting, next_one))
            ]
            await asyncio.sleep(0.1)
            assert waiting.stats().state == next_one.stats().state == "waiting"
            assert (waiting.stats().queue_position, next_one.stats().queue_position) == (1, 2)
            assert engine.session_states()["waiting"] == 2
            tasks[0].cancel()
            with pytest.raises(asyncio.CancelledError):
                await tasks[0]
            for _ in range(100):
                await asyncio.sleep(0.01)
                if waiting.stats().state == "asleep":
                    break
            assert waiting.stats().state == "asleep"
            assert next_one.stats().queue_position == 1
            waiting.close()
        await tasks[1]

    with Engine(str(tiny_model_dir), options("cpu", tmp_path)) as engine:
        asyncio.run(play(engine))
        check_integrity(engine)


def test_an_engine_that_is_closed_tells_who_waits(tiny_model_dir: Path, tmp_path: Path) -> None:
    engine = Engine(str(tiny_model_dir), options("cpu", tmp_path))
    sessions = [engine.session(f"session {number}") for number in range(8)]
    [waiting, *_] = [each for each in sessions if each.stats().state == "asleep"]
    with ExitStack() as held:
        for session in sessions:
            if session.stats().state == "awake":
                held.enter_context(engine._loop.held(session._live.sequence, awake=True))
        feed = ThreadPoolExecutor(1).submit(waiting.feed([prompt(1)]).run)
        while waiting.stats().state != "waiting":
            time.sleep(0.005)
        engine.close()
        with pytest.raises(EngineClosedError):
            feed.result(30)


def test_who_rests_falls_asleep_by_itself(tiny_model_dir: Path, tmp_path: Path) -> None:
    config = options("both", tmp_path, sleep_after=0.05)
    with Engine(str(tiny_model_dir), config) as engine:
        session = engine.session("first")
        session.feed([prompt(3)]).run()
        for _ in range(500):
            if session.stats().state == "asleep":
                break
            time.sleep(0.02)
        assert session.stats().state == "asleep" and engine.usage()["gpu"].num_blocks == 0
        assert_goes_on_like(session, engine, prompt(3))


@pytest.mark.parametrize("tier", TIERS)
def test_what_is_recalled_is_recalled_again_after_sleep(
    tiny_model_dir: Path, tmp_path: Path, tier: str
) -> None:
    more = {"window_size": 192, "recall_blocks": 3, "recall_stride": 64, "attention": "recall"}
    with Engine(str(tiny_model_dir), options(tier, tmp_path, max_sessions=4, **more)) as engine:
        awake, asleep = engine.session("awake"), engine.session("asleep")
        for length in (300, 61, 64, 200, 3):
            for session in (awake, asleep):
                session.feed([[5 + (7 * index + length) % 200 for index in range(length)]]).run()
            put_to_sleep(engine, asleep)
            assert greedy(asleep, 9) == greedy(awake, 9)
            recalled = [sorted(each._live.sequence.table.recalled) for each in (awake, asleep)]
            assert recalled[0] == recalled[1] and len(recalled[0]) == 3
            assert asleep.attended() == awake.attended()
            put_to_sleep(engine, asleep)
            if length == 64:
                with pytest.raises(PoolFullError, match="attends to old blocks"):
                    many = [asleep.fork(f"fork {number}") for number in range(10)]
                    assert many
        for name in list(engine._sessions):
            engine._sessions[name].delete()
        engine._tiers.flush()
        check_integrity(engine)
        assert engine.usage()["gpu"].num_blocks == 0


def test_full_stays_awake(tiny_model_dir: Path, tmp_path: Path) -> None:
    """Its blocks are all that it attends to; who waits for its room gets that of others."""
    config = options("cpu", tmp_path, gpu_bytes="1MiB")
    with Engine(str(tiny_model_dir), config) as engine:
        full = engine.session("full")
        full.feed([prompt(4)]).run()
        full.set_mode("full")
        sequence = full._live.sequence
        for _ in range(5):
            engine._loop.submit(Call(partial(begin_to_leave, engine, sequence))).result()
            assert full.stats().state == "awake"
        others = [engine.session(f"other {number}") for number in range(20)]
        assert [each.stats().state for each in others].count("asleep") > 5
        for number, other in enumerate(others):
            other.feed([prompt(number % 4)]).run()
        assert full.stats().state == "awake"
        assert greedy(full, 5)


def test_kept_text_counts_when_a_session_wakes(tiny_model_dir: Path, tmp_path: Path) -> None:
    with Engine(str(tiny_model_dir), options("cpu", tmp_path, max_sessions=4)) as engine:
        session = open_asleep(engine, "first", prompt(2))
        room = engine._opener._entrance._room
        assert room.promised("first") == 0
        greedy(session, 3)
        before = room.promised("first")
        session.feed([prompt(3)]).run()
        session.keep(" the fox keeps this for ever and ever" * 12)
        session.feed([prompt(3)]).run()
        put_to_sleep(engine, session)
        greedy(session, 3)
        kept = session._live.sequence.window.sink_ranges[-1]
        assert room.promised("first") - before >= (kept[1] - kept[0]) // 64 > 0
        assert len(session._live.sequence.table) <= room.promised("first")
