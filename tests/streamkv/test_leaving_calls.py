"""Calls that are left while they wait for room leave the queue, and nothing of them is done."""

import asyncio
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from sleepy import greedy, open_asleep, options
from stream_oracle import check_integrity

from streamkv import Engine, SamplingParams, Session
from streamkv.errors import InputError, SessionError

IDS = [5 + 7 * index % 200 for index in range(150)]
LONG = SamplingParams(temperature=0.0, max_tokens=10**6, ignore_eos=True)


class Holder:
    """Sessions that have the whole pool, and keep it for as long as is wanted."""

    def __init__(self, engine: Engine) -> None:
        self._held = ExitStack()
        others = [engine.session(f"other {number}") for number in range(8)]
        awake = [each for each in others if each.stats().state == "awake"]
        assert 0 < len(awake) < len(others)
        for session in awake:
            session.feed([IDS]).run()
            self._held.enter_context(engine._loop.held(session._live.sequence, awake=True))

    def end(self) -> None:
        """Let others have room."""
        self._held.close()


@pytest.fixture
def engine(tiny_model_dir: Path, tmp_path: Path) -> Iterator[Engine]:
    config = options("both", tmp_path, max_sessions=1, turn_tokens=10**6)
    with Engine(str(tiny_model_dir), config) as engine:
        yield engine


@pytest.fixture
def waiting(engine: Engine) -> Iterator[tuple[Session, Holder]]:
    """A session that would have to wait, and the one that it waits for."""
    session = open_asleep(engine, "first", IDS)
    holder = Holder(engine)
    yield session, holder
    holder.end()
    engine._tiers.flush()


def until_waiting(session: Session) -> None:
    while session.stats().state != "waiting":
        time.sleep(0.001)


@pytest.mark.parametrize("what", ["arewind", "afork", "agenerate", "afeed", "akeep"])
def test_an_awaited_call_leaves_the_queue_and_does_nothing(
    engine: Engine, waiting: tuple[Session, Holder], what: str
) -> None:
    session, holder = waiting

    async def call() -> None:
        match what:
            case "arewind":
                await session.arewind(20)
            case "afork":
                await session.afork("second")
            case "agenerate":
                await session.agenerate(LONG).run()
            case "afeed":
                await session.afeed([IDS]).run()
            case "akeep":
                await session.akeep(" Keep this.")

    async def leave() -> None:
        task = asyncio.create_task(call())
        while session.stats().state != "waiting":
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert session.stats().state == "asleep"

    asyncio.run(leave())
    num_tokens = session.num_tokens
    holder.end()
    assert "second" not in engine.session_names()
    assert session.num_tokens == num_tokens, "it was not carried out later"
    assert what != "arewind" or num_tokens == len(IDS)
    assert greedy(session, 5)
    check_integrity(engine)


@pytest.mark.parametrize("what", ["arewind", "afork"])
def test_it_is_carried_out_when_there_is_room(
    engine: Engine, waiting: tuple[Session, Holder], what: str
) -> None:
    session, holder = waiting

    async def call() -> None:
        threading.Timer(0.2, holder.end).start()
        if what == "arewind":
            await session.arewind(20)
            assert session.num_tokens == 20
            with pytest.raises(InputError, match="outside the stream"):
                await session.arewind(21)
        else:
            second = await session.afork("second")
            assert second.num_tokens == len(IDS)
            with pytest.raises(InputError, match="second"):
                await session.afork("second")

    asyncio.run(call())
    assert greedy(session, 5)
    check_integrity(engine)


def test_an_iterator_that_waits_is_closed_by_another_thread(
    engine: Engine, waiting: tuple[Session, Holder]
) -> None:
    session, holder = waiting
    deltas = session.generate(LONG)
    found: list[object] = []
    thread = threading.Thread(target=lambda: found.append(list(deltas)))
    thread.start()
    until_waiting(session)
    deltas.close()
    thread.join()
    assert found == [[]]
    assert session.stats().state == "asleep"
    assert list(deltas) == []
    holder.end()
    assert greedy(session, 5), "the session stays usable"


def test_an_iterator_that_computes_is_closed_by_another_thread(engine: Engine) -> None:
    session = engine.session("first")
    session.feed([IDS]).run()
    deltas, found = session.generate(LONG), list[object]()

    def generate() -> None:
        found.extend(delta.token_id for delta in deltas)

    thread = threading.Thread(target=generate)
    thread.start()
    while len(found) < 3:
        time.sleep(0.001)
    deltas.close()
    thread.join()
    assert session.num_tokens == len(IDS) + len(found), "all that it accepted was handed out"
    assert session._live.past.state.num_tokens == session.num_tokens
    counted = engine.counters()
    assert counted["operations_cancelled"] == 1
    assert greedy(session, 5)


def test_a_closed_session_is_not_deleted_in_silence(engine: Engine) -> None:
    session = engine.session("first")
    session.feed([IDS]).run()
    session.close()
    with pytest.raises(SessionError, match="Open it again by its name"):
        session.delete()
    with pytest.raises(SessionError, match="Open it again by its name"):
        asyncio.run(session.adelete())
    assert engine.session_names() == ["first"]
    again = engine.session("first")
    again.delete()
    again.delete()
    again.close()
    assert engine.session_names() == []


def test_an_export_does_not_go_among_the_stores_own_files(engine: Engine, tmp_path: Path) -> None:
    engine.session("first").feed([IDS]).run()
    place = tmp_path / "store" / "sessions" / "evil.journal"
    with pytest.raises(InputError, match="lies in the store"):
        engine.export_session("first", place)
    assert engine.session_names() == ["first"]
    assert sum(engine.session_states().values()) == 1


CHILD = """
import sys
from streamkv import Engine, EngineConfig
engine = Engine(sys.argv[1], EngineConfig(window_size=128, store=sys.argv[2]))
session = engine.session("left open")
session.feed([list(range(5, 105))]).run()
if sys.argv[3] == "raise":
    raise ValueError("on purpose")
"""


@pytest.mark.parametrize("end", ["end", "raise"])
def test_a_process_that_leaves_its_engine_open_ends_well(
    tiny_model_dir: Path, tmp_path: Path, end: str
) -> None:
    command = [sys.executable, "-c", CHILD, str(tiny_model_dir), str(tmp_path / "store"), end]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == (1 if end == "raise" else 0), done.stderr
    assert "terminate" not in done.stderr
    with Engine(str(tiny_model_dir), options("both", tmp_path, window_size=128)) as engine:
        session = engine.session("left open")
        assert session.resumed and session.num_tokens == 100
        assert session.stats().num_computed == 99, "it was put to sleep"
