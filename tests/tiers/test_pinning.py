"""Page-locking in pieces: whole blocks, each piece once, a refusal that is said and lived with."""

import itertools
import logging
import mmap

import numpy as np
import pytest
import torch
from fake_page_lock import FakePageLock
from hypothesis import given
from hypothesis import strategies as st

from streamkv.tiers.cuda_transfer import CudaTransfer
from streamkv.tiers.gpu_pool import GpuPool
from streamkv.tiers.host_memory import Bytes, anonymous_memory, keep_from_forks
from streamkv.tiers.pinning import CudaPageLock, Pinning
from streamkv.tiers.spec import KVSpec

PAGE = mmap.PAGESIZE
DONTFORK = hasattr(mmap, "MADV_DONTFORK")


def memory_of(num_bytes: int) -> Bytes:
    return np.frombuffer(anonymous_memory("cpu_bytes", max(num_bytes, 1)), np.uint8, num_bytes)


def pieces_of(num_blocks: int, block_pages: int, piece_pages: int) -> list[int]:
    """Sizes, in pages, of the pieces that are pinned one after another."""
    lock, memory = FakePageLock(), memory_of(num_blocks * block_pages * PAGE)
    pinning = Pinning(memory, block_pages * PAGE, lock, piece_pages * PAGE)
    while pinning.pin_next():
        pass
    addresses = sorted(lock.pieces)
    assert addresses == [address for _, address in lock.history]
    assert not addresses or addresses[0] == memory.ctypes.data
    for address, following in itertools.pairwise(addresses):
        assert address + lock.pieces[address] == following
    return [lock.pieces[address] // PAGE for address in addresses]


@pytest.mark.parametrize(
    ("num_blocks", "block_pages", "piece_pages", "pieces"),
    [
        (8, 1, 4, [4, 4]),
        (9, 1, 4, [4, 4, 1]),
        (4, 3, 8, [6, 6]),  # two blocks of three pages: a third would be cut
        (5, 3, 8, [6, 6, 3]),
        (2, 5, 4, [5, 5]),  # a block larger than a piece is a piece of its own
        (1, 1, 4, [1]),
        (0, 1, 4, []),
    ],
)
def test_pieces_are_whole_blocks_and_follow_each_other(
    num_blocks: int, block_pages: int, piece_pages: int, pieces: list[int]
) -> None:
    assert pieces_of(num_blocks, block_pages, piece_pages) == pieces


def test_progress_is_counted_and_ends() -> None:
    pinning = Pinning(memory_of(3 * PAGE), PAGE, FakePageLock(), 2 * PAGE)
    seen = []
    for _ in range(4):
        seen.append((pinning.num_pinned_bytes // PAGE, pinning.ended))
        pinning.pin_next()
    assert seen == [(0, False), (2, False), (3, True), (3, True)]
    assert pinning.pin_next() is False


@pytest.mark.parametrize("refuse_at", [0, 1, 3])
def test_a_refusal_is_said_once_with_what_was_had_and_nothing_more_is_tried(
    refuse_at: int, caplog: pytest.LogCaptureFixture
) -> None:
    lock = FakePageLock(refuse_at)
    pinning = Pinning(memory_of(5 * PAGE), PAGE, lock, PAGE)
    with caplog.at_level(logging.WARNING, "streamkv.tiers.pinning"):
        pinned = [pinning.pin_next() for _ in range(8)]
    assert pinned == [True] * refuse_at + [False] * (8 - refuse_at)
    assert (pinning.num_pinned_bytes, pinning.ended) == (refuse_at * PAGE, True)
    assert lock.num_refusals == 1
    [message] = caplog.messages
    assert f"{refuse_at * PAGE} of {5 * PAGE} bytes" in message
    assert "out of memory" in message and "cpu_bytes" in message and "ulimit -l" in message
    pinning.close()
    assert lock.pieces == {}


def test_a_piece_that_stays_registered_is_said_and_the_others_go(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Stubborn(FakePageLock):
        def unregister(self, address: int) -> str | None:
            return super().unregister(address) if len(self.pieces) == 1 else "CUDA error 1: busy"

    lock = Stubborn()
    pinning = Pinning(memory_of(PAGE), PAGE, lock, PAGE)
    pinning.pin_next()
    lock.pieces[0] = PAGE  # somebody else's
    pinning.close()
    assert caplog.messages == ["a piece of the cpu pool stays page-locked: CUDA error 1: busy"]


@given(
    num_blocks=st.integers(0, 7),
    block_pages=st.integers(1, 3),
    piece_pages=st.integers(1, 7),
    refuse_at=st.none() | st.integers(0, 4),
    events=st.lists(st.sampled_from(["pin", "pin", "pin", "close"]), max_size=12),
)
def test_whatever_happens_each_piece_is_undone_once(
    num_blocks: int, block_pages: int, piece_pages: int, refuse_at: int | None, events: list[str]
) -> None:
    lock, memory = FakePageLock(refuse_at), memory_of(num_blocks * block_pages * PAGE)
    pinning = Pinning(memory, block_pages * PAGE, lock, piece_pages * PAGE)
    closed = False
    for event in events:
        if event == "close":
            pinning.close()
            closed = True
        else:
            before = pinning.num_pinned_bytes
            assert pinning.pin_next() is (pinning.num_pinned_bytes > before)
        assert sum(lock.pieces.values()) == pinning.num_pinned_bytes
        assert pinning.num_pinned_bytes % (block_pages * PAGE) == 0
        if closed:
            assert lock.pieces == {}
    pinning.close()
    registered = [address for call, address in lock.history if call == "register"]
    unregistered = [address for call, address in lock.history if call == "unregister"]
    assert sorted(registered) == sorted(unregistered) == sorted(set(registered))


@pytest.mark.skipif(not DONTFORK, reason="advice of Linux")
def test_a_child_process_does_not_get_the_memory() -> None:
    memory = anonymous_memory("cpu_bytes", 3 * PAGE)
    address = np.frombuffer(memory, np.uint8).ctypes.data

    def flags() -> list[str]:
        inside, found = False, []
        with open("/proc/self/smaps") as lines:
            for line in lines:
                first = line.split()[0]
                if "-" in first and not first.endswith(":"):
                    begin, end = (int(part, 16) for part in first.split("-"))
                    inside = begin <= address < end
                elif inside and first == "VmFlags:":
                    found = line.split()[1:]
        return found

    assert "dc" not in flags()
    keep_from_forks(memory)
    assert "dc" in flags()


needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
SPEC = KVSpec(num_layers=4, num_kv_heads=2, head_dim=64, dtype="bfloat16")


@needs_gpu
@pytest.mark.gpu
def test_a_gpu_copies_to_and_from_what_is_pinned_without_making_anybody_wait() -> None:
    """Held up on the GPU: a copy from ordinary memory would return only when it is done."""
    pool = GpuPool(SPEC, 2, "cuda")
    transfer = CudaTransfer(pool)
    memory = memory_of(4 * SPEC.block_bytes)
    pinning = Pinning(memory, SPEC.block_bytes, CudaPageLock(torch.device("cuda")))
    assert pinning.pin_next() and pinning.ended
    assert torch.from_numpy(memory).is_pinned()
    rows = memory.reshape(4, SPEC.block_bytes)
    rows[0] = np.random.default_rng(1).integers(0, 256, SPEC.block_bytes, dtype=np.uint8)
    with torch.cuda.stream(transfer._stream):
        torch.cuda._sleep(200_000_000)
    up = transfer.promote(rows[0], 1)
    down = transfer.demote(1, rows[3])
    assert not up.done() and not down.done()
    down.wait()
    assert up.done() and np.array_equal(rows[3], rows[0])
    pinning.close()
    assert not torch.from_numpy(memory).is_pinned()


@needs_gpu
@pytest.mark.gpu
def test_pieces_next_to_each_other_are_copied_one_by_one() -> None:
    pool = GpuPool(SPEC, 4, "cuda")
    transfer = CudaTransfer(pool)
    memory = memory_of(4 * SPEC.block_bytes)
    lock = CudaPageLock(torch.device("cuda"))
    pinning = Pinning(memory, SPEC.block_bytes, lock, piece_bytes=SPEC.block_bytes)
    while pinning.pin_next():
        pass
    rows = memory.reshape(4, SPEC.block_bytes)
    for number, row in enumerate(rows):
        row[:] = number
        transfer.promote(row, number)
    for number, row in enumerate(rows):
        transfer.demote(3 - number, row).wait()
    assert [int(row[0]) for row in rows] == [3, 2, 1, 0]
    assert all((row == row[0]).all() for row in rows)
    pinning.close()


@needs_gpu
@pytest.mark.gpu
def test_a_refusal_of_the_driver_is_told_and_disturbs_no_later_launch() -> None:
    memory, lock = memory_of(2 * PAGE), CudaPageLock(torch.device("cuda"))
    address = memory.ctypes.data
    assert lock.register(address, 2 * PAGE) is None
    refused = lock.register(address, 2 * PAGE)
    assert refused is not None and "712" in refused
    assert torch.ones(4, device="cuda").sum().item() == 4
    assert lock.unregister(address) is None
    assert lock.unregister(address) is not None
    assert torch.ones(4, device="cuda").sum().item() == 4
