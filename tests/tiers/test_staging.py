"""Buffers that are used again: each by one reader at a time, and no more of them than allowed."""

import logging
import threading
from contextlib import ExitStack

import numpy as np
import pytest

from streamkv.tiers.host_memory import Bytes
from streamkv.tiers.staging import Staging

NUM_BYTES = 64


class Maker:
    """Makes plain memory that passes for page-locked; from some number on it is refused."""

    def __init__(self, num_granted: int = 1000) -> None:
        self.num_granted = num_granted
        self.made: list[int] = []
        self.num_refused = 0

    def __call__(self, num_bytes: int) -> Bytes:
        if len(self.made) == self.num_granted:
            self.num_refused += 1
            raise RuntimeError("CUDA error: out of memory")
        buffer = np.empty(num_bytes, dtype=np.uint8)
        self.made.append(buffer.ctypes.data)
        return buffer


def test_one_reader_after_another_uses_one_buffer() -> None:
    maker = Maker()
    staging = Staging(NUM_BYTES, 4, maker)
    for _ in range(10):
        with staging.buffer() as buffer:
            assert buffer.shape == (NUM_BYTES,) and buffer.dtype == np.uint8
            assert buffer.ctypes.data == maker.made[0]
    assert len(maker.made) == 1
    with staging.buffer() as one, staging.buffer() as other:
        assert not np.shares_memory(one, other)
    assert len(maker.made) == 2


def test_a_buffer_comes_back_from_a_reader_that_fails() -> None:
    maker = Maker()
    staging = Staging(NUM_BYTES, 1, maker)
    for _ in range(3):
        with pytest.raises(OSError), staging.buffer():
            raise OSError("the disk broke")
    with staging.buffer():
        assert len(maker.made) == 1


def test_many_readers_never_share_one_nor_have_more_than_the_limit() -> None:
    maker = Maker()
    staging = Staging(NUM_BYTES, 3, maker)
    wrong: list[int] = []

    def read(number: int) -> None:
        for _ in range(200):
            with staging.buffer() as buffer:
                buffer[:] = number
                threading.Event().wait(0)
                if not (buffer == number).all():
                    wrong.append(number)

    threads = [threading.Thread(target=read, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and len(maker.made) <= 3


def test_what_the_system_refuses_is_plain_memory_and_said_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    maker = Maker(num_granted=1)
    staging = Staging(NUM_BYTES, 4, maker)
    with caplog.at_level(logging.WARNING), ExitStack() as stack:
        buffers = [stack.enter_context(staging.buffer()) for _ in range(3)]
        for number, buffer in enumerate(buffers):
            buffer[:] = number
        assert [buffer[0] for buffer in buffers] == [0, 1, 2]
    assert maker.num_refused == 1
    [record] = caplog.records
    assert "out of memory" in record.message and "ulimit -l" in record.message
