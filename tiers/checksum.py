"""CRC-32 by ISA-L, and that of frames one behind the other from the checksum of each.

A frame is checked in microseconds, and then its thread waits for the interpreter, which takes as
long or longer when several threads read. So the frames of a block are checked together: one
checksum over all of them, which is right exactly if that of each is, but for a chance of one in
four billion.

Invariant: no byte is read here. CRC-32 is linear: what a frame's checksum begins with, and what it
would have been from another beginning, differ by as much for every frame of that length.
"""

from collections.abc import Iterable

from isal.isal_zlib import crc32, crc32_combine

__all__ = ["crc32", "joined_checksum"]


def joined_checksum(frames: Iterable[tuple[int, int, int]]) -> int:
    """The checksum, from 0 on, of frames one behind the other.

    Args:
        frames: of each frame the checksum that its own begins with, its own, and its bytes.
    """
    joined = 0
    for before, after, num_bytes in frames:
        # Two beginnings differ by what they differ by together; the frame's bytes count once.
        joined = crc32_combine(joined ^ before, after, num_bytes)
    return joined
