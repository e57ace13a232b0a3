"""A page lock for machines without a GPU: remembers what is registered, refuses when told to."""

import numpy as np
from numpy.typing import NDArray


class FakePageLock:
    """Keeps CUDA's rules: no byte registered twice, nothing unregistered that is not registered.

    Args:
        refuse_at: number of the registration that is refused, and every later one; `None`: none.

    Attributes:
        pieces: bytes of each registered piece, by address.
        history: ("register" or "unregister", address) of every call that was not refused.
        num_refusals: calls that were refused.
    """

    def __init__(self, refuse_at: int | None = None) -> None:
        self.refuse_at = refuse_at
        self.pieces: dict[int, int] = {}
        self.history: list[tuple[str, int]] = []
        self.num_refusals = 0

    def register(self, address: int, num_bytes: int) -> str | None:
        """Remember a piece."""
        if self.refuse_at is not None and len(self.history) >= self.refuse_at:
            self.num_refusals += 1
            return "CUDA error 2: out of memory"
        for begin, length in self.pieces.items():
            assert address >= begin + length or address + num_bytes <= begin, "registered twice"
        self.pieces[address] = num_bytes
        self.history.append(("register", address))
        return None

    def unregister(self, address: int) -> str | None:
        """Forget a piece, which must be there."""
        del self.pieces[address]
        self.history.append(("unregister", address))
        return None

    def holds(self, row: NDArray[np.uint8]) -> bool:
        """Whether a row of bytes lies wholly in one piece, where one copy may read it."""
        first, end = row.ctypes.data, row.ctypes.data + row.nbytes
        # A copy: another thread may be registering a piece.
        return any(begin <= first and end <= begin + n for begin, n in list(self.pieces.items()))
