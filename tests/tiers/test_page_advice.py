"""What is asked of the kernel ahead is read, and nothing else happens."""

import ctypes
import mmap
import os
import time
from pathlib import Path

import numpy as np
import pytest

from streamkv.tiers.page_advice import will_need

NUM_PAGES = 64


def pages_in_memory(address: int) -> list[bool]:
    """Which pages of a mapped file are in the page cache."""
    seen = np.zeros(NUM_PAGES, np.uint8)
    libc = ctypes.CDLL(None, use_errno=True)
    num_bytes = ctypes.c_size_t(NUM_PAGES * mmap.PAGESIZE)
    assert libc.mincore(ctypes.c_void_p(address), num_bytes, ctypes.c_void_p(seen.ctypes.data)) == 0
    return [bool(page & 1) for page in seen]


@pytest.mark.skipif(not hasattr(mmap, "MADV_WILLNEED"), reason="the kernel cannot be asked")
def test_what_is_asked_for_is_read_and_what_is_not_stays_on_disk(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(NUM_PAGES * mmap.PAGESIZE))
    with path.open("r+b") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        with mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as memory:
            memory.madvise(mmap.MADV_RANDOM)
            view = np.frombuffer(memory, np.uint8)
            if any(pages_in_memory(view.ctypes.data)):
                pytest.skip("this file system keeps its files in memory")
            # From within the fourth page to within the eighth.
            assert view[6 * mmap.PAGESIZE] == 0, "some of it is there"
            will_need(view.ctypes.data + 3 * mmap.PAGESIZE + 100, 4 * mmap.PAGESIZE)
            expected = [3 <= page < 8 for page in range(NUM_PAGES)]
            deadline_s = time.monotonic() + 60
            while pages_in_memory(view.ctypes.data) != expected:
                assert time.monotonic() < deadline_s, pages_in_memory(view.ctypes.data)
                time.sleep(0.01)
            del view


@pytest.mark.parametrize("num_bytes", [-mmap.PAGESIZE, 0, 4 * mmap.PAGESIZE])
def test_memory_that_is_not_there_is_no_error(num_bytes: int) -> None:
    will_need(mmap.PAGESIZE, num_bytes)
