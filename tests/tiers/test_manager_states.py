"""Random histories of a tier manager, checked after every step against a plain model.

The model knows what must be found (nothing may be lost while a window or a manifest needs it, or
while the tiers have room) and what may be found (nothing that was never sealed). Bytes are always
compared.
"""

import mmap
import tempfile
from contextlib import ExitStack
from pathlib import Path

import numpy as np
from fake_page_lock import FakePageLock
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from streamkv.errors import PoolFullError
from streamkv.tiers.cpu_pool import CpuPool
from streamkv.tiers.gpu_pool import GpuPool
from streamkv.tiers.keys import child_key, partial_key, root_key
from streamkv.tiers.manager import TierManager
from streamkv.tiers.spec import BlockKey, KVSpec
from streamkv.tiers.ssd import SsdTier, StoreIdentity

SPEC = KVSpec(num_layers=1, num_kv_heads=1, head_dim=2, dtype="bfloat16", block_size=4)
ROOT = root_key(b"weights", SPEC, b"rope")
NUM_GPU_BLOCKS = 5
NUMBERS = st.integers(0, 11)
SESSIONS = st.sampled_from(["diary", "log"])


def key_of(number: int) -> BlockKey:
    return child_key(ROOT, [number] * SPEC.block_size, b"dense")


def partial_key_of(number: int) -> BlockKey:
    return partial_key("diary", ROOT, [number], b"dense")


def bytes_of(number: int) -> np.ndarray:
    return np.random.default_rng(number).integers(0, 256, SPEC.block_bytes, dtype=np.uint8)


