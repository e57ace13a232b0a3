"""Which entries recalled blocks have, by position policy."""

import pytest

from streamkv.block_table import BlockTable
from streamkv.recalled import POSITION_POLICIES, PositionPolicy, RecalledBlocks, farthest
from streamkv.window import NO_CAP, Window

SIZE = 4
WINDOW = Window(8, ((0, 2),))


def recalled(policy: PositionPolicy, *indices: int) -> RecalledBlocks:
    made = RecalledBlocks(SIZE)
    made.policy = policy
    made.set({index: 100 + index for index in indices})
    return made


def test_far_blocks_all_seem_just_beyond_the_window() -> None:
    entries = recalled("far", 5, 1).entries(WINDOW, 60)
    assert [(e.block_id, e.start, e.cap, e.first_valid, e.end_valid) for e in entries] == [
        (101, 4, 12, 0, 4),
        (105, 20, 12, 0, 4),
    ]


def test_cached_blocks_stand_between_sink_tokens_and_window() -> None:
    blocks = recalled("cache", 1, 5, 9)
    assert [entry.cap for entry in blocks.entries(WINDOW, 60)] == [8 + 12, 8 + 8, 8 + 4]
    assert blocks.num_cached_tokens == 12
    assert recalled("far", 1, 5).num_cached_tokens == 0


def test_the_distance_to_sink_tokens_counts_cached_blocks() -> None:
    table = BlockTable(SIZE)
    table.add(0, 7)
    alone = table.entries(WINDOW, 60, 61).sinks
    table.recalled.policy = "cache"
    table.recalled.set({3: 9, 4: 8})
    beside = table.entries(WINDOW, 60, 61).sinks
    assert [b.cap - a.cap for a, b in zip(alone, beside, strict=True)] == [8]


def test_true_distances_have_no_cap() -> None:
    assert {entry.cap for entry in recalled("absolute", 1, 5).entries(WINDOW, 60)} == {NO_CAP}


def test_sink_tokens_of_a_recalled_block_are_left_out() -> None:
    [entry] = recalled("far", 0).entries(WINDOW, 60)
    assert (entry.first_valid, entry.end_valid) == (2, 4)
    inner = Window(8, ((5, 6),))
    pairs = [(e.first_valid, e.end_valid) for e in recalled("far", 1).entries(inner, 60)]
    assert pairs == [(0, 1), (2, 4)]


def test_what_no_query_sees_yet_has_no_entry() -> None:
    """Token t is older than the window of queries from t + window_size on."""
    blocks = recalled("far", 2)
    assert blocks.entries(WINDOW, 16) == []
    assert len(blocks.entries(WINDOW, 17)) == 1


def test_a_change_is_seen_in_the_version_of_the_table() -> None:
    table = BlockTable(SIZE)
    before = table.version
    table.recalled.set({3: 9})
    changed = table.version
    table.recalled.set({3: 9})
    assert (before, changed, table.version) == (0, 1, 1)
    table.recalled.set({})
    assert table.version == 2 and table.entries(WINDOW, 50, 51).recalled == []


@pytest.mark.parametrize("policy", POSITION_POLICIES)
def test_no_distance_passes_the_farthest(policy: PositionPolicy) -> None:
    entries = recalled(policy, *range(6)).entries(WINDOW, 60)
    bound = farthest(policy, WINDOW.window_size, 6, SIZE)
    assert max(entry.cap for entry in entries) == (bound or NO_CAP)
