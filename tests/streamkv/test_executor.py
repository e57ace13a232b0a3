"""A sequence's blocks are live before a step, sealed and given back after, over real pools."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from small_tiers import SmallTiers, small_tiers

from streamkv.batch import SequenceStep, Wanted
from streamkv.errors import PoolFullError
from streamkv.window import Window

WINDOW = Window(8, ((0, 2),))


@pytest.fixture
def tiers(tmp_path: Path) -> Iterator[SmallTiers]:
    with small_tiers(tmp_path / "blocks") as tiers:
        yield tiers


def test_only_the_blocks_that_a_step_writes_are_made_live(tiers: SmallTiers) -> None:
    one, two = tiers.sequence(WINDOW, 1), tiers.sequence(WINDOW, 2)
    one.append(range(20))
    two.append(range(3))
    for _ in range(2):
        tiers.executor.prepare(SequenceStep(one, 5))
        tiers.executor.prepare(SequenceStep(two, 3))
    assert [block.block_index for block in one.table] == [0, 1]
    assert [block.block_index for block in two.table] == [0]
    assert len({block.block_id for table in (one.table, two.table) for block in table}) == 3
    assert tiers.num_used() == 3


def test_what_a_full_pool_gave_stays_with_its_sequence(tiers: SmallTiers) -> None:
    one, other = tiers.sequence(Window(40), 1), tiers.sequence(WINDOW, 2)
    other.append(range(16))
    tiers.step(other, 16)
    one.append(range(40))
    with pytest.raises(PoolFullError):
        tiers.step(one, 36)
    held = [(block.block_index, block.block_id) for block in one.table]
    assert one.num_computed == 0 and len(held) + len(other.table) == tiers.num_used() == 8
    tiers.executor.release(other)
    tiers.step(one, 32)
    assert [(block.block_index, block.block_id) for block in one.table][: len(held)] == held
    assert len(one.table) == tiers.num_used() == 8


def test_full_blocks_can_be_restored_and_those_out_of_the_window_are_given_back(
    tiers: SmallTiers,
) -> None:
    one = tiers.sequence(WINDOW)
    one.append(range(24))
    tiers.step(one, 12)
    keys = [block.key for block in one.table]
    tiers.step(one, 7)
    # Sinks are in block 0, the window of token 16 begins in block 2, block 4 is open.
    assert [block.block_index for block in one.table] == [0, 2, 3, 4]
    assert one.table[4].key is None
    assert tiers.num_used() == 4
    for index, key in enumerate(keys):
        assert key is not None
        assert tiers.restored(key) == [4.0 * index + offset for offset in range(4)]


def test_the_last_token_of_a_step_for_logits_stays_pending_with_its_kv_written(
    tiers: SmallTiers,
) -> None:
    one = tiers.sequence(WINDOW)
    one.append(range(8))
    tiers.step(one, 8, Wanted.LOGITS)
    assert (one.num_computed, one.num_pending, one.head_is_written) == (7, 1, True)
    assert one.table[1].key is None
    tiers.executor.advance(one, 1)
    assert (one.num_computed, one.num_pending, one.head_is_written) == (8, 0, False)
    key = one.table[1].key
    assert key is not None and tiers.restored(key) == [4.0, 5.0, 6.0, 7.0]


def test_a_written_head_is_counted_only_if_something_follows_it(tiers: SmallTiers) -> None:
    one = tiers.sequence(WINDOW)
    one.append(range(8))
    tiers.step(one, 8, Wanted.LOGITS)
    tiers.executor.count_written_head(one)
    assert (one.num_computed, one.num_pending) == (7, 1)
    one.append([8])
    tiers.executor.count_written_head(one)
    assert (one.num_computed, one.num_pending) == (8, 1)
    assert one.table[1].key is not None
    tiers.executor.count_written_head(one)
    assert (one.num_computed, one.num_pending) == (8, 1)


def test_blocks_without_a_key_are_given_back_too(tiers: SmallTiers) -> None:
    one = tiers.sequence(Window(4))
    one.exact_from = 8
    one.append(range(20))
    for _ in range(5):
        tiers.step(one, 4)
    assert [block.block_index for block in one.table] == [4]
    assert tiers.num_used() == 1


def test_release_gives_every_block_back_and_keeps_what_is_stored(tiers: SmallTiers) -> None:
    one = tiers.sequence(WINDOW)
    one.append(range(11))
    tiers.step(one, 11)
    key = one.table[1].key
    tiers.executor.release(one)
    tiers.executor.release(one)
    assert (len(one.table), tiers.num_used()) == (0, 0)
    assert key is not None and tiers.restored(key) == [4.0, 5.0, 6.0, 7.0]
