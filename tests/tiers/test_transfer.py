"""Copies of whole blocks are bit for bit, in every dtype, and touch nothing else."""

import numpy as np
import pytest

from streamkv.tiers.gpu_pool import GpuPool
from streamkv.tiers.spec import KVSpec
from streamkv.tiers.transfer import Transfer


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_a_block_goes_down_and_up_unchanged(dtype: str) -> None:
    spec = KVSpec(num_layers=2, num_kv_heads=1, head_dim=4, dtype=dtype, block_size=8)
    pool = GpuPool(spec, 3)
    transfer = Transfer(pool)
    pattern = np.random.default_rng(1).integers(0, 256, spec.block_bytes, dtype=np.uint8)
    transfer.read(0)[:] = pattern
    host = np.zeros(spec.block_bytes, np.uint8)
    down = transfer.demote(0, host)
    down.wait()
    assert down.done() and np.array_equal(host, pattern)
    transfer.promote(host, 1).wait()
    transfer.copy(1, 2).wait()
    assert all(np.array_equal(pool.block_bytes(i), pattern) for i in range(3))
    assert not pool.data[pool.guard_block_id].any()


def test_what_runs_where_it_is_called_is_written_at_once() -> None:
    spec = KVSpec(num_layers=1, num_kv_heads=1, head_dim=2, dtype="float32", block_size=2)
    written = Transfer(GpuPool(spec, 1)).written()
    assert written.done()
    written.wait()
