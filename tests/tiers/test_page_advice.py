"""What is asked of the kernel ahead: all of what lies in a row, little of what does not."""

import mmap

from hypothesis import given
from hypothesis import strategies as st

from streamkv.tiers.page_advice import ReadAhead

STEP = 10


def asked(places: list[int]) -> list[int]:
    """Places of pieces that are asked for while those at `places` are read in order."""
    found: list[int] = []

    def ask(address: int, num_bytes: int) -> None:
        assert address % STEP == 0 and num_bytes % STEP == 0 and num_bytes > 0
        found.extend(range(address // STEP, (address + num_bytes) // STEP))

    ahead = ReadAhead(len(places), STEP, ask)
    for place in places:
        ahead.follow(place * STEP)
    return found


def test_pieces_in_a_row_are_asked_for_once_and_nothing_beyond() -> None:
    for num_pieces in range(1, 200):
        assert asked(list(range(7, 7 + num_pieces))) == list(range(8, 7 + num_pieces))


def test_they_are_asked_for_in_few_requests_and_well_ahead() -> None:
    requests: list[tuple[int, int]] = []
    ahead = ReadAhead(128, STEP, lambda *request: requests.append(request))
    ahead.follow(0)
    assert requests == [(STEP, 4 * STEP)]
    for place in range(1, 64):
        ahead.follow(place * STEP)
    assert sum(num_bytes for _, num_bytes in requests) == 127 * STEP
    assert len(requests) <= 12


@given(st.lists(st.integers(1, 12), min_size=1, max_size=30))
def test_a_scattered_record_costs_at_most_twice_what_it_holds(runs: list[int]) -> None:
    places = [1000 * at + offset for at, length in enumerate(runs) for offset in range(length)]
    found = asked(places)
    assert len(found) == len(set(found))
    assert len(set(found) - set(places)) <= len(places) + 4


def test_memory_that_is_not_there_is_no_error() -> None:
    ReadAhead(4, mmap.PAGESIZE).follow(mmap.PAGESIZE)
