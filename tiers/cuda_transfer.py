"""Copies between a gpu pool on a GPU and host memory, on a stream of their own.

Invariant: a copy into a block starts, on the GPU, after everything that was issued to the compute
stream before it, so that no kernel still reads what the block held. A copy out of a block does not:
its caller waits for `written` first. What is copied is there when its completion is done.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from streamkv.tiers.gpu_pool import GpuPool
from streamkv.tiers.host_memory import Bytes
from streamkv.tiers.read_threads import MAX_THREADS
from streamkv.tiers.staging import Staging
from streamkv.tiers.transfer import Completion, Transfer


class Recorded:
    """The completion of what a stream was given up to now."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch's
        self._event.record(stream)

    def done(self) -> bool:
        """Whether the stream has come this far."""
        return bool(self._event.query())

    def wait(self) -> None:
        """Block the calling thread, not the GPU, until it has."""
        self._event.synchronize()


class CudaTransfer(Transfer):
    """Copies to and from the blocks of a gpu pool on a GPU. Safe to use from several threads.

    The compute stream, which kernels that read the pool run on, is the one that is current where
    this is made.

    Args:
        gpu_pool: the pool whose blocks are copied.
    """

    def __init__(self, gpu_pool: GpuPool) -> None:
        super().__init__(gpu_pool)
        self._device = gpu_pool.data.device
        self._compute_stream = torch.cuda.current_stream(self._device)
        self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]  # too
        self._staging = Staging(gpu_pool.spec.block_bytes, MAX_THREADS)

    def written(self) -> Completion:
        """Marks all work that the calling thread has issued so far on the pool."""
        return Recorded(torch.cuda.current_stream(self._device))

    def read(self, block_id: int) -> Bytes:
        """A copy of the bytes of a gpu block."""
        out = np.empty(self._gpu_pool.spec.block_bytes, dtype=np.uint8)
        self.demote(block_id, out).wait()
        return out

    @contextmanager
    def filling(self, block_id: int) -> Iterator[Bytes]:
        """Room [block_bytes] for the ssd tier to read into; in the gpu block on leaving."""
        with self._staging.buffer() as room:
            yield room
            # The next user of the room must not write to it before it was copied.
            self.promote(room, block_id).wait()

    def demote(self, block_id: int, out: Bytes) -> Completion:
        """Copy a gpu block into host memory [block_bytes]."""
        return self._copy(torch.from_numpy(out), self._gpu_pool.row(block_id))

    def promote(self, source: Bytes, block_id: int) -> Completion:
        """Copy host memory [block_bytes] into a gpu block."""
        self._wait_for_readers()
        return self._copy(self._gpu_pool.row(block_id), torch.from_numpy(source))

    def promote_many(self, pairs: Iterable[tuple[Bytes, int]]) -> Completion:
        """`promote` each; done when all are."""
        # One wait and one event for all: each takes the host as long as a block takes the bus.
        self._wait_for_readers()
        row = self._gpu_pool.row
        with torch.cuda.stream(self._stream):
            for source, block_id in pairs:
                self._issue(row(block_id), torch.from_numpy(source))
            return Recorded(self._stream)

    def copy(self, source_block_id: int, block_id: int) -> Completion:
        """Copy one gpu block into another."""
        self._wait_for_readers()
        return self._copy(self._gpu_pool.row(block_id), self._gpu_pool.row(source_block_id))

    def _wait_for_readers(self) -> None:
        """Hold copies that come after this back until the kernels issued so far are done."""
        self._stream.wait_stream(self._compute_stream)

    def _copy(self, target: torch.Tensor, source: torch.Tensor) -> Completion:
        with torch.cuda.stream(self._stream):
            self._issue(target, source)
            return Recorded(self._stream)

    def _issue(self, target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source, non_blocking=True)
