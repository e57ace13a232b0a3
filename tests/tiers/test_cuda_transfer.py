"""Copies between a GPU and host memory: whole, ordered after the kernels, done when they say so."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from streamkv.tiers.cuda_transfer import CudaTransfer
from streamkv.tiers.gpu_pool import GpuPool
from streamkv.tiers.read_threads import MAX_THREADS
from streamkv.tiers.spec import KVSpec

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

SPEC = KVSpec(num_layers=4, num_kv_heads=2, head_dim=64, dtype="bfloat16")


def pattern(seed: int) -> "np.ndarray[tuple[int], np.dtype[np.uint8]]":
    return np.random.default_rng(seed).integers(0, 256, SPEC.block_bytes, dtype=np.uint8)


def test_blocks_go_down_and_up_again_bit_for_bit() -> None:
    transfer = CudaTransfer(GpuPool(SPEC, 4, "cuda"))
    with transfer.filling(2) as out:
        out[:] = pattern(1)
    transfer.copy(2, 3).wait()
    room = np.zeros(SPEC.block_bytes, dtype=np.uint8)
    copied = transfer.demote(3, room)
    copied.wait()
    assert copied.done() and np.array_equal(room, pattern(1))
    transfer.promote(pattern(2), 3).wait()
    assert np.array_equal(transfer.read(3), pattern(2))
    assert np.array_equal(transfer.read(2), pattern(1))


def test_blocks_that_many_threads_read_in_at_once_arrive_bit_for_bit() -> None:
    """Through buffers that are page-locked, used again, and fewer than the blocks."""
    num_blocks = 6 * MAX_THREADS
    transfer = CudaTransfer(GpuPool(SPEC, num_blocks, "cuda"))
    where: set[int] = set()

    def read(block_id: int) -> None:
        with transfer.filling(block_id) as out:
            assert torch.from_numpy(out).is_pinned()
            where.add(out.ctypes.data)
            out[:] = pattern(block_id)

    with ThreadPoolExecutor(2 * MAX_THREADS) as threads:
        list(threads.map(read, range(num_blocks)))
    assert len(where) <= MAX_THREADS
    for block_id in range(num_blocks):
        assert np.array_equal(transfer.read(block_id), pattern(block_id)), f"block {block_id}"


def test_a_buffer_is_not_written_to_before_a_slow_copy_of_it() -> None:
    """The copies are held up by a kernel, while the next reader wants the same buffer."""
    transfer = CudaTransfer(GpuPool(SPEC, 3, "cuda"))
    with transfer.filling(0) as out:
        out[:] = pattern(0)
    torch.cuda.synchronize()
    torch.cuda._sleep(200_000_000)
    for block_id in (1, 2):
        with transfer.filling(block_id) as out:
            out[:] = pattern(block_id)
    for block_id in range(3):
        assert np.array_equal(transfer.read(block_id), pattern(block_id))


def test_where_nothing_can_be_page_locked_blocks_arrive_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(num_bytes: int) -> None:
        raise RuntimeError("CUDA error: out of memory")

    transfer = CudaTransfer(GpuPool(SPEC, 2, "cuda"))
    monkeypatch.setattr(transfer._staging, "_make", refuse)
    for block_id in range(2):
        with transfer.filling(block_id) as out:
            out[:] = pattern(block_id)
    assert [np.array_equal(transfer.read(n), pattern(n)) for n in range(2)] == [True, True]


def test_a_copy_that_waits_for_written_sees_what_a_slow_kernel_wrote() -> None:
    """The writer is held up on the GPU; whoever does not wait reads what was there before."""
    pool = GpuPool(SPEC, 2, "cuda")
    transfer = CudaTransfer(pool)
    new = torch.from_numpy(pattern(3)).cuda()
    torch.cuda.synchronize()
    torch.cuda._sleep(200_000_000)
    pool.row(0).copy_(new)
    written = transfer.written()
    assert not written.done()
    early = transfer.read(0)
    written.wait()
    assert np.array_equal(transfer.read(0), pattern(3))
    assert not early.any(), "the kernel was not slow, so this test shows nothing"
