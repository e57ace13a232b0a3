"""Numbers of rows are rounded up to few sizes, and only where a size costs memory."""

import pytest
import torch

from streamkv.row_padding import padded_rows


def test_few_sizes_serve_every_number_of_rows() -> None:
    sizes = {padded_rows(rows, torch.bfloat16) for rows in range(1, 513)}
    assert sizes == {1, 8, 16, 32, 64, 128, 256, 384, 512}
    assert len({padded_rows(rows, torch.bfloat16) for rows in range(513, 8193)}) == 16


@pytest.mark.parametrize("rows", [1, 8, 64, 512, 1024, 4096])
def test_whole_chunks_are_not_padded(rows: int) -> None:
    assert padded_rows(rows, torch.float16) == rows


def test_no_size_is_too_small() -> None:
    for rows in range(1, 5000):
        assert rows <= padded_rows(rows, torch.bfloat16) <= max(8, 2 * rows)
        assert rows < 512 or padded_rows(rows, torch.bfloat16) <= rows * 5 / 4


def test_float32_is_left_alone() -> None:
    assert [padded_rows(rows, torch.float32) for rows in (1, 7, 300)] == [1, 7, 300]
