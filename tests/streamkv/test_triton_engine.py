"""Whole engines over the Triton runner, interpreted or on a GPU, against the CPU's tokens."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from gpu_cases import DEVICE, ON_GPU
from torch import Tensor

from streamkv import Engine, EngineConfig, SamplingParams, Session, mixed_graphs
from streamkv import engine as engine_module
from streamkv.mixed_graphs import MixedGraphs, MixedStep
from streamkv.model import ModelAdapter
from streamkv.tiers.gpu_pool import GpuPool
from streamkv.triton_runner import TritonRunner

pytestmark = [pytest.mark.gpu] if ON_GPU else []

GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
SEEDED = SamplingParams(temperature=0.9, top_p=0.9, seed=3, max_tokens=3, ignore_eos=True)
TEXTS = (
    "The quick brown fox. " * 3,
    "A window holds the newest tokens; nothing is forgotten. " * 2,
)


def config(**others: Any) -> EngineConfig:
    options: dict[str, Any] = {
        "window_size": 64,
        "dtype": "float32",
        "retain": "none",
        "cpu_bytes": 0,
        "prefill_chunk": 32,
        "max_sessions": 3,
    }
    return EngineConfig(**{**options, **others})


@contextmanager
def triton_engine(model: Path, mixed: int = 0, **others: Any) -> Iterator[Engine]:
    """An engine whose runner is Triton's, whatever the device of its pool.

    Args:
        model: directory.
        mixed: most tokens of a chunk in a step of the mixed kind; on a GPU `mixed_chunk` says it.
        others: options.
    """
    if ON_GPU:
        with Engine(str(model), config(device=DEVICE, **others)) as engine:
            yield engine
        return

    def make(adapter: ModelAdapter, pool: GpuPool, options: EngineConfig) -> TritonRunner:
        return TritonRunner(
            adapter, pool.data, adapter.trained_length, capacity=8, mixed_chunk=mixed
        )

    # In the interpreter rows that nobody uses take as long as others.
    few_rows = mock.patch.object(mixed_graphs, "MIXED_BUCKETS", (2,))
    with mock.patch.object(engine_module, "make_runner", make), few_rows:
        engine = Engine(str(model), config(**others))
    with engine:
        yield engine


def tokens(session: Session, params: SamplingParams) -> list[int | None]:
    return [delta.token_id for delta in session.generate(params)]


async def all_tokens(sessions: list[Session], params: SamplingParams) -> list[list[int | None]]:
    async def one(session: Session) -> list[int | None]:
        return [delta.token_id async for delta in session.agenerate(params)]

    return await asyncio.gather(*(one(session) for session in sessions))


@pytest.fixture(scope="module")
def expected(tiny_model_dir: Path) -> list[list[list[int | None]]]:
    """By text and by turn, from the CPU's runner, which takes one step after another."""
    found = []
    with Engine(str(tiny_model_dir), config()) as engine:
        for index, text in enumerate(TEXTS):
            session = engine.session(str(index))
            session.feed([text]).run()
            turns = [tokens(session, GREEDY), tokens(session, SEEDED)]
            session.feed([" And then:"]).run()
            found.append([*turns, tokens(session, GREEDY)])
    return found


def test_a_session_alone_gets_the_tokens_of_the_cpu(
    tiny_model_dir: Path, expected: list[list[list[int | None]]]
) -> None:
    with triton_engine(tiny_model_dir) as engine:
        session = engine.session("one")
        session.feed([TEXTS[0]]).run()
        assert tokens(session, GREEDY) == expected[0][0]
        assert tokens(session, SEEDED) == expected[0][1]
        session.feed([" And then:"]).run()
        assert tokens(session, GREEDY) == expected[0][2]


def test_sessions_that_share_steps_get_them_too(
    tiny_model_dir: Path, expected: list[list[list[int | None]]]
) -> None:
    with triton_engine(tiny_model_dir) as engine:
        sessions = [engine.session(str(index)) for index in range(len(TEXTS))]
        for session, text in zip(sessions, TEXTS, strict=True):
            session.feed([text]).run()
        assert asyncio.run(all_tokens(sessions, GREEDY)) == [turns[0] for turns in expected]
        assert asyncio.run(all_tokens(sessions, SEEDED)) == [turns[1] for turns in expected]


