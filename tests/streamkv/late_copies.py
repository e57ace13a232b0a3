"""Copies between host and device that are made as late as a device may: when something waits.

Until a copy to the host is made, its place holds NaN: what a host reads that does not wait.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from streamkv.device_copies import Arrival
from streamkv.digest_memory import DigestMemory


class LateArrival(Arrival):
    """Marks a place in the order of the copies."""

    def __init__(self, copies: "LateCopies") -> None:
        super().__init__(torch.device("cpu"))
        self._copies = copies
        self._end = copies.num_asked

    def done(self) -> bool:
        """Whether all before it was made."""
        return self._copies.num_made >= self._end

    def wait(self) -> None:
        """Make all before it."""
        self._copies.carry_out(self._end)


class LateCopies:
    """Copies that wait to be made, in order; all tensors pass for ones of the device.

    Attributes:
        num_asked, num_made: copies to the host.
        fetched: bytes of every copy to the device.
    """

    def __init__(self) -> None:
        self.num_asked = 0
        self.num_made = 0
        self.fetched: list[int] = []
        self._pending: list[Callable[[], object]] = []

    def is_there(self, tensor: Tensor) -> bool:
        """Always, as if everything came from the device."""
        return True

    def send(self, host: Tensor, source: Tensor) -> None:
        """Copy later; until then there is nothing to be read."""
        assert host.is_contiguous() and source.is_contiguous() and host.dtype == source.dtype
        host.fill_(torch.nan)
        # The device keeps what it reads until it has read it.
        kept = source.clone()
        self._pending.append(lambda: host.copy_(kept))
        self.num_asked += 1

    def fetch(self, host: Tensor) -> Tensor:
        """A copy, behind all that was asked for before."""
        assert host.is_contiguous()
        self.carry_out(self.num_asked)
        self.fetched.append(host.numel() * host.element_size())
        return host.clone()

    def mark(self) -> Arrival:
        """When all that was asked for until now is made."""
        return LateArrival(self)

    def carry_out(self, end: int) -> None:
        """Make the copies before the `end`-th."""
        while self.num_made < end:
            self._pending.pop(0)()
            self.num_made += 1


class Exhausted(DigestMemory):
    """Memory of a machine whose host has none left, as long as `is_exhausted`."""

    is_exhausted = True

    def _host_memory(self, num_bytes: int) -> Tensor | None:
        # More than any machine has, so that torch's own refusal is what is seen.
        return super()._host_memory(1 << 60 if self.is_exhausted else num_bytes)
