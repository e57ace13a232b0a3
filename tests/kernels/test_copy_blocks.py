"""Gathering and scattering whole blocks, and slices of one layer, between two pools."""

from typing import NamedTuple

import pytest
import torch
from gpu_cases import DEVICE, DTYPES, ON_GPU
from torch import Tensor

from streamkv.errors import ConfigError
from streamkv.kernels import batch_reference, gpu
from streamkv.kernels.batch_table import block_addresses

pytestmark = pytest.mark.gpu if ON_GPU else []

NUM_LAYERS = 3
BLOCK = (2, 2, 16, 16)


class Pools(NamedTuple):
    """A gpu pool, a cpu pool and a staging buffer of lone slices; no two elements are equal."""

    gpu: Tensor
    cpu: Tensor
    staging: Tensor

    def slices(self) -> list[Tensor]:
        return [pool.flatten(0, 1) for pool in self]


def pools_of(dtype: torch.dtype) -> Pools:
    shapes = [(n, layers, *BLOCK) for n, layers in ((6, NUM_LAYERS), (5, NUM_LAYERS), (4, 1))]
    generator = torch.Generator().manual_seed(1)
    pools = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
    if ON_GPU:
        return Pools(pools[0].cuda(), pools[1].pin_memory(), pools[2].cuda())
    return Pools(*pools)


def copied(pools: Pools, sources: list[int], targets: list[int], by_slice: bool) -> Pools:
    """By the kernel, ids counted through the pools; returns what the twin makes of a clone."""
    expected = Pools(*(pool.clone() for pool in pools))
    units = expected.slices() if by_slice else list(expected)[:2]
    every = [unit for pool in units for unit in pool]
    batch_reference.copy_blocks([every[i] for i in sources], [every[i] for i in targets])
    named = pools.slices() if by_slice else list(pools)[:2]
    addresses = [block_addresses(torch.tensor(ids), named).to(DEVICE) for ids in (sources, targets)]
    gpu.copy_blocks(*addresses, every[0].numel() * every[0].element_size())
    if ON_GPU:
        torch.cuda.synchronize()
    return expected


def assert_equal(found: Pools, expected: Pools) -> None:
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("sources", "targets"),
    [
        pytest.param([4, 0, 2], [6, 10, 8], id="demote"),
        pytest.param([10, 7, 6, 9], [1, 5, 0, 3], id="promote"),
        pytest.param([3, 8, 3], [9, 0, 10], id="both-ways-one-source-twice"),
    ],
)
def test_whole_blocks_between_two_pools(
    sources: list[int], targets: list[int], dtype: torch.dtype
) -> None:
    pools = pools_of(dtype)
    before = Pools(*(pool.clone() for pool in pools))
    assert_equal(pools, copied(pools, sources, targets, by_slice=False))
    blocks, old = [*pools.gpu.cpu(), *pools.cpu], [*before.gpu.cpu(), *before.cpu]
    for source, target in zip(sources, targets, strict=True):
        assert torch.equal(blocks[target], old[source])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_slices_of_a_layer_gather_into_a_staging_buffer_and_scatter_back(
    dtype: torch.dtype,
) -> None:
    pools = pools_of(dtype)
    before = Pools(*(pool.clone() for pool in pools))
    first_staged = (len(pools.gpu) + len(pools.cpu)) * NUM_LAYERS
    # (block of both pools, layer) of each slot of the staging buffer.
    wanted = [(8, 1), (0, 1), (10, 2), (4, 0)]
    sources = [block * NUM_LAYERS + layer for block, layer in wanted]
    staged = [first_staged + slot for slot in range(4)]
    assert_equal(pools, copied(pools, sources, staged, by_slice=True))
    blocks = torch.cat([before.gpu.cpu(), before.cpu])
    for slot, (block, layer) in enumerate(wanted):
        assert torch.equal(pools.staging[slot, 0].cpu(), blocks[block, layer])

    targets = [2 * NUM_LAYERS + 2, 7 * NUM_LAYERS, 7 * NUM_LAYERS + 1, 5 * NUM_LAYERS]
    assert_equal(pools, copied(pools, staged, targets, by_slice=True))
    assert torch.equal(pools.gpu[2, 2].cpu(), blocks[8, 1])
    assert torch.equal(pools.gpu[2, :2].cpu(), before.gpu[2, :2].cpu())
    assert torch.equal(pools.cpu[1, 1], blocks[10, 2])


@pytest.mark.parametrize("num_bytes", [0, 16])
def test_nothing_to_copy(num_bytes: int) -> None:
    nothing = torch.zeros(0, dtype=torch.int64, device=DEVICE)
    gpu.copy_blocks(nothing, nothing, num_bytes)


def test_what_the_kernel_is_not_made_for_is_refused() -> None:
    places = torch.zeros(2, dtype=torch.int64)
    with pytest.raises(ConfigError, match="multiple of 16"):
        gpu.copy_blocks(places, places, 24)
    with pytest.raises(ConfigError, match="one target for each source"):
        gpu.copy_blocks(places, places[:1], 16)
    with pytest.raises(ConfigError, match="Pass int64"):
        gpu.copy_blocks(places, places.int(), 16)
