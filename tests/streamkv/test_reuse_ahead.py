"""Runs of stored blocks whatever is under way meanwhile, and however their feed is cut."""

import dataclasses
import itertools
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from streamkv import Engine, EngineConfig, SamplingParams, Session
from streamkv.errors import EngineClosedError, InputError
from streamkv.reuse import Taking
from streamkv.tiers.spec import BlockKey

SMALL = EngineConfig(
    window_size=1024, prefill_chunk=128, cpu_bytes="16MiB", ssd_bytes="64MiB", compile="off"
)
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=0)
NUMBERS = itertools.count()
IDS = random.Random(3).choices(range(100, 390), k=1100)
NUM_BLOCKS = 12
STREAM = IDS[: NUM_BLOCKS * 64 + 1]


@pytest.fixture(scope="module")
def engine(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    config = dataclasses.replace(SMALL, store=str(tmp_path_factory.mktemp("store")))
    with Engine(str(tiny_model_dir), config) as engine:
        engine.cost_gate.always_reads = True
        yield engine


@pytest.fixture(scope="module")
def cold(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """An engine without a cpu pool, so that all is read from ssd."""
    config = dataclasses.replace(SMALL, cpu_bytes=0, store=str(tmp_path_factory.mktemp("cold")))
    with Engine(str(tiny_model_dir), config) as engine:
        engine.cost_gate.always_reads = True
        yield engine


@pytest.fixture
def name() -> str:
    """A name that no other test has, for a tenant or a session."""
    return f"test {next(NUMBERS)}"


def answer(session: Session) -> list[tuple[int, float]]:
    deltas = [delta for delta in session.generate(GREEDY) if delta.logprob is not None]
    return [(d.logprob.token_id, d.logprob.logprob) for d in deltas if d.logprob is not None]


def assert_same(found: list[tuple[int, float]], expected: list[tuple[int, float]]) -> None:
    assert len(found) == GREEDY.max_tokens
    assert [token for token, _ in found] == [token for token, _ in expected]
    assert [lp for _, lp in found] == pytest.approx([lp for _, lp in expected], abs=1e-4)


def computed(engine: Engine, name: str) -> tuple[list[BlockKey], list[tuple[int, float]]]:
    """Keys of the stream's blocks, computed by a session that sleeps, and what comes next."""
    with engine.session(f"{name} first", tenant=name) as session:
        session.feed(STREAM).run()
        keys = [block.key for block in session._live.sequence.table]
        expected = answer(session)
    engine._tiers.flush()
    assert None not in keys[:NUM_BLOCKS]
    return [key for key in keys[:NUM_BLOCKS] if key is not None], expected


def feed_rest(session: Session) -> None:
    """Feed what of the stream was not accepted."""
    if session.num_tokens < len(STREAM):
        session.feed([STREAM[session.num_tokens :]]).run()


def assert_all_given_back(engine: Engine) -> None:
    """No session is open: nothing is owned, held or locked by anybody."""
    engine._tiers.flush()
    engine._tiers.check_integrity()
    assert engine.usage()["gpu"].num_blocks == 0
    pool, unstored = engine._cpu_pool, engine._tiers._lower._unstored
    locked = {key: block.num_locks for key, block in pool._index.items() if block.num_locks}
    assert locked == dict.fromkeys(unstored, 1), "a block of the cpu pool is still locked"


@pytest.mark.parametrize("tier", ["cpu", "ssd", "gpu"])
@pytest.mark.parametrize("num_ahead", [0, 1, 3, 100])
@pytest.mark.parametrize("at_once", [1, 5, 32])
def test_the_run_is_the_same_however_much_is_under_way(
    engine: Engine,
    cold: Engine,
    name: str,
    tier: str,
    num_ahead: int,
    at_once: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("streamkv.reuse.NUM_AHEAD", num_ahead)
    monkeypatch.setattr("streamkv.reuse.READ_AT_ONCE", at_once)
    used = cold if tier == "ssd" else engine
    keys, expected = computed(used, name)
    first = used.session(f"{name} first") if tier == "gpu" else None
    assert {used._tiers.where(key) for key in keys} == {tier}
    landed: list[int] = []
    real = Taking._end_oldest

    def end_oldest(self: Taking) -> None:
        before = len(self._held)
        real(self)
        landed.append(len(self._held) - before)

    monkeypatch.setattr(Taking, "_end_oldest", end_oldest)
    with used.session(f"{name} b", tenant=name) as second:
        second.feed(STREAM).run()
        assert second.stats().num_reused == NUM_BLOCKS * 64
        found = [block.key for block in second._live.sequence.table][:NUM_BLOCKS]
        assert found == keys
        assert_same(answer(second), expected)
    assert sum(landed) == NUM_BLOCKS and max(landed) <= at_once
    if first is not None:
        first.close()
    assert_all_given_back(used)


def test_no_more_than_two_batches_are_under_way_and_one_ends_a_step(
    engine: Engine, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("streamkv.reuse.READ_AT_ONCE", 2)
    computed(engine, name)
    seen: list[tuple[int, int, int | None]] = []
    real = Taking.step

    def step(self: Taking) -> int | None:
        result = real(self)
        held = len(self._held) if result is None else NUM_BLOCKS
        seen.append((sum(len(batch.block_ids) for batch in self._under_way), held, result))
        return result

    monkeypatch.setattr(Taking, "step", step)
    with engine.session(f"{name} b", tenant=name) as second:
        second.feed(STREAM).run()
    # While a batch is waited for, the next one is under way.
    assert [(under_way, held) for under_way, held, _ in seen] == [
        (2, 0),
        *((2, held) for held in range(2, NUM_BLOCKS, 2)),
        (0, NUM_BLOCKS),
    ]
    assert [result for _, _, result in seen] == [None] * (len(seen) - 1) + [NUM_BLOCKS * 64]


@pytest.mark.parametrize("piece_ids", [1, 63, 64, 300, 4096])
@pytest.mark.parametrize("limit", [0, 256, 65_536])
def test_it_does_not_depend_on_how_the_feed_is_cut(
    engine: Engine, name: str, piece_ids: int, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys, expected = computed(engine, name)
    monkeypatch.setattr("streamkv.intake.PIECE_IDS", piece_ids)
    monkeypatch.setattr("streamkv.intake.MAX_IDS_AHEAD", limit)
    with engine.session(f"{name} b", tenant=name) as second:
        progress = second.feed([STREAM]).run()
        assert second.stats().num_reused == progress[-1].num_reused == NUM_BLOCKS * 64
        assert progress[-1].num_tokens == NUM_BLOCKS * 64
        assert [block.key for block in second._live.sequence.table][:NUM_BLOCKS] == keys
        assert second._live.past.ids(0, len(STREAM)).tolist() == STREAM
        assert_same(answer(second), expected)
    assert_all_given_back(engine)


def test_a_list_is_one_run_and_is_accepted_no_further_than_it_is_stored(
    engine: Engine, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    computed(engine, name)
    monkeypatch.setattr("streamkv.intake.PIECE_IDS", 64)
    before = engine.counters()["gate_reads"]
    with engine.session(f"{name} b", tenant=name) as session:
        session.feed([STREAM]).run()
        assert session.stats().num_reused == NUM_BLOCKS * 64
    assert engine.counters()["gate_reads"] - before == 1
    # Other tokens: nothing is found, so no more is pending than a chunk and a piece.
    most = 0
    with engine.session(f"{name} c", tenant=name) as session:
        for _ in session.feed([[5, *IDS]]):
            most = max(most, session.num_tokens - session.stats().num_computed)
    assert most <= 128 + 64
    # Only some are stored: what is pending stays in proportion to what was found.
    most = 0
    with engine.session(f"{name} d", tenant=name) as session:
        for _ in session.feed([STREAM[:256] + [5] * 3000]):
            most = max(most, session.num_tokens - session.stats().num_computed)
        assert session.stats().num_reused == 256
    assert most <= 2 * (256 + 128)


def test_items_are_asked_for_as_late_as_ever(
    engine: Engine, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of an endless iterable nothing is taken before what came before it is computed."""
    computed(engine, name)
    asked: list[tuple[int, int]] = []
    session = engine.session(f"{name} b", tenant=name)

    def items() -> Iterator[list[int]]:
        for start in itertools.count(0, 64):
            asked.append((start, session.num_tokens - session.stats().num_computed))
            yield (STREAM * 2)[start % 512 : start % 512 + 64]

    outputs = session.feed(items())
    for progress in outputs:
        if progress.num_tokens > 1000:
            break
    outputs.close()
    assert all(pending <= 128 for _, pending in asked) and len(asked) < 24
    session.close()


def test_what_is_refused_ahead_is_refused_when_its_turn_comes(
    engine: Engine, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, expected = computed(engine, name)
    monkeypatch.setattr("streamkv.intake.PIECE_IDS", 64)
    bad = [*STREAM[: NUM_BLOCKS * 64], 10**9]
    with engine.session(f"{name} b", tenant=name) as session:
        with pytest.raises(InputError, match="token id"):
            session.feed([bad]).run()
        # All that stood before it is accepted, and was taken.
        assert session.num_tokens == NUM_BLOCKS * 64
        assert session.stats().num_reused >= (NUM_BLOCKS - 3) * 64
        session.feed([STREAM[-1:]]).run()
        assert_same(answer(session), expected)
    assert_all_given_back(engine)


@pytest.mark.parametrize("doomed", [{0}, {1}, {2}, {3}, {4}, {5}, {11}, {3, 4}, {2, 5, 6}, {0, 11}])
def test_damage_in_one_batch_while_the_next_is_under_way(
    cold: Engine, name: str, doomed: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Batches of three: their first, middle and last blocks, in one of them or in two."""
    keys, expected = computed(cold, name)
    monkeypatch.setattr("streamkv.reuse.READ_AT_ONCE", 3)
    bad = {keys[index] for index in doomed}
    assert cold._store is not None
    blocks = cold._store.blocks
    real = blocks.read

    def read(key: BlockKey, *more: Any) -> bool:
        return key not in bad and real(key, *more)

    monkeypatch.setattr(blocks, "read", read)
    with cold.session(f"{name} b", tenant=name) as second:
        second.feed([STREAM]).run()
        # The window holds all of it, so the run ends where the first block is missing; what it did
        # not need of what was read is found again behind the block that was computed.
        assert second.stats().num_reused >= min(doomed) * 64
        assert [block.key for block in second._live.sequence.table][:NUM_BLOCKS] == keys
        assert_same(answer(second), expected)
    monkeypatch.undo()
    assert_all_given_back(cold)


@pytest.mark.parametrize("tier", ["cpu", "ssd"])
@pytest.mark.parametrize("num_steps", [1, 2, 4])
def test_who_leaves_in_the_middle_leaves_no_block_behind(
    engine: Engine,
    cold: Engine,
    name: str,
    tier: str,
    num_steps: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    used = cold if tier == "ssd" else engine
    _, expected = computed(used, name)
    monkeypatch.setattr("streamkv.reuse.READ_AT_ONCE", 2)
    left = iter(range(num_steps))
    real = Taking.step

    def step(self: Taking) -> int | None:
        if next(left, None) is None:
            assert self._under_way, "nothing was under way, so this test shows nothing"
            raise KeyboardInterrupt
        return real(self)

    with monkeypatch.context() as patch:
        patch.setattr(Taking, "step", step)
        second = used.session(f"{name} b", tenant=name)
        with pytest.raises(KeyboardInterrupt):
            second.feed([STREAM]).run()
    assert second.stats().num_computed == 0 and second.num_tokens > 0
    while used.usage()["gpu"].num_blocks:  # reads that had begun end
        pass
    assert_all_given_back(used)
    feed_rest(second)
    assert_same(answer(second), expected)
    second.close()
    assert_all_given_back(used)


def test_a_step_that_comes_after_its_caller_has_left_takes_nothing(
    engine: Engine, name: str
) -> None:
    computed(engine, name)
    with engine.session(f"{name} b", tenant=name) as second:
        second._live.intake.accept(STREAM)
        reuse = second._live.reuse
        run = reuse.find()
        assert run is not None and len(run.wanted) == NUM_BLOCKS
        with reuse.taking(run, lambda: None) as taking:
            pass
        assert taking.step() == 0
        assert engine.usage()["gpu"].num_blocks == 0 and second.stats().num_computed == 0
    assert_all_given_back(engine)


@pytest.mark.parametrize("cpu_bytes", [0, "16MiB"])
def test_an_engine_that_closes_in_the_middle_ends_it(
    tiny_model_dir: Path, tmp_path: Path, cpu_bytes: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("streamkv.reuse.READ_AT_ONCE", 2)
    config = dataclasses.replace(SMALL, store=str(tmp_path), cpu_bytes=cpu_bytes)
    engine = Engine(str(tiny_model_dir), config)
    engine.cost_gate.always_reads = True
    _, expected = computed(engine, "a")
    second = engine.session("b", tenant="a")
    real = Taking.step

    def step(self: Taking) -> int | None:
        result = real(self)
        if len(self._held) == 4:
            engine._loop.close()
        return result

    monkeypatch.setattr(Taking, "step", step)
    with pytest.raises(EngineClosedError):
        second.feed([STREAM]).run()
    monkeypatch.setattr(Taking, "step", real)
    engine.close()
    engine._tiers.check_integrity()
    assert engine._gpu_pool.free_list.num_used == 0
    with Engine(str(tiny_model_dir), config) as again, again.session("b") as session:
        feed_rest(session)
        assert_same(answer(session), expected)
