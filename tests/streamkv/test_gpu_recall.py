"""Recall on a GPU: captured decode steps, choices that nothing waits for, and blocks that are read.

What needs no GPU is tested in `test_triton_recall` and `test_recall_ahead`.
"""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from test_cuda_races import (
    ROOT,
    SPEC,
    Rig,
    SlowCopies,
    UnawaitedPromotions,
    UnawaitedReaders,
    bytes_of,
    key_of,
    rig,
    spin,
)
from torch import Tensor

from streamkv import Engine, EngineConfig, SamplingParams, Session, recaller
from streamkv.digest_index import DigestIndex
from streamkv.digest_memory import DigestMemory
from streamkv.kernels.digests import block_digests, block_weights
from streamkv.kernels.rope import RopeTables
from streamkv.observed_queries import NUM_OBSERVED
from streamkv.past import MemoryPast
from streamkv.recall_log import RecallLog
from streamkv.recall_schedule import Choice, Known
from streamkv.recaller import Recaller, RecallOptions
from streamkv.retrieval_heads import Head, RetrievalHeads
from streamkv.sequence import Sequence
from streamkv.tiers.cuda_transfer import CudaTransfer
from streamkv.tiers.spec import BlockKey, KVSpec
from streamkv.triton_runner import TritonRunner
from streamkv.window import Window

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

STRIDE = 64
LONG = SamplingParams(temperature=0.0, max_tokens=150, ignore_eos=True)
SHORT = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)


def options(**others: Any) -> EngineConfig:
    given: dict[str, Any] = {
        "window_size": 3 * STRIDE,
        "recall_blocks": 3,
        "recall_stride": STRIDE,
        "attention": "recall",
        "prefill_chunk": 128,
        "cpu_bytes": "64MiB",
        "max_sessions": 4,
        "dtype": "float32",
        "device": "cuda",
    }
    return EngineConfig(**(given | others))


@contextmanager
def counting_graphs(engine: Engine) -> Iterator[list[int]]:
    """Rows of each decode step that a graph has served."""
    runner = engine._runner
    assert isinstance(runner, TritonRunner) and runner._graphs is not None
    launched, launch = list[int](), runner._graphs.launch

    def counted(steps: Any, targets: Any = ()) -> Tensor:
        launched.append(len(steps))
        return launch(steps, targets)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner._graphs, "launch", counted)
        yield launched


def some_ids(count: int, seed: int = 3) -> list[int]:
    return [5 + (seed * index * index + 7 * index) % 290 for index in range(count)]


def answer(session: Session, params: SamplingParams = LONG) -> tuple[list[Any], list[int]]:
    """Tokens, and where the blocks begin that were attended."""
    tokens = [delta.token_id for delta in session.generate(params)]
    return tokens, [each.start for each in session.attended()]


def story(session: Session) -> list[tuple[list[Any], list[int]]]:
    """Read, answer beyond two choices, read on, answer."""
    found = []
    for number in (900, 90):
        session.feed([some_ids(number, seed=number)]).run()
        found.append(answer(session))
    return found


@pytest.mark.parametrize("compile_", ["auto", "off"])
def test_tokens_and_choices_are_those_of_the_cpu(tiny_model_dir: Path, compile_: str) -> None:
    with Engine(str(tiny_model_dir), options(device="cpu", compile="off")) as engine:
        expected = story(engine.session("one"))
    with Engine(str(tiny_model_dir), options(compile=compile_)) as engine:
        if compile_ == "off":
            assert story(engine.session("one")) == expected
        else:
            with counting_graphs(engine) as launched:
                assert story(engine.session("one")) == expected
            assert len(launched) >= 2 * 140
        engine._tiers.check_integrity()


def test_sessions_that_share_steps_answer_as_each_alone(tiny_model_dir: Path) -> None:
    """Of three one does not recall, and the others are at other tokens of their strides."""

    def opened(engine: Engine) -> list[Session]:
        sessions = [engine.session(str(number)) for number in range(3)]
        for number, session in enumerate(sessions):
            if number == 1:
                session.set_mode("window")
            session.feed([some_ids(700 + 30 * number, seed=5 + number)]).run()
        return sessions

    async def together(sessions: list[Session]) -> list[list[int | None]]:
        async def one(session: Session) -> list[int | None]:
            return [delta.token_id async for delta in session.agenerate(LONG)]

        return await asyncio.gather(*(one(session) for session in sessions))

    with Engine(str(tiny_model_dir), options()) as engine:
        alone = [answer(session) for session in opened(engine)]
    with Engine(str(tiny_model_dir), options()) as engine:
        sessions = opened(engine)
        with counting_graphs(engine) as launched:
            found = asyncio.run(together(sessions))
        assert max(launched) > 1
        assert found == [tokens for tokens, _ in alone]
        attended = [[each.start for each in session.attended()] for session in sessions]
        assert attended == [blocks for _, blocks in alone]
        assert attended[0] and not attended[1] and attended[2]


