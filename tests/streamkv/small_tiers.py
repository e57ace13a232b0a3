"""Real tiers with blocks of four tokens, and an executor over them that computes nothing."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from streamkv.batch import Batch, Landed, SequenceStep, StepResult, Wanted
from streamkv.executor import Executor
from streamkv.journal import Journal
from streamkv.journal_records import SessionHeader
from streamkv.sequence import Sequence
from streamkv.tiers.cpu_pool import CpuPool
from streamkv.tiers.gpu_pool import GpuPool
from streamkv.tiers.manager import TierManager
from streamkv.tiers.spec import BlockKey, KVSpec
from streamkv.tiers.ssd import SsdTier, StoreIdentity
from streamkv.window import Window

SIZE = 4
SPEC = KVSpec(num_layers=2, num_kv_heads=1, head_dim=2, dtype="float32", block_size=SIZE)
ROOT = BlockKey(b"r" * 16)


class NoRunner:
    """Stands for the model where only blocks matter."""

    def launch(self, batch: Batch) -> Landed:
        """Nothing for each sequence."""
        return Landed([StepResult() for _ in batch.steps])


@dataclass
class SmallTiers:
    """Pools, store, manager and executor."""

    gpu_pool: GpuPool
    ssd: SsdTier
    manager: TierManager
    executor: Executor

    def sequence(self, window: Window, seq_id: int = 1) -> Sequence:
        """A new stream; different `seq_id`s have different roots."""
        return Sequence(seq_id, window, SIZE, BlockKey(bytes([2 * seq_id]) + ROOT[1:]))

    def step(
        self, sequence: Sequence, num_tokens: int, wanted: Wanted = Wanted.NOTHING
    ) -> list[StepResult]:
        """One step over `num_tokens` pending tokens; a token's KV is its own index, everywhere."""
        batch = Batch((SequenceStep(sequence, num_tokens, wanted),))
        for step in batch.steps:
            self.executor.prepare(step)
        for token in range(sequence.num_computed, sequence.num_computed + num_tokens):
            block_id, offset = divmod(sequence.table.slot(token), SIZE)
            self.gpu_pool.data[block_id, :, :, :, offset] = float(token)
        results = self.executor.run(batch)
        for step in batch.steps:
            self.executor.postprocess(step)
        return results

    def restored(self, key: BlockKey) -> list[float] | None:
        """The tokens of a stored block, `None` if no tier has it."""
        block_id = self.manager.allocate()
        self.gpu_pool.fill_nan(block_id)
        found = self.manager.restore(key, block_id)
        rows = self.gpu_pool.data[block_id].flatten(0, 2).unique(dim=0)
        tokens: list[float] = rows[0, :, 0].tolist()
        if found and not key[0] & 1:
            self.manager.drop(block_id)
        else:
            self.manager.free(block_id)
        return tokens if found else None

    def num_used(self) -> int:
        """Blocks of the gpu pool in use once nothing is under way; checks every invariant."""
        self.manager.flush()
        self.manager.check_integrity()
        self.ssd.check_integrity()
        return self.manager.usage()["gpu"].num_blocks


@contextmanager
def small_tiers(path: Path, num_blocks: int = 8, retain: Any = "all") -> Iterator[SmallTiers]:
    """Open a store at `path` with pools above it, and close all of them."""
    ssd = SsdTier(path, SPEC, StoreIdentity("tiny", b"w"), limit_bytes=4 << 20, codec="raw")
    try:
        gpu_pool = GpuPool(SPEC, num_blocks)
        cpu_pool = CpuPool(SPEC, 16 * SPEC.block_bytes)
        manager = TierManager(SPEC, gpu_pool, cpu_pool, ssd, retain=retain, on_pressure="wait")
        with manager:
            executor = Executor(NoRunner(), manager)  # type: ignore[arg-type]
            yield SmallTiers(gpu_pool, ssd, manager, executor)
    finally:
        ssd.close()


def new_journal(path: Path) -> Journal:
    """An empty journal of a session."""
    header = SessionHeader("tiny", "00", 100_000, 8, 2, "window", "cache", "", 0.0)
    return Journal.create(path, header)
