"""The checksum of frames together, against zlib's over all their bytes."""

import zlib

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from streamkv.tiers.checksum import joined_checksum


@given(
    st.lists(st.tuples(st.integers(0, 2**32 - 1), st.integers(0, 5000)), max_size=12),
    st.integers(0, 2**32),
)
def test_it_is_that_of_all_bytes_whatever_each_begins_with_and_however_long(
    frames: list[tuple[int, int]], seed: int
) -> None:
    rng = np.random.default_rng(seed)
    data = [rng.bytes(num_bytes) for _, num_bytes in frames]
    known = [
        (begin, zlib.crc32(frame, begin), len(frame))
        for (begin, _), frame in zip(frames, data, strict=True)
    ]
    assert joined_checksum(known) == zlib.crc32(b"".join(data))


def test_any_changed_checksum_changes_it() -> None:
    frames = [(7 * at, 1000 + at, 300 + at) for at in range(5)]
    right = joined_checksum(frames)
    for at, (before, after, num_bytes) in enumerate(frames):
        for bit in range(32):
            for other in (
                (before ^ 1 << bit, after, num_bytes),
                (before, after ^ 1 << bit, num_bytes),
            ):
                assert joined_checksum([*frames[:at], other, *frames[at + 1 :]]) != right
