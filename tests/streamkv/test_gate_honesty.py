"""What the cost gate learns of reading is what the caller waits, and it decides by that."""

import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from streamkv import Engine, EngineConfig
from streamkv.cost_gate import CostGate
from streamkv.tiers.read_threads import MAX_THREADS
from streamkv.tiers.spec import BlockKey

IDS = random.Random(5).choices(range(100, 390), k=2000)
NUM_BLOCKS = 12
PREFIX = IDS[: NUM_BLOCKS * 64 + 1]


@pytest.fixture(scope="module")
def engine(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """An engine without a cpu pool, which has computed and stored a prefix."""
    config = EngineConfig(
        window_size=1024,
        prefill_chunk=128,
        cpu_bytes=0,
        ssd_bytes="64MiB",
        compile="off",
        store=str(tmp_path_factory.mktemp("store")),
    )
    with Engine(str(tiny_model_dir), config) as engine:
        with engine.session("first", tenant="one") as session:
            session.feed([PREFIX]).run()
        engine._tiers.flush()
        yield engine


@pytest.fixture(params=[2, 5, 32])
def at_once(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Blocks of one batch: several under way at a time, one after the other, or all together."""
    monkeypatch.setattr("streamkv.reuse.READ_AT_ONCE", request.param)
    return int(request.param)


def delay(engine: Engine, monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Have every block take at least so long to read from ssd."""
    ssd = engine._tiers._lower._ssd
    assert ssd is not None
    read = ssd.read

    def late(key: BlockKey, out: Any) -> bool:
        time.sleep(seconds)
        return read(key, out)

    monkeypatch.setattr(ssd, "read", late)


def fresh_gate(engine: Engine) -> CostGate:
    """The gate as if nothing had been read or computed yet."""
    gate = engine.cost_gate
    gate.__init__()  # type: ignore[misc]  # all others hold it
    return gate


def fed(engine: Engine, name: str, tenant: str | None = "one") -> int:
    """Tokens reused by a new session that is fed the prefix."""
    with engine.session(name, tenant=tenant) as session:
        session.feed([PREFIX]).run()
        return session.stats().num_reused


def test_after_a_slow_restore_it_computes(
    engine: Engine, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = fresh_gate(engine)
    delay(engine, monkeypatch, 0.3)
    assert fed(engine, f"slow {at_once}") == NUM_BLOCKS * 64, "nothing was computed yet"
    assert fed(engine, f"computed {at_once}", None) == 0
    assert gate.counters() == {"gate_reads": 1, "gate_computes": 0}
    assert fed(engine, f"gate {at_once}") == 0
    assert gate.counters()["gate_reads"] == 1 and gate.counters()["gate_computes"] > 0


def test_after_a_fast_restore_it_reads(engine: Engine, at_once: int) -> None:
    gate = fresh_gate(engine)
    assert fed(engine, f"fast {at_once}") == NUM_BLOCKS * 64
    # As slow as a model that is large against its blocks: any reading is sooner.
    gate.note_computed(len(PREFIX), 600.0)
    assert fed(engine, f"gate reads {at_once}") == NUM_BLOCKS * 64
    assert gate.counters() == {"gate_reads": 2, "gate_computes": 0}


def test_all_that_it_is_told_of_a_run_is_what_the_run_took(
    engine: Engine, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Batches that are under way together are not each told the time of all, nor a part of it."""
    fresh_gate(engine)
    delay(engine, monkeypatch, 0.1)
    told: list[tuple[int, float]] = []

    def note_read(self: CostGate, place: str, num_bytes: int, seconds: float) -> None:
        told.append((num_bytes, seconds))

    monkeypatch.setattr(CostGate, "note_read", note_read)
    begun_s = time.monotonic()
    assert fed(engine, f"told {at_once}") == NUM_BLOCKS * 64
    waited_s = time.monotonic() - begun_s
    assert sum(num_bytes for num_bytes, _ in told) == NUM_BLOCKS * engine._gpu_pool.spec.block_bytes
    total_s = sum(seconds for _, seconds in told)
    # No read is shorter than its delay, and the threads are no more than those that there are.
    assert 0.1 * NUM_BLOCKS / MAX_THREADS <= total_s <= waited_s
