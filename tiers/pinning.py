"""Page-locks the memory of the cpu pool piece by piece, so that a GPU reads it where it lies.

Invariant: [0, num_pinned_bytes) of the memory is page-locked, in pieces that never cut a block: one
copy over two registrations is refused by CUDA. Once a piece is refused no further one is tried;
what is pinned stays so until `close`. This module does not know what is kept in the memory, nor
when a piece may be pinned: it costs about 45 ms for 64 MiB, and holds up all calls of the driver.
"""

import logging
import mmap
import threading
from contextlib import suppress
from typing import Protocol

import torch

from streamkv.tiers.host_memory import Bytes

PIECE_BYTES = 64 << 20
"""Largest piece that is page-locked at once; a block that is larger is a piece of its own."""

_PORTABLE_AND_MAPPED = 3  # cudaHostRegisterPortable | cudaHostRegisterMapped

_log = logging.getLogger(__name__)


class PageLock(Protocol):
    """What makes memory of the host readable for a GPU."""

    def register(self, address: int, num_bytes: int) -> str | None:
        """Page-lock [address, address + num_bytes). Returns why not, `None` once it is done."""

    def unregister(self, address: int) -> str | None:
        """Undo the registration that begins at `address`. Returns why not, `None` once undone."""


class CudaPageLock:
    """Page-locks by cudaHostRegister.

    Args:
        device: the GPU whose context takes the registration; every other one sees it, too.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def register(self, address: int, num_bytes: int) -> str | None:
        """Page-lock [address, address + num_bytes). Returns why not, `None` once it is done."""
        return self._call("cudaHostRegister", address, num_bytes, _PORTABLE_AND_MAPPED)

    def unregister(self, address: int) -> str | None:
        """Undo a registration, after all work that the GPU was given: it may read there."""
        with suppress(torch.AcceleratorError):  # a context that is lost reads nothing any more
            torch.cuda.synchronize(self._device)
        return self._call("cudaHostUnregister", address)

    def _call(self, name: str, *args: int) -> str | None:
        problems: list[str | None] = []

        def call() -> None:
            try:
                with torch.cuda.device(self._device):
                    cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]  # torch's
                    code = getattr(cudart, name)(*args)
                    text = f"CUDA error {int(code)}: {cudart.cudaGetErrorString(code)}"
                    problems.append(text if int(code) else None)
            except RuntimeError as error:
                problems.append(str(error))

        # CUDA keeps an error for the next launch of the same thread, which would fail for it.
        # A thread that launches nothing takes it along when it ends.
        thread = threading.Thread(target=call, name="streamkv-page-lock")
        thread.start()
        thread.join()
        [problem] = problems
        return problem


class Pinning:
    """Progress of page-locking one run of memory. Not safe for several threads at once.

    Args:
        memory: uint8 [num_bytes], begins on a page; kept alive as long as it is registered.
        block_bytes: a piece is a whole number of these; a multiple of the page size.
        page_lock: what registers a piece.
        piece_bytes: size of the largest piece that is not a single block.
    """

    def __init__(
        self,
        memory: Bytes,
        block_bytes: int,
        page_lock: PageLock,
        piece_bytes: int = PIECE_BYTES,
    ) -> None:
        assert memory.ctypes.data % mmap.PAGESIZE == 0, "the memory does not begin on a page"
        assert block_bytes % mmap.PAGESIZE == 0, f"blocks of {block_bytes} bytes do not fill pages"
        self._memory = memory
        self._piece_bytes = max(piece_bytes // block_bytes, 1) * block_bytes
        self._page_lock = page_lock
        self._addresses: list[int] = []
        self._num_pinned_bytes = 0
        self._ended = memory.size == 0

    @property
    def num_pinned_bytes(self) -> int:
        """Bytes from the start of the memory that are page-locked."""
        return self._num_pinned_bytes

    @property
    def piece_bytes(self) -> int:
        """Bytes of every piece but the last."""
        return self._piece_bytes

    @property
    def ended(self) -> bool:
        """Whether all is pinned, or nothing more will be."""
        return self._ended

    def pin_next(self) -> bool:
        """Page-lock one more piece. Returns whether it was; not if all is pinned, or given up."""
        if self._ended:
            return False
        address = self._memory.ctypes.data + self._num_pinned_bytes
        num_bytes = min(self._piece_bytes, self._memory.size - self._num_pinned_bytes)
        problem = self._page_lock.register(address, num_bytes)
        if problem is not None:
            self._give_up(problem)
            return False
        self._addresses.append(address)
        self._num_pinned_bytes += num_bytes
        self._ended = self._num_pinned_bytes == self._memory.size
        return True

    def close(self) -> None:
        """Undo every registration; nothing is pinned any more. Idempotent."""
        self._ended = True
        self._num_pinned_bytes = 0
        while self._addresses:
            problem = self._page_lock.unregister(self._addresses.pop())
            if problem is not None:
                _log.warning("a piece of the cpu pool stays page-locked: %s", problem)

    def _give_up(self, problem: str) -> None:
        self._ended = True
        _log.warning(
            "the cpu pool is smaller than asked for: %d of %d bytes could be page-locked (%s). "
            "Use a smaller cpu_bytes, free memory of the host, or raise its limit of locked "
            "memory (ulimit -l).",
            self._num_pinned_bytes,
            self._memory.size,
            problem,
        )
