"""Where the digests of all streams of an engine lie: a fixed part of the device, then host memory.

    device   one allocation of `budget_bytes`, made at the start; pages are runs of it
    host     page-locked where the device is a GPU; on a CPU everything is host memory

A page is taken from the device while there is room, else from the host, and stays where it is: what
is chosen does not depend on it. Room that is given back is used again.

Invariant: a page in host memory is written and read by the device's stream, in the order in which
it is asked to; so a digest that was just written is seen by the choice behind it, and nothing
waits. The host looks at such a page only once what was sent has arrived. All threads give their
work to the same stream, so that a page which was given back is written by its next user behind the
reads of the one before; torch keeps page-locked memory until the copies from it are made.

Safe for several threads, with one thread at a time for each stream.
"""

import logging
import threading
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from streamkv.device_copies import Arrival
from streamkv.digest_pages import DigestUsage
from streamkv.extents import Extents

_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Page:
    """Digests of some blocks, for one stream or for several that share them.

    Attributes:
        data: [rows, blocks, block_size, head_dim]; what was never written is of no meaning.
        num_bytes: that it takes.
        start: in the device's part; `None` in host memory.
        num_users: streams that have it.
        is_used: whether the device was asked to read or write it, in host memory.
        sent: when what was sent to it last has arrived there.
    """

    data: Tensor
    num_bytes: int
    start: int | None
    num_users: int = 1
    is_used: bool = False
    sent: Arrival | None = None


class Copies(Protocol):
    """Copies between host memory and the device that nothing waits for."""

    def is_there(self, tensor: Tensor) -> bool:
        """Whether a tensor is on the device."""

    def send(self, host: Tensor, source: Tensor) -> None:
        """Copy from the device to contiguous host memory, in the order of the device's work."""

    def fetch(self, host: Tensor) -> Tensor:
        """A copy on the device, in the order of its work."""

    def mark(self) -> Arrival:
        """When all that was asked for until now is done."""


