"""Sizes of pages of digests, and which block lies where."""

import pytest

from streamkv.digest_pages import page_blocks, page_bytes, parts_of, room_bytes

KIB, MIB = 1 << 10, 1 << 20
SIZES = [2 * KIB, 4 * KIB, 48 * KIB, 64 * KIB, 128 * KIB, 3 * MIB]


def test_pages_double_up_to_64_mib() -> None:
    sizes = [page_bytes(number, 48 * KIB) // MIB for number in range(7)]
    assert sizes == [4, 8, 16, 32, 64, 64, 64]
    assert [page_blocks(number, 48 * KIB) for number in range(5)] == [85, 170, 341, 682, 1365]
    assert [page_blocks(number, 128 * KIB) for number in range(4)] == [64, 128, 256, 512]
    # Where the first page is larger, all are as large as that.
    assert [page_bytes(number, 3 * MIB) // MIB for number in range(2)] == [256, 256]


@pytest.mark.parametrize("size", SIZES)
def test_a_page_is_a_power_of_two_and_holds_as_many_as_fit(size: int) -> None:
    for number in range(12):
        num_bytes, num_blocks = page_bytes(number, size), page_blocks(number, size)
        assert num_bytes & (num_bytes - 1) == 0
        assert num_blocks >= 64 and num_blocks * size <= num_bytes < (num_blocks + 1) * size


@pytest.mark.parametrize("size", SIZES)
def test_every_block_is_in_one_place_whatever_range_is_asked_for(size: int) -> None:
    places = [(n, place) for n in range(4) for place in range(page_blocks(n, size))]
    for first, end in ((0, 1), (0, 64), (63, 65), (64, 64), (70, 400), (0, len(places))):
        found = []
        for part in parts_of(first, min(end, len(places)), size):
            assert len(found) == part.first
            found += [(part.number, place) for place in range(part.low, part.high)]
        assert found == places[first:end]


def test_room_of_a_stream_is_that_of_its_pages() -> None:
    assert room_bytes(0, 48 * KIB) == 0
    assert room_bytes(85, 48 * KIB) == 4 * MIB
    assert room_bytes(86, 48 * KIB) == 12 * MIB
    # A million tokens of SmolLM2-135M.
    assert room_bytes(15_625, 48 * KIB) == (60 + 11 * 64) * MIB