def test_fork_rewind_and_a_change_of_mode(tiny_model_dir: Path) -> None:
    def tell(engine: Engine) -> list[tuple[list[Any], list[int]]]:
        session = engine.session("one")
        session.feed([some_ids(900)]).run()
        found = [answer(session)]
        fork = session.fork("two")
        for each in (session, fork):
            each.feed([some_ids(100, seed=11)]).run()
            found.append(answer(each))
        session.rewind(700)
        session.feed([some_ids(40, seed=12)]).run()
        found.append(answer(session))
        fork.set_mode("window")
        found.append(answer(fork, SHORT))
        fork.set_mode("recall", 2)
        found.append(answer(fork, SHORT))
        fork.delete()
        session.delete()
        engine._tiers.flush()
        assert engine.usage()["gpu"].num_blocks == 0
        return found

    with Engine(str(tiny_model_dir), options(device="cpu", compile="off")) as engine:
        expected = tell(engine)
    with Engine(str(tiny_model_dir), options()) as engine:
        assert tell(engine) == expected


def queries_of(session: Session) -> Tensor:
    """float32 [num_layers, NUM_OBSERVED, num_q_heads * head_dim]: what would choose now."""
    recaller, sequence = session._live.executor.recaller, session._live.sequence
    assert recaller is not None
    found = recaller._streams[sequence].queries.before(sequence.num_computed)
    assert found is not None and found.shape[1] == NUM_OBSERVED
    return found.float().flatten(2).cpu()


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-3), ("bfloat16", 0.15)])
def test_captured_steps_keep_the_queries_that_a_chunk_keeps(
    tiny_model_dir: Path, dtype: str, tolerance: float
) -> None:
    """In a graph of one row and in one of four, of which some rows are unused."""
    ids = some_ids(500)
    first = len(ids) - NUM_OBSERVED - 5
    eager, captured = (
        options(attention="window", dtype=dtype, compile=compile_) for compile_ in ("off", "auto")
    )
    with Engine(str(tiny_model_dir), eager) as engine:
        session = engine.session("one")
        session.feed([ids]).run()
        expected = queries_of(session)
    with Engine(str(tiny_model_dir), captured) as engine:
        sessions = [engine.session(str(number)) for number in range(3)]
        for session in sessions:
            session.feed([ids[:first]]).run()

        async def feed_one_by_one(session: Session) -> None:
            for token in ids[first:]:
                await session.afeed([[token]]).run()

        async def together() -> None:
            await asyncio.gather(*(feed_one_by_one(session) for session in sessions[1:]))

        with counting_graphs(engine) as launched:
            asyncio.run(feed_one_by_one(sessions[0]))
            asyncio.run(together())
        assert len(launched) >= NUM_OBSERVED
        for session in sessions:
            found = queries_of(session)
            lengths = expected.norm(dim=-1)
            differences = (found - expected).norm(dim=-1) / lengths
            assert float(differences.median()) < tolerance
            # Queries of neighbours would differ by far more.
            others = (found[:, :-1] - expected[:, 1:]).norm(dim=-1) / lengths[:, 1:]
            assert float(others.median()) > 0.4


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_captured_step_attends_to_recalled_blocks_as_an_eager_one_does(
    tiny_model_dir: Path, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same blocks in all engines: what is chosen may differ where weights nearly tie."""
    monkeypatch.setattr(DigestIndex, "choose", lambda *_: Known((1, 4, 6)))
    # Nothing is computed again, in a chunk: the answer begins with a captured step.
    monkeypatch.setattr(recaller, "question_start", lambda num_computed, size: num_computed)
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, logprobs=1)

    def told(engine: Engine, mode: str) -> list[float]:
        """Of a fixed token after each of some prompts, each a question of one token."""
        found = []
        for number in range(6):
            session = engine.session(f"{mode} {number}")
            session.feed([some_ids(700 + number, seed=3 + number)]).run()
            session.set_mode(mode)  # type: ignore[arg-type]  # one of the two
            [delta] = [each for each in session.generate(params) if each.logprob is not None]
            assert delta.logprob is not None
            found.append(delta.logprob.logprob)
            session.delete()
        return found

    eagerly = options(attention="window", dtype=dtype, compile="off")
    with Engine(str(tiny_model_dir), eagerly) as engine:
        eager, plain = told(engine, "recall"), told(engine, "window")
    with (
        Engine(str(tiny_model_dir), options(attention="window", dtype=dtype)) as engine,
        counting_graphs(engine) as runs,
    ):
        captured = told(engine, "recall")
    assert len(runs) >= 6
    difference = max(abs(a - b) for a, b in zip(captured, eager, strict=True))
    assert difference < (1e-3 if dtype == "float32" else 0.2)
    # What is recalled shows: without it they would be far off.
    assert max(abs(a - b) for a, b in zip(plain, eager, strict=True)) > 0.3


# What the host waits for.

INDEX_SPEC = KVSpec(num_layers=3, num_kv_heads=2, head_dim=64, dtype="bfloat16")


@pytest.mark.parametrize("budget", [64 << 20, 0])
def test_digesting_and_choosing_wait_for_nothing(budget: int) -> None:
    """With digests on the device, and in page-locked memory of the host."""
    rope = RopeTables(10000.0 ** -(torch.arange(32).double() / 32), 1)
    angles = tuple(each.cuda() for each in rope.rows(torch.tensor(300)))
    kv_heads = torch.tensor([[0, 1], [2, 0]], device="cuda")
    queries = torch.randn(3, 16, 64, device="cuda", generator=torch.Generator("cuda"))
    queries = queries.bfloat16()
    pool = torch.randn(8, 3, 2, 2, 64, 64, device="cuda").bfloat16()
    block_ids = torch.arange(8, device="cuda")
    index = DigestIndex(2, INDEX_SPEC, DigestMemory("cuda", budget))

    def extend() -> None:
        first = len(index)
        keys = [BlockKey((2 * (first + i)).to_bytes(16, "big")) for i in range(8)]
        index.put(first, keys, block_digests(pool, block_ids, kv_heads))

    def choose() -> Any:
        return index.choose(
            queries, 1, len(index), 4, [0, 1, 1], (angles[0], angles[1]), [0.125] * 3
        )

    # What is loaded, pinned and allocated for the first time may be waited for.
    for _ in range(3):
        extend()
    index.put_missing(len(index))
    choose().blocks()
    assert (index._memory.usage().cpu_bytes > 0) == (budget == 0)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        spin()
        extend()
        choosing = choose()
        assert not choosing.is_known()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    found = choosing.blocks()
    assert choosing.is_known() and len(set(found)) == 4 and min(found) >= 1
    assert index.key(24) is None and 24 not in found
    assert choose().blocks() == found


def test_digests_in_host_memory_are_chosen_to_the_bit_as_on_the_device() -> None:
    """Blocks that a slow device has sealed, one run after the other, read right behind it."""
    rope = RopeTables(10000.0 ** -(torch.arange(32).double() / 32), 1)
    cos, sin = (each.cuda() for each in rope.rows(torch.tensor(300)))
    queries = torch.randn(3, 16, 64, device="cuda").bfloat16()
    pool = torch.randn(8, 3, 2, 2, 64, 64, device="cuda").bfloat16()
    kv_heads = torch.tensor([[0, 1], [2, 0]], device="cuda")
    block_ids = torch.arange(8, device="cuda")
    budgets = (256 << 20, 0, 3 << 20)
    indices = [DigestIndex(2, INDEX_SPEC, DigestMemory("cuda", budget)) for budget in budgets]
    for turn in range(60):
        # Other digests each time, of a device that is behind.
        pool.mul_(1.01)
        if turn % 20 == 0:
            spin()
        digests = block_digests(pool, block_ids, kv_heads)
        for index in indices:
            keys = [BlockKey((2 * (8 * turn + i)).to_bytes(16, "big")) for i in range(8)]
            index.put(8 * turn, keys, digests)
    spin()
    found = []
    for index in indices:
        pages, fetch = list(index._cut(0, 480)), index._memory.fetch
        found.append(block_weights(queries, pages, [0, 1, 1], cos, sin, [0.125] * 3, fetch=fetch))
    last = [BlockKey(bytes(16))]
    spin()
    for index in indices:
        index.put(480, last, 2 * digests[:, :1])
        assert torch.equal(index.digest(480).cpu(), (2 * digests[:, 0]).cpu())
    fork = indices[1].copy()
    spin()
    fork.put(480, last, 3 * digests[:, :1])
    assert torch.equal(fork.digest(480), (3 * digests[:, 0]).cpu())
    assert torch.equal(fork.digest(479), indices[0].digest(479).cpu())
    assert torch.equal(indices[1].digest(480), (2 * digests[:, 0]).cpu())
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])
    for index in (*indices, fork):
        index.close()
    for index in indices:
        assert index._memory.usage().gpu_bytes == index._memory.usage().cpu_bytes == 0


def test_an_answer_that_waits_for_its_choice_is_counted(tiny_model_dir: Path) -> None:
    with Engine(str(tiny_model_dir), options()) as engine:
        session = engine.session("one")
        session.feed([some_ids(700)]).run()
        answer(session, SHORT)
        session.feed([some_ids(9)]).run()
        engine._loop.settle(session._live.sequence)
        torch.cuda.synchronize()
        before = engine.counters()
        spin()
        answer(session, SHORT)
        after = engine.counters()
        assert after["choice_waits"] > before["choice_waits"]
        assert after["choice_wait_ms"] > before["choice_wait_ms"]


# Blocks that are recalled while steps are under way.


def replace_what_a_slow_step_reads(
    made: Rig, slow_copies: bool
) -> tuple[NDArray[Any], NDArray[Any]]:
    """Recall block 1 in place of block 0, in the only gpu block there is, while a step reads it.

    Returns what that step read, and the one after it; blocks 0 and 1 are right.
    """
    made.stored(0)
    made.stored(1)
    adapter: Any = SimpleNamespace(
        spec=SPEC,
        num_q_heads=2,
        head_dim=64,
        inv_freq=10000.0 ** -(torch.arange(32).double() / 32),
        trained_length=4096,
        scales=[0.125] * 4,
    )
    recalled = RecallOptions(1, STRIDE, "far")
    heads = RetrievalHeads((Head(0, 0), Head(3, 1)), group=1)
    recaller = Recaller(
        adapter, made.pool.data, made.manager, heads, recalled, DigestMemory("cuda", 1 << 20)
    )
    sequence = Sequence(1, Window(3 * STRIDE), 64, ROOT)
    recaller.open(sequence, RecallLog(MemoryPast()))
    recaller.resume(sequence, True)
    stream = recaller._streams[sequence]
    stream.index.put(0, [key_of(0), key_of(1)], torch.zeros(2, 2, 64, 64, device="cuda"))
    other = made.manager.allocate()
    stream.schedule.put(Choice(0, Known((0,))))
    recaller.before_step(sequence, 0)
    [block_id] = [sequence.table.recalled[index] for index in sequence.table.recalled]
    torch.cuda.synchronize()
    spin()
    before = made.kernel_reads(block_id)
    made.transfer.is_slow = slow_copies
    stream.schedule.put(Choice(STRIDE, Known((1,))))
    recaller.before_step(sequence, STRIDE)
    assert list(sequence.table.recalled) == [1] and sequence.table.recalled[1] == block_id
    after = made.kernel_reads(block_id)
    torch.cuda.synchronize()
    made.transfer.is_slow = False
    recaller.give_back(sequence)
    made.manager.free(other)
    return before.cpu().numpy(), after.cpu().numpy()


def test_a_recalled_block_is_replaced_behind_the_steps_that_read_it() -> None:
    with rig(SlowCopies) as made:
        before, after = replace_what_a_slow_step_reads(made, slow_copies=True)
    assert np.array_equal(before, bytes_of(0)) and np.array_equal(after, bytes_of(1))


def test_without_that_wait_a_step_would_read_what_a_later_one_recalls() -> None:
    with rig(UnawaitedReaders) as made:
        before, _ = replace_what_a_slow_step_reads(made, slow_copies=False)
    assert np.array_equal(before, bytes_of(1))


def test_without_waiting_for_the_copy_a_step_would_read_what_was_recalled_before() -> None:
    with rig(UnawaitedPromotions) as made:
        _, after = replace_what_a_slow_step_reads(made, slow_copies=True)
    assert np.array_equal(after, bytes_of(0))


def test_the_rigs_own_transfer_does_all_of_it() -> None:
    with rig(CudaTransfer) as made:
        before, after = replace_what_a_slow_step_reads(made, slow_copies=False)
    assert np.array_equal(before, bytes_of(0)) and np.array_equal(after, bytes_of(1))
