"""Recall over the Triton runner, interpreted or on a GPU, against the CPU's tokens and choices."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from gpu_cases import DEVICE, ON_GPU

from streamkv import Engine, EngineConfig, SamplingParams, Session
from streamkv import engine as engine_module
from streamkv.batch import Batch, Flight
from streamkv.kernels import gpu_decode
from streamkv.model import ModelAdapter
from streamkv.observed_queries import ObservedQueries
from streamkv.runner import Runner
from streamkv.tiers.gpu_pool import GpuPool
from streamkv.triton_runner import TritonRunner

pytestmark = [pytest.mark.gpu] if ON_GPU else []

STRIDE = 64
WINDOW_SIZE = 3 * STRIDE
PLAIN_TOKENS = 5 * STRIDE
"""Computed by the CPU's runner, which is a hundred times as fast as the interpreter."""

GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
BRIEF = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)

Story = list[tuple[list[Any], list[int]]]


def options(**others: Any) -> EngineConfig:
    given: dict[str, Any] = {
        "window_size": WINDOW_SIZE,
        "recall_blocks": 1,
        "recall_stride": STRIDE,
        "attention": "recall",
        "prefill_chunk": 128,
        "cpu_bytes": "64MiB",
        "max_sessions": 3,
        "dtype": "float32",
        "compile": "off",
    }
    return EngineConfig(**(given | others))


class LateTritonRunner(TritonRunner):
    """Triton's runner from token `PLAIN_TOKENS` on; what comes before is the CPU runner's."""

    def __init__(self, model: ModelAdapter, pool: GpuPool) -> None:
        super().__init__(model, pool.data, model.trained_length)
        self._early = Runner(model, pool.data, model.trained_length)

    def observe(self, seq_id: int, queries: ObservedQueries | None) -> None:
        super().observe(seq_id, queries)
        self._early.observe(seq_id, queries)

    def launch(self, batch: Batch) -> Flight:  # type: ignore[override]  # either runner's
        if all(step.start + step.query_len <= PLAIN_TOKENS for step in batch.steps):
            return self._early.launch(batch)
        return super().launch(batch)


@contextmanager
def triton_engine(model: Path, **others: Any) -> Iterator[Engine]:
    """An engine whose runner is Triton's, whatever the device of its pool."""
    if ON_GPU:
        with Engine(str(model), options(device=DEVICE, **others)) as engine:
            yield engine
        return

    def make(adapter: ModelAdapter, pool: GpuPool, config: EngineConfig) -> TritonRunner:
        return LateTritonRunner(adapter, pool)

    with (
        mock.patch.object(engine_module, "make_runner", make),
        # Fewer programs for each sequence: they are what takes the interpreter its time.
        mock.patch.object(gpu_decode, "processors", lambda device: 1),
        Engine(str(model), options(**others)) as engine,
    ):
        yield engine


def some_ids(count: int, seed: int = 3) -> list[int]:
    return [5 + (seed * index * index + 7 * index) % 290 for index in range(count)]


def answer(session: Session, params: SamplingParams = GREEDY) -> tuple[list[Any], list[int]]:
    """Tokens, and where the blocks begin that were attended."""
    tokens = [delta.token_id for delta in session.generate(params)]
    return tokens, [each.start for each in session.attended()]


def read(session: Session, ids: list[int], cut: int = 1000) -> None:
    session.feed([ids[low : low + cut] for low in range(0, len(ids), cut)]).run()


def on_both(model: Path, tell: Callable[[Engine], Story]) -> None:
    """What a story says is the same on the CPU's runner and on Triton's."""
    with Engine(str(model), options()) as engine:
        expected = tell(engine)
    assert all(attended for _, attended in expected)
    with triton_engine(model) as engine:
        assert tell(engine) == expected
        engine._tiers.check_integrity()


@pytest.mark.parametrize("cut", [1000, 9])
def test_tokens_and_choices_are_those_of_the_cpu_however_the_input_is_cut(
    narrow_model_dir: Path, cut: int
) -> None:
    """A chunk and decode steps attend to what was chosen, and show their queries for the next.

    The answer passes a multiple of the stride: a choice falls due in the middle of it.
    """
    num_tokens = PLAIN_TOKENS + STRIDE - 3

    def tell(engine: Engine) -> Story:
        session = engine.session("one")
        read(session, some_ids(num_tokens), cut)
        return [answer(session)]

    on_both(narrow_model_dir, tell)


def test_sessions_that_share_steps_answer_as_each_alone(narrow_model_dir: Path) -> None:
    """One recalls and the other does not."""

    def opened(engine: Engine) -> list[Session]:
        sessions = [engine.session("one"), engine.session("two")]
        for session, mode in zip(sessions, ("recall", "window"), strict=True):
            session.set_mode(mode)  # type: ignore[arg-type]  # one of the two
            read(session, some_ids(PLAIN_TOKENS + 2))
        return sessions

    async def together(sessions: list[Session]) -> list[list[int | None]]:
        async def one(session: Session) -> list[int | None]:
            return [delta.token_id async for delta in session.agenerate(GREEDY)]

        return await asyncio.gather(*(one(session) for session in sessions))

    with Engine(str(narrow_model_dir), options()) as engine:
        alone = [answer(session) for session in opened(engine)]
    with triton_engine(narrow_model_dir) as engine:
        sessions = opened(engine)
        assert asyncio.run(together(sessions)) == [tokens for tokens, _ in alone]
        attended = [[each.start for each in session.attended()] for session in sessions]
        assert attended == [blocks for _, blocks in alone]
        assert attended[0] and not attended[1]


def test_fork_and_rewind_are_those_of_the_cpu(narrow_model_dir: Path) -> None:
    def tell(engine: Engine) -> Story:
        session = engine.session("one")
        read(session, some_ids(PLAIN_TOKENS + 3))
        fork = session.fork("two")
        found = [answer(session, BRIEF), answer(fork, BRIEF)]
        session.rewind(PLAIN_TOKENS - 20)
        read(session, some_ids(22, seed=11))
        return [*found, answer(session, BRIEF)]

    on_both(narrow_model_dir, tell)
