"""Blocks that were chosen, known once the device has said which."""

from collections.abc import Sequence

from torch import Tensor

from streamkv.device_copies import Arrival, to_host


class Chosen:
    """A choice on its way from the device; on a CPU it is there at once.

    Args:
        first_block: what places count from.
        places: int64 [n], on the device.
        shares: float32 [n], likewise: the weight of each.
        pages: memory that the device may still be reading; nobody else gets it before the choice
            is known, or given up.
    """

    def __init__(
        self, first_block: int, places: Tensor, shares: Tensor, pages: Sequence[Tensor] = ()
    ) -> None:
        self._first_block = first_block
        self._places = to_host(places)
        self._shares = to_host(shares)
        self._arrival = Arrival(places.device)
        self._pages = tuple(pages)

    def is_known(self) -> bool:
        """Whether nothing has to be waited for."""
        return self._arrival.done()

    def blocks(self) -> tuple[int, ...]:
        """Block indices, ascending; waits for them."""
        return tuple(index for index, _ in self._ascending())

    def weights(self) -> tuple[float, ...]:
        """Weight of each, in the same order; waits for them."""
        return tuple(share for _, share in self._ascending())

    def _ascending(self) -> list[tuple[int, float]]:
        self._arrival.wait()
        self._pages = ()
        places, shares = self._places.tolist(), self._shares.tolist()
        return sorted(
            (self._first_block + at, share) for at, share in zip(places, shares, strict=True)
        )
