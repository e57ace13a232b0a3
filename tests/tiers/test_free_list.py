"""The free list: who uses a block, and when its id may be used again."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamkv.errors import PoolFullError
from streamkv.tiers.free_list import FreeList


def test_hands_out_each_block_once_then_refuses() -> None:
    blocks = FreeList(3)
    assert [blocks.allocate() for _ in range(3)] == [0, 1, 2]
    with pytest.raises(PoolFullError, match="all 3 blocks"):
        blocks.allocate()
    assert (blocks.num_free, blocks.num_used, blocks.num_blocks) == (0, 3, 3)


def test_a_block_returns_only_with_its_last_user() -> None:
    blocks = FreeList(1)
    block_id = blocks.allocate()
    blocks.acquire(block_id)
    assert blocks.ref_count(block_id) == 2
    assert blocks.release(block_id) is False
    assert blocks.num_free == 0
    assert blocks.release(block_id) is True
    assert blocks.num_free == 1


def test_reuses_the_block_that_was_freed_last() -> None:
    blocks = FreeList(4)
    for _ in range(3):
        blocks.allocate()
    blocks.release(0)
    blocks.release(2)
    assert [blocks.allocate() for _ in range(3)] == [2, 0, 3]


@given(st.sets(st.integers(0, 8)), st.integers(0, 9))
def test_many_at_once_are_those_that_are_handed_out_one_by_one(
    freed: set[int], num_blocks: int
) -> None:
    lists = FreeList(9), FreeList(9)
    for blocks in lists:
        for _ in range(9):
            blocks.allocate()
        for block_id in sorted(freed, key=lambda block_id: 5 * block_id % 9):
            blocks.release(block_id)
    num_blocks = min(num_blocks, len(freed))
    found = lists[0].allocate_many(num_blocks)
    assert found == [lists[1].allocate() for _ in range(num_blocks)]
    assert [lists[0].ref_count(block_id) for block_id in found] == [1] * num_blocks
    lists[0].check_integrity()
    with pytest.raises(AssertionError):
        lists[0].allocate_many(lists[0].num_free + 1)


def test_refuses_to_free_twice_and_to_share_a_free_block() -> None:
    blocks = FreeList(1)
    blocks.allocate()
    blocks.release(0)
    with pytest.raises(AssertionError, match="free already"):
        blocks.release(0)
    with pytest.raises(AssertionError, match="cannot gain a user"):
        blocks.acquire(0)
    blocks.check_integrity()


def test_a_pool_without_blocks_is_full() -> None:
    blocks = FreeList(0)
    blocks.check_integrity()
    with pytest.raises(PoolFullError):
        blocks.allocate()


@given(st.lists(st.integers(0, 2), max_size=60), st.data())
def test_free_and_used_always_make_the_total(actions: list[int], data: st.DataObject) -> None:
    blocks = FreeList(4)
    users: list[int] = []
    for action in actions:
        if action == 0 and blocks.num_free:
            users.append(blocks.allocate())
        elif action == 1 and users:
            users.append(data.draw(st.sampled_from(users)))
            blocks.acquire(users[-1])
        elif action == 2 and users:
            blocks.release(users.pop(data.draw(st.integers(0, len(users) - 1))))
        blocks.check_integrity()
        assert blocks.num_used == len(set(users))
        assert all(blocks.ref_count(block_id) == users.count(block_id) for block_id in range(4))


def test_grows_by_blocks_that_come_after_those_that_are_free() -> None:
    blocks = FreeList(0)
    with pytest.raises(PoolFullError):
        blocks.allocate()
    blocks.grow(2)
    first = blocks.allocate()
    blocks.grow(0)
    blocks.grow(2)
    blocks.check_integrity()
    assert (blocks.num_blocks, blocks.num_free, blocks.num_used) == (4, 3, 1)
    blocks.release(first)
    assert [blocks.allocate() for _ in range(4)] == [0, 1, 2, 3]
