"""Which parts of a run of bytes are free. Pure bookkeeping: no memory, no threads.

Invariant: free parts are in order and never touch, so that what is given back can be used for
something larger. The first part that is large enough is taken, from its start.
"""

import bisect


class Extents:
    """Free and used parts of [0, num_bytes).

    Args:
        num_bytes: of all of it.
    """

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self._free = [(0, num_bytes)] if num_bytes else []
        self._used: dict[int, int] = {}

    @property
    def used_bytes(self) -> int:
        """Bytes that are taken."""
        return sum(self._used.values())

    def take(self, num_bytes: int) -> int | None:
        """Where a part of `num_bytes`, at least 1, begins; `None` if no free one is that long."""
        for place, (start, end) in enumerate(self._free):
            if end - start >= num_bytes:
                rest = [(start + num_bytes, end)] if end - start > num_bytes else []
                self._free[place : place + 1] = rest
                self._used[start] = num_bytes
                return start
        return None

    def give_back(self, start: int) -> None:
        """Free the part that begins at `start`."""
        end = start + self._used.pop(start)
        place = bisect.bisect(self._free, (start, end))
        low = high = place
        if place and self._free[place - 1][1] == start:
            low, start = place - 1, self._free[place - 1][0]
        if place < len(self._free) and self._free[place][0] == end:
            high, end = place + 1, self._free[place][1]
        self._free[low:high] = [(start, end)]

    def check_integrity(self) -> None:
        """Assert that every byte is in one part, and that no two free parts touch."""
        used = [(start, start + size) for start, size in self._used.items()]
        parts = sorted([*self._free, *used])
        ends = [0, *(end for _, end in parts)]
        assert [start for start, _ in parts] == ends[:-1] and ends[-1] == self.num_bytes, parts
        free = zip(self._free, self._free[1:], strict=False)
        assert all(end < start for (_, end), (start, _) in free), self._free
