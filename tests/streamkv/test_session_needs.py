"""What sessions need asleep: against every token that is seen, and what an engine stores."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamkv import Engine, EngineConfig
from streamkv.digest_pages import room_bytes
from streamkv.errors import ConfigError
from streamkv.recall_schedule import question_start
from streamkv.session_needs import (
    MOST,
    Workload,
    Writes,
    asleep_blocks,
    daily_writes,
    digest_host_bytes,
    history_blocks,
    locked_blocks,
)
from streamkv.sizing import digest_bytes
from streamkv.stored_bytes import block_bytes, journal_bytes
from streamkv.tiers.spec import KVSpec
from streamkv.window import Window

SPEC = KVSpec(num_layers=2, num_kv_heads=2, head_dim=16, dtype="float32")
TB = 10**12


def seen_blocks(config: EngineConfig, num_tokens: int) -> int:
    """Blocks with a token that a query from where a resume begins up to the next one sees."""
    resume_at = num_tokens // 64 * 64
    if config.recall_blocks:
        resume_at = question_start(num_tokens, 64)
    window = Window(config.window_size, ((0, config.num_sink_tokens),))
    first = window.first_visible(resume_at)
    sinks = range(min(config.num_sink_tokens, num_tokens))
    return len({token // 64 for token in [*range(first, num_tokens), *sinks]})


@given(
    num_blocks=st.integers(0, 12),
    window_size=st.integers(192, 500),
    num_sink_tokens=st.integers(0, 200),
    recall_blocks=st.integers(0, 1),
)
def test_the_blocks_of_a_sleeping_session_are_those_that_are_seen(
    num_blocks: int, window_size: int, num_sink_tokens: int, recall_blocks: int
) -> None:
    config = EngineConfig(
        window_size=window_size, num_sink_tokens=num_sink_tokens, recall_blocks=recall_blocks
    )
    lengths = range(num_blocks * 64, num_blocks * 64 + 64)
    most = max(seen_blocks(config, length) for length in lengths)
    assert {asleep_blocks(config, length) for length in lengths} == {most}


@pytest.mark.parametrize("recall_blocks", [0, 2])
def test_a_sleeping_session_stores_the_blocks_that_were_said(
    tiny_model_dir: Path, tmp_path: Path, recall_blocks: int
) -> None:
    config = EngineConfig(
        window_size=200,
        num_sink_tokens=70,
        recall_blocks=recall_blocks,
        prefill_chunk=128,
        store=str(tmp_path),
        ssd_bytes="64MiB",
    )
    stored = dict[int, int]()  # the last token of each is not computed yet
    with Engine(str(tiny_model_dir), config) as engine:
        for num_tokens in (10, 70, 258, 700, 767):
            with engine.session(f"of {num_tokens}") as session:
                session.feed((list(range(3, 203)) * 4)[:num_tokens]).run()
            assert engine._store is not None
            stored[num_tokens] = len(engine._store.blocks.manifest(f"of {num_tokens}"))
    assert stored == {number: asleep_blocks(config, number) for number in stored}


def test_checkpoints_of_awake_sessions_count_twice() -> None:
    config = EngineConfig(window_size=128)
    assert locked_blocks(config, SPEC, Workload(10, 3, 1000)) == 13 * (1 + 2 + 1)


def test_a_history_is_all_of_its_blocks() -> None:
    assert [history_blocks(tokens, SPEC) for tokens in (1, 63, 64, 65, 1000)] == [1, 1, 2, 2, 16]


def test_a_day_is_counted_by_hand() -> None:
    config = EngineConfig(window_size=128)
    writes = daily_writes(config, SPEC, Workload(10, 2, 1000, 1000, 3))
    asleep = 1 + 2 + 1  # sink tokens, window, the open block
    assert writes == Writes(
        blocks=10 * 16 * block_bytes(SPEC),
        open_blocks=10 * 3 * block_bytes(SPEC),
        journals=10 * journal_bytes(config, SPEC, 1000, asleep),
        digests=0,
    )
    assert writes.total == writes.blocks + writes.open_blocks + writes.journals


def test_with_recall_a_day_has_digests() -> None:
    config = EngineConfig(recall_blocks=2)
    writes = daily_writes(config, SPEC, Workload(10, 2, 1000, 6400))
    assert writes.digests == 10 * 100 * (24 + digest_bytes(SPEC))
    assert writes.total - writes.digests == writes.blocks + writes.open_blocks + writes.journals


def test_a_disk_lasts_as_long_as_its_endurance_is_not_written() -> None:
    assert Writes(TB, TB // 2, TB // 4, TB // 4).years(730.5 * TB) == pytest.approx(1.0)
    assert Writes(0, 0, 0, 0).years(600 * TB) is None


def test_digests_lie_in_host_memory_as_far_as_a_gpu_has_no_room() -> None:
    work = Workload(10, 4, 640_000)
    pages = 4 * room_bytes(10_000, digest_bytes(SPEC))
    small = EngineConfig(recall_blocks=2, digest_bytes="8MiB", max_sessions=4)
    assert digest_host_bytes(small, SPEC, work, on_gpu=True) == pages - (8 << 20)
    assert digest_host_bytes(small, SPEC, work, on_gpu=False) == pages
    large = EngineConfig(recall_blocks=2, digest_bytes="80GiB")
    assert digest_host_bytes(large, SPEC, work, on_gpu=True) == 0
    assert digest_host_bytes(EngineConfig(), SPEC, work, on_gpu=False) == 0


@pytest.mark.parametrize(
    ("field", "value", "bound"),
    [
        ("num_sessions", 0, "from 1 to"),
        ("num_awake", 0, "from 1 to 10"),
        ("num_awake", 11, "from 1 to 10"),
        ("num_tokens", 0, "from 1 to"),
        ("num_tokens", MOST + 1, f"to {MOST}"),
        ("tokens_per_day", -1, "from 0 to"),
        ("sleeps_per_day", 1.5, "from 0 to"),
    ],
)
def test_work_that_cannot_be_is_refused(field: str, value: Any, bound: str) -> None:
    given: dict[str, Any] = {"num_sessions": 10, "num_awake": 1, "num_tokens": 5}
    with pytest.raises(ConfigError, match=f"{field}={value}.*{bound}"):
        Workload(**(given | {field: value}))