class TierHistory(RuleBasedStateMachine):
    @initialize(
        retain=st.sampled_from(["all", "window", "none"]),
        on_pressure=st.sampled_from(["wait", "drop"]),
        cpu=st.sampled_from([None, 0, 1, 3]),
        has_ssd=st.booleans(),
        max_pending=st.sampled_from([1, 2, 32]),
        refuse_at=st.sampled_from(["no gpu", None, 0, 1]),
    )
    def open(
        self,
        retain: str,
        on_pressure: str,
        cpu: int | None,
        has_ssd: bool,
        max_pending: int,
        refuse_at: str | int | None,
    ) -> None:
        self.owned = ExitStack()
        folder = self.owned.enter_context(tempfile.TemporaryDirectory())
        self.retain = retain
        self.on_pressure = on_pressure
        self.has_ssd = has_ssd
        self.gpu_pool = GpuPool(SPEC, NUM_GPU_BLOCKS)
        cpu_pool = None
        if cpu is not None:
            lock = None if isinstance(refuse_at, str) else FakePageLock(refuse_at)
            row_bytes = SPEC.block_bytes if lock is None else mmap.PAGESIZE
            cpu_pool = CpuPool(SPEC, cpu * row_bytes, lock, piece_bytes=row_bytes)
            self.owned.callback(cpu_pool.close)
        self.ssd: SsdTier | None = None
        if has_ssd:
            identity = StoreIdentity("tiny", b"weights")
            self.ssd = SsdTier(
                Path(folder) / "store", SPEC, identity, limit_bytes=4 << 20, codec="raw"
            )
            self.owned.callback(self.ssd.close)
        self.manager = TierManager(
            SPEC,
            self.gpu_pool,
            cpu_pool,
            self.ssd,
            retain=retain,  # type: ignore[arg-type]  # drawn from its values
            on_pressure=on_pressure,  # type: ignore[arg-type]
            watermark=0.5,
            max_pending=max_pending,
        )
        self.owned.callback(self.manager.close, drain=False)
        self.unsealed: dict[int, int] = {}
        self.sealed: dict[int, int] = {}
        self.ever_sealed: set[int] = set()
        self.durable: dict[str, set[int]] = {}
        self.named: dict[str, set[int]] = {}
        self.forgotten: set[int] = set()
        self.written: set[int] = set()

    @precondition(lambda self: len(self.unsealed) + len(self.sealed) < NUM_GPU_BLOCKS)
    @rule(number=NUMBERS)
    def allocate(self, number: int) -> None:
        block_id = self.manager.allocate()
        assert block_id not in self.unsealed and block_id not in self.sealed
        self.gpu_pool.block_bytes(block_id)[:] = bytes_of(number)
        self.unsealed[block_id] = number

    @precondition(lambda self: len(self.unsealed) + len(self.sealed) == NUM_GPU_BLOCKS)
    @rule()
    def allocate_from_a_full_pool(self) -> None:
        try:
            block_id = self.manager.allocate()
        except PoolFullError:
            return
        raise AssertionError(f"block {block_id} was given out twice")

    @precondition(lambda self: self.unsealed)
    @rule(data=st.data())
    def seal(self, data: st.DataObject) -> None:
        block_id = data.draw(st.sampled_from(sorted(self.unsealed)))
        number = self.unsealed.pop(block_id)
        self.manager.seal(block_id, key_of(number))
        self.sealed[block_id] = number
        self.ever_sealed.add(number)
        self.forgotten.discard(number)

    @precondition(lambda self: self.unsealed)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        block_id = data.draw(st.sampled_from(sorted(self.unsealed)))
        del self.unsealed[block_id]
        self.manager.free(block_id)

    @precondition(lambda self: self.sealed)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        block_id = data.draw(st.sampled_from(sorted(self.sealed)))
        del self.sealed[block_id]
        self.manager.drop(block_id)

    @rule(session=SESSIONS)
    def checkpoint(self, session: str) -> None:
        named = [(key_of(number), block_id) for block_id, number in self.sealed.items()]
        ticket = self.manager.checkpoint(session, named)
        self.named.setdefault(session, set()).update(self.sealed.values())
        if ticket.wait():
            assert self.has_ssd and self.retain != "none"
            self.durable[session] = set(self.sealed.values())
        else:
            assert not self.has_ssd or self.retain == "none"

    @precondition(lambda self: self.unsealed)
    @rule(data=st.data())
    def write_partial(self, data: st.DataObject) -> None:
        block_id = data.draw(st.sampled_from(sorted(self.unsealed)))
        number = self.unsealed[block_id]
        if self.manager.write_partial(partial_key_of(number), block_id).wait():
            self.written.add(number)

    @rule(session=SESSIONS)
    def forget(self, session: str) -> None:
        self.manager.forget(session).wait()
        self.durable.pop(session, None)
        self.forgotten |= self.named.pop(session, set())

    @precondition(lambda self: len(self.unsealed) + len(self.sealed) < NUM_GPU_BLOCKS)
    @rule(number=NUMBERS)
    def restore(self, number: int) -> None:
        block_id = self.manager.allocate()
        self.gpu_pool.block_bytes(block_id)[:] = 0xEE
        found = self.manager.restore(key_of(number), block_id)
        if found:
            assert number in self.ever_sealed
            assert np.array_equal(self.gpu_pool.block_bytes(block_id), bytes_of(number))
            self.sealed[block_id] = number
        else:
            assert not self.must_be_found(number), f"block {number} is lost"
            self.manager.free(block_id)

    @precondition(lambda self: len(self.unsealed) + len(self.sealed) < NUM_GPU_BLOCKS)
    @rule(number=NUMBERS)
    def restore_partial(self, number: int) -> None:
        block_id = self.manager.allocate()
        found = self.manager.restore(partial_key_of(number), block_id)
        if found:
            assert np.array_equal(self.gpu_pool.block_bytes(block_id), bytes_of(number))
        assert found or number not in self.written
        self.manager.free(block_id)

    @rule(numbers=st.lists(NUMBERS, max_size=4))
    def prefetch(self, numbers: list[int]) -> None:
        self.manager.prefetch([key_of(number) for number in numbers])

    @rule(numbers=st.lists(NUMBERS, max_size=3))
    def fetch(self, numbers: list[int]) -> None:
        keys = [key_of(number) for number in numbers]
        num_free = NUM_GPU_BLOCKS - len(self.unsealed) - len(self.sealed)
        try:
            block_ids = self.manager.fetch(keys)
        except PoolFullError:
            assert len(keys) > num_free
            return
        assert len(keys) <= num_free and len(block_ids) == len(keys)
        for number, block_id in zip(numbers, block_ids, strict=True):
            if block_id is None:
                assert not self.must_be_found(number), f"block {number} is lost"
                continue
            assert number in self.ever_sealed
            assert block_id not in self.unsealed and block_id not in self.sealed
            assert np.array_equal(self.gpu_pool.block_bytes(block_id), bytes_of(number))
            self.sealed[block_id] = number

    @rule(idle=st.booleans())
    def between_steps(self, idle: bool) -> None:
        self.manager.between_steps(idle=idle)

    @rule()
    def flush(self) -> None:
        self.manager.flush()
        if self.ssd is not None:
            self.ssd.check_integrity()

    @invariant()
    def every_block_is_accounted_for(self) -> None:
        if hasattr(self, "manager"):
            self.manager.check_integrity()

    def must_be_found(self, number: int) -> bool:
        if number in self.sealed.values():
            return True
        if any(number in named for named in self.durable.values()):
            return True
        keeps_all = self.retain == "all" and self.has_ssd and self.on_pressure == "wait"
        return keeps_all and number in self.ever_sealed and number not in self.forgotten

    def teardown(self) -> None:
        if not hasattr(self, "manager"):
            return
        for block_id in self.sealed:
            self.manager.drop(block_id)
        for block_id in self.unsealed:
            self.manager.free(block_id)
        self.manager.flush()
        self.manager.check_integrity()
        assert self.manager.usage()["gpu"].num_blocks == 0
        assert self.manager.counters()["ssd_disabled"] == 0
        self.owned.close()


TestTierHistory = TierHistory.TestCase
TestTierHistory.settings = settings(
    max_examples=40,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
