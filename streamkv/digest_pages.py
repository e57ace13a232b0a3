"""How large the pages are that hold a stream's digests, and which block lies on which. Pure.

A page takes a power of two of bytes: page-locked memory is given out in those, and runs of such
sizes leave few gaps. It holds as many whole digests as fit. Each page is twice as large as the one
before, up to `MOST_BYTES`.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

FIRST_BLOCKS = 64
"""Blocks that the first page has room for, at least."""

MOST_BYTES = 64 << 20
"""Of a page, unless the first one is larger."""


class Part(NamedTuple):
    """Blocks on one page.

    Attributes:
        number: of the page.
        low, high: places on it, half-open.
        first: of the blocks, counted from the first one that was asked for.
    """

    number: int
    low: int
    high: int
    first: int


@dataclass(frozen=True, slots=True)
class DigestUsage:
    """Bytes of pages of digests, by place.

    Attributes:
        gpu_bytes: taken of the device's part.
        gpu_limit_bytes: all of that part.
        cpu_bytes: in host memory; grows with the streams.
        num_lost: blocks that cannot be chosen because there was no memory for their digests.
    """

    gpu_bytes: int = 0
    gpu_limit_bytes: int = 0
    cpu_bytes: int = 0
    num_lost: int = 0


def page_bytes(number: int, digest_bytes: int) -> int:
    """Bytes of a page, with what is left over at its end.

    Args:
        number: of the page in its stream, from 0.
        digest_bytes: of one digest.
    """
    first = 1 << (FIRST_BLOCKS * digest_bytes - 1).bit_length()
    return max(first, min(first << number, MOST_BYTES))


def page_blocks(number: int, digest_bytes: int) -> int:
    """Digests that a page has room for."""
    return page_bytes(number, digest_bytes) // digest_bytes


def room_bytes(num_blocks: int, digest_bytes: int) -> int:
    """Bytes of the pages that hold the digests of a stream of so many blocks."""
    parts = parts_of(0, num_blocks, digest_bytes)
    return sum(page_bytes(part.number, digest_bytes) for part in parts)


def parts_of(first_block: int, end_block: int, digest_bytes: int) -> Iterator[Part]:
    """Where the blocks of a range lie, page by page."""
    number, start, block = 0, 0, first_block
    while block < end_block:
        end = start + page_blocks(number, digest_bytes)
        if block < end:
            high = min(end_block, end)
            yield Part(number, block - start, high - start, block - first_block)
            block = high
        number, start = number + 1, end
