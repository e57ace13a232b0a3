"""Kernels and copies that are late on a GPU: nothing is read half written or reused too early.

One side of each pair is held up on the GPU by a kernel that spins. Every guard has a twin that
takes it away and sees the corruption it prevents; were the kernel not slow enough to show it, the
twin would fail.
"""

import threading
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from streamkv.tiers.cpu_pool import CpuPool
from streamkv.tiers.cuda_transfer import CudaTransfer
from streamkv.tiers.gpu_pool import GpuPool
from streamkv.tiers.host_memory import Bytes
from streamkv.tiers.keys import child_key, root_key
from streamkv.tiers.manager import TierManager
from streamkv.tiers.pinning import CudaPageLock
from streamkv.tiers.spec import BlockKey, KVSpec
from streamkv.tiers.ssd import SsdTier, StoreIdentity
from streamkv.tiers.transfer import Completion, Finished

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

SPEC = KVSpec(num_layers=4, num_kv_heads=2, head_dim=64, dtype="bfloat16")
ROOT = root_key(b"weights", SPEC, b"rope")
SPIN_CYCLES = 800_000_000
"""About 0.4 s: the host does in it what takes it milliseconds."""


def key_of(number: int) -> BlockKey:
    return child_key(ROOT, [number] * SPEC.block_size, b"dense")


def bytes_of(number: int) -> NDArray[np.uint8]:
    return np.random.default_rng(number).integers(0, 256, SPEC.block_bytes, dtype=np.uint8)


def spin() -> None:
    """Hold up the current stream."""
    torch.cuda._sleep(SPIN_CYCLES)


class SlowCopies(CudaTransfer):
    """Copies whose engine is busy for a while before each, once `is_slow`."""

    is_slow = False

    def _issue(self, target: torch.Tensor, source: torch.Tensor) -> None:
        if self.is_slow:
            spin()
        super()._issue(target, source)


class UnawaitedKernels(CudaTransfer):
    """Nobody waits for the kernels that write a block."""

    def written(self) -> Completion:
        return Finished()


class UnawaitedReaders(CudaTransfer):
    """Nobody waits for the kernels that read a block."""

    def _wait_for_readers(self) -> None:
        pass


class UnawaitedDemotions(SlowCopies):
    """Nobody waits for copies out of a block."""

    def demote(self, block_id: int, out: Bytes) -> Completion:
        super().demote(block_id, out)
        return Finished()


class UnawaitedPromotions(SlowCopies):
    """Nobody waits for copies into a block."""

    def promote(self, source: Bytes, block_id: int) -> Completion:
        super().promote(source, block_id)
        return Finished()

    def promote_many(self, pairs: Sequence[tuple[Bytes, int]]) -> Completion:
        super().promote_many(pairs)
        return Finished()


class Rig:
    """A manager over a gpu pool of two blocks and a pinned cpu pool, and contents on the GPU.

    Attributes:
        pool, transfer, manager: what is tested.
        contents: of blocks 0 to 3, on the GPU, so that a kernel can write them.
    """

    def __init__(self, transfer_type: type[CudaTransfer], cpu_pool: CpuPool) -> None:
        self.pool = GpuPool(SPEC, 2, "cuda")
        self.transfer: Any = transfer_type(self.pool)
        self.manager = TierManager(
            SPEC,
            self.pool,
            cpu_pool,
            None,
            retain="all",
            on_pressure="wait",
            transfer=self.transfer,
        )
        self.contents = [torch.from_numpy(bytes_of(number)).cuda() for number in range(4)]

    def write(self, block_id: int, number: int) -> None:
        """Have a kernel of the compute stream write a block."""
        self.pool.row(block_id).copy_(self.contents[number])

    def kernel_reads(self, block_id: int) -> torch.Tensor:
        """What a kernel of the compute stream finds in a block, once it has run."""
        return self.pool.row(block_id).clone()

    def stored(self, number: int) -> int:
        """Seal a block and wait until it is in the cpu pool; its id, given back."""
        block_id = self.manager.allocate()
        self.write(block_id, number)
        self.manager.seal(block_id, key_of(number))
        self.manager.flush()
        self.manager.drop(block_id)
        return block_id

    def holds(self, number: int) -> bool:
        """Whether a restored block is bit for bit what was sealed."""
        block_id = self.manager.allocate()
        assert self.manager.restore(key_of(number), block_id)
        found = np.array_equal(self.pool.row(block_id).cpu().numpy(), bytes_of(number))
        self.manager.drop(block_id)
        return found


@contextmanager
def rig(transfer_type: type[CudaTransfer]) -> Iterator[Rig]:
    """A rig that has done everything once: what is loaded late must not wait for a slow kernel."""
    cpu_pool = CpuPool(SPEC, 8 * SPEC.block_bytes, CudaPageLock(torch.device("cuda")))
    try:
        while cpu_pool.pin_next():
            pass
        made = Rig(transfer_type, cpu_pool)
        with made.manager:
            made.stored(3)
            made.holds(3)
            made.kernel_reads(0)
            torch.cuda._sleep(1)
            torch.cuda.synchronize()
            yield made
            torch.cuda.synchronize()
            made.manager.check_integrity()
    finally:
        cpu_pool.close()


def demote_what_a_slow_kernel_writes(made: Rig) -> bool:
    """Seal a block whose kernel still runs. Returns whether what is stored is what it wrote."""
    block_id = made.manager.allocate()
    spin()
    made.write(block_id, 0)
    made.manager.seal(block_id, key_of(0))
    made.manager.flush()
    torch.cuda.synchronize()
    made.manager.drop(block_id)
    return made.holds(0)


