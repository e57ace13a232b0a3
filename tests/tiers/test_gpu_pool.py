"""The gpu pool: block views, the guard block, and memory that costs nothing until used."""

import os
from pathlib import Path

import numpy as np
import pytest
import torch

from streamkv.errors import ConfigError
from streamkv.tiers.gpu_pool import GpuPool
from streamkv.tiers.spec import KVSpec

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def spec_of(dtype: str) -> KVSpec:
    return KVSpec(num_layers=2, num_kv_heads=3, head_dim=4, dtype=dtype, block_size=8)


def resident_bytes() -> int:
    fields = Path("/proc/self/statm").read_text().split()
    return int(fields[1]) * PAGE_BYTES


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_a_block_and_its_bytes_are_the_same_memory(dtype: str) -> None:
    pool = GpuPool(spec_of(dtype), 3)
    assert pool.data.shape == (4, 2, 2, 3, 8, 4)
    assert pool.data.is_contiguous()
    row = pool.block_bytes(1)
    assert row.shape == (spec_of(dtype).block_bytes,)
    pool.data[1].fill_(1.5)
    assert torch.frombuffer(row, dtype=pool.data.dtype).tolist() == [1.5] * (2 * 2 * 3 * 8 * 4)
    row[:] = 0
    assert not pool.data[1].any()


def test_bytes_survive_that_are_no_ordinary_numbers() -> None:
    pool = GpuPool(spec_of("bfloat16"), 2)
    pattern = np.random.default_rng(0).integers(0, 256, pool.spec.block_bytes, dtype=np.uint8)
    pool.block_bytes(0)[:] = pattern
    pool.data[1] = pool.data[0]
    assert np.array_equal(pool.block_bytes(1), pattern)


def test_starts_at_zero_and_never_hands_out_the_guard_block() -> None:
    pool = GpuPool(spec_of("float32"), 2)
    assert not pool.data.any()
    assert pool.guard_block_id == 2
    assert sorted(pool.free_list.allocate() for _ in range(2)) == [0, 1]


def test_fill_nan_touches_only_the_named_blocks() -> None:
    pool = GpuPool(spec_of("bfloat16"), 2)
    pool.fill_nan(0, pool.guard_block_id)
    assert torch.isnan(pool.data[0]).all() and torch.isnan(pool.data[2]).all()
    assert not pool.data[1].any()


def test_untouched_blocks_take_no_memory() -> None:
    spec = KVSpec(num_layers=4, num_kv_heads=8, head_dim=64, dtype="float32")
    before = resident_bytes()
    pool = GpuPool(spec, 512)
    assert 512 * spec.block_bytes == 512 * 2**20
    assert resident_bytes() - before < 2**24
    pool.data[:16].fill_(1)
    assert 16 * 2**20 <= resident_bytes() - before < 40 * 2**20


def test_refuses_a_pool_without_blocks_or_beyond_the_machine() -> None:
    with pytest.raises(ConfigError, match="gpu_bytes=0: smaller than one block"):
        GpuPool(spec_of("float32"), 0)
    with pytest.raises(ConfigError, match="the system refuses that many bytes"):
        GpuPool(spec_of("float32"), 2**52)
