"""How a GPU's memory is divided up: figures by hand, and refusals that say what would fit."""

import dataclasses
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamkv.config import EngineConfig, parse_size
from streamkv.errors import ConfigError
from streamkv.gpu_plan import (
    GRAPH_BYTES,
    DeviceMemory,
    GpuPlan,
    ModelSize,
    plan_gpu,
    require_room,
)
from streamkv.query_ring import NUM_PLACES
from streamkv.sizing import digest_bytes
from streamkv.tiers.spec import KVSpec

MIB, GIB = 1 << 20, 1 << 30
SPEC = KVSpec(num_layers=16, num_kv_heads=4, head_dim=64, dtype="bfloat16")  # 1 MiB a block
MODEL = ModelSize(weight_bytes=2 * GIB, hidden_size=1000, layer_width=4000, vocab_size=10_000)
CONFIG = EngineConfig(window_size=512, prefill_chunk=64, num_sink_tokens=0, max_sessions=4)
BLOCKS_OF_ONE = (512 + 64) // 64 + 2 + 512 // 64  # window and chunk, ends, system prompt
WORKING = (64 + 4) * (2 * (2 * 1000 + 4 * 4000) + 12 * 1000)
WORKING += 64 * 10_000 * 2 + 4 * 10_000 * (2 + 8)  # logits of a chunk, and of four sessions


def planned(free_bytes: int, **options: Any) -> tuple[GpuPlan, EngineConfig]:
    config = dataclasses.replace(CONFIG, **options)
    return plan_gpu(DeviceMemory(80 * GIB, free_bytes), MODEL, SPEC, config), config


def refusal(free_bytes: int, **options: Any) -> ConfigError:
    plan, config = planned(free_bytes, **options)
    with pytest.raises(ConfigError) as caught:
        require_room(plan, SPEC, config)
    return caught.value


def test_the_parts_are_those_counted_by_hand() -> None:
    assert SPEC.block_bytes == MIB
    plan, config = planned(10 * GIB)
    assert plan == GpuPlan(
        total_bytes=80 * GIB,
        free_bytes=10 * GIB,
        weight_bytes=2 * GIB,
        graph_bytes=512 * MIB,
        working_bytes=4_944_000,
        pool_bytes=(4 * BLOCKS_OF_ONE + 1) * MIB,
        num_blocks=4 * BLOCKS_OF_ONE,
        max_sessions=400,
        max_window=512,
    )
    assert WORKING == 4_944_000 and BLOCKS_OF_ONE == 19
    assert plan.room_bytes == 10 * GIB - 2 * GIB - 512 * MIB - WORKING
    assert plan.spare_bytes == plan.room_bytes - 77 * MIB
    assert plan.fits
    require_room(plan, SPEC, config)


def test_recall_takes_queries_of_each_session_scores_and_digests() -> None:
    """By hand: 16 layers of 1000 bytes a query, digests of 2,048 blocks, two rooms for scores."""
    model = dataclasses.replace(MODEL, query_width=500)
    config = dataclasses.replace(CONFIG, recall_blocks=3)
    plan = plan_gpu(DeviceMemory(80 * GIB, 10 * GIB), model, SPEC, config)
    plain = plan_gpu(DeviceMemory(80 * GIB, 10 * GIB), model, SPEC, CONFIG)
    assert plan.recall_bytes == 4 * NUM_PLACES * 16_000 + 2 * 128 * MIB
    assert plan.digest_bytes == 4 * 2048 * digest_bytes(SPEC) == 512 * MIB
    assert plan.num_blocks == plain.num_blocks + 4 * (3 + 2)
    assert plain.recall_bytes == plain.digest_bytes == 0
    assert plan.room_bytes == plain.room_bytes - plan.recall_bytes - plan.digest_bytes
    assert plan.max_sessions < plain.max_sessions and plan.max_window == 512


@pytest.mark.parametrize("max_sessions", [1, 4, 30])
def test_a_budget_of_digests_is_the_same_for_any_number_of_sessions(max_sessions: int) -> None:
    recall = {"recall_blocks": 3, "max_sessions": max_sessions}
    for size, expected in (("100MiB", 100 * MIB), (0, 0), (4 * MIB, 4 * MIB)):
        plan, config = planned(10 * GIB, **recall, digest_bytes=size)
        assert plan.digest_bytes == expected
        require_room(plan, SPEC, config)
    assert planned(10 * GIB, digest_bytes="100MiB")[0].digest_bytes == 0, "nothing is recalled"