def test_a_generation_that_was_left_goes_on_as_if_it_had_not_been(
    tiny_model_dir: Path, expected: list[list[list[int | None]]]
) -> None:
    """The step that was under way when it was left is claimed, or forgotten."""
    with triton_engine(tiny_model_dir) as engine:
        session = engine.session("one")
        session.feed([TEXTS[0]]).run()
        first = session.generate(GREEDY)
        found = [next(first).token_id for _ in range(3)]
        first.close()
        found += tokens(session, SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True))
        assert found == expected[0][0]


def test_log_probabilities_and_penalties_come_from_the_host(
    tiny_model_dir: Path, expected: list[list[list[int | None]]]
) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, logprobs=2)
    with triton_engine(tiny_model_dir) as engine:
        session = engine.session("one")
        session.feed([TEXTS[0]]).run()
        deltas = session.generate(params).run()
    assert [delta.token_id for delta in deltas] == expected[0][0]
    for delta in deltas:
        assert delta.logprob is not None and len(delta.logprob.top) == 2
        assert delta.logprob.logprob == delta.logprob.top[0][1]


def test_scores_are_those_of_the_cpu(tiny_model_dir: Path) -> None:
    with Engine(str(tiny_model_dir), config()) as engine:
        wanted = [score.logprob for score in engine.session("one").score([TEXTS[1]])]
    with triton_engine(tiny_model_dir) as engine:
        found = [score.logprob for score in engine.session("one").score([TEXTS[1]])]
        chunks = engine.session("two").score_chunks([TEXTS[1]]).run()
    assert found[0] is None and wanted[0] is None
    assert found[1:] == pytest.approx(wanted[1:], abs=2e-4)
    by_chunks = [logprob for chunk in chunks for logprob in chunk.logprobs.tolist()]
    assert len(chunks) > 1 and by_chunks[1:] == pytest.approx(wanted[1:], abs=2e-4)


@contextmanager
def noted_steps() -> Iterator[list[MixedStep]]:
    """The steps that were launched as a chunk beside single tokens."""
    launched = []
    launch = MixedGraphs.launch

    def noting(self: MixedGraphs, step: MixedStep) -> Tensor:
        launched.append(step)
        return launch(self, step)

    with mock.patch.object(MixedGraphs, "launch", noting):
        yield launched


def test_short_chunks_are_computed_like_all_others(
    tiny_model_dir: Path, expected: list[list[list[int | None]]]
) -> None:
    """By a graph on a GPU, else by the same kernels in turn; the last one says what follows it."""
    with noted_steps() as steps, triton_engine(tiny_model_dir, 32, mixed_chunk=32) as engine:
        session = engine.session("one")
        session.feed([TEXTS[1]]).run()
        found = [tokens(session, GREEDY), tokens(session, SEEDED)]
        session.feed([" And then:"]).run()
        found.append(tokens(session, GREEDY))
    assert found == expected[1]
    lengths = {step.chunk.query_len for step in steps}
    assert 32 in lengths and any(1 < length < 32 for length in lengths)
    assert any(step.num_head_rows for step in steps)


def test_a_chunk_beside_sessions_that_decode_is_computed_like_all_others(
    tiny_model_dir: Path, expected: list[list[list[int | None]]]
) -> None:
    """So are they; each of them has read more than a window when its turn comes."""
    with noted_steps() as steps, triton_engine(tiny_model_dir, 32, mixed_chunk=32) as engine:
        talker, reader = engine.session("talker"), engine.session("reader")
        talker.feed([TEXTS[0]]).run()

        async def read_and_answer() -> list[int | None]:
            async for _ in reader.afeed([TEXTS[1]]):
                pass
            return (await all_tokens([reader], GREEDY))[0]

        async def both() -> tuple[list[int | None], list[int | None]]:
            talked, reading = [], None
            async for delta in talker.agenerate(replace(GREEDY, max_tokens=500)):
                talked.append(delta.token_id)
                reading = reading or asyncio.ensure_future(read_and_answer())
                if reading.done():
                    break
            assert reading is not None
            return talked, await reading

        talked, found = asyncio.run(both())
        assert found == expected[1][0]
        assert talked[: len(expected[0][0])] == expected[0][0][: len(talked)]
        alone = engine.session("alone")
        alone.feed([TEXTS[0]]).run()
        assert tokens(alone, replace(GREEDY, max_tokens=len(talked))) == talked
    assert any(step.singles for step in steps)
    # The feed's last chunk and the first token after it are one step with the talker's token.
    assert any(step.singles and step.num_head_rows > len(step.singles) for step in steps)
