"""The checksum of frames together, against zlib's over all their bytes."""

import zlib

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from streamkv.tiers.joined_checksum import joined_checksum


@given(
    st.lists(st.integers(0, 2**32 - 1), max_size=12), st.integers(1, 5000), st.integers(0, 2**32)
)
def test_it_is_that_of_all_bytes_whatever_each_begins_with(
    begins: list[int], num_bytes: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    frames = [rng.bytes(num_bytes) for _ in begins]
    pairs = [(begin, zlib.crc32(frame, begin)) for begin, frame in zip(begins, frames, strict=True)]
    assert joined_checksum(pairs, num_bytes) == zlib.crc32(b"".join(frames))


def test_any_changed_checksum_changes_it() -> None:
    pairs = [(7 * at, 1000 + at) for at in range(5)]
    right = joined_checksum(pairs, 300)
    for at, (before, after) in enumerate(pairs):
        for bit in range(32):
            for other in ((before ^ 1 << bit, after), (before, after ^ 1 << bit)):
                assert joined_checksum([*pairs[:at], other, *pairs[at + 1 :]], 300) != right
