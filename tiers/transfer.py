"""Copies of whole blocks between the gpu pool and host memory, and when they are finished.

Invariant: a copy out of a block starts after everything that was issued to write the block
(`written` marks that point), and the caller keeps the block from reuse until the copy's completion
is done. On a CPU machine kernels and copies run where they are called, so every completion is done
at once; `cuda_transfer` returns events of a copy stream. This module does not know keys, tiers or
policies.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import numpy as np

from streamkv.tiers.gpu_pool import GpuPool
from streamkv.tiers.host_memory import Bytes


class Completion(Protocol):
    """Something that was issued and finishes at some time."""

    def done(self) -> bool:
        """Whether it has finished; never waits."""

    def wait(self) -> None:
        """Return when it has finished."""


class Finished:
    """The completion of work that was done where it was called."""

    def done(self) -> bool:
        """Always True."""
        return True

    def wait(self) -> None:
        """Return at once."""


class Together:
    """The completion of several things.

    Args:
        completions: of each.
    """

    def __init__(self, completions: Sequence[Completion]) -> None:
        self._completions = completions

    def done(self) -> bool:
        """Whether all have finished."""
        return all(completion.done() for completion in self._completions)

    def wait(self) -> None:
        """Return when all have."""
        for completion in self._completions:
            completion.wait()


class Transfer:
    """Copies to and from the blocks of one gpu pool. Safe to use from several threads.

    Args:
        gpu_pool: the pool whose blocks are copied.
    """

    def __init__(self, gpu_pool: GpuPool) -> None:
        self._gpu_pool = gpu_pool

    def written(self) -> Completion:
        """Marks all work that the calling thread has issued so far on the pool."""
        return Finished()

    def read(self, block_id: int) -> Bytes:
        """The bytes of a gpu block [block_bytes], for the ssd tier to write."""
        return self._gpu_pool.block_bytes(block_id)

    @contextmanager
    def filling(self, block_id: int) -> Iterator[Bytes]:
        """Room [block_bytes] for the ssd tier to read into; in the gpu block on leaving."""
        yield self._gpu_pool.block_bytes(block_id)

    def demote(self, block_id: int, out: Bytes) -> Completion:
        """Copy a gpu block into host memory [block_bytes]."""
        # numpy and not torch: a plain memcpy without the GIL, and without torch's thread pool,
        # which would compete with the attention of the step that runs meanwhile.
        np.copyto(out, self._gpu_pool.block_bytes(block_id))
        return Finished()

    def promote(self, source: Bytes, block_id: int) -> Completion:
        """Copy host memory [block_bytes] into a gpu block."""
        np.copyto(self._gpu_pool.block_bytes(block_id), source)
        return Finished()

    def promote_many(self, pairs: Iterable[tuple[Bytes, int]]) -> Completion:
        """`promote` each; done when all are."""
        return Together([self.promote(source, block_id) for source, block_id in pairs])

    def copy(self, source_block_id: int, block_id: int) -> Completion:
        """Copy one gpu block into another."""
        np.copyto(self._gpu_pool.block_bytes(block_id), self._gpu_pool.block_bytes(source_block_id))
        return Finished()
