"""Pieces wherever they lie, against copying them one by one."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.lib.stride_tricks import as_strided

from streamkv.tiers.piece_runs import copy_rows, runs


@given(st.lists(st.booleans(), max_size=12), st.integers(1, 9))
def test_runs_end_where_the_next_piece_lies_elsewhere(follows: list[bool], stride: int) -> None:
    addresses = [1000]
    for is_next in follows:
        addresses.append(addresses[-1] + (stride if is_next else stride + 1))
    found = runs(addresses, stride)
    assert [index for run in found for index in run] == list(range(len(addresses)))
    assert [run.start for run in found] == [
        0,
        *(at for at, is_next in enumerate(follows, 1) if not is_next),
    ]


def test_pieces_that_lie_backwards_are_no_run() -> None:
    assert runs([40, 30, 20, 20, 30], 10) == [range(1), range(1, 2), range(2, 3), range(3, 5)]
    assert runs([7], 10) == [range(1)]


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