def test_a_budget_without_room_for_a_page_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"digest_bytes='1MiB'.*takes 4.0 MiB.*or 0 for"):
        planned(10 * GIB, recall_blocks=3, digest_bytes="1MiB")


@pytest.mark.parametrize("digest_bytes", ["900MiB", "7GiB"])
def test_a_budget_too_large_is_refused_with_the_size_that_fits(digest_bytes: str) -> None:
    error = refusal(3 * GIB, recall_blocks=3, digest_bytes=digest_bytes)
    assert (error.field, error.value) == ("digest_bytes", digest_bytes)
    assert "graphs (512.0 MiB), digests (" in error.problem
    size = error.remedy.split('"')[1]
    assert planned(3 * GIB, recall_blocks=3, digest_bytes=size)[0].fits
    more = parse_size("digest_bytes", size) + MIB
    assert not planned(3 * GIB, recall_blocks=3, digest_bytes=more)[0].fits


def test_where_no_page_of_digests_fits_none_is_the_remedy() -> None:
    least = planned(3 * GIB, recall_blocks=3, digest_bytes=0)[0]
    free = 3 * GIB - least.spare_bytes + 3 * MIB
    error = refusal(free, recall_blocks=3, digest_bytes="64MiB")
    assert error.remedy.startswith('Use at most "0MiB"')
    assert planned(free, recall_blocks=3, digest_bytes="0MiB")[0].spare_bytes == 3 * MIB


@pytest.mark.parametrize("free_bytes", [0, 3 * GIB, 10 * GIB])
def test_a_plan_with_recall_names_no_window_that_is_too_small_for_it(free_bytes: int) -> None:
    plan, _ = planned(free_bytes, recall_blocks=3, window_size=10_000, recall_stride=1024)
    assert plan.max_window == 0 or plan.max_window >= 192


def test_it_fits_to_the_byte() -> None:
    needed = 2 * GIB + GRAPH_BYTES + WORKING + (4 * BLOCKS_OF_ONE + 1) * MIB
    assert planned(needed)[0].spare_bytes == 0 and planned(needed)[0].max_sessions == 4
    assert planned(needed - 1)[0].spare_bytes == -1 and planned(needed - 1)[0].max_sessions == 3


def test_a_pool_of_given_size_is_taken_as_it_is() -> None:
    plan, _ = planned(10 * GIB, gpu_bytes="100MiB")
    assert (plan.num_blocks, plan.pool_bytes) == (100, 101 * MIB)
    with pytest.raises(ConfigError, match=r"gpu_bytes='1MiB'.*one session needs 11"):
        planned(10 * GIB, gpu_bytes="1MiB")


def test_every_session_needs_a_row_of_logits_and_of_activations() -> None:
    few, many = planned(10 * GIB, max_sessions=1)[0], planned(10 * GIB, max_sessions=300)[0]
    assert many.working_bytes - few.working_bytes == 299 * (48_000 + 100_000)


def test_logits_of_scoring_end_at_256_mib() -> None:
    rows = 256 * MIB // 20_000
    short, long = (planned(40 * GIB, prefill_chunk=rows + more)[0] for more in (0, 1))
    assert long.working_bytes - short.working_bytes == 48_000


def test_long_chunks_of_long_windows_are_copied() -> None:
    chunk = {"prefill_chunk": 1024, "window_size": 2048}
    copied = planned(40 * GIB, **chunk)[0].working_bytes
    short = planned(40 * GIB, **{**chunk, "prefill_chunk": 1023})[0].working_bytes
    plain = planned(40 * GIB, **{**chunk, "window_size": 2047})[0].working_bytes
    assert copied - plain == 2 * (1024 * 4 * (1000 + 256) + 4 * 2048 * 256)
    assert plain - short == 48_000 + 20_000


def test_too_many_sessions_are_refused_with_the_number_that_fits() -> None:
    error = refusal(3 * GIB, max_sessions=100)
    assert (error.field, error.value) == ("max_sessions", 100)
    assert "3.0 GiB of 80.0 GiB free" in error.problem
    assert "weights (2.0 GiB), graphs (512.0 MiB)" in error.problem
    assert "for the gpu pool, which needs 1.9 GiB" in error.problem
    most = planned(3 * GIB)[0].max_sessions
    assert most == 26 and f"max_sessions={most}," in error.remedy
    assert planned(3 * GIB, max_sessions=most)[0].fits
    assert not planned(3 * GIB, max_sessions=most + 1)[0].fits


