"""The tiers below the gpu pool: what waits for the ssd, what is evicted, how failures are told."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from streamkv.errors import StoreError, StoreFullError
from streamkv.tiers.cpu_pool import CpuPool
from streamkv.tiers.faults import inject
from streamkv.tiers.gpu_pool import GpuPool
from streamkv.tiers.keys import child_key, root_key
from streamkv.tiers.lower import LowerTiers
from streamkv.tiers.policy import Policy
from streamkv.tiers.spec import BlockKey, KVSpec
from streamkv.tiers.ssd import SsdTier, StoreIdentity
from streamkv.tiers.transfer import Completion, Transfer
from streamkv.tiers.usage import Counters

SPEC = KVSpec(num_layers=2, num_kv_heads=1, head_dim=2, dtype="float16", block_size=4)
ROOT = root_key(b"weights", SPEC, b"rope")
KEYS = [child_key(ROOT, [number] * 4, b"dense") for number in range(40)]
NAMES = ("demotions", "dropped", "writes", "read_errors", "ssd_disabled")


def fail() -> None:
    raise OSError(5, "Input/output error")


def bytes_of(number: int) -> NDArray[np.uint8]:
    return np.full(SPEC.block_bytes, number + 1, np.uint8)


@dataclass
class Below:
    """Lower tiers with two gpu blocks: 0 to demote from, 1 to read into."""

    gpu: GpuPool
    cpu: CpuPool | None
    ssd: SsdTier
    tiers: LowerTiers
    counters: Counters

    def put(self, *numbers: int) -> list[bool]:
        results = []
        for number in numbers:
            self.gpu.block_bytes(0)[:] = bytes_of(number)
            results.append(self.tiers.put(KEYS[number], 0))
            self.tiers.check_integrity()
        return results

    def read(self, number: int) -> bool:
        [block] = self.tiers.lock_many([KEYS[number]])
        if block is not None:
            self.tiers.promote_many([(block, 1)]).wait()
            self.tiers.unlock_many([block])
        found = block is not None or self.tiers.read_stored(KEYS[number], 1)
        assert not found or np.array_equal(self.gpu.block_bytes(1), bytes_of(number))
        return found

    def stored(self, *numbers: int) -> list[bool]:
        return [self.ssd.contains(KEYS[number]) for number in numbers]


@pytest.fixture
def ssd(tmp_path: Path) -> Iterator[SsdTier]:
    identity = StoreIdentity("tiny", b"weights")
    with SsdTier(tmp_path, SPEC, identity, limit_bytes=4 << 20, codec="raw") as store:
        yield store


def below(ssd: SsdTier, cpu: int | None, policy: Policy) -> Below:
    gpu = GpuPool(SPEC, 2)
    pool = None if cpu is None else CpuPool(SPEC, cpu * SPEC.block_bytes)
    counters = Counters(NAMES)
    return Below(gpu, pool, ssd, LowerTiers(Transfer(gpu), pool, ssd, policy, counters), counters)


def test_an_unwritten_block_is_written_before_it_is_evicted(ssd: SsdTier) -> None:
    tiers = below(ssd, 2, Policy("all", watermark=1.0, batch_blocks=1))
    assert tiers.put(0, 1) == [True, True]
    assert tiers.stored(0, 1) == [False, False]
    assert tiers.put(2) == [True]
    assert tiers.stored(0, 1, 2) == [True, False, False]
    assert [tiers.read(number) for number in range(3)] == [True] * 3


def test_idle_work_writes_the_oldest_down_to_the_watermark(ssd: SsdTier) -> None:
    tiers = below(ssd, 4, Policy("all", watermark=0.25, batch_blocks=2))
    tiers.put(0, 1, 2, 3)
    assert tiers.tiers.write_oldest() is True
    assert tiers.tiers.write_oldest() is False
    assert tiers.stored(0, 1, 2, 3) == [True, True, True, False]
    tiers.tiers.flush()
    assert tiers.stored(3) == [True]


def test_a_block_already_on_ssd_need_not_be_written_again(ssd: SsdTier) -> None:
    tiers = below(ssd, 2, Policy("all", watermark=0.0))
    ssd.write([(KEYS[0], bytes_of(0))])
    tiers.put(0)
    assert tiers.tiers.write_oldest() is False
    assert tiers.counters.snapshot()["writes"] == 0


def test_window_blocks_do_not_wait_for_the_ssd(ssd: SsdTier) -> None:
    tiers = below(ssd, 2, Policy("window"))
    assert tiers.put(0, 1, 2) == [True] * 3
    tiers.tiers.flush()
    assert tiers.stored(0, 1, 2) == [False] * 3
    assert [tiers.read(number) for number in range(3)] == [False, True, True]


def test_a_checkpoint_takes_each_block_from_wherever_it_is(ssd: SsdTier) -> None:
    tiers = below(ssd, 2, Policy("window"))
    ssd.write([(KEYS[0], bytes_of(0))])
    tiers.put(1)
    tiers.gpu.block_bytes(0)[:] = bytes_of(2)
    wanted = [(KEYS[0], None), (KEYS[1], None), (KEYS[2], 0), (KEYS[3], None)]
    assert tiers.tiers.checkpoint("diary", wanted) == 1
    assert tiers.stored(0, 1, 2, 3) == [True, True, True, False]
    assert ssd.manifest("diary") == KEYS[:4]
    assert tiers.counters.snapshot()["writes"] == 2
    assert [tiers.read(number) for number in range(4)] == [True, True, True, False]


def test_a_checkpoint_frees_its_blocks_for_eviction_from_the_cpu_pool(ssd: SsdTier) -> None:
    tiers = below(ssd, 1, Policy("all", watermark=1.0))
    tiers.put(0)
    tiers.tiers.checkpoint("diary", [(KEYS[0], None)])
    tiers.put(1)
    assert tiers.counters.snapshot()["writes"] == 1
    assert tiers.read(0) and tiers.read(1)


def test_manifest_and_sync_come_after_the_writes_in_this_order(ssd: SsdTier) -> None:
    tiers = below(ssd, None, Policy("window"))
    seen: list[str] = []
    with (
        inject("ssd.put", lambda: seen.append("put")),
        inject("ssd.commit", lambda: seen.append(f"commit {len(ssd.manifest('diary'))}")),
        inject("ssd.fsync", lambda: seen.append(f"sync {len(ssd.manifest('diary'))}")),
    ):
        tiers.tiers.checkpoint("diary", [(KEYS[0], 0)])
    assert seen == ["put", "commit 0", "commit 0", "sync 1"]


def test_kept_blocks_stay_until_released(ssd: SsdTier) -> None:
    tiers = below(ssd, 2, Policy("all"))
    tiers.tiers.disable_ssd(StoreError("gone"))
    tiers.put(0)
    assert tiers.tiers.keep("diary", [(KEYS[0], None), (KEYS[9], None)]) == 1
    tiers.put(1, 2, 3)
    assert [tiers.read(number) for number in range(4)] == [True, False, False, True]
    tiers.tiers.release_kept("diary")
    tiers.put(4, 5)
    assert tiers.read(0) is False


def test_a_new_block_is_dropped_when_all_room_is_kept_for_sessions(ssd: SsdTier) -> None:
    tiers = below(ssd, 1, Policy("all"))
    tiers.tiers.disable_ssd(StoreError("gone"))
    tiers.put(0)
    tiers.tiers.keep("diary", [(KEYS[0], None)])
    assert tiers.put(1) == [False]
    assert tiers.counters.snapshot()["dropped"] == 1
    assert tiers.read(0) is True


def test_giving_the_ssd_up_lets_unwritten_blocks_be_evicted(ssd: SsdTier) -> None:
    tiers = below(ssd, 2, Policy("all", watermark=1.0))
    tiers.put(0, 1)
    tiers.tiers.disable_ssd(StoreError("gone"))
    tiers.tiers.disable_ssd(StoreError("gone again"))
    assert tiers.counters.snapshot()["ssd_disabled"] == 1
    assert not tiers.tiers.has_ssd
    tiers.put(2, 3)
    assert [tiers.read(number) for number in range(4)] == [False, False, True, True]


def test_forgetting_a_session_revives_a_full_ssd_but_not_a_broken_one(ssd: SsdTier) -> None:
    tiers = below(ssd, None, Policy("all"))
    tiers.tiers.disable_ssd(StoreFullError("no room"))
    tiers.tiers.forget("diary")
    assert tiers.tiers.has_ssd
    tiers.tiers.disable_ssd(StoreError("broken"))
    tiers.tiers.forget("diary")
    assert not tiers.tiers.has_ssd


def test_a_read_that_fails_is_a_counted_miss(ssd: SsdTier) -> None:
    def fail() -> None:
        raise OSError(5, "Input/output error")

    tiers = below(ssd, None, Policy("all"))
    tiers.put(0)
    with inject("ssd.get", fail):
        assert tiers.read(0) is False
    assert tiers.read(0) is True
    assert tiers.tiers.has_ssd


def test_where_a_block_is(ssd: SsdTier) -> None:
    tiers = below(ssd, 2, Policy("all", watermark=0.0))
    tiers.put(0)
    tiers.tiers.flush()
    tiers.put(1, 2)
    places = [tiers.tiers.where(KEYS[number]) for number in range(4)]
    assert places == ["ssd", "cpu", "cpu", None]
    assert [tiers.read(number) for number in range(4)] == [True, True, True, False]


class Intrusion(Transfer):
    """While a block is copied down, somebody lists what he read of it from ssd."""

    def __init__(self, gpu: GpuPool, cpu: CpuPool, ssd: SsdTier, key: BlockKey) -> None:
        super().__init__(gpu)
        self._cpu, self._ssd, self._key = cpu, ssd, key

    def demote(self, block_id: int, out: NDArray[np.uint8]) -> Completion:
        block = self._cpu.reserve(self._key)
        assert block is not None and self._ssd.read(self._key, self._cpu.data(block))
        assert self._cpu.publish(block)
        self._cpu.unlock(block)
        return super().demote(block_id, out)


@pytest.mark.parametrize("keep", [False, True])
def test_a_block_that_was_read_ahead_while_it_is_copied_down_is_there_once(
    ssd: SsdTier, keep: bool
) -> None:
    gpu, cpu, counters = GpuPool(SPEC, 2), CpuPool(SPEC, 4 * SPEC.block_bytes), Counters(NAMES)
    ssd.write([(KEYS[0], bytes_of(0))])
    transfer = Intrusion(gpu, cpu, ssd, KEYS[0])
    tiers = Below(gpu, cpu, ssd, LowerTiers(transfer, cpu, ssd, Policy("all"), counters), counters)
    gpu.block_bytes(0)[:] = bytes_of(0)
    if keep:
        assert tiers.tiers.keep("diary", [(KEYS[0], 0)]) == 0
    else:
        assert tiers.tiers.put(KEYS[0], 0) is True
    tiers.tiers.check_integrity()
    assert cpu.usage().num_blocks == 1
    assert tiers.counters.snapshot()["demotions"] == 0
    assert tiers.read(0)
    evictable = [cpu.reserve(KEYS[number]) is not None for number in range(1, 5)]
    assert evictable == [True, True, True, not keep]


def test_deleting_leaves_no_trace_in_either_tier(ssd: SsdTier) -> None:
    tiers = below(ssd, 2, Policy("all", watermark=0.0))
    tiers.put(0, 1)
    tiers.tiers.flush()
    tiers.put(2)
    doomed: list[BlockKey] = KEYS[:3]
    tiers.tiers.delete_in_memory(doomed)
    tiers.tiers.delete_stored(doomed)
    tiers.tiers.check_integrity()
    assert [tiers.read(number) for number in range(3)] == [False] * 3
    assert tiers.stored(0, 1, 2) == [False] * 3


def test_a_block_that_cannot_be_read_any_more_is_erased_all_the_same(ssd: SsdTier) -> None:
    tiers = below(ssd, 2, Policy("all", watermark=0.0))
    tiers.put(0, 1)
    tiers.tiers.flush()
    with inject("ssd.get", fail):
        assert not ssd.read(KEYS[0], np.empty(ssd.spec.block_bytes, dtype=np.uint8))
    assert not ssd.contains(KEYS[0]), "it is not shown"
    assert tiers.tiers.erase_stored(KEYS[:1])
    assert ssd.usage().num_blocks == 1


def test_what_a_failed_ssd_cannot_erase_is_said(ssd: SsdTier) -> None:
    tiers = below(ssd, 2, Policy("all", watermark=0.0))
    tiers.put(0)
    tiers.tiers.flush()
    with inject("ssd.commit", fail):
        assert not tiers.tiers.erase_stored(KEYS[:1])
    assert not tiers.tiers.erase_stored(KEYS[:1]), "it is not written to any more"
    assert tiers.stored(0) == [True]
