"""Speeds of this machine, measured with stated sizes; what was written is removed."""

import os
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from streamkv.cli.doctor_facts import existing_parent

PIECE_BYTES = 8 << 20
ROUNDS = 3


@dataclass(frozen=True, slots=True)
class DiskSpeed:
    """Sequential speed of a file system.

    Attributes:
        directory: where the file lay.
        num_bytes: size of the file.
        write_bytes_per_s: written and fsynced.
        read_bytes_per_s: read after it.
        cold: the system was asked to drop the file from its page cache before it was read.
    """

    directory: str
    num_bytes: int
    write_bytes_per_s: float
    read_bytes_per_s: float
    cold: bool


def memory_bytes_per_s(num_bytes: int) -> float:
    """Best of some products of a matrix of `num_bytes` and a vector, which decoding consists of."""
    row = 1024
    matrix = np.ones((num_bytes // (4 * row), row), dtype=np.float32)
    vector = np.ones(row, dtype=np.float32)
    seconds = []
    for _ in range(ROUNDS):
        started = time.perf_counter()
        matrix @ vector
        seconds.append(time.perf_counter() - started)
    return matrix.nbytes / min(seconds)


def disk_speed(directory: Path, num_bytes: int) -> DiskSpeed:
    """Write a file of `num_bytes`, sync it, drop it from the page cache, read it, remove it.

    Raises:
        OSError: the directory cannot be written or the disk is full.
    """
    # Random bytes: some file systems compress.
    piece = np.random.default_rng(0).integers(0, 256, PIECE_BYTES, dtype=np.uint8).tobytes()
    num_pieces = max(num_bytes // PIECE_BYTES, 1)
    with tempfile.TemporaryFile(dir=directory) as file:
        fd = file.fileno()
        started = time.perf_counter()
        for _ in range(num_pieces):
            written = 0
            while written < len(piece):
                written += os.write(fd, piece[written:])
        os.fsync(fd)
        write_s = time.perf_counter() - started
        cold = _drop_from_page_cache(fd)
        started = time.perf_counter()
        os.lseek(fd, 0, os.SEEK_SET)
        while os.read(fd, PIECE_BYTES):
            pass
        read_s = time.perf_counter() - started
    total = num_pieces * PIECE_BYTES
    return DiskSpeed(str(directory), total, total / write_s, total / read_s, cold)


def writable_parent(path: Path) -> Path | None:
    """`path` or the nearest directory above it that exists, if it can be written."""
    directory = existing_parent(path)
    return directory if os.access(directory, os.W_OK | os.X_OK) else None


def _drop_from_page_cache(fd: int) -> bool:
    advise = getattr(os, "posix_fadvise", None)
    if advise is None:
        return False
    advise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    return True
