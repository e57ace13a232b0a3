"""A plan for many sessions: by hand, never better for more, and what an engine then takes."""

import dataclasses
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamkv import Engine, EngineConfig
from streamkv.cli.doctor_model import read_size
from streamkv.gpu_plan import DeviceMemory, ModelSize, plan_gpu
from streamkv.session_plan import SessionPlan, Speeds, Workload, plan_sessions
from streamkv.stored_bytes import block_bytes, journal_bytes, room_for_blocks
from streamkv.tiers.cpu_pool import CpuPool
from streamkv.tiers.spec import KVSpec

MIB, GIB = 1 << 20, 1 << 30
SPEC = KVSpec(num_layers=16, num_kv_heads=4, head_dim=64, dtype="bfloat16")  # 1 MiB a block
MODEL = ModelSize(weight_bytes=2 * GIB, hidden_size=1000, layer_width=4000, vocab_size=10_000)
MEMORY = DeviceMemory(80 * GIB, 79 * GIB)
CONFIG = EngineConfig(window_size=512, num_sink_tokens=4, cpu_bytes="100MiB", ssd_bytes="4GiB")
WORK = Workload(num_sessions=100, num_awake=10, num_tokens=10_000, tokens_per_day=1000)
ASLEEP = 1 + 8 + 1  # sink tokens, window, the open block


def planned(
    memory: DeviceMemory | None = MEMORY, work: dict[str, int] | None = None, **options: Any
) -> SessionPlan:
    config = dataclasses.replace(CONFIG, **options)
    return plan_sessions(MODEL, SPEC, config, dataclasses.replace(WORK, **(work or {})), memory)


def test_the_parts_are_those_counted_by_hand() -> None:
    assert SPEC.block_bytes == MIB
    plan = planned()
    assert (plan.token_bytes, plan.block_bytes) == (16 * 1024, MIB)
    assert plan.ssd_block_bytes == block_bytes(SPEC) and plan.ssd_token_bytes * 64 >= MIB
    assert plan.awake_blocks == (512 + 512) // 64 + 2 + 1 + 512 // 64
    assert plan.pool_blocks == 10 * plan.awake_blocks
    assert plan.asleep_blocks == ASLEEP
    assert plan.cpu_sessions == 100 // ASLEEP
    assert plan.ssd_blocks == room_for_blocks(4 * GIB, SPEC)
    assert plan.ssd_sessions == plan.ssd_blocks // ASLEEP - 10
    assert plan.ssd_histories == plan.ssd_blocks // 157
    assert plan.digest_host_bytes == plan.digest_file_bytes == 0
    assert plan.journal_bytes == 100 * journal_bytes(CONFIG, SPEC, 10_000, ASLEEP)
    assert plan.writes is not None and plan.writes.blocks == 100 * 16 * block_bytes(SPEC)
    assert plan.fits


def test_waking_takes_bytes_over_bandwidth() -> None:
    """By hand: 10 MiB of blocks; 90 sessions sleep, of which 10 are in the cpu pool."""
    plan = plan_sessions(MODEL, SPEC, CONFIG, WORK, MEMORY, Speeds(pinned=10e9, ssd=2e9))
    files = journal_bytes(CONFIG, SPEC, 10_000, ASLEEP)
    wake = plan.wake
    assert (wake.num_bytes, wake.file_bytes) == (10 * MIB, files)
    assert wake.pinned_s == pytest.approx(files / 2e9 + 10 * MIB / 10e9)
    assert wake.ssd_s == pytest.approx(files / 2e9 + 10 * MIB / 2e9)
    assert wake.mean_s == pytest.approx((10 * wake.pinned_s + 80 * wake.ssd_s) / 90)


def test_a_slow_bus_is_what_a_fast_disk_waits_for() -> None:
    plan = plan_sessions(MODEL, SPEC, CONFIG, WORK, MEMORY, Speeds(pinned=1e9, ssd=2e9))
    assert plan.wake.ssd_s == plan.wake.pinned_s == pytest.approx(plan.wake.mean_s)


def test_where_none_sleeps_there_is_no_mean() -> None:
    assert planned(work={"num_sessions": 10}).wake.mean_s is None


def test_recall_wakes_recalled_blocks_and_digests_too() -> None:
    plan = planned(recall_blocks=5)
    assert plan.asleep_blocks == ASLEEP + 1  # the question is computed again
    assert plan.wake.num_bytes == (ASLEEP + 1 + 5) * MIB
    assert plan.digest_file_bytes == 100 * (24 + 156 * (24 + 16 * 64 * 64))
    files = journal_bytes(dataclasses.replace(CONFIG, recall_blocks=5), SPEC, 10_000, ASLEEP + 1)
    assert plan.wake.file_bytes == files + plan.digest_file_bytes // 100
    short = planned(recall_blocks=5, work={"num_tokens": 600})
    assert short.wake.num_bytes == 10 * MIB, "no more blocks than there are"


@given(
    num_awake=st.integers(1, 3000),
    free=st.integers(0, 60 * GIB),
    recall_blocks=st.sampled_from([0, 3]),
    gpu_bytes=st.sampled_from([None, "1GiB"]),
)
def test_the_gpu_is_planned_as_the_engine_plans_it(
    num_awake: int, free: int, recall_blocks: int, gpu_bytes: str | None
) -> None:
    memory = DeviceMemory(80 * GIB, free)
    work = {"num_sessions": 3000, "num_awake": num_awake}
    plan = planned(memory, work, recall_blocks=recall_blocks, gpu_bytes=gpu_bytes)
    config = dataclasses.replace(CONFIG, max_sessions=num_awake, recall_blocks=recall_blocks)
    assert plan.gpu == plan_gpu(memory, MODEL, SPEC, config)
    assert plan.pool_blocks == plan.gpu.num_blocks
    assert plan.gpu.fits == all(short.tier != "gpu" for short in plan.shortfalls)


