"""A tier manager over real pools and a real store; a block's bytes follow from its number."""

import mmap
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from streamkv.tiers.cpu_pool import CpuPool
from streamkv.tiers.gpu_pool import GpuPool
from streamkv.tiers.keys import child_key, partial_key, root_key
from streamkv.tiers.manager import TierManager
from streamkv.tiers.pinning import PageLock
from streamkv.tiers.spec import BlockKey, KVSpec
from streamkv.tiers.ssd import SsdTier, StoreIdentity
from streamkv.tiers.transfer import Transfer

SPEC = KVSpec(num_layers=2, num_kv_heads=1, head_dim=2, dtype="bfloat16", block_size=4)
ROOT = root_key(b"weights", SPEC, b"rope")


def key_of(number: int) -> BlockKey:
    """The key of the block number `number`."""
    return child_key(ROOT, [number] * SPEC.block_size, b"dense")


def partial_key_of(number: int) -> BlockKey:
    """The key of a session's open block number `number`."""
    return partial_key("diary", ROOT, [number], b"dense")


def bytes_of(number: int) -> NDArray[np.uint8]:
    """The bytes of that block: arbitrary bit patterns, NaNs included."""
    return np.random.default_rng(number).integers(0, 256, SPEC.block_bytes, dtype=np.uint8)


@dataclass
class Rig:
    """A manager with its pools and store.

    Attributes:
        gpu_pool, cpu_pool, ssd: what the manager moves blocks between.
        manager: what is tested.
    """

    gpu_pool: GpuPool
    cpu_pool: CpuPool | None
    ssd: SsdTier | None
    manager: TierManager
    spec: KVSpec = field(default=SPEC)

    key_of = staticmethod(key_of)
    partial_key_of = staticmethod(partial_key_of)
    bytes_of = staticmethod(bytes_of)

    def fill(self, number: int) -> int:
        """Allocate a block and write number `number` into it."""
        block_id = self.manager.allocate()
        self.gpu_pool.block_bytes(block_id)[:] = bytes_of(number)
        return block_id

    def seal(self, number: int) -> int:
        """Allocate, write and seal block number `number`."""
        block_id = self.fill(number)
        self.manager.seal(block_id, key_of(number))
        return block_id

    def pass_through(self, *numbers: int) -> None:
        """Seal blocks and drop each at once."""
        for number in numbers:
            self.manager.drop(self.seal(number))

    def restored(self, number: int, key: BlockKey | None = None) -> bool:
        """Whether block `number` is still held somewhere; asserts that its bytes are right."""
        block_id = self.manager.allocate()
        self.gpu_pool.block_bytes(block_id)[:] = 0xEE
        name = key_of(number) if key is None else key
        found = self.manager.restore(name, block_id)
        if found:
            assert np.array_equal(self.gpu_pool.block_bytes(block_id), bytes_of(number))
        if found and key is None:
            self.manager.drop(block_id)
        else:
            self.manager.free(block_id)
        return found

    def held(self, *numbers: int) -> list[bool]:
        """`restored` for each."""
        return [self.restored(number) for number in numbers]

    def count(self, name: str) -> int:
        """A counter's value."""
        return self.manager.counters()[name]

    def until(self, name: str, value: int) -> None:
        """Spin until a counter has reached a value: the other thread has come that far."""
        while self.count(name) < value:
            threading.Event().wait(0.001)

    def prefetch(self, *numbers: int) -> None:
        """Have blocks read ahead."""
        self.manager.prefetch([key_of(number) for number in numbers])

    def prefetch_ends(self) -> None:
        """Wait until no prefetch is queued or under way."""
        while not self.manager._prefetching.is_quiet():
            threading.Event().wait(0.001)

    def fetched(self, *numbers: int) -> list[bool]:
        """Which blocks a fetch of them all gives; asserts that their bytes are right."""
        block_ids = self.manager.fetch([key_of(number) for number in numbers])
        for number, block_id in zip(numbers, block_ids, strict=True):
            if block_id is not None:
                assert np.array_equal(self.gpu_pool.block_bytes(block_id), bytes_of(number))
                self.manager.drop(block_id)
        return [block_id is not None for block_id in block_ids]

    def where(self, *numbers: int) -> list[str | None]:
        """The fastest tier of each block."""
        return [self.manager.where(key_of(number)) for number in numbers]

    def settle(self) -> None:
        """Wait for the worker, then check every invariant."""
        self.manager.flush()
        self.check()

    def check(self) -> None:
        """Check every invariant."""
        self.manager.check_integrity()
        if self.ssd is not None:
            self.ssd.check_integrity()


MakeRig = Callable[..., Rig]


def open_store(path: Path, limit_bytes: int = 4 << 20) -> SsdTier:
    """The store of these tests."""
    identity = StoreIdentity("tiny", b"weights")
    return SsdTier(path, SPEC, identity, limit_bytes=limit_bytes, codec="raw")


@pytest.fixture
def make_rig(tmp_path: Path) -> Iterator[MakeRig]:
    """Makes rigs; the worker and the store of each are closed after the test."""
    with ExitStack() as owned:

        def make(
            *,
            gpu: int = 4,
            cpu: int | None = 4,
            ssd: bool = True,
            retain: str = "all",
            on_pressure: str = "wait",
            watermark: float = 0.5,
            max_pending: int = 32,
            limit_bytes: int = 4 << 20,
            manager_type: type[TierManager] = TierManager,
            transfer_type: type[Transfer] = Transfer,
            page_lock: PageLock | None = None,
            read_limit_s: float = 60.0,
        ) -> Rig:
            gpu_pool = GpuPool(SPEC, gpu)
            row_bytes = SPEC.block_bytes if page_lock is None else mmap.PAGESIZE
            cpu_pool = (
                None if cpu is None else CpuPool(SPEC, cpu * row_bytes, page_lock, 2 * row_bytes)
            )
            store = open_store(tmp_path / "store", limit_bytes) if ssd else None
            if store is not None:
                owned.callback(store.close)
            manager = manager_type(
                SPEC,
                gpu_pool,
                cpu_pool,
                store,
                retain=retain,  # type: ignore[arg-type]  # plain strings are handier here
                on_pressure=on_pressure,  # type: ignore[arg-type]
                watermark=watermark,
                max_pending=max_pending,
                transfer=transfer_type(gpu_pool),
                read_limit_s=read_limit_s,
            )
            owned.callback(manager.close, drain=False)
            return Rig(gpu_pool, cpu_pool, store, manager)

        yield make
