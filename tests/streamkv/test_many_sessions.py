"""More sessions than the gpu pool has room for: each is as it would be alone."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from stream_oracle import check_integrity

from streamkv import Engine, EngineConfig, SamplingParams, Session

NUM_SESSIONS = 5
NUM_TOKENS = 150
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
TIERS = ["cpu", "ssd", "both"]


def options(tier: str, tmp_path: Path, **more: Any) -> EngineConfig:
    given = {
        "window_size": 128,
        "prefill_chunk": 64,
        "max_sessions": 2,
        "turn_tokens": 40,
        "cpu_bytes": "64MiB" if tier != "ssd" else 0,
        "store": str(tmp_path / "store") if tier != "cpu" else None,
        "ssd_bytes": "64MiB",
        "compile": "off",
    }
    return EngineConfig(**{**given, **more})


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
