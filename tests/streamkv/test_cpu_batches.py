"""Several sequences in one step on a CPU: what a session says does not depend on the others."""

import asyncio
import random
import threading
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from streamkv import Delta, Engine, EngineConfig, SamplingParams, Session
from streamkv.batch import Batch, SequenceStep, StepResult, Wanted
from streamkv.errors import ModelError
from streamkv.kernels.native_build import find_compiler
from streamkv.model import ModelAdapter
from streamkv.operations import Call
from streamkv.runner import MAX_SEQUENCES, Runner
from streamkv.sequence import Sequence
from streamkv.tiers.gpu_pool import GpuPool
from streamkv.tiers.spec import BlockKey
from streamkv.window import Window

NUM_SAID = 24
FAST = pytest.param(
    "auto", marks=pytest.mark.skipif(find_compiler() is None, reason="no C compiler"), id="native"
)
WAYS = pytest.mark.parametrize("compile_mode", [FAST, pytest.param("off", id="torch")])

Said = list[Delta]


@pytest.fixture
def batches(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Tokens of each sequence in each step that a runner has computed since."""
    seen: list[list[int]] = []
    run = Runner.run

    def recorded(runner: Runner, batch: Batch) -> list[StepResult]:
        seen.append([step.query_len for step in batch.steps])
        return run(runner, batch)

    monkeypatch.setattr(Runner, "run", recorded)
    return seen


def config(compile_mode: Any, **options: Any) -> EngineConfig:
    given = {"window_size": 256, "prefill_chunk": 128, "cpu_bytes": "16MiB", "max_sessions": 8}
    return EngineConfig(compile=compile_mode, **(given | options))


def some_ids(seed: int, count: int) -> list[int]:
    return random.Random(seed).choices(range(3, 300), k=count)


def spoken(seed: int | None) -> SamplingParams:
    """Greedy, or drawn with a seed."""
    temperature = 0.0 if seed is None else 0.8
    return SamplingParams(
        temperature=temperature, max_tokens=NUM_SAID, ignore_eos=True, seed=seed, logprobs=2
    )


# Streams that differ in everything that a step knows of them.


def short(session: Session) -> None:
    session.feed([some_ids(1, 1)]).run()


def within_a_block(session: Session) -> None:
    session.feed([some_ids(2, 50)]).run()


def beyond_the_window(session: Session) -> None:
    session.feed([some_ids(3, 700)]).run()


def with_kept_text(session: Session) -> None:
    session.feed([some_ids(4, 300)]).run()
    session.keep("A secret: seven. " * 5)
    session.feed([some_ids(5, 130)]).run()


def recalling(session: Session) -> None:
    session.feed([some_ids(6, 900)]).run()
    session.set_mode("recall")


def attending_to_all(session: Session) -> None:
    session.feed([some_ids(7, 500)]).run()
    session.set_mode("full")


def another_short(session: Session) -> None:
    session.feed([some_ids(8, 3)]).run()


STREAMS: list[tuple[Callable[[Session], None], int | None]] = [
    (short, None),
    (within_a_block, 11),
    (beyond_the_window, None),
    (with_kept_text, None),
    (recalling, None),
    (attending_to_all, 12),
    (another_short, None),
]


@pytest.fixture(params=["auto", "off"])
def engine(
    request: pytest.FixtureRequest, tiny_model_dir: Path, batches: list[list[int]]
) -> Iterator[Engine]:
    """With every mode allowed; on native kernels, and on torch's."""
    if request.param == "auto" and find_compiler() is None:
        pytest.skip("there is no C compiler")
    # A float32 Llama of 2 layers: room for all of what `full` attends to.
    options = config(
        request.param, recall_blocks=4, recall_stride=64, gpu_bytes="64MiB", cpu_bytes="32MiB"
    )
    with Engine(str(tiny_model_dir), options) as made:
        assert made.wait_until_fast() is (request.param == "auto")
        batches.clear()
        yield made


async def at_once(engine: Engine, *awaited: Awaitable[Any]) -> list[Any]:
    """Results or errors of all, which are asked for before the engine's thread sees the first."""
    is_held, go_on = threading.Event(), threading.Event()

    def hold() -> None:
        is_held.set()
        go_on.wait()

    held = engine._loop.submit(Call(hold))
    await asyncio.to_thread(is_held.wait)
    tasks = [asyncio.ensure_future(each) for each in awaited]
    while len(engine._loop._inbox) + len(engine._loop._calls) < len(tasks):
        await asyncio.sleep(0.001)
        assert not any(task.done() for task in tasks)
    go_on.set()
    found = await asyncio.gather(*tasks, return_exceptions=True)
    held.result()
    return found


async def all_say(engine: Engine, sessions: list[Session], seeds: list[int | None]) -> list[Any]:
    """What sessions say, or the error that ended it; after their first tokens all share a step."""
    runs = [session.agenerate(spoken(seed)) for session, seed in zip(sessions, seeds, strict=True)]
    # With the first token comes what is done once for an answer.
    first = [[await anext(run)] for run in runs]
    rest = await at_once(engine, *(run.run() for run in runs))
    return [
        said if isinstance(said, BaseException) else begun + said
        for begun, said in zip(first, rest, strict=True)
    ]


def require_same(engine: Engine, found: Said, expected: Said) -> None:
    """To the bit by native kernels; torch's products of other sizes round differently."""
    if engine.config.compile == "auto":
        assert found == expected
        return
    assert [delta.token_id for delta in found] == [delta.token_id for delta in expected]
    for one, other in zip(found, expected, strict=True):
        assert one.logprob is not None and other.logprob is not None
        assert one.logprob.logprob == pytest.approx(other.logprob.logprob, abs=2e-4)


def alone(engine: Engine, prepare: Callable[[Session], None], seed: int | None) -> Said:
    """What a stream says with the engine to itself."""
    with engine.session("alone") as session:
        prepare(session)
        said = session.generate(spoken(seed)).run()
        session.delete()
    return said


def test_a_session_says_the_same_whoever_shares_its_steps(
    engine: Engine, batches: list[list[int]]
) -> None:
    expected = [alone(engine, *stream) for stream in STREAMS]
    assert {tuple(lens) for lens in batches if lens[0] == 1} == {(1,)}
    sessions = [engine.session(prepare.__name__) for prepare, _ in STREAMS]
    for session, (prepare, _) in zip(sessions, STREAMS, strict=True):
        prepare(session)
    batches.clear()
    said = asyncio.run(all_say(engine, sessions, [seed for _, seed in STREAMS]))
    assert [1] * len(STREAMS) in batches
    for found, wanted in zip(said, expected, strict=True):
        require_same(engine, found, wanted)


def test_decodes_share_a_step_with_a_chunk_of_a_feed(
    engine: Engine, batches: list[list[int]]
) -> None:
    streams = STREAMS[1:4]
    expected = [alone(engine, *stream) for stream in streams]
    fed = alone(engine, lambda session: session.feed([some_ids(9, 600)]).run(), None)
    sessions = [engine.session(prepare.__name__) for prepare, _ in streams]
    for session, (prepare, _) in zip(sessions, streams, strict=True):
        prepare(session)
    reader = engine.session("reader")
    batches.clear()

    runs = [
        session.agenerate(spoken(seed)).run()
        for session, (_, seed) in zip(sessions, streams, strict=True)
    ]
    *said, _ = asyncio.run(at_once(engine, *runs, reader.afeed([some_ids(9, 600)]).run()))
    assert [1, 1, 1, 128] in batches
    for found, wanted in zip(said, expected, strict=True):
        require_same(engine, found, wanted)
    require_same(engine, reader.generate(spoken(None)).run(), fed)


def test_scores_do_not_depend_on_the_decodes_beside_them(
    engine: Engine, batches: list[list[int]]
) -> None:
    ids = some_ids(10, 400)
    alone_scores = [score.logprob for score in engine.session("before").score([ids]).run()]
    expected = alone(engine, *STREAMS[2])
    speaker, scorer = engine.session("speaker"), engine.session("scorer")
    STREAMS[2][0](speaker)
    batches.clear()
    scoring = scorer.ascore([ids]).run()
    said, scores = asyncio.run(at_once(engine, speaker.agenerate(spoken(None)).run(), scoring))
    assert any(len(lens) == 2 and max(lens) > 1 for lens in batches)
    require_same(engine, said, expected)
    found = [score.logprob for score in scores]
    if engine.config.compile == "auto":
        assert found == alone_scores
    else:
        assert found[1:] == pytest.approx(alone_scores[1:], abs=2e-4)


def test_a_session_whose_sampling_fails_fails_alone(
    engine: Engine, batches: list[list[int]]
) -> None:
    """Its KV is NaN, and so are its logits; nobody else sees anything of it."""
    streams = [STREAMS[1], STREAMS[2], STREAMS[3]]
    expected = [alone(engine, *stream) for stream in streams]
    sessions = [engine.session(prepare.__name__) for prepare, _ in streams]
    for session, (prepare, _) in zip(sessions, streams, strict=True):
        prepare(session)
    bad = sessions[1]
    block_id = next(iter(bad._live.sequence.table)).block_id
    before = engine._gpu_pool.data[block_id].clone()
    engine._gpu_pool.data[block_id] = float("nan")
    batches.clear()
    runs = [
        session.agenerate(spoken(seed)).run()
        for session, (_, seed) in zip(sessions, streams, strict=True)
    ]
    said = asyncio.run(at_once(engine, *runs))
    assert [1, 1, 1] in batches
    assert isinstance(said[1], ModelError)
    require_same(engine, said[0], expected[0])
    require_same(engine, said[2], expected[2])
    # Nothing was accepted that was not said: with its block mended it goes on where it was.
    engine._gpu_pool.data[block_id] = before
    require_same(engine, bad.generate(spoken(streams[1][1])).run(), expected[1])


def test_a_cancelled_session_leaves_the_others_alone(
    engine: Engine, batches: list[list[int]]
) -> None:
    streams = STREAMS[1:4]
    expected = [alone(engine, *stream) for stream in streams]
    sessions = [engine.session(prepare.__name__) for prepare, _ in streams]
    for session, (prepare, _) in zip(sessions, streams, strict=True):
        prepare(session)

    async def three_tokens(session: Session, seed: int | None) -> Said:
        found = []
        outputs = session.agenerate(spoken(seed))
        async for delta in outputs:
            found.append(delta)
            if len(found) == 3:
                break
        await outputs.aclose()
        return found

    first, second, third = (
        sessions[0].agenerate(spoken(streams[0][1])).run(),
        three_tokens(sessions[1], streams[1][1]),
        sessions[2].agenerate(spoken(streams[2][1])).run(),
    )
    said = asyncio.run(at_once(engine, first, second, third))
    require_same(engine, said[0], expected[0])
    require_same(engine, said[1], expected[1][:3])
    require_same(engine, said[2], expected[2])


@WAYS
def test_more_sessions_than_a_step_has_room_for_take_turns(
    tiny_model_dir: Path, batches: list[list[int]], compile_mode: str
) -> None:
    with Engine(
        str(tiny_model_dir), config(compile_mode, max_sessions=3, window_size=64)
    ) as engine:
        engine.wait_until_fast()
        sessions = [engine.session(str(index)) for index in range(5)]
        for index, session in enumerate(sessions):
            session.feed([some_ids(index, 40)]).run()
        expected = [alone_again(engine, index) for index in range(5)]
        batches.clear()
        runs = [session.agenerate(spoken(None)).run() for session in sessions]
        said = asyncio.run(at_once(engine, *runs))
        assert max(len(lens) for lens in batches) == 3
        assert sum(len(lens) for lens in batches) == 5 * NUM_SAID
        for found, wanted in zip(said, expected, strict=True):
            require_same(engine, found, wanted)


def alone_again(engine: Engine, index: int) -> Said:
    return alone(engine, lambda session: session.feed([some_ids(index, 40)]).run(), None)


# The runner by itself.


class Bench:
    """A runner, on native kernels or on torch's, over a pool that is all NaN until written."""

    def __init__(self, directory: Path, native_threads: int, dtype: str = "float32") -> None:
        self.adapter = ModelAdapter.load(str(directory), dtype=dtype)
        pool = GpuPool(self.adapter.spec, 24)
        pool.fill_nan(*range(25))
        length = self.adapter.trained_length
        self.runner = Runner(self.adapter, pool.data, length, native_threads)
        assert self.runner.wait_until_fast() is (native_threads > 0)
        self._free = list(range(24))

    def sequence(self, seed: int, num_computed: int, num_pending: int = 200) -> Sequence:
        made = Sequence(1, Window(64, ((0, 4),)), 64, BlockKey(b"r" * 16))
        made.append(some_ids(seed, num_computed + num_pending))
        if num_computed:
            self.run(SequenceStep(made, num_computed))
        return made

    def run(self, *steps: SequenceStep) -> list[StepResult]:
        for step in steps:
            start = step.sequence.num_computed
            for index in step.sequence.table.missing(start, start + step.query_len):
                step.sequence.table.add(index, self._free.pop())
        results = self.runner.run(Batch(steps))
        for step in steps:
            step.sequence.advance(step.query_len)
        return results


KINDS = pytest.mark.parametrize(
    ("native_threads", "dtype"),
    [(0, "float32"), (0, "bfloat16"), (2, "float32"), (2, "bfloat16")],
)


@KINDS
def test_results_come_in_the_order_of_the_batch(
    tiny_model_dir: Path, native_threads: int, dtype: str
) -> None:
    """Whichever parts are decodes, wherever they stand, whatever each of them wants."""
    if native_threads and find_compiler() is None:
        pytest.skip("there is no C compiler")
    bench = Bench(tiny_model_dir, native_threads, dtype)
    places = [(1, 1), (2, 65), (3, 0), (4, 130), (5, 7), (6, 90)]
    wanted = [
        (1, Wanted.SCORES), (40, Wanted.LOGITS), (1, Wanted.LOGITS),
        (1, Wanted.NOTHING), (3, Wanted.SCORES), (1, Wanted.LOGITS),
    ]  # fmt: skip

    def steps(order: list[int]) -> list[SequenceStep]:
        sequences = [bench.sequence(*place) for place in places]
        return [SequenceStep(sequences[index], *wanted[index]) for index in order]

    each = [bench.run(step)[0] for step in steps(list(range(6)))]
    bench = Bench(tiny_model_dir, native_threads, dtype)
    order = [3, 1, 0, 5, 4, 2]
    together = bench.run(*steps(order))
    tolerance = 2e-4 if dtype == "float32" else 0.3
    for index, found in zip(order, together, strict=True):
        for name in ("scores", "logits"):
            one, other = getattr(found, name), getattr(each[index], name)
            assert (one is None) == (other is None)
            if one is not None:
                torch.testing.assert_close(one, other, atol=tolerance, rtol=0)
                if native_threads and wanted[index][0] == 1:
                    assert torch.equal(one, other)


def test_the_head_is_read_once_for_all_rows(
    tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(tiny_model_dir, 0)
    sequences = [bench.sequence(seed, 10 * seed) for seed in range(1, 5)]
    sizes: list[int] = []
    head = bench.adapter.head

    def counted(rows: torch.Tensor) -> torch.Tensor:
        sizes.append(len(rows))
        return head(rows)

    monkeypatch.setattr(bench.adapter, "head", counted)
    bench.run(*(SequenceStep(sequence, 1, Wanted.LOGITS) for sequence in sequences))
    assert sizes == [4]


def test_a_step_has_room_for_the_sessions_of_the_engine(tiny_model_dir: Path) -> None:
    adapter = ModelAdapter.load(str(tiny_model_dir))
    pool = GpuPool(adapter.spec, 1).data
    for asked, given in ((1, 1), (3, 3), (MAX_SEQUENCES, MAX_SEQUENCES), (500, MAX_SEQUENCES)):
        assert Runner(adapter, pool, 64, max_sequences=asked).max_sequences == given
