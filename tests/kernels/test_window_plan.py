"""The cut of a chunk against the definition of a window, and which chunks have a plan at all."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from gpu_cases import BLOCK_SIZE, Stream, table_of

from streamkv.kernels.batch_table import BatchTable
from streamkv.kernels.table import SequenceTable
from streamkv.kernels.window_plan import Part, Rows, WindowPlan, cut, window_plan

B = BLOCK_SIZE


def plan_of_sizes(query_start: int, num_queries: int, window: int, step: int) -> WindowPlan:
    segments = cut(query_start, num_queries, window, step)
    nothing = torch.empty(0, dtype=torch.int64)
    return WindowPlan(query_start, num_queries, window, segments, 0, nothing, nothing, 16)


def indices(rows: Rows) -> Iterator[list[int]]:
    for run in range(rows.num_runs):
        first = rows.first + run * rows.step
        yield list(range(first, first + rows.size))


def pairs(plan: WindowPlan, part: Part) -> Iterator[tuple[int, int]]:
    """(query, key) tokens that a part adds up, padding included."""
    end, last = plan.query_start + plan.num_rows, plan.last_start
    for queries, keys in zip(indices(part.queries), indices(part.keys), strict=True):
        if part.is_reversed:
            assert min(queries) >= 0 and max(queries) < plan.num_rows
            assert min(keys) >= 0 and max(keys) < plan.num_previous
            query_tokens, key_tokens = [end - 1 - r for r in queries], [last - 1 - r for r in keys]
        else:
            query_tokens, key_tokens = (
                [plan.query_start + r for r in rows] for rows in (queries, keys)
            )
        for r, query in enumerate(query_tokens):
            yield from ((query, key) for key in key_tokens[: r + 1 if part.is_causal else None])


def counted(plan: WindowPlan) -> Counter[tuple[int, int]]:
    """How often real queries meet each key."""
    end = plan.query_start + plan.num_queries
    found: Counter[tuple[int, int]] = Counter()
    for segment in plan.segments:
        for part in (plan.own(segment), plan.triangle(segment), plan.rectangle(segment)):
            if part is not None:
                found.update(pair for pair in pairs(plan, part) if pair[0] < end)
    return found


def window_pairs(query_start: int, num_queries: int, window: int) -> Counter[tuple[int, int]]:
    queries = range(query_start, query_start + num_queries)
    return Counter((t, key) for t in queries for key in range(max(0, t - window + 1), t + 1))


@pytest.mark.parametrize("window", [1, 2, 3, 8, 13])
@pytest.mark.parametrize("step", [1, 4, 256])
def test_every_query_meets_every_key_of_its_window_once(window: int, step: int) -> None:
    for query_start in range(2 * window + 2):
        for num_queries in range(1, 3 * window + 2):
            plan = plan_of_sizes(query_start, num_queries, window, step)
            expected = window_pairs(query_start, num_queries, window)
            assert counted(plan) == expected, (query_start, num_queries)


def test_a_chunk_of_whole_windows_is_one_segment_without_rectangles() -> None:
    (segment,) = cut(24576, 8192, 4096)
    assert (segment.num_pieces, segment.size, segment.triangle) == (2, 4096, 4095)
    assert segment.rectangle == 0 and segment.recurring
    first, second = cut(0, 8192, 4096)
    assert (first.size, first.triangle, first.rectangle) == (4096, 0, 0)
    assert (second.size, second.triangle, second.rectangle) == (4096, 4095, 0)
    assert first.recurring and second.recurring


def test_few_sizes_recur_whatever_the_chunk() -> None:
    sizes = {
        (segment.size, segment.triangle, segment.rectangle)
        for num_queries in range(1, 8193, 7)
        for segment in cut(5000, num_queries, 4096)
    }
    assert len(sizes) == 16


def host_table(stream: Stream, edit: dict[str, torch.Tensor] | None = None) -> BatchTable:
    """The table of a stream, block i at address 1000 * i."""
    table = table_of(stream, list(range(-(-stream.num_tokens // B))))
    table = replace(table, **edit) if edit else table
    columns = (table.block_ids, 1000 * table.block_ids, table.starts, table.caps)
    rows = [column[None] for column in (*columns, table.first_valid.int(), table.end_valid.int())]
    counts = [torch.tensor([n], dtype=torch.int32) for n in (table.num_entries, sinks_of(table))]
    return BatchTable(*rows, *counts, torch.tensor([stream.window_size]))


def sinks_of(table: SequenceTable) -> int:
    return table.num_sink_entries


def plan_of(
    stream: Stream, edit: dict[str, torch.Tensor] | None = None, **smallest: int
) -> WindowPlan | None:
    first = stream.num_tokens - stream.num_queries
    smallest = smallest or {"min_queries": 1, "min_window": 1}
    return window_plan(host_table(stream, edit), 0, first, stream.num_queries, B, "cpu", **smallest)


def test_a_plan_names_the_blocks_from_the_oldest_key_to_the_last() -> None:
    plan = plan_of(Stream(6 * B + 3, B, window_size=2 * B))
    assert plan is not None
    assert plan.first_key == 3 * B + 4 and plan.first_start == 3 * B
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