def test_a_copy_out_of_a_block_waits_for_the_kernel_that_writes_it() -> None:
    with rig(CudaTransfer) as made:
        assert demote_what_a_slow_kernel_writes(made)


def test_without_that_wait_the_copy_would_be_of_what_was_there_before() -> None:
    with rig(UnawaitedKernels) as made:
        assert not demote_what_a_slow_kernel_writes(made)


def reuse_a_block_that_is_slowly_copied(made: Rig) -> bool:
    """Give a block back while its copy runs, and write over whatever is free.

    Returns whether what is stored is what was sealed.
    """
    other = made.manager.allocate()
    block_id = made.manager.allocate()
    made.write(block_id, 0)
    torch.cuda.synchronize()
    made.transfer.is_slow = True
    made.manager.seal(block_id, key_of(0))
    made.manager.drop(block_id)
    # The only block there is: handed out once its copy has finished.
    taken = made.manager.allocate()
    assert taken == block_id
    made.write(taken, 1)
    made.manager.flush()
    torch.cuda.synchronize()
    made.transfer.is_slow = False
    made.manager.free(taken)
    made.manager.free(other)
    return made.holds(0)


def test_a_block_is_reused_only_after_its_copy_has_finished() -> None:
    with rig(SlowCopies) as made:
        assert reuse_a_block_that_is_slowly_copied(made)


def test_without_that_event_the_copy_would_be_of_the_next_owners_block() -> None:
    with rig(UnawaitedDemotions) as made:
        assert not reuse_a_block_that_is_slowly_copied(made)


def promote_into_what_a_slow_kernel_reads(made: Rig) -> NDArray[np.uint8]:
    """Give a block back while a kernel is about to read it, and restore another one into it.

    Returns what the kernel read; block 1 is right.
    """
    made.stored(0)
    other = made.manager.allocate()
    block_id = made.stored(1)
    assert block_id != other
    spin()
    seen = made.kernel_reads(block_id)
    taken = made.manager.allocate()
    assert taken == block_id
    assert made.manager.restore(key_of(0), taken)
    torch.cuda.synchronize()
    assert np.array_equal(made.pool.row(taken).cpu().numpy(), bytes_of(0))
    made.manager.drop(taken)
    made.manager.free(other)
    return seen.cpu().numpy()


def test_a_block_is_filled_anew_only_after_every_kernel_that_reads_it() -> None:
    with rig(CudaTransfer) as made:
        assert np.array_equal(promote_into_what_a_slow_kernel_reads(made), bytes_of(1))


def test_without_that_wait_the_kernel_would_read_the_next_owners_block() -> None:
    with rig(UnawaitedReaders) as made:
        assert np.array_equal(promote_into_what_a_slow_kernel_reads(made), bytes_of(0))


def attend_what_is_slowly_promoted(made: Rig) -> NDArray[np.uint8]:
    """Restore a block, and have a kernel read it at once. Returns what it read; block 0 is right.

    The block held block 2 before.
    """
    made.stored(0)
    block_id = made.manager.allocate()
    made.write(block_id, 2)
    torch.cuda.synchronize()
    made.transfer.is_slow = True
    assert made.manager.restore(key_of(0), block_id)
    seen = made.kernel_reads(block_id)
    torch.cuda.synchronize()
    made.transfer.is_slow = False
    made.manager.drop(block_id)
    return seen.cpu().numpy()


def test_a_promoted_block_is_read_only_after_its_copy() -> None:
    with rig(SlowCopies) as made:
        assert np.array_equal(attend_what_is_slowly_promoted(made), bytes_of(0))


def test_without_that_event_a_kernel_would_read_what_was_there_before() -> None:
    with rig(UnawaitedPromotions) as made:
        assert np.array_equal(attend_what_is_slowly_promoted(made), bytes_of(2))


def test_a_prefetched_block_is_bit_for_bit_the_sealed_one(tmp_path: Path) -> None:
    """From a kernel to ssd, read ahead into pinned memory, and back to what a kernel reads."""
    cpu_pool = CpuPool(SPEC, 4 * SPEC.block_bytes, CudaPageLock(torch.device("cuda")))
    pool = GpuPool(SPEC, 8, "cuda")
    store = SsdTier(
        tmp_path, SPEC, StoreIdentity("tiny", b"weights"), limit_bytes=64 << 20, codec="zstd"
    )
    manager = TierManager(
        SPEC,
        pool,
        cpu_pool,
        store,
        retain="all",
        on_pressure="wait",
        watermark=0.0,
        transfer=CudaTransfer(pool),
    )
    numbers = [5, 0, 9, 2]
    with closing(cpu_pool), store, manager:
        for number in range(12):
            block_id = manager.allocate()
            pool.row(block_id).copy_(torch.from_numpy(bytes_of(number)).cuda())
            manager.seal(block_id, key_of(number))
            manager.drop(block_id)
        manager.flush()
        keys = [key_of(number) for number in numbers]
        ahead = [key for key in keys[:3] if manager.where(key) == "ssd"]
        manager.prefetch(ahead)
        while manager.counters()["prefetched"] < len(ahead):
            threading.Event().wait(0.001)
        assert ahead and all(manager.where(key) == "cpu" for key in ahead)
        for number, block_id in zip(numbers, manager.fetch(keys), strict=True):
            assert block_id is not None
            seen = pool.row(block_id).clone().cpu().numpy()
            assert np.array_equal(seen, bytes_of(number))
            manager.drop(block_id)
        manager.check_integrity()
