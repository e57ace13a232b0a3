"""The cut of a chunk against the definition of a window, pair by pair."""

from collections import Counter
from collections.abc import Iterator

import pytest

from streamkv.kernels.window_cut import Cut, Part, Rows, cut


def indices(rows: Rows) -> Iterator[list[int]]:
    for run in range(rows.num_runs):
        first = rows.first + run * rows.step
        yield list(range(first, first + rows.size))


def pairs(chunk: Cut, part: Part) -> Iterator[tuple[int, int]]:
    """(query, key) tokens that a part adds up, padding included."""
    end, last = chunk.query_start + chunk.num_rows, chunk.last_start
    for queries, keys in zip(indices(part.queries), indices(part.keys), strict=True):
        if part.is_reversed:
            assert min(queries) >= 0 and max(queries) < chunk.num_rows
            assert min(keys) >= 0 and max(keys) < chunk.num_previous
            query_tokens, key_tokens = [end - 1 - r for r in queries], [last - 1 - r for r in keys]
        else:
            query_tokens, key_tokens = (
                [chunk.query_start + r for r in rows] for rows in (queries, keys)
            )
        for r, query in enumerate(query_tokens):
            yield from ((query, key) for key in key_tokens[: r + 1 if part.is_causal else None])


def counted(chunk: Cut) -> Counter[tuple[int, int]]:
    """How often real queries meet each key."""
    found: Counter[tuple[int, int]] = Counter()
    for segment in chunk.segments:
        for part in (chunk.own(segment), chunk.triangle(segment), chunk.rectangle(segment)):
            if part is not None:
                found.update(pair for pair in pairs(chunk, part) if pair[0] < chunk.end)
    return found


def window_pairs(query_start: int, num_queries: int, window: int) -> Counter[tuple[int, int]]:
    queries = range(query_start, query_start + num_queries)
    return Counter((t, key) for t in queries for key in range(max(0, t - window + 1), t + 1))


@pytest.mark.parametrize("window", [1, 2, 3, 8, 13])
@pytest.mark.parametrize("step", [1, 4, 256])
def test_every_query_meets_every_key_of_its_window_once(window: int, step: int) -> None:
    for query_start in range(2 * window + 2):
        for num_queries in range(1, 3 * window + 2):
            chunk = cut(query_start, num_queries, window, step)
            expected = window_pairs(query_start, num_queries, window)
            assert counted(chunk) == expected, (query_start, num_queries)


def test_a_chunk_of_whole_windows_is_one_segment_without_rectangles() -> None:
    (segment,) = cut(24576, 8192, 4096).segments
    assert (segment.num_pieces, segment.size, segment.triangle) == (2, 4096, 4095)
    assert segment.rectangle == 0 and segment.recurring
    first, second = cut(0, 8192, 4096).segments
    assert (first.size, first.triangle, first.rectangle) == (4096, 0, 0)
    assert (second.size, second.triangle, second.rectangle) == (4096, 4095, 0)
    assert first.recurring and second.recurring


def test_few_sizes_recur_whatever_the_chunk() -> None:
    sizes = {
        (segment.size, segment.triangle, segment.rectangle)
        for num_queries in range(1, 8193, 7)
        for segment in cut(5000, num_queries, 4096).segments
    }
    assert len(sizes) == 16
