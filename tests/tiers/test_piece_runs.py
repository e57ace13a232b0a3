"""Pieces wherever they lie, against copying them one by one."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.lib.stride_tricks import as_strided

from streamkv.tiers.piece_runs import copy_rows, runs


class Places:
    """Where pieces lie, by index, and which were looked up.

    Args:
        addresses: of the pieces.
        first: index of the first.
    """

    def __init__(self, addresses: list[int], first: int = 0) -> None:
        self._addresses = addresses
        self.wanted = range(first, first + len(addresses))
        self.looked_up: list[int] = []

    def address_of(self, index: int) -> int:
        self.looked_up.append(index)
        return self._addresses[index - self.wanted.start]


def placed(follows: list[bool], stride: int) -> list[int]:
    """Addresses of pieces that lie behind the one before them, or further on."""
    addresses = [1000]
    for is_next in follows:
        addresses.append(addresses[-1] + (stride if is_next else stride + 1))
    return addresses


@given(st.lists(st.booleans(), max_size=40), st.integers(1, 9), st.integers(0, 3), st.booleans())
def test_runs_end_where_the_next_piece_lies_elsewhere(
    follows: list[bool], stride: int, first: int, by_ends: bool
) -> None:
    addresses = placed(follows, stride)
    places = Places(addresses, first)
    found = runs(places.wanted, places.address_of, stride, by_ends=by_ends)
    assert [index for run in found for index in run] == list(places.wanted)
    starts = [0, *(at for at, is_next in enumerate(follows, 1) if not is_next)]
    assert [run.start - first for run in found] == starts
    assert list(found.values()) == [addresses[at] for at in starts]
    assert len(places.looked_up) == len(set(places.looked_up)), "none is looked up twice"
    if not by_ends:
        assert sorted(places.looked_up) == list(places.wanted)


@given(st.lists(st.integers(-3, 3), min_size=1, max_size=24))
def test_all_looked_up_no_place_is_mistaken(addresses: list[int]) -> None:
    places = Places(addresses)
    found = runs(places.wanted, places.address_of, 1)
    assert {at: begin + at - run.start for run, begin in found.items() for at in run} == dict(
        enumerate(addresses)
    )


@pytest.mark.parametrize("num_pieces", [1, 2, 3, 129])
def test_by_ends_one_run_takes_two_look_ups_and_two_runs_few(num_pieces: int) -> None:
    places = Places(placed([True] * (num_pieces - 1), 10))
    assert list(runs(places.wanted, places.address_of, 10, by_ends=True)) == [range(num_pieces)]
    assert len(places.looked_up) == min(num_pieces, 2)
    for broken in range(num_pieces - 1):
        places = Places(placed([at != broken for at in range(num_pieces - 1)], 10))
        assert len(runs(places.wanted, places.address_of, 10, by_ends=True)) == 2
        assert len(places.looked_up) <= 2 + num_pieces.bit_length()


def test_pieces_that_lie_backwards_are_no_run() -> None:
    places = Places([40, 30, 20, 20, 30])
    expected = {range(1): 40, range(1, 2): 30, range(2, 3): 20, range(3, 5): 20}
    assert runs(places.wanted, places.address_of, 10) == expected
    assert runs(places.wanted, places.address_of, 10, by_ends=True) == expected


@settings(deadline=None)
@given(st.integers(1, 7), st.integers(1, 6), st.data())
def test_rows_are_copied_as_bytes_one_by_one(
    num_rows: int, row_bytes: int, data: st.DataObject
) -> None:
    stride = row_bytes + 2
    memory = np.random.default_rng(1).integers(0, 255, num_rows * stride, dtype=np.uint8)
    rows = as_strided(memory, (num_rows, row_bytes), (stride, 1), writeable=False)
    skipped = data.draw(st.integers(0, row_bytes - 1))
    size = data.draw(st.integers(1, num_rows * row_bytes + 3))
    out = np.full(size, 255, dtype=np.uint8)
    payload = [memory[row * stride + at] for row in range(num_rows) for at in range(row_bytes)]
    expected = payload[skipped : skipped + size]
    assert copy_rows(rows, skipped, out) == len(expected)
    assert out.tolist() == expected + [255] * (size - len(expected))
