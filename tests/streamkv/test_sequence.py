"""What a stream has accepted, computed and live, against lists that are kept beside it."""

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from streamkv.sequence import Jump, Sequence, policy_in_force
from streamkv.tiers.keys import AttentionPolicy, child_key
from streamkv.tiers.spec import BlockKey
from streamkv.window import Window

SIZE = 4
ROOT = BlockKey(b"r" * 16)
WINDOW = Window(10, ((0, 2),))


def new_sequence(window: Window = WINDOW) -> Sequence:
    return Sequence(1, window, SIZE, ROOT)


def make_live(sequence: Sequence, end: int) -> None:
    """Give the tokens up to `end` a block; block `index` gets id `70 + index`."""
    for index in sequence.table.missing(sequence.num_computed, end):
        sequence.table.add(index, 70 + index)


def chain(ids: list[int], window: Window = WINDOW) -> list[BlockKey]:
    """Keys of all full blocks of a stream that had one window."""
    keys, key = [], ROOT
    for start in range(0, len(ids) - SIZE + 1, SIZE):
        key = child_key(key, ids[start : start + SIZE], policy_in_force(window, start, SIZE))
        keys.append(key)
    return keys


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.lists(st.integers(0, 99), max_size=9), st.integers(0, 9))))
def test_however_it_is_cut_the_counts_ids_and_keys_are_those_of_the_whole(
    moves: list[tuple[list[int], int]],
) -> None:
    sequence, accepted, num_computed = new_sequence(), list[int](), 0
    sealed: list[tuple[int, BlockKey]] = []
    for ids, wish in moves:
        sequence.append(ids)
        accepted += ids
        query_len = min(wish, len(accepted) - num_computed)
        assert sequence.next_ids(query_len) == accepted[num_computed:][:query_len]
        make_live(sequence, num_computed + query_len)
        sealed += sequence.advance(query_len)
        num_computed += query_len
        assert (sequence.num_tokens, sequence.num_computed) == (len(accepted), num_computed)
        assert list(sequence.pending) == accepted[num_computed:]
        assert list(sequence.recent_ids) == accepted[-10:]
        assert sequence.open_ids == accepted[num_computed - num_computed % SIZE : num_computed]
    keys = chain(accepted[:num_computed])
    assert sealed == [(70 + index, key) for index, key in enumerate(keys)]
    assert sequence.chain_key == (keys[-1] if keys else ROOT)


def test_a_written_head_is_forgotten_once_tokens_are_counted() -> None:
    sequence = new_sequence()
    sequence.append([1, 2])
    sequence.head_is_written = True
    sequence.advance(1)
    assert not sequence.head_is_written


def test_a_block_is_named_by_the_window_in_force_at_its_last_token() -> None:
    kept, late = WINDOW.with_sinks(21, 23), WINDOW.with_sinks(24, 26)
    ids = list(range(100, 124))
    found = {}
    for name, start, window in (("inside", 21, kept), ("at its end", 24, late)):
        sequence = new_sequence()
        sequence.append(ids)
        sequence.change_window(start, window)
        assert (sequence.window, sequence.final_window) == (WINDOW, window)
        assert sequence.next_boundary == start
        make_live(sequence, 24)
        sequence.advance(min(start, 24))
        assert (sequence.window, sequence.next_boundary) == (window, None)
        sequence.advance(24 - sequence.num_computed)
        found[name] = sequence.table[5].key
    before = chain(ids)[4]
    assert found["inside"] == child_key(before, ids[20:], policy_in_force(kept, 20, SIZE))
    assert found["at its end"] == chain(ids)[5]
    assert found["inside"] != found["at its end"]


def test_window_changes_take_force_one_after_the_other() -> None:
    sequence, second, third = new_sequence(), WINDOW.with_sinks(2, 3), WINDOW.with_sinks(2, 5)
    sequence.append([7] * 6)
    sequence.change_window(2, second)
    sequence.change_window(5, third)
    seen = []
    for _ in range(6):
        seen.append((sequence.window, sequence.next_boundary))
        sequence.advance(1)
    assert seen == [
        *[(WINDOW, 2)] * 2,
        *[(second, 5)] * 3,
        (third, None),
    ]
    assert sequence.final_window == third


def test_a_policy_is_the_same_bytes_wherever_they_are_remembered_from() -> None:
    rng = random.Random(3)
    for _ in range(3000):
        sinks, at = [], 0
        for _ in range(rng.randrange(4)):
            start = at + rng.randrange(90)
            at = start + rng.randrange(1, 90)
            sinks.append((start, at))
        window = Window(rng.randrange(1, 200), tuple(sinks))
        policy = AttentionPolicy("window", window.window_size, window.sink_ranges, "cache")
        first, size = rng.randrange(900), rng.choice([1, 16, 64])
        assert policy_in_force(window, first, size) == policy.in_force(first, size)


def test_a_change_at_the_next_token_is_in_force_at_once() -> None:
    sequence, window = new_sequence(), WINDOW.with_sinks(0, 5)
    sequence.change_window(0, window)
    assert (sequence.window, sequence.next_boundary) == (window, None)


def test_blocks_without_their_whole_past_get_no_key_but_carry_the_chain_on() -> None:
    sequence, ids = new_sequence(), list(range(40))
    keys = chain(ids)
    sequence.restart_at(0, ROOT, ids[:4] + ids[16:], Jump(4, 16, keys[3]))
    sequence.exact_from = 24
    sequence.advance(4)
    make_live(sequence, 32)
    assert sequence.advance(16) == [(76, keys[6]), (77, keys[7])]
    assert [block.key for block in sequence.table] == [None, None, keys[6], keys[7]]


def test_a_jump_leaves_tokens_out_and_takes_their_chain_key() -> None:
    sequence, ids = new_sequence(), list(range(40))
    keys = chain(ids)
    jump = Jump(8, 32, keys[7])
    sequence.restart_at(0, ROOT, ids[:8] + ids[32:], jump)
    assert (sequence.num_tokens, sequence.next_boundary) == (40, 8)
    sequence.advance(8)
    assert (sequence.num_computed, sequence.next_boundary) == (32, None)
    make_live(sequence, 40)
    assert sequence.advance(8) == [(78, keys[8]), (79, keys[9])]
    assert sequence.num_pending == 0


def test_a_restored_open_block_counts_as_computed_and_seals_like_any_other() -> None:
    ids = list(range(200, 212))
    keys = chain(ids)
    sequence = new_sequence()
    sequence.restart_at(4, keys[0], ids[4:])
    sequence.table.add(1, 71)
    sequence.restore_open(7)
    assert (sequence.num_computed, sequence.num_pending) == (7, 5)
    assert sequence.open_ids == ids[4:7]
    make_live(sequence, 12)
    assert sequence.advance(5) == [(71, keys[1]), (72, keys[2])]


def test_blocks_stay_until_neither_a_query_nor_a_resume_needs_them() -> None:
    """A resume begins at the last full block, so its first query's window counts."""
    sequence = new_sequence(Window(4, ((0, 2),)))
    ids = list(range(20))
    keys = chain(ids, sequence.window)
    sequence.append(ids)
    make_live(sequence, 20)
    gone = []
    for _ in range(20):
        sequence.advance(1)
        gone.append([block_id for block_id, _ in sequence.take_expired()])
    assert {index: ids for index, ids in enumerate(gone, 1) if ids} == {
        12: [71],
        16: [72],
        20: [73],
    }
    assert [block.key for block in sequence.table] == [keys[0], keys[4]]
