"""One session computes a block that many are about to need; the others take it."""

import asyncio
import contextlib
import threading
from pathlib import Path
from typing import Any

import pytest
from sleepy import greedy, options
from stream_oracle import check_integrity

from streamkv import Engine, Session
from streamkv.errors import EngineClosedError
from streamkv.reply import Reply
from streamkv.tiers.spec import BlockKey
from streamkv.under_way import Claim, UnderWay

SYSTEM = "You keep the lighthouse, and you answer every ship that asks where it is. " * 8


def keys(*numbers: int) -> list[BlockKey]:
    return [BlockKey(bytes([number]) * 32) for number in numbers]


def claim(under_way: UnderWay, *numbers: int) -> Claim:
    made = under_way.claim(keys(*numbers))
    assert isinstance(made, Claim)
    return made


def test_who_waits_is_told_when_a_block_is_sealed_and_not_before() -> None:
    under_way = UnderWay()
    with claim(under_way, 1, 2, 3) as own:
        first, third = under_way.wait_for(keys(1)[0]), under_way.wait_for(keys(3)[0])
        assert first is not None and third is not None
        own.sealed(2)
        assert first.done() and not third.done()
        assert under_way.wait_for(keys(2)[0]) is None
    assert third.done()
    under_way.check_integrity()


def test_a_block_is_claimed_once() -> None:
    under_way = UnderWay()
    with claim(under_way, 2) as older:
        reply = under_way.claim(keys(2, 3))
        assert isinstance(reply, Reply) and not reply.done()
        with claim(under_way, 1, 2, 3) as younger:
            younger.sealed(3)
            assert not reply.done(), "what another computes is not this one's to end"
        older.sealed(1)
        assert reply.done()
    under_way.check_integrity()


def test_a_claim_of_nothing_and_one_that_fails_end_all_the_same() -> None:
    under_way = UnderWay()
    with claim(under_way):
        pass
    reply = None
    with pytest.raises(ValueError, match="no"), claim(under_way, 1):
        reply = under_way.wait_for(keys(1)[0])
        raise ValueError("no")
    assert reply is not None and reply.done()
    under_way.check_integrity()


def test_who_gives_up_waiting_is_not_told() -> None:
    under_way = UnderWay()
    with claim(under_way, 1):
        reply = under_way.wait_for(keys(1)[0])
        assert reply is not None and reply.cancel()
    assert reply.cancelled()


def open_all(engine: Engine, number: int, **given: Any) -> list[Session]:
    return [
        engine.session(f"keeper {index}", system=SYSTEM, **{"tenant": "acme", **given})
        for index in range(number)
    ]


def question(index: int) -> str:
    return f"Ship {index} asks where the rocks are, and how deep the water is."


@pytest.fixture(scope="module")
def alone(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    """What each of them answers with an engine of its own."""
    found = []
    for index in range(6):
        config = options("cpu", tmp_path_factory.mktemp("alone"))
        with Engine(str(tiny_model_dir), config) as engine:
            session = engine.session("only", system=SYSTEM)
            session.feed(question(index)).run()
            found.append(greedy(session))
    return found


@pytest.mark.parametrize("max_sessions", [1, 2, 8])
@pytest.mark.parametrize("chunk", [64, 512])
@pytest.mark.parametrize("given", [{"tenant": "acme"}, {"tenant": None, "shared_prompt": True}])
def test_a_prompt_given_to_many_at_once_is_computed_once(
    tiny_model_dir: Path,
    tmp_path: Path,
    alone: list[list[int]],
    max_sessions: int,
    chunk: int,
    given: dict[str, Any],
) -> None:
    config = options("cpu", tmp_path, max_sessions=max_sessions, prefill_chunk=chunk)
    with Engine(str(tiny_model_dir), config) as engine:
        sessions = open_all(engine, 6, **given)
        num_shared = sessions[0].num_tokens // 64 * 64
        assert num_shared >= 320

        async def feed_all() -> None:
            await asyncio.gather(
                *(each.afeed(question(index)).run() for index, each in enumerate(sessions))
            )

        asyncio.run(feed_all())
        num_fed = sum(session.num_tokens - 1 for session in sessions)
        counted = engine.counters()
        assert counted["prefill_tokens"] == num_fed - 5 * num_shared
        assert counted["reused_tokens"] == 5 * num_shared
        assert [greedy(session) for session in sessions] == alone
        engine._tiers.flush()
        check_integrity(engine)


def test_threads_share_as_well(
    tiny_model_dir: Path, tmp_path: Path, alone: list[list[int]]
) -> None:
    with Engine(str(tiny_model_dir), options("both", tmp_path, max_sessions=8)) as engine:
        sessions = open_all(engine, 6)
        num_shared = sessions[0].num_tokens // 64 * 64
        found: dict[int, list[int]] = {}

        def answer(index: int) -> None:
            sessions[index].feed(question(index)).run()
            found[index] = greedy(sessions[index])

        threads = [threading.Thread(target=answer, args=[index]) for index in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [found[index] for index in range(6)] == alone
        assert engine.counters()["reused_tokens"] == 5 * num_shared


def test_with_nothing_kept_below_they_wait_in_vain_and_compute(
    tiny_model_dir: Path, tmp_path: Path, alone: list[list[int]]
) -> None:
    config = options("cpu", tmp_path, cpu_bytes=0, retain="none", max_sessions=8)
    with Engine(str(tiny_model_dir), config) as engine:
        sessions = open_all(engine, 6)

        async def answers() -> None:
            await asyncio.gather(
                *(each.afeed(question(index)).run() for index, each in enumerate(sessions))
            )

        asyncio.run(answers())
        assert [greedy(session) for session in sessions] == alone


def test_the_one_that_computes_may_be_cancelled(
    tiny_model_dir: Path, tmp_path: Path, alone: list[list[int]]
) -> None:
    config = options("cpu", tmp_path, max_sessions=8, prefill_chunk=64)
    with Engine(str(tiny_model_dir), config) as engine:
        sessions = open_all(engine, 6)

        async def answers() -> None:
            tasks = [
                asyncio.ensure_future(each.afeed(question(index)).run())
                for index, each in enumerate(sessions)
            ]
            while not engine._sharing.under_way._waiting:
                await asyncio.sleep(0)
            tasks[0].cancel()
            await asyncio.gather(*tasks[1:])
            assert tasks[0].cancelled()

        asyncio.run(answers())
        assert [greedy(session) for session in sessions[1:]] == alone[1:]
        assert len(greedy(sessions[0], 5)) == 5, "it goes on with what it had accepted"
        check_integrity(engine)


def test_an_engine_that_is_closed_tells_those_who_wait_for_another(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    engine = Engine(str(tiny_model_dir), options("cpu", tmp_path, max_sessions=8))
    sessions = open_all(engine, 3)

    def feed(index: int) -> None:
        # Or it was done before.
        with contextlib.suppress(EngineClosedError):
            sessions[index].feed(question(index)).run()

    threads = [threading.Thread(target=feed, args=[index]) for index in range(3)]
    for thread in threads:
        thread.start()
    engine.close()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
