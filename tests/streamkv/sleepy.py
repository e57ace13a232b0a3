"""Sessions of small engines that are put to sleep when a test says so."""

import time
from functools import partial
from pathlib import Path
from typing import Any

from streamkv import Engine, EngineConfig, SamplingParams, Session
from streamkv.admission import State
from streamkv.sequence import Sequence
from streamkv.step_loop import Call


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


def open_asleep(engine: Engine, name: str, ids: list[int]) -> Session:
    """A session that has read `ids` and sleeps."""
    session = engine.session(name)
    session.feed([ids]).run()
    put_to_sleep(engine, session)
    return session


def put_to_sleep(engine: Engine, *sessions: Session) -> None:
    """Have the engine's thread put them to sleep, as if others needed the room."""
    for session in sessions:
        sequence = session._live.sequence
        for _ in range(1000):
            engine._loop.submit(Call(partial(begin_to_leave, engine, sequence))).result()
            if session.stats().state == "asleep":
                break
            time.sleep(0.002)
        assert session.stats().state == "asleep"
        assert session.stats().num_blocks == 0


def begin_to_leave(engine: Engine, sequence: Sequence) -> None:
    sleepers = engine._loop._sleepers
    assert sleepers is not None
    session = sleepers._sessions[sequence]
    if sleepers._admission.state(session.name) is State.AWAKE and not session.is_held:
        engine._loop._may_leave(sequence)
        sleepers._begin_leaving(session, lambda sequence: None)


def greedy(session: Session, num_tokens: int = 20) -> list[int]:
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    found = [delta.token_id for delta in session.generate(params)]
    return [token_id for token_id in found if token_id is not None]
