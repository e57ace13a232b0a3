"""Pieces of a payload that lie one behind the other in memory, and copies of them.

Invariant: only bytes of pieces that were found are copied, in the order of the payload; what lies
between two of them (a page header) is stepped over. This module does not know keys, transactions or
files.
"""

from collections.abc import Sequence
from itertools import pairwise

from streamkv.tiers.codec import Bytes


def runs(addresses: Sequence[int], stride: int) -> list[range]:
    """Which of the pieces lie one behind the other: half-open ranges of their indices, in order."""
    breaks = [at for at, (one, other) in enumerate(pairwise(addresses), 1) if other - one != stride]
    return [range(*ends) for ends in pairwise([0, *breaks, len(addresses)])]


def copy_rows(rows: Bytes, skipped: int, out: Bytes) -> int:
    """Fill `out` with the bytes of rows one behind the other, as far as they reach.

    Args:
        rows: uint8 `[num_rows, row_bytes]`.
        skipped: bytes of the first row that are not wanted, less than a row.
        out: uint8, contiguous.

    Returns:
        How many bytes were copied.
    """
    num_rows, row_bytes = rows.shape
    size: int = min(num_rows * row_bytes - skipped, out.size)
    head = min(-skipped % row_bytes, size)
    if head:
        out[:head] = rows[0, skipped : skipped + head]
    begin = (skipped + head) // row_bytes
    num_whole = (size - head) // row_bytes
    done = head + num_whole * row_bytes
    out[head:done].reshape(num_whole, row_bytes)[:] = rows[begin : begin + num_whole]
    if done < size:
        out[done:size] = rows[begin + num_whole, : size - done]
    return size
