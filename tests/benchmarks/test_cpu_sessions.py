"""The benchmark of sessions that decode at once on a CPU, small."""

import argparse
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from streamkv import Delta, Engine, Session

BENCHMARKS = Path(__file__).parent.parent.parent / "benchmarks"
QUICK = argparse.Namespace(quick=True, rounds=5)
Timed = tuple[float, list[list[Delta]]]


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch, tiny_model_dir: Path) -> ModuleType:
    """The script, with a tiny model in the place of its own."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    made: ModuleType = __import__("cpu_sessions")
    monkeypatch.setattr(made, "MODEL", str(tiny_model_dir))
    monkeypatch.setattr(made, "WINDOW_SIZE", 128)
    monkeypatch.setattr(made, "NUM_THREADS", 1)
    return made


@pytest.fixture
def engine(module: ModuleType) -> Iterator[Engine]:
    with module.open_engine("float32") as made:
        made.wait_until_fast()
        yield made


def make_report() -> Any:
    return __import__("report").Report("made_up")


def test_it_reports_rates_and_their_ratio(module: ModuleType, engine: Engine) -> None:
    report = make_report()
    module.measure_length(engine, report, "float32_64", 64, QUICK, 1e-3)
    figures = report.figures
    assert figures["float32_64_same_tokens"]["value"] == 8 * 8
    one, eight = (figures[f"float32_64_{name}"]["rounds"] for name in ("one", "eight"))
    assert len(one) == len(eight) == 1
    ratio = figures["float32_64_ratio"]
    assert ratio["value"] == pytest.approx(eight[0] / one[0])
    assert ratio["bound"] == 1e-3 and ratio["better"] == "higher" and ratio["ok"]
    # It leaves nothing behind: the next length has room.
    assert engine.session_names() == []


def test_contexts_differ_and_forks_leave_them_as_they_are(
    module: ModuleType, engine: Engine
) -> None:
    contexts = module.read_contexts(engine, 100)
    said = [[delta.token_id for delta in deltas] for deltas in module.timed(contexts, 6)[1]]
    again = [[delta.token_id for delta in deltas] for deltas in module.timed(contexts, 6)[1]]
    assert said == again and len(set(map(tuple, said))) > 1
    assert [session.num_tokens for session in contexts] == [100] * 8


def test_a_token_that_differs_ends_it(
    module: ModuleType, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    contexts, timed = module.read_contexts(engine, 64), module.timed

    def wrong(sessions: list[Session], num_tokens: int) -> Timed:
        rate, said = timed(sessions, num_tokens)
        if len(sessions) == 8:
            last = said[5][-1]
            assert last.token_id is not None
            said[5][-1] = dataclasses.replace(last, token_id=last.token_id ^ 1)
        return rate, said

    monkeypatch.setattr(module, "timed", wrong)
    report = make_report()
    with pytest.raises(SystemExit, match="token 5 of session 5 differs"):
        module.check(contexts, report, "float32", "float32_64", 6)
    assert not report.figures
