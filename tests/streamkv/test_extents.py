"""Parts of a run of bytes, against a map of every byte."""

import random

import pytest

from streamkv.extents import Extents


def test_the_first_part_that_is_long_enough_is_taken() -> None:
    extents = Extents(10)
    assert [extents.take(3) for _ in range(4)] == [0, 3, 6, None]
    assert extents.take(1) == 9 and extents.take(1) is None
    extents.give_back(3)
    assert extents.take(4) is None and extents.take(2) == 3 and extents.take(1) == 5


def test_neighbours_that_are_free_are_one_part() -> None:
    for order in ([0, 2, 4], [4, 2, 0], [0, 4, 2], [2, 0, 4]):
        extents = Extents(6)
        assert [extents.take(2) for _ in range(3)] == [0, 2, 4]
        for start in order:
            extents.give_back(start)
            extents.check_integrity()
        assert extents.take(6) == 0


@pytest.mark.parametrize("seed", range(5))
def test_no_byte_is_given_out_twice_and_none_is_lost(seed: int) -> None:
    draw, extents = random.Random(seed), Extents(200)
    owner: list[int | None] = [None] * 200
    taken: dict[int, int] = {}
    for _ in range(400):
        if taken and draw.random() < 0.45:
            start = draw.choice(list(taken))
            size = taken.pop(start)
            owner[start : start + size] = [None] * size
            extents.give_back(start)
        else:
            size = draw.randint(1, 40)
            found = extents.take(size)
            free = [at for at in range(201 - size) if owner[at : at + size] == [None] * size]
            assert found == (free[0] if free else None)
            if found is not None:
                owner[found : found + size] = [found] * size
                taken[found] = size
        extents.check_integrity()
        assert extents.used_bytes == sum(taken.values()) == 200 - owner.count(None)


def test_of_nothing_nothing_can_be_taken() -> None:
    extents = Extents(0)
    extents.check_integrity()
    assert extents.take(1) is None and extents.used_bytes == extents.num_bytes == 0
