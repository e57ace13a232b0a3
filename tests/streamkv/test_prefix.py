"""Which runs may stand in for computing, against a brute-force reading of the rule."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamkv.block_keys import BlockKeys
from streamkv.prefix import blocks_seen, has_block_ahead, keys_ahead, longest_run
from streamkv.sequence import Jump, Sequence
from streamkv.tiers.keys import Salting
from streamkv.tiers.spec import BlockKey
from streamkv.window import Window

SIZE = 4
ROOT = BlockKey(b"r" * 16)
WINDOW = Window(8, ((0, 2),))


def stream_of(ids: list[int], num_computed: int, salting: Salting | None = None) -> Sequence:
    """A stream with that many tokens computed and live."""
    stream = Sequence(1, WINDOW, SIZE, ROOT, salting or Salting(b"s"))
    stream.append(ids)
    compute(stream, num_computed)
    return stream


def compute(stream: Sequence, num_tokens: int) -> list[BlockKey]:
    """Count tokens as computed; returns the keys of blocks that became full."""
    end = stream.num_computed + num_tokens
    for index in stream.table.missing(stream.num_computed, end) if num_tokens else ():
        stream.table.add(index, index)
    return [key for _, key in stream.advance(num_tokens)]


@given(st.integers(0, 40), st.integers(0, 40), st.integers(0, 12))
def test_keys_ahead_are_those_that_computing_gives(
    num_computed: int, num_pending: int, num_shared: int
) -> None:
    ids = [7 * n % 97 for n in range(num_computed + num_pending)]
    stream = stream_of(ids, num_computed, Salting(b"s", num_shared))
    found = keys_ahead(stream)
    assert found == compute(stream, max(0, num_pending - 1))


@given(st.integers(0, 40), st.integers(1, 60), st.integers(0, 60), st.integers(0, 12))
def test_keys_that_were_found_are_gone_on_from(
    num_computed: int, num_pending: int, num_more: int, num_shared: int
) -> None:
    ids = [7 * n % 97 for n in range(num_computed + num_pending + num_more)]
    stream = stream_of(ids[: num_computed + num_pending], num_computed, Salting(b"s", num_shared))
    known = keys_ahead(stream)
    stream.append(ids[num_computed + num_pending :])
    assert known + keys_ahead(stream, known) == keys_ahead(stream)
    assert keys_ahead(stream, keys_ahead(stream)) == []


@pytest.mark.parametrize("change", [None, 24, 30])
@given(st.integers(0, 40), st.integers(1, 40), st.integers(0, 12), st.integers(0, 12))
def test_blocks_whose_keys_are_known_count_like_computed_ones(
    change: int | None, num_computed: int, num_pending: int, num_shared: int, num_fewer: int
) -> None:
    """Also in what comes after them: the keys, and where the window changes."""
    ids = [7 * n % 97 for n in range(num_computed + num_pending + 30)]

    def make() -> Sequence:
        stream = stream_of(ids[: num_computed + num_pending], num_computed, salting)
        stream.keys = BlockKeys(100)
        if change is not None and change >= num_computed:
            stream.change_window(change, WINDOW.with_sinks(change, change + 1))
        return stream

    salting = Salting(b"s", num_shared)
    computed, taken = make(), make()
    keys = keys_ahead(taken)
    keys = keys[: max(1, len(keys) - num_fewer)]
    if not keys:
        return
    first = num_computed // SIZE
    compute(computed, (first + len(keys)) * SIZE - num_computed)
    taken.advance_blocks(keys)
    for stream in (computed, taken):
        stream.append(ids[-30:])
    assert state(taken) == state(computed)
    for stream in (computed, taken):
        compute(stream, stream.num_pending - 1)
    assert state(taken) == state(computed)


def state(stream: Sequence) -> tuple[object, ...]:
    """All that decides how a stream goes on, but for its live blocks."""
    assert stream.keys is not None
    keys = [stream.keys.get(index) for index in range(len(WINDOWS) * 20)]
    counts = stream.num_tokens, stream.num_computed, list(stream.pending), stream.open_ids
    return counts, stream.chain_key, stream.window, stream.next_boundary, keys


def test_the_last_pending_token_fills_no_block() -> None:
    assert len(keys_ahead(stream_of(list(range(13)), 0))) == 3
    assert len(keys_ahead(stream_of(list(range(12)), 0))) == 2
    assert keys_ahead(stream_of(list(range(4)), 0)) == []
    assert keys_ahead(stream_of([], 0)) == []


def test_the_look_ahead_ends_where_the_window_changes() -> None:
    stream = stream_of(list(range(40)), 2)
    stream.change_window(13, WINDOW.with_sinks(13, 15))
    assert len(keys_ahead(stream)) == 3
    compute(stream, 11)
    assert len(keys_ahead(stream)) == 6


def test_the_look_ahead_ends_where_tokens_are_left_out() -> None:
    stream = Sequence(1, WINDOW, SIZE, ROOT)
    stream.restart_at(0, ROOT, list(range(30)), Jump(8, 40, BlockKey(b"c" * 16)))
    assert len(keys_ahead(stream)) == 2


@given(st.integers(0, 40), st.integers(1, 40), st.integers(0, 9))
def test_there_are_keys_ahead_where_pending_tokens_fill_a_block(
    num_computed: int, num_pending: int, look_back: int
) -> None:
    stream = stream_of(list(range(num_computed + num_pending)), num_computed)
    stream.look_back = look_back
    assert bool(keys_ahead(stream)) == has_block_ahead(stream)


def is_allowed(window: Window, end: int, first: int, stored: list[bool], live: set[int]) -> bool:
    """The rule, token by token: whatever a query at the end or later sees must be had."""
    query = end * SIZE
    for token in range(query):
        is_sink = any(start <= token < stop for start, stop in window.sink_ranges)
        if is_sink or token > query - window.window_size:
            block = token // SIZE
            if not (stored[block - first] if block >= first else block in live):
                return False
    return True


WINDOWS = [
    Window(8),
    Window(5, ((0, 2),)),
    Window(12, ((0, 9),)),
    Window(6, ((0, 1), (10, 11), (21, 26))),
]


@settings(deadline=None)
@given(
    st.sampled_from(WINDOWS),
    st.integers(0, 6),
    st.lists(st.booleans(), max_size=9),
    st.sets(st.integers(0, 5)),
)
def test_the_longest_run_is_the_longest_that_the_rule_allows(
    window: Window, first: int, stored: list[bool], live: set[int]
) -> None:
    live = {index for index in live if index < first}
    allowed = [
        end
        for end in range(first + 1, first + len(stored) + 1)
        if is_allowed(window, end, first, stored, live)
    ]
    found = longest_run(window, SIZE, first, stored, live, room=100)
    assert found == max(allowed, default=first)


def test_a_run_needs_no_more_blocks_than_there_is_room_for() -> None:
    # A window of two blocks; four more are live at the start.
    window, live = Window(8), {0, 1, 2, 3}
    for room, end in ((0, 4), (1, 5), (2, 6)):
        found = longest_run(window, SIZE, 4, [True, True], live, room)
        assert found == end
    # Once the window has passed, the room need only be that of a window.
    assert longest_run(window, SIZE, 4, [True] * 20, live, room=3) == 24


def test_what_has_left_the_window_by_the_end_need_not_be_stored() -> None:
    window = Window(8)
    assert longest_run(window, SIZE, 0, [False] * 6 + [True, True], set(), 9) == 8
    assert longest_run(window, SIZE, 0, [False] * 6 + [True, False], set(), 9) == 0


@pytest.mark.parametrize("query", range(4, 60, SIZE))
@pytest.mark.parametrize("window", WINDOWS)
def test_blocks_seen_are_those_that_do_not_expire(window: Window, query: int) -> None:
    full = range(query // SIZE)
    kept = [n for n in full if not window.is_expired(n * SIZE, (n + 1) * SIZE, query)]
    assert blocks_seen(window, SIZE, query) == kept