def needs(plan: SessionPlan) -> list[float]:
    """What is worse the larger it is."""
    room = (plan.cpu_sessions, plan.ssd_sessions, plan.ssd_histories)
    assert plan.writes is not None and plan.gpu is not None
    return [
        *(-count for count in room),
        -plan.gpu.spare_bytes,
        plan.pool_blocks,
        plan.asleep_blocks,
        plan.digest_host_bytes + plan.digest_file_bytes,
        plan.journal_bytes,
        plan.writes.total,
        plan.wake.num_bytes,
        plan.wake.pinned_s,
        plan.wake.ssd_s,
        not plan.fits,
    ]


@given(
    what=st.sampled_from(
        ["num_sessions", "num_awake", "num_tokens", "tokens_per_day", "window_size"]
    ),
    base=st.integers(0, 2000),
    more=st.integers(0, 5000),
    recall_blocks=st.sampled_from([0, 2]),
)
def test_more_never_needs_less(what: str, base: int, more: int, recall_blocks: int) -> None:
    least = {"num_sessions": 10, "num_awake": 1, "num_tokens": 1, "tokens_per_day": 1}
    most = {"num_awake": WORK.num_sessions}
    at = least.get(what, 192) + base
    pair = [min(value, most.get(what, value)) for value in (at, at + more)]
    few, many = (
        planned(recall_blocks=recall_blocks, window_size=value)
        if what == "window_size"
        else planned(recall_blocks=recall_blocks, work={what: value})
        for value in pair
    )
    assert all(a <= b for a, b in zip(needs(few), needs(many), strict=True))


@given(smaller=st.integers(0, 8 * GIB), more=st.integers(0, 8 * GIB))
def test_larger_tiers_have_room_for_no_fewer(smaller: int, more: int) -> None:
    def room(size: int) -> tuple[int, int, bool]:
        plan = planned(cpu_bytes=size, ssd_bytes=size)
        windows = all("wake" not in short.problem for short in plan.shortfalls)
        return plan.cpu_sessions, plan.ssd_sessions, windows

    assert all(a <= b for a, b in zip(room(smaller), room(smaller + more), strict=True))


@pytest.mark.parametrize("recall_blocks", [0, 2])
def test_an_engine_takes_the_memory_that_was_planned(
    tiny_model_dir: Path, tmp_path: Path, recall_blocks: int
) -> None:
    config = EngineConfig(
        window_size=200,
        prefill_chunk=100,
        num_sink_tokens=70,
        max_sessions=3,
        recall_blocks=recall_blocks,
        cpu_bytes="4MiB",
        store=str(tmp_path),
    )
    with Engine(str(tiny_model_dir), config) as engine:
        spec, used = engine.model.spec, engine.usage()
        plan = plan_sessions(MODEL, spec, config, Workload(9, 3, 1000))
        assert used["gpu"].limit_bytes == plan.pool_blocks * plan.block_bytes
        assert plan.pool_blocks == 3 * plan.awake_blocks
        with engine.session("one") as session:
            session.feed((list(range(3, 203)) * 5)[:999]).run()
            live = engine.usage()["gpu"].num_blocks
        assert plan.asleep_blocks <= live + 1 <= plan.awake_blocks


@pytest.mark.parametrize("share", [1.0, 0.5])
def test_a_store_of_the_size_that_was_advised_lets_every_session_wake(
    tiny_model_dir: Path, tmp_path: Path, share: float
) -> None:
    """Of half that size it does not."""
    config = EngineConfig(
        window_size=1000,
        cpu_bytes=0,
        store=str(tmp_path),
        codec="raw",
        max_sessions=2,
        checkpoint_tokens=512,
        ssd_bytes="1MiB",
    )
    spec = read_size(tiny_model_dir, "float32")[1]
    [short] = plan_sessions(MODEL, spec, config, Workload(12, 2, 2000)).shortfalls
    advised = next(each for each in short.remedies if each.option == "ssd_bytes")
    config = dataclasses.replace(config, ssd_bytes=int(advised.value * share))
    with Engine(str(tiny_model_dir), config) as engine:
        assert engine._store is not None
        for number in range(0, 12, 2):
            pair = [engine.session(f"of {each}") for each in (number, number + 1)]
            for ids in ([3 + number, 5, 7] * 400, [9, 3 + number] * 400):
                for session in pair:
                    session.feed(ids).run()
            for session in pair:
                session.close()
        stored = engine._store.blocks
        wanted = [key for name in engine.session_names() for key in stored.manifest(name)]
        can_wake = all(stored.contains(key) for key in wanted) and len(wanted) >= 12 * 17
        assert (can_wake and engine.counters()["ssd_disabled"] == 0) == (share == 1.0)


def test_a_cpu_pool_holds_the_sleeping_sessions_that_were_planned() -> None:
    small = KVSpec(2, 1, 16, "float32")
    config = dataclasses.replace(CONFIG, cpu_bytes="5MiB")
    plan = plan_sessions(MODEL, small, config, WORK)
    pool = CpuPool(small, 5 * MIB)
    assert plan.cpu_sessions == pool.num_blocks // plan.asleep_blocks > 0
    pool.close()


def test_a_plan_is_made_without_torch() -> None:
    code = "import sys, streamkv.session_plan; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
