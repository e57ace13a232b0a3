"""What does not fit, by hand; and every remedy, tried."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamkv.config import EngineConfig
from streamkv.gpu_plan import DeviceMemory, ModelSize
from streamkv.plan_shortfalls import Remedy, Shortfall, in_cpu_pool, on_gpu, on_ssd
from streamkv.session_needs import Workload
from streamkv.tiers.spec import KVSpec

MIB, GIB = 1 << 20, 1 << 30
SPEC = KVSpec(num_layers=16, num_kv_heads=4, head_dim=64, dtype="bfloat16")  # 1 MiB a block
MODEL = ModelSize(weight_bytes=2 * GIB, hidden_size=1000, layer_width=4000, vocab_size=10_000)
CONTEXT = GIB


def shortfalls(asked: dict[str, Any]) -> list[Shortfall]:
    """Of a GPU, tiers and sessions that are described by options alone."""
    work = {name: asked[name] for name in ("num_sessions", "num_awake", "num_tokens")}
    total = asked["gpu_memory"]
    memory = DeviceMemory(total, total - CONTEXT)
    options = {name: value for name, value in asked.items() if name not in {*work, "gpu_memory"}}
    config = EngineConfig(**options, max_sessions=work["num_awake"], store=".")
    return [
        *on_gpu(memory, MODEL, SPEC, config),
        *in_cpu_pool(SPEC, config),
        *on_ssd(SPEC, config, Workload(**work)),
    ]


ENOUGH = {
    "gpu_memory": 80 * GIB,
    "cpu_bytes": 100 * MIB,
    "ssd_bytes": 40 * GIB,
    "window_size": 512,
    "num_sessions": 100,
    "num_awake": 10,
    "num_tokens": 10_000,
}


def test_what_fits_has_no_shortfall() -> None:
    assert shortfalls(ENOUGH) == []
    assert shortfalls(ENOUGH | {"recall_blocks": 3}) == []


def test_a_store_too_small_for_windows_names_ways_out() -> None:
    [short] = shortfalls(ENOUGH | {"ssd_bytes": 500 * MIB})
    assert short.tier == "ssd"
    assert short.problem.startswith("what sessions need to wake are 1,100 blocks; the store has")
    size, sessions, window = short.remedies
    assert size.option == "ssd_bytes" and size.is_size and size.value > 1100 * MIB
    assert sessions.option == "num_sessions" and 25 < sessions.value < 40
    assert window.option == "window_size" and window.value % 64 == 0


def test_fewer_awake_may_be_enough() -> None:
    [short] = shortfalls(ENOUGH | {"ssd_bytes": 1200 * MIB, "num_awake": 50})
    [awake] = [remedy.value for remedy in short.remedies if remedy.option == "num_awake"]
    assert 1 <= awake < 50
    assert shortfalls(ENOUGH | {"ssd_bytes": 1200 * MIB, "num_awake": awake}) == []
    assert shortfalls(ENOUGH | {"ssd_bytes": 1200 * MIB, "num_awake": awake + 1}) != []


def test_histories_count_only_where_they_are_recalled() -> None:
    small = ENOUGH | {"ssd_bytes": 4 * GIB}
    assert shortfalls(small) == []
    [short] = shortfalls(small | {"recall_blocks": 3})
    assert short.problem.startswith("whole histories for recall are 15,700 blocks")
    assert [remedy.option for remedy in short.remedies] == [
        "ssd_bytes",
        "num_sessions",
        "num_tokens",
    ]


def test_a_cpu_pool_of_less_than_a_block_is_none_or_larger() -> None:
    [short] = shortfalls(ENOUGH | {"cpu_bytes": MIB - 1})
    assert short.tier == "cpu"
    assert short.remedies == (Remedy("cpu_bytes", MIB, is_size=True), Remedy("cpu_bytes", 0))
    assert shortfalls(ENOUGH | {"cpu_bytes": 0}) == []


def test_a_gpu_too_small_for_the_weights_helps_only_larger() -> None:
    [short] = shortfalls(ENOUGH | {"gpu_memory": 2 * GIB})
    assert short.tier == "gpu"
    assert [remedy.option for remedy in short.remedies] == ["gpu_memory"]


def test_sessions_are_never_fewer_than_are_awake() -> None:
    [short] = shortfalls(ENOUGH | {"ssd_bytes": 120 * MIB, "num_awake": 90})
    assert [remedy.option for remedy in short.remedies] == ["ssd_bytes"]


@pytest.mark.parametrize("step", [1, -1])
def test_values_are_the_nearest_that_fit(step: int) -> None:
    """One step towards what was asked for, and it does not fit; `-1`: one away, and it does."""
    [short] = shortfalls(ENOUGH | {"ssd_bytes": 500 * MIB})
    for remedy in short.remedies:
        by = {"ssd_bytes": -MIB, "num_sessions": 1, "window_size": 64}[remedy.option] * step
        tried = ENOUGH | {"ssd_bytes": 500 * MIB} | {remedy.option: remedy.value + by}
        assert bool(shortfalls(tried)) == (step == 1), remedy


@given(
    gpu_memory=st.integers(1 * GIB, 8 * GIB),
    cpu_bytes=st.sampled_from([0, 100, GIB]),
    ssd_bytes=st.integers(0, 8 * GIB),
    window_size=st.integers(192, 5000),
    num_sessions=st.integers(1, 500),
    awake=st.floats(0, 1),
    num_tokens=st.integers(1, 20_000),
    recall=st.sampled_from([{}, {"recall_blocks": 3}])
    | st.integers(4 * MIB, 4 * GIB).map(lambda size: {"recall_blocks": 3, "digest_bytes": size}),
)
def test_every_remedy_helps_by_itself(
    num_sessions: int, awake: float, recall: dict[str, int], **given: int
) -> None:
    num_awake = max(1, round(awake * num_sessions))
    asked = {**given, **recall, "num_sessions": num_sessions, "num_awake": num_awake}
    for short in shortfalls(asked):
        what = short.problem.split(" are ")[0]
        assert short.remedies
        for remedy in short.remedies:
            left = shortfalls(asked | {remedy.option: remedy.value})
            same = [each for each in left if each.tier == short.tier]
            if short.tier == "ssd":
                same = [each for each in same if each.problem.startswith(what)]
            assert not same, remedy