class StreamCopies:
    """By the device's current stream.

    Args:
        device: a GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def is_there(self, tensor: Tensor) -> bool:
        """Whether a tensor is on the device."""
        return tensor.device.type == self._device.type

    def send(self, host: Tensor, source: Tensor) -> None:
        """Copy from the device to contiguous host memory, in the order of the stream."""
        # Else torch copies by a tensor in between, which the host reads without waiting.
        assert host.is_contiguous() and source.is_contiguous() and host.dtype == source.dtype
        host.copy_(source, non_blocking=True)

    def fetch(self, host: Tensor) -> Tensor:
        """A copy on the device, in the order of the stream."""
        return host.to(self._device, non_blocking=True)

    def mark(self) -> Arrival:
        """When all that the stream was given until now is done."""
        return Arrival(self._device)


class DigestMemory:
    """Pages of digests of one engine.

    Args:
        device: on which blocks are chosen.
        budget_bytes: of the device; 0: all pages are in host memory.
        copies: between host and device; `None`: those of a GPU, and on a CPU none, as host memory
            is where it computes.
    """

    def __init__(
        self, device: torch.device | str, budget_bytes: int = 0, copies: Copies | None = None
    ) -> None:
        self.device = torch.device(device)
        if copies is None and self.device.type != "cpu":
            copies = StreamCopies(self.device)
        self._copies = copies
        self._lock = threading.Lock()
        self._extents = Extents(budget_bytes)
        self._part = torch.empty(budget_bytes, dtype=torch.uint8, device=self.device)
        self._host_bytes = 0
        self._num_lost = 0
        self._pins = self.device.type == "cuda"

    def usage(self) -> DigestUsage:
        """Bytes by place; may be called at any time."""
        with self._lock:
            extents = self._extents
            used, limit = extents.used_bytes, extents.num_bytes
            return DigestUsage(used, limit, self._host_bytes, self._num_lost)

    def take(self, num_bytes: int, shape: tuple[int, ...], dtype: torch.dtype) -> Page | None:
        """A page for one user; `None` if neither device nor host has room.

        Args:
            num_bytes: that the page takes, a power of two.
            shape: of `Page.data`, which has no more bytes than that.
            dtype: of it, in 16 bits.
        """
        with self._lock:
            start = self._extents.take(num_bytes)
        if start is not None:
            part = self._part[start : start + 2 * torch.Size(shape).numel()]
            return Page(part.view(dtype).view(shape), num_bytes, start)
        memory = self._host_memory(num_bytes)
        if memory is None:
            return None
        with self._lock:
            self._host_bytes += num_bytes
        data = memory[: 2 * torch.Size(shape).numel()].view(dtype).view(shape)
        return Page(data, num_bytes, None)

    def share(self, page: Page) -> None:
        """One more user, who has it as long as it is not given back."""
        with self._lock:
            page.num_users += 1

    def give_back(self, page: Page) -> None:
        """A user less; without any its room is free."""
        with self._lock:
            assert page.num_users > 0
            page.num_users -= 1
            if page.num_users:
                return
            if page.start is not None:
                self._extents.give_back(page.start)
            else:
                self._host_bytes -= page.num_bytes

    def copy(self, page: Page) -> Page | None:
        """A page of the same content for one user; `None` if there is no room for it."""
        shape = tuple(page.data.shape)
        made = self.take(page.num_bytes, shape, page.data.dtype)
        if made is None:
            return None
        if self._copies is None or (page.start is not None and made.start is not None):
            made.data.copy_(page.data)
            return made
        # A row at a time, so that little is on its way over the device.
        for source, target in zip(page.data, made.data, strict=True):
            there = source if page.start is not None else self._copies.fetch(source)
            if made.start is not None:
                target.copy_(there)
            else:
                self._copies.send(target, there)
        for each in (page, made):
            self._note(each)
        return made

    def write(self, page: Page, first: int, digests: Tensor) -> None:
        """Put digests into a page of one user.

        Args:
            page: of one user.
            first: place of the first on the page.
            digests: [rows, n, block_size, head_dim], of any type, on the device or the host.
        """
        assert page.num_users == 1
        target = page.data[:, first : first + digests.shape[1]]
        if self._copies is None or page.start is not None:
            target.copy_(digests)
        elif self._copies.is_there(digests):
            for row, source in zip(target, digests.to(target.dtype), strict=True):
                self._copies.send(row, source.contiguous())
            self._note(page)
        else:
            if page.is_used:
                self._copies.mark().wait()
            target.copy_(digests)

    def read(self, page: Page, place: int) -> Tensor:
        """One digest as it is kept: [rows, block_size, head_dim], there for the host to read if it
        lies in host memory."""
        if page.sent is not None:
            page.sent.wait()
        return page.data[:, place]

    def fetch(self, keys: Tensor) -> Tensor:
        """Part of a page, on the device."""
        if self._copies is None or keys.device.type != "cpu":
            return keys
        return self._copies.fetch(keys)

    def fetched(self, page: Page) -> None:
        """Parts of a page are on their way to the device, or were."""
        page.is_used = page.start is None

    def lost(self, num_blocks: int) -> None:
        """Count blocks for whose digests there was no room."""
        with self._lock:
            is_first = self._num_lost == 0
            self._num_lost += num_blocks
        if is_first:
            _log.warning(
                "no memory for the digests of more blocks: those that are read now cannot be "
                "recalled. Close sessions, free memory of the host, or use a larger digest_bytes."
            )

    def check_integrity(self) -> None:
        """Assert that the device's part is divided up without gaps or overlaps."""
        with self._lock:
            self._extents.check_integrity()

    def _note(self, page: Page) -> None:
        """The device was asked to read or write the page."""
        if page.start is None:
            assert self._copies is not None
            page.is_used = True
            page.sent = self._copies.mark()

    def _host_memory(self, num_bytes: int) -> Tensor | None:
        if self._pins:
            # Powers of two are what torch gives out without waste; what it gets back it keeps for
            # the next page, because locking and unlocking 64 MiB holds up all calls of the driver.
            try:
                return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
            except RuntimeError as error:
                self._pins = False
                _log.warning(
                    "no more host memory can be page-locked for digests (%s): the engine goes on "
                    "with plain memory, and waits for copies from it. Raise the limit of locked "
                    "memory (ulimit -l), or use a larger digest_bytes.",
                    error,
                )
        try:
            return torch.empty(num_bytes, dtype=torch.uint8)
        except (RuntimeError, MemoryError):
            return None
