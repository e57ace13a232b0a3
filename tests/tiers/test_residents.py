"""Who uses a gpu block: owners, copies and names."""

import pytest

from streamkv.tiers.free_list import FreeList
from streamkv.tiers.residents import Residents
from streamkv.tiers.spec import BlockKey

A, B = BlockKey(b"a" * 16), BlockKey(b"b" * 16)


def test_a_block_that_a_copy_holds_leaves_but_is_not_free() -> None:
    blocks = FreeList(1)
    residents = Residents(blocks)
    block_id = residents.allocate()
    residents.seal(block_id, A)
    residents.hold(block_id)
    assert residents.give_back(block_id) == A
    assert (residents.num_leaving, blocks.num_free) == (1, 0)
    residents.check_integrity()
    residents.unhold(block_id)
    assert (residents.num_leaving, blocks.num_free) == (0, 1)
    residents.check_integrity()


def test_two_blocks_may_have_one_name() -> None:
    residents = Residents(FreeList(2))
    first, second = residents.allocate(), residents.allocate()
    residents.seal(first, A)
    residents.seal(second, A)
    assert residents.num_users(A) == 2
    residents.give_back(first)
    assert residents.find(A) == second
    residents.give_back(second)
    assert residents.find(A) is None
    assert residents.num_users(A) == 0
    residents.check_integrity()


def test_several_are_sealed_at_once_like_one_by_one() -> None:
    """Also two of one name, and one of a name that is known."""
    residents = Residents(FreeList(4))
    known, *ids = [residents.allocate() for _ in range(4)]
    residents.seal(known, A)
    residents.seal_many(list(zip((A, B, B), ids, strict=True)))
    assert (residents.num_users(A), residents.num_users(B)) == (2, 2)
    assert all(residents.is_sealed(block_id) for block_id in ids)
    residents.check_integrity()
    with pytest.raises(AssertionError, match="sealed already"):
        residents.seal_many([(A, ids[0])])


def test_an_unsealed_block_has_no_name() -> None:
    residents = Residents(FreeList(1))
    assert residents.give_back(residents.allocate()) is None


def test_misuse_is_a_bug_and_changes_nothing() -> None:
    residents = Residents(FreeList(1))
    with pytest.raises(AssertionError, match="no owner"):
        residents.give_back(0)
    block_id = residents.allocate()
    residents.seal(block_id, A)
    with pytest.raises(AssertionError, match="sealed already"):
        residents.seal(block_id, B)
    with pytest.raises(AssertionError, match="not held"):
        residents.unhold(block_id)
    residents.check_integrity()


def test_a_shared_block_leaves_with_its_last_owner() -> None:
    blocks = FreeList(2)
    residents = Residents(blocks)
    block_id = residents.allocate()
    residents.seal(block_id, A)
    residents.share(block_id)
    residents.share(block_id)
    assert (residents.ref_count(block_id), blocks.ref_count(block_id)) == (3, 3)
    residents.hold(block_id)
    residents.check_integrity()
    for num_left in (2, 1):
        assert residents.give_back(block_id) == A
        assert residents.ref_count(block_id) == num_left
        assert (residents.find(A), residents.num_users(A), residents.num_leaving) == (
            block_id,
            1,
            0,
        )
        residents.check_integrity()
    assert residents.give_back(block_id) == A
    assert (residents.find(A), residents.num_leaving, blocks.num_free) == (None, 1, 1)
    residents.unhold(block_id)
    assert blocks.num_free == 2
    residents.check_integrity()


def test_only_a_sealed_block_is_shared() -> None:
    residents = Residents(FreeList(1))
    block_id = residents.allocate()
    with pytest.raises(AssertionError, match="not sealed"):
        residents.share(block_id)
    residents.check_integrity()
