"""Which tokens a query sees, against counting them one by one."""

from hypothesis import given, settings
from hypothesis import strategies as st

from streamkv.block_table import BlockTable
from streamkv.window import NO_CAP, Window

BLOCK = 8


def ranges(limit: int) -> st.SearchStrategy[tuple[tuple[int, int], ...]]:
    """Disjoint ascending ranges within [0, limit)."""
    return st.sets(st.integers(0, limit - 1), max_size=limit).map(runs)


def runs(tokens: set[int]) -> tuple[tuple[int, int], ...]:
    found: list[tuple[int, int]] = []
    for token in sorted(tokens):
        if found and found[-1][1] == token:
            found[-1] = (found[-1][0], token + 1)
        else:
            found.append((token, token + 1))
    return tuple(found)


def members(spans: tuple[tuple[int, int], ...]) -> set[int]:
    return {token for start, end in spans for token in range(start, end)}


def test_the_window_counts_the_current_token() -> None:
    window = Window(4)
    assert [window.first_visible(token) for token in (0, 2, 3, 4, 9)] == [0, 0, 0, 1, 6]


def test_caps_of_the_first_sink_tokens_are_those_of_a_full_cache() -> None:
    window = Window(1020, ((0, 4),))
    assert [window.sink_cap(token) for token in range(4)] == [1023, 1022, 1021, 1020]


def test_added_sink_ranges_merge_where_they_overlap_and_not_where_they_only_touch() -> None:
    window = Window(64, ((0, 4), (10, 12))).with_sinks(4, 6).with_sinks(11, 15)
    assert window.sink_ranges == ((0, 4), (4, 6), (10, 15))
    assert window.num_sink_tokens == 11
    assert window.cache_position(10) == 6


@settings(max_examples=150, deadline=None)
@given(ranges(40), st.integers(0, 40), st.integers(0, 40))
def test_ranges_are_split_into_sinks_and_others(
    spans: tuple[tuple[int, int], ...], start: int, length: int
) -> None:
    window, sinks, tokens = Window(8, spans), members(spans), set(range(start, start + length))
    assert members(tuple(window.sinks_in(start, start + length))) == sinks & tokens
    assert members(tuple(window.others_in(start, start + length))) == tokens - sinks


@settings(max_examples=150, deadline=None)
@given(ranges(40), st.integers(1, 40), st.integers(1, 64), st.integers(1, 20))
def test_entries_show_each_visible_token_once_at_its_distance(
    spans: tuple[tuple[int, int], ...], window_size: int, num_tokens: int, query_len: int
) -> None:
    window = Window(window_size, tuple(span for span in spans if span[1] <= num_tokens))
    table = BlockTable(BLOCK)
    end = num_tokens + query_len
    for index in table.missing(0, end):
        table.add(index, 100 + index)
    for block in table.take_expired(window, num_tokens):
        assert window.is_expired(block.block_index * BLOCK, (block.block_index + 1) * BLOCK, end)
    sink_entries, _, window_entries = table.entries(window, num_tokens, end)
    for query in range(num_tokens, end):
        seen: dict[int, int] = {}
        for entry in (*sink_entries, *window_entries):
            reach = NO_CAP if entry in sink_entries else window_size
            for slot in range(entry.first_valid, entry.end_valid):
                token = entry.start + slot
                if 0 <= query - token < reach:
                    assert token not in seen
                    seen[token] = min(query - entry.start, entry.cap) - slot
        assert seen == brute_force(window, query)


def brute_force(window: Window, query: int) -> dict[int, int]:
    """Distance to each visible token: counted in the cache for sinks, true for the rest."""
    sinks = members(window.sink_ranges)
    expected = {}
    for token in range(query + 1):
        if token in sinks:
            later_sinks = sum(1 for other in sinks if other >= token)
            expected[token] = min(query - token, later_sinks + window.window_size - 1)
        elif query - token < window.window_size:
            expected[token] = query - token
    return expected
