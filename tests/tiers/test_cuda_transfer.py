"""Copies between a GPU and host memory: whole, ordered after the kernels, done when they say so."""

import numpy as np
import pytest
import torch

from streamkv.tiers.cuda_transfer import CudaTransfer
from streamkv.tiers.gpu_pool import GpuPool
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
