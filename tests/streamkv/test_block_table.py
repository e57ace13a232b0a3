"""Live blocks of one sequence: which are missing, where a token lies, which may go."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamkv.block_table import BlockTable, Entries, LiveBlock, TableEntry
from streamkv.entry_columns import EntryColumns, have_sinks
from streamkv.recalled import POSITION_POLICIES, PositionPolicy
from streamkv.tiers.spec import BlockKey
from streamkv.window import NO_CAP, Window

SIZE = 4


def table_of(*indices: int) -> BlockTable:
    """A table in which block `index` lies at block id `50 - index`."""
    table = BlockTable(SIZE)
    for index in indices:
        table.add(index, 50 - index)
    return table


def indices(table: BlockTable) -> list[int]:
    return [block.block_index for block in table]


def is_seen(window: Window, token: int, next_query: int, horizon: int) -> bool:
    """Whether a query in `[next_query, horizon)` sees the token, asked one by one."""
    sinks = {t for start, end in window.sink_ranges for t in range(start, end)}
    return any(
        token <= query and (token in sinks or query - token < window.window_size)
        for query in range(next_query, horizon)
    )


def test_missing_names_only_the_blocks_that_the_tokens_touch() -> None:
    table = table_of(0, 3)
    assert table.missing(0, 4) == []
    assert table.missing(3, 5) == [1]
    assert table.missing(2, 21) == [1, 2, 4, 5]
    assert table.missing(12, 16) == []
    assert table.missing(16, 16) == []


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 30), st.integers(1, 30))
def test_a_tokens_slot_is_its_blocks_place_and_its_offset(first: int, length: int) -> None:
    table = table_of(*range(16))
    expected = [
        (50 - token // SIZE) * SIZE + token % SIZE for token in range(first, first + length)
    ]
    assert table.slots(first, first + length) == expected
    assert [table.slot(token) for token in range(first, first + length)] == expected


@settings(max_examples=200, deadline=None)
@given(
    st.sets(st.integers(0, 15), min_size=1),
    st.integers(1, 20),
    st.sets(st.integers(0, 60), max_size=8),
    st.integers(0, 64),
)
def test_exactly_the_blocks_that_no_later_query_sees_expire(
    live: set[int], window_size: int, sinks: set[int], next_query: int
) -> None:
    window = Window(window_size)
    for token in sinks:
        window = window.with_sinks(token, token + 1)
    table = table_of(*sorted(live))
    # Beyond the horizon no new token of these blocks comes into any window.
    horizon = next_query + 70
    dead = [
        index
        for index in sorted(live)
        if not any(
            is_seen(window, token, next_query, horizon)
            for token in range(index * SIZE, (index + 1) * SIZE)
        )
    ]
    assert table.take_expired(window, next_query) == [LiveBlock(i, 50 - i) for i in dead]
    assert indices(table) == [index for index in sorted(live) if index not in dead]


def test_all_blocks_can_be_taken_with_their_keys_and_the_table_used_anew() -> None:
    table, key = table_of(2), BlockKey(b"k" * 16)
    table.add(7, 9, key)
    assert table.take_all() == [LiveBlock(2, 48), LiveBlock(7, 9, key)]
    assert len(table) == 0 and 7 not in table
    table.add(0, 1)
    assert table[0] == LiveBlock(0, 1)


def test_several_blocks_are_added_at_once_like_one_by_one() -> None:
    table, blocks = table_of(0, 2), [LiveBlock(index, 50 - index, None) for index in (3, 4, 7)]
    before = table.version
    table.add_all([])
    table.add_all(blocks)
    assert table.version > before
    assert list(table) == list(table_of(0, 2, 3, 4, 7))
    for wrong in (blocks[:1], [LiveBlock(9, 1), LiveBlock(8, 2)]):
        with pytest.raises(AssertionError):
            table.add_all(wrong)


def test_entries_split_a_block_at_its_sink_tokens() -> None:
    table, window = table_of(0, 1, 2), Window(6, ((0, 2), (5, 7)))
    sinks, _, recent = table.entries(window, 8, 10)
    # Four sink tokens and six of the window: the oldest sink token is at most 9 away.
    assert sinks == [
        TableEntry("gpu", 50, 0, 9, 0, 2),
        TableEntry("gpu", 49, 4, 8, 1, 3),
    ]
    assert recent == [
        TableEntry("gpu", 50, 0, NO_CAP, 2, 4),
        TableEntry("gpu", 49, 4, NO_CAP, 0, 1),
        TableEntry("gpu", 49, 4, NO_CAP, 3, 4),
        TableEntry("gpu", 48, 8, NO_CAP, 0, 2),
    ]


def test_only_the_end_of_the_open_block_moves_with_the_stream() -> None:
    table, window = table_of(0, 1, 2), Window(12, ((0, 1),))
    before = table.entries(window, 8, 9)
    after = table.entries(window, 9, 11)
    assert before.sinks == after.sinks
    assert before.recent[:-1] == after.recent[:-1]
    assert (before.recent[-1].end_valid, after.recent[-1].end_valid) == (1, 3)


def ranges(limit: int) -> st.SearchStrategy[tuple[tuple[int, int], ...]]:
    """Disjoint ascending ranges below a limit; some touch."""
    edges = st.sets(st.integers(0, limit), max_size=12).map(sorted)
    apart = edges.map(lambda found: tuple(zip(found[::2], found[1::2], strict=False)))
    return apart | edges.map(lambda found: tuple(itertools.pairwise(found)))


def columns_of(entries: Entries) -> EntryColumns:
    """What lists of entries are as columns."""
    values = np.array([entry[1:] for kind in entries for entry in kind], dtype=np.int64)
    return EntryColumns(values.reshape(-1, 5).T, len(entries.sinks), len(entries.recalled))


def check_columns(table: BlockTable, window: Window, first: int, end: int) -> None:
    found, expected = (
        table.columns(window, first, end),
        columns_of(table.entries(window, first, end)),
    )
    assert found.values.dtype == np.int64 and found.values.shape == expected.values.shape
    assert found.values.tolist() == expected.values.tolist()
    assert found[1:] == expected[1:]


@settings(max_examples=400, deadline=None)
@given(
    st.sets(st.integers(0, 15)),
    st.integers(1, 40),
    ranges(64),
    st.sets(st.integers(0, 15)),
    st.sampled_from(POSITION_POLICIES),
    st.integers(0, 60),
    st.integers(1, 20),
)
def test_columns_are_what_entries_lists(
    live: set[int],
    window_size: int,
    sinks: tuple[tuple[int, int], ...],
    recalled: set[int],
    policy: PositionPolicy,
    first: int,
    query_len: int,
) -> None:
    """Sink ranges anywhere, blocks behind the last query, an open block that shows some of it."""
    window, table = Window(window_size, sinks), table_of(*sorted(live))
    table.recalled.set_policy(policy)
    table.recalled.trained_length = 100
    table.recalled.set({index: 70 + index for index in recalled})
    check_columns(table, window, first, first + query_len)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_columns_are_made_anew_with_every_change(data: st.DataObject) -> None:
    """Blocks come and go, others are recalled, the window changes, queries move."""
    table, window, first = table_of(0, 1), Window(9, ((0, 2),)), 4
    for step in range(12):
        match data.draw(st.integers(0, 6)):
            case 0:
                table.add(2 + step, 30 - step)
            case 1:
                table.take_expired(window, first)
            case 2:
                table.take_from(1 + step // 2)
            case 3:
                table.recalled.set(
                    {index: 60 + step for index in range(data.draw(st.integers(0, 3)))}
                )
            case 4:
                table.recalled.set_policy(data.draw(st.sampled_from(POSITION_POLICIES)))
            case 5:
                window = Window(data.draw(st.integers(1, 20)), data.draw(ranges(40)))
            case 6:
                first += data.draw(st.integers(0, 6))
        check_columns(table, window, first, first + 4)
        assert table.columns(window, first, first + 4) is table.columns(window, first, first + 4)


@given(ranges(64), st.sets(st.integers(0, 15)))
def test_blocks_have_sinks_where_a_range_has_a_token_of_them(
    sinks: tuple[tuple[int, int], ...], live: set[int]
) -> None:
    window, starts = Window(8, sinks), [index * SIZE for index in sorted(live)]
    found = have_sinks(window, np.array(starts, dtype=np.int64), SIZE)
    assert found.tolist() == [bool(window.sinks_in(start, start + SIZE)) for start in starts]


def test_blocks_behind_the_last_query_show_nothing() -> None:
    """They were made live for steps to come; sink ranges may reach into them."""
    table, window = table_of(0, 1, 2), Window(6, ((0, 10),))
    sinks, _, recent = table.entries(window, 3, 4)
    assert [entry.start for entry in sinks] == [0] and recent == []
    check_columns(table, window, 3, 4)
