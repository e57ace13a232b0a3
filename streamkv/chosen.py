"""Blocks that were chosen, known once the device has said which."""

from torch import Tensor

from streamkv.device_copies import Arrival, to_host


class Chosen:
    """A choice on its way from the device; on a CPU it is there at once.

    Args:
        first_block: what places count from.
        places: int64 [n], on the device.
    """

    def __init__(self, first_block: int, places: Tensor) -> None:
        self._first_block = first_block
        self._places = to_host(places)
        self._arrival = Arrival(places.device)

    def is_known(self) -> bool:
        """Whether nothing has to be waited for."""
        return self._arrival.done()

    def blocks(self) -> tuple[int, ...]:
        """Block indices, ascending; waits for them."""
        self._arrival.wait()
        return tuple(sorted(self._first_block + place for place in self._places.tolist()))
