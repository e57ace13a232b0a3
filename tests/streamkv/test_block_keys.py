"""Names of blocks are found again, against a dictionary."""

from hypothesis import given
from hypothesis import strategies as st

from streamkv.block_keys import BlockKeys
from streamkv.tiers.spec import BlockKey

LIMIT = 12


def key(number: int) -> BlockKey:
    return BlockKey(number.to_bytes(16, "big"))


puts = st.tuples(st.integers(0, 15), st.none() | st.integers(1, 200).map(key))
truncations = st.integers(0, 15)


@given(st.lists(puts | truncations))
def test_what_was_put_last_is_found(steps: list[tuple[int, BlockKey | None] | int]) -> None:
    keys, expected = BlockKeys(LIMIT), dict[int, BlockKey | None]()
    for step in steps:
        if isinstance(step, int):
            keys.truncate(step)
            expected = {index: found for index, found in expected.items() if index < step}
        else:
            keys.put(*step)
            if step[0] < LIMIT:
                expected[step[0]] = step[1]
        assert [keys.get(index) for index in range(20)] == [
            expected.get(index) for index in range(20)
        ]


def test_a_copy_goes_its_own_way() -> None:
    keys = BlockKeys(LIMIT)
    keys.put(0, key(1))
    copied = keys.copy()
    copied.put(0, key(2))
    keys.put(1, key(3))
    assert (keys.get(0), keys.get(1)) == (key(1), key(3))
    assert (copied.get(0), copied.get(1)) == (key(2), None)
