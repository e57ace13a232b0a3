"""Pieces of a payload that lie one behind the other in memory, and copies of them.

Invariant: bytes are copied in the order of the payload; what lies between two pieces (a page
header) is stepped over. This module does not know keys, transactions or files.
"""

from collections.abc import Callable
from itertools import pairwise

from streamkv.tiers.codec import Bytes


def runs(
    wanted: range, address_of: Callable[[int], int], stride: int, *, by_ends: bool = False
) -> dict[range, int]:
    """Which pieces lie one behind the other.

    Args:
        wanted: indices of the pieces, at least one.
        address_of: looks a piece up.
        stride: bytes from a piece to the next where they lie one behind the other.
        by_ends: take two pieces that are as far apart as they would be in one run to be in one, and
            look up none between them: two look-ups for a record that was written at once. That is a
            guess, so whoever copies must be able to tell right bytes from wrong ones.

    Returns:
        Half-open ranges of indices, in order, and the address of the first piece of each.
    """
    assert wanted
    first, ends = wanted[0], [wanted[-1]]
    found = {first: address_of(first)}
    starts = [first]
    while ends:
        last = ends[-1]
        if last not in found:
            found[last] = address_of(last)
        is_run = found[last] - found[first] == (last - first) * stride
        if last - first > 1 and not (is_run and by_ends):
            ends.append((first + last) // 2)
            continue
        if not is_run:
            starts.append(last)
        first = ends.pop()
    bounds = pairwise([*starts, wanted.stop])
    return {range(*each): found[each[0]] for each in bounds}


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
