"""The CRC-32 of frames that lie one behind the other, from the checksums that each has by itself.

A frame is checked in microseconds, and then its thread waits for the interpreter, which takes as
long or longer when several threads read. So frames of one size are checked together: one checksum
over all of them, which is right exactly if that of each is, but for a chance of one in four
billion.

Invariant: no byte is read here. CRC-32 is linear, so what a number of bytes does to the checksum
before them does not depend on what they hold: it is the exclusive or of what it does to each bit.
"""

from collections.abc import Iterable
from functools import lru_cache

from isal.isal_zlib import crc32

_Table = tuple[int, ...]


def joined_checksum(frames: Iterable[tuple[int, int]], num_bytes: int) -> int:
    """The checksum, from 0 on, of frames of one size, one behind the other.

    Args:
        frames: of each frame the checksum that its own begins with, and its own.
        num_bytes: of each frame.
    """
    lowest, low, high, highest = _passing(num_bytes)
    joined = 0
    for before, after in frames:
        changed = joined ^ before
        joined = (
            after
            ^ lowest[changed & 0xFF]
            ^ low[changed >> 8 & 0xFF]
            ^ high[changed >> 16 & 0xFF]
            ^ highest[changed >> 24]
        )
    return joined


@lru_cache(maxsize=8)
def _passing(num_bytes: int) -> tuple[_Table, _Table, _Table, _Table]:
    """How so many bytes change the checksum before them, for each value of each of its bytes."""
    zeros = bytes(num_bytes)
    unchanged = crc32(zeros, 0)
    bits = [crc32(zeros, 1 << bit) ^ unchanged for bit in range(32)]
    lowest, low, high, highest = (_table(bits[first : first + 8]) for first in range(0, 32, 8))
    return lowest, low, high, highest


def _table(bits: list[int]) -> _Table:
    """What each value of a byte gives, from what each of its bits does."""
    table = [0]
    for bit in bits:
        table += [value ^ bit for value in table]
    return tuple(table)
