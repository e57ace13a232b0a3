"""What a plan reads, and which chunks have a plan at all."""

from dataclasses import replace

import pytest
import torch
from gpu_cases import BLOCK_SIZE, Stream, table_of

from streamkv.kernels.batch_table import BatchTable
from streamkv.kernels.window_plan import WindowPlan, window_plan

B = BLOCK_SIZE


def host_table(stream: Stream, edit: dict[str, torch.Tensor] | None = None) -> BatchTable:
    """The table of a stream, block i at address 1000 * i."""
    table = table_of(stream, list(range(-(-stream.num_tokens // B))))
    table = replace(table, **edit) if edit else table
    columns = (table.block_ids, 1000 * table.block_ids, table.starts, table.caps)
    rows = [column[None] for column in (*columns, table.first_valid.int(), table.end_valid.int())]
    counts = [
        torch.tensor([n], dtype=torch.int32)
        for n in (table.num_entries, table.num_sink_entries, table.num_recalled_entries)
    ]
    return BatchTable(*rows, *counts, torch.tensor([stream.window_size]))


def plan_of(
    stream: Stream, edit: dict[str, torch.Tensor] | None = None, **smallest: int
) -> WindowPlan | None:
    first = stream.num_tokens - stream.num_queries
    smallest = smallest or {"min_queries": 1, "min_window": 1}
    return window_plan(host_table(stream, edit), 0, first, stream.num_queries, B, "cpu", **smallest)


def test_a_plan_names_the_blocks_from_the_oldest_key_to_the_last() -> None:
    plan = plan_of(Stream(6 * B + 3, B, window_size=2 * B))
    assert plan is not None
    assert plan.cut.first_key == 3 * B + 4 and plan.first_start == 3 * B
    assert plan.addresses.tolist() == [3000, 4000, 5000, 6000]


def test_sink_tokens_are_listed_only_once_they_leave_the_window() -> None:
    within = plan_of(Stream(2 * B + 4, B, window_size=2 * B + 4))
    assert within is not None and within.sinks.shape == (0, 5)
    one_left = plan_of(Stream(2 * B + 5, B, window_size=2 * B + 4))
    assert one_left is not None
    assert one_left.sinks.tolist() == [[0, 0, 4 + 2 * B + 3, 0, 4]]
    many = plan_of(Stream(8 * B, B, window_size=2 * B, num_sinks=B + 3))
    assert many is not None
    assert [(start, first, end) for _, start, _, first, end in many.sinks.tolist()] == [
        *((0, first, first + many.sink_slots) for first in range(0, B, many.sink_slots)),
        (B, 0, 3),
    ]


def test_the_queries_between_leaving_and_cap_are_named() -> None:
    """The first sink leaves the window at the query of index 2 B + 4; all are capped 4 later."""
    window = 2 * B + 4
    plan = plan_of(Stream(4 * B, 4 * B, window_size=window))
    assert plan is not None and plan.uncapped == ((window, window + 4),)
    first, second = plan.cut.segments
    assert not plan.has_uncapped(first) and plan.has_uncapped(second)
    later = plan_of(Stream(9 * B, 4 * B, window_size=window))
    assert later is not None
    assert not any(later.has_uncapped(segment) for segment in later.cut.segments)


STREAM = Stream(6 * B, 2 * B, window_size=2 * B)


def column(name: str, entry: int, value: int) -> dict[str, torch.Tensor]:
    """A column of the stream's table with one value changed."""
    changed: torch.Tensor = getattr(table_of(STREAM, list(range(6))), name).clone()
    changed[entry] = value
    return {name: changed}


REFUSED = [
    pytest.param(column("end_valid", 2, B - 1), id="a-hole"),
    pytest.param(column("first_valid", 1, B - 1), id="keys-missing-at-the-start"),
    pytest.param(column("end_valid", 4, B - 1), id="keys-missing-at-the-end"),
    pytest.param(column("caps", 2, 3 * B - 3), id="capped-in-the-window"),
    pytest.param(column("starts", 2, 3 * B - 1), id="out-of-step"),
]


@pytest.mark.parametrize("edit", REFUSED)
def test_tables_that_the_squares_do_not_fit_have_no_plan(edit: dict[str, torch.Tensor]) -> None:
    assert plan_of(STREAM) is not None
    assert plan_of(STREAM, edit) is None


def test_a_cap_that_begins_as_the_key_leaves_is_none() -> None:
    assert plan_of(STREAM, column("caps", 2, 3 * B - 2)) is not None


def test_small_chunks_and_windows_have_no_plan() -> None:
    sizes = {"min_queries": 2 * B, "min_window": 2 * B}
    assert plan_of(STREAM, **sizes) is not None
    assert plan_of(replace(STREAM, num_queries=2 * B - 1), **sizes) is None
    assert plan_of(replace(STREAM, window_size=2 * B - 1), **sizes) is None
    assert (
        window_plan(host_table(STREAM), 0, 4 * B, 0, B, "cpu", min_queries=0, min_window=0) is None
    )
