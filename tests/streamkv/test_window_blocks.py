"""The bytes of a CHECKPOINT record, there and back."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamkv.errors import JournalError
from streamkv.tiers.spec import BlockKey
from streamkv.window_blocks import WindowBlocks

keys = st.binary(min_size=16, max_size=16).map(BlockKey)


@given(st.integers(0, 2**62), keys, st.lists(st.tuples(st.integers(0, 2**62), keys)))
def test_what_a_record_carries_is_read_back(
    token_index: int, chain_key: BlockKey, blocks: list[tuple[int, BlockKey]]
) -> None:
    window = WindowBlocks(token_index, chain_key, tuple(blocks))
    assert WindowBlocks.decode(token_index, window.encode()) == window
    for cut in (1, 8, 16):
        with pytest.raises(JournalError, match="CHECKPOINT record"):
            WindowBlocks.decode(token_index, window.encode()[:-cut])


def test_the_bytes_are_the_same_on_every_machine() -> None:
    """They are in journals: a change makes every session compute its window anew."""
    window = WindowBlocks(
        128, BlockKey(b"c" * 16), ((0, BlockKey(b"k" * 16)), (258, BlockKey(b"l" * 16)))
    )
    assert window.encode() == (b"c" * 16 + b"\0" * 8 + b"k" * 16 + b"\2\1" + b"\0" * 6 + b"l" * 16)
