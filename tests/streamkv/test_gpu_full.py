"""Mode `full` on a GPU: every block of a stream, whichever tier it lay in."""

from pathlib import Path
from typing import Any

import pytest
import torch

from streamkv import Engine, EngineConfig, SamplingParams, Session

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

NUM_TOKENS = 900


def options(**others: Any) -> EngineConfig:
    given: dict[str, Any] = {
        "window_size": 192,
        "prefill_chunk": 128,
        "cpu_bytes": "64MiB",
        "gpu_bytes": "64MiB",
        "max_sessions": 2,
        "dtype": "float32",
        "device": "cuda",
    }
    return EngineConfig(**(given | others))


def some_ids(count: int, seed: int = 3) -> list[int]:
    return [5 + (seed * index * index + 7 * index) % 290 for index in range(count)]


def scores(session: Session, ids: list[int], cut: int) -> list[float]:
    pieces = [ids[low : low + cut] for low in range(0, len(ids), cut)]
    return [score.logprob or 0.0 for score in session.score(pieces)]


@pytest.fixture(scope="module")
def dense(tiny_model_dir: Path) -> list[float]:
    """Every token attends to all before it, on a CPU."""
    wide = options(device="cpu", window_size=1000, compile="off")
    with Engine(str(tiny_model_dir), wide) as engine:
        return scores(engine.session("dense"), some_ids(NUM_TOKENS), NUM_TOKENS)


@pytest.mark.parametrize("cut", [NUM_TOKENS, 64, 7])
def test_from_the_first_token_on_it_is_dense_attention(
    tiny_model_dir: Path, dense: list[float], cut: int
) -> None:
    with Engine(str(tiny_model_dir), options(attention="full")) as engine:
        found = scores(engine.session("all"), some_ids(NUM_TOKENS), cut)
        engine._tiers.check_integrity()
    assert found == pytest.approx(dense, abs=1e-3)


def test_blocks_come_back_from_the_cpu_pool(tiny_model_dir: Path) -> None:
    """Read in `window`, go on in `full`: as on a CPU."""
    found = []
    greedy = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
    for device in ("cpu", "cuda"):
        with Engine(str(tiny_model_dir), options(device=device)) as engine:
            session = engine.session("one")
            session.feed([some_ids(NUM_TOKENS)]).run()
            engine._tiers.flush()
            session.set_mode("full")
            later = scores(session, some_ids(200, seed=5), 200)
            found.append((later, [delta.token_id for delta in session.generate(greedy)]))
            session.set_mode("window")
            session.generate(greedy).run()
            engine._tiers.check_integrity()
    assert found[1][0] == pytest.approx(found[0][0], abs=1e-3)
    assert found[1][1] == found[0][1]