def test_a_pool_too_large_is_refused_with_the_size_that_fits() -> None:
    error = refusal(3 * GIB, gpu_bytes="2GiB")
    assert (error.field, error.value) == ("gpu_bytes", "2GiB")
    assert error.remedy == 'Use at most "506MiB". Without it up to max_sessions=26 fits.'
    assert planned(3 * GIB, gpu_bytes="506MiB")[0].fits
    assert not planned(3 * GIB, gpu_bytes=507 * MIB)[0].fits


def test_a_window_too_large_for_one_session_is_refused_with_the_one_that_fits() -> None:
    error = refusal(3 * GIB, window_size=100_000)
    assert (error.field, error.value) == ("window_size", 100_000)
    most = int(error.remedy.split()[3])
    assert planned(3 * GIB, window_size=most, max_sessions=1)[0].fits
    assert not planned(3 * GIB, window_size=most + 64, max_sessions=1)[0].fits


@pytest.mark.parametrize("free_bytes", [0, 2 * GIB, 2 * GIB + GRAPH_BYTES + WORKING])
def test_a_gpu_too_small_for_any_window_is_refused(free_bytes: int) -> None:
    error = refusal(free_bytes)
    assert (error.field, error.value) == ("device", "cuda")
    assert "leave 0 B for the gpu pool" in error.problem and 'device="cpu"' in error.remedy


@given(
    free=st.integers(0, 8 * GIB),
    max_sessions=st.integers(1, 400),
    window_size=st.integers(64, 20_000),
    gpu_bytes=st.none() | st.integers(400 * MIB, 6 * GIB),
    recall=st.sampled_from([{}, {"recall_blocks": 3}])
    | st.integers(4 * MIB, 4 * GIB).map(lambda size: {"recall_blocks": 3, "digest_bytes": size}),
)
def test_whatever_does_not_fit_is_refused_with_a_remedy_that_does(
    free: int,
    max_sessions: int,
    window_size: int,
    gpu_bytes: int | None,
    recall: dict[str, int],
) -> None:
    if recall:
        window_size = max(window_size, 3 * 64)
    options = {"max_sessions": max_sessions, "window_size": window_size, "gpu_bytes": gpu_bytes}
    options |= recall
    plan, config = planned(free, **options)
    if plan.fits:
        require_room(plan, SPEC, config)
        return
    error = refusal(free, **options)
    match error.field:
        case "digest_bytes":
            size = error.remedy.split('"')[1]
            assert planned(free, **(options | {"digest_bytes": size}))[0].fits
        case "gpu_bytes" if "at most" in error.remedy:
            size = error.remedy.split('"')[1]
            assert parse_size("gpu_bytes", size) > 0
            assert planned(free, **(options | {"gpu_bytes": size}))[0].fits
        case "gpu_bytes" | "max_sessions":
            change = {"gpu_bytes": None, "max_sessions": plan.max_sessions}
            assert planned(free, **(options | change))[0].fits
        case "window_size":
            change = {"gpu_bytes": None, "max_sessions": 1, "window_size": plan.max_window}
            assert planned(free, **(options | change))[0].fits
        case _:
            least = 3 * 64 if recall else 64
            change = {"gpu_bytes": None, "max_sessions": 1, "window_size": least}
            assert not planned(free, **(options | change))[0].fits


@pytest.mark.parametrize(
    ("config", "layer_width"),
    [
        ({"intermediate_size": 5000}, 5000),
        ({"intermediate_size": 100}, (16 + 2 * 4) * 64),
        ({}, 4 * 1000),
        ({"moe_intermediate_size": 700, "num_experts_per_tok": 8}, 5600),
    ],
)
def test_a_models_width_is_that_of_its_mlp_or_of_its_attention(
    config: dict[str, int], layer_width: int
) -> None:
    shape = {"hidden_size": 1000, "vocab_size": 10_000, "num_attention_heads": 16}
    assert ModelSize.of(shape | config, SPEC, 7) == ModelSize(7, 1000, layer_width, 10_000, 1024)


def test_a_plan_is_made_without_torch() -> None:
    code = "import sys, streamkv.gpu_plan; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
