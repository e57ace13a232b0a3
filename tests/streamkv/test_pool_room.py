"""No more is promised than there is, whoever asks."""

from concurrent.futures import ThreadPoolExecutor

from hypothesis import given
from hypothesis import strategies as st

from streamkv.pool_room import PoolRoom

NUM_BLOCKS = 10


@given(st.lists(st.tuples(st.sampled_from("abc"), st.none() | st.integers(0, 12))))
def test_what_is_promised_fits_and_a_refusal_changes_nothing(
    steps: list[tuple[str, int | None]],
) -> None:
    room, expected = PoolRoom(NUM_BLOCKS), dict[str, int]()
    for owner, wanted in steps:
        if wanted is None:
            room.release(owner)
            expected.pop(owner, None)
            continue
        others = sum(expected.values()) - expected.get(owner, 0)
        fits = others + wanted <= NUM_BLOCKS
        assert room.reserve(owner, wanted) is fits
        if fits:
            expected[owner] = wanted
        assert {each: room.promised(each) for each in room.owners} == expected
        assert room.num_free == NUM_BLOCKS - sum(expected.values()) >= 0


def test_many_threads_are_promised_no_more_than_there_is() -> None:
    room = PoolRoom(100)
    with ThreadPoolExecutor(4) as threads:
        taken = list(threads.map(lambda owner: room.reserve(owner, 1), range(400)))
    assert sum(taken) == 100 and room.num_free == 0
