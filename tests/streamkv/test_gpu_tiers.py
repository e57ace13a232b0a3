"""The same stream on a GPU with tiers and without: lossless, so the same tokens."""

from pathlib import Path
from typing import Any

import pytest
import torch

from streamkv import Engine, EngineConfig, SamplingParams, Session

pytestmark = [
    pytest.mark.gpu,
    # Another process must not choose other tiles between two engines: they round otherwise.
    pytest.mark.usefixtures("own_cache"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

WINDOW_SIZE = 256
GREEDY = SamplingParams(temperature=0.0, max_tokens=70, ignore_eos=True)
SEEDED = SamplingParams(temperature=1.0, seed=7, max_tokens=70, ignore_eos=True)
TURNS = 4


def ids(turn: int) -> list[int]:
    """What is fed in a turn: several blocks more than the window has, ending within a block."""
    return [5 + (7 * turn + 11 * index * index) % 300 for index in range(WINDOW_SIZE + 64 + 37)]


def engine_config(dtype: str, compile_: str, **others: Any) -> EngineConfig:
    options: dict[str, Any] = {
        "window_size": WINDOW_SIZE,
        "device": "cuda",
        "dtype": dtype,
        "compile": compile_,
        "max_sessions": 3,
        "prefill_chunk": 128,
    }
    return EngineConfig(**(options | others))


def turn(session: Session, number: int) -> list[int | None]:
    """Feed, then generate over the edge of a block: greedily in even turns, else by chance."""
    session.feed([ids(number)]).run()
    params = SEEDED if number % 2 else GREEDY
    return [delta.token_id for delta in session.generate(params)]


def live(model: Path, config: EngineConfig) -> list[list[int | None]]:
    """All turns in one session that stays open."""
    with Engine(str(model), config) as engine:
        session = engine.session("one")
        found = [turn(session, number) for number in range(TURNS)]
        assert engine.counters()["demotions"] == engine.counters()["promotions"] == 0
    return found


def resumed(model: Path, config: EngineConfig) -> list[list[int | None]]:
    """The session is closed and opened again after every turn; the engine, too, in the middle.

    Between two turns another session takes the gpu blocks that were given back.
    """
    found, promotions = [], 0
    for first in range(0, TURNS, 2):
        with Engine(str(model), config) as engine:
            for number in (first, first + 1):
                with engine.session("one") as session:
                    found.append(turn(session, number))
                with engine.session(f"other-{number}") as other:
                    turn(other, number + 10)
            promotions += engine.counters()["promotions"]
            assert engine.counters()["demotions"] > 0 and engine.counters()["dropped"] == 0
    assert promotions > 0
    return found


@pytest.mark.parametrize("compile_", ["auto", "off"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_tiers_do_not_change_a_token(
    tiny_model_dir: Path, tmp_path: Path, dtype: str, compile_: str
) -> None:
    without = live(tiny_model_dir, engine_config(dtype, compile_, cpu_bytes=0, retain="none"))
    # The cpu pool has room for a few blocks only, so that most go on to the ssd.
    tiers = {"cpu_bytes": "256KiB", "store": str(tmp_path / "store"), "retain": "all"}
    assert resumed(tiny_model_dir, engine_config(dtype, compile_, **tiers)) == without
