"""Digests and the choice of blocks, against loops over tokens, heads and blocks in float64."""

import itertools
import math
import random

import pytest
import torch
from gpu_cases import BLOCK_SIZE, DEVICE, DTYPES, ON_GPU
from torch import Tensor

from streamkv.kernels import digests as digests_module
from streamkv.kernels import gpu_digest
from streamkv.kernels.digests import block_digests, block_weights
from streamkv.kernels.rope import RopeTables

pytestmark = pytest.mark.gpu if ON_GPU else []

LAYERS, KV_HEADS, GROUP, B, DIM = 3, 2, 2, 64, 16
INV_FREQ = 10000.0 ** -(torch.arange(8).double() / 8)
ROPE = RopeTables(INV_FREQ, 1000)
SCALES = [0.25, 0.5, 0.125]


def weights_of(queries: Tensor, digests: Tensor, distance: int, *cuts: int) -> Tensor:
    """`digests` [n, layers, heads, DIM] in pages that end at `cuts`."""
    cos, sin = ROPE.rows(torch.tensor(distance))
    units = digests.flatten(1, 2).transpose(0, 1)
    pages = [units[:, a:b] for a, b in itertools.pairwise([0, *cuts, len(digests)])]
    return block_weights(queries, pages, cos, sin, torch.tensor(SCALES))


def random_pool(num_blocks: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_blocks, LAYERS, 2, KV_HEADS, B, DIM, generator=generator)


def some_queries(count: int, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(LAYERS, count, KV_HEADS * GROUP, DIM, generator=generator)


def turned(q: Tensor, distance: int) -> Tensor:
    """A query [DIM] turned by a distance, pair by pair."""
    half = DIM // 2
    found = q.double().clone()
    for pair in range(half):
        angle = distance * float(INV_FREQ[pair])
        a, b = float(q[pair]), float(q[pair + half])
        found[pair] = a * math.cos(angle) - b * math.sin(angle)
        found[pair + half] = b * math.cos(angle) + a * math.sin(angle)
    return found


def expected_weights(queries: Tensor, pool: Tensor, ids: list[int], distance: int) -> Tensor:
    """By the mean score over all tokens of each block, which the digest stands for."""
    rows = []
    for layer in range(LAYERS):
        for head in range(KV_HEADS * GROUP):
            for query in queries[layer, :, head]:
                q = turned(query, distance)
                keys = pool[ids, layer, 0, head // GROUP].double()
                means = torch.stack([(block @ q * SCALES[layer]).mean() for block in keys])
                rows.append(means.softmax(0))
    return torch.stack(rows).mean(0)


@pytest.mark.parametrize("num_queries", [1, 5])
@pytest.mark.parametrize("distance", [0, 1, 700])
def test_a_blocks_weight_is_that_of_its_tokens_mean_score(num_queries: int, distance: int) -> None:
    pool, queries = random_pool(9), some_queries(num_queries)
    ids = random.Random(3).sample(range(9), 6)
    digests = block_digests(pool, torch.tensor(ids))
    found = weights_of(queries, digests, distance)
    expected = expected_weights(queries, pool, ids, distance)
    torch.testing.assert_close(found.double(), expected, atol=1e-6, rtol=1e-5)
    assert found.sum().item() == pytest.approx(1.0)


def test_digests_of_16_bits_are_made_and_read_in_32() -> None:
    pool = random_pool(4).to(torch.bfloat16)
    digests = block_digests(pool, torch.tensor([2]))
    assert digests.dtype == torch.float32 and digests.shape == (1, LAYERS, KV_HEADS, DIM)
    torch.testing.assert_close(digests[0], pool[2, :, 0].double().mean(-2).float())
    half = weights_of(some_queries(2), digests.half(), 100)
    assert half.dtype == torch.float32


def test_a_single_block_gets_all() -> None:
    digests = block_digests(random_pool(1), torch.tensor([0]))
    assert weights_of(some_queries(3), digests, 9).tolist() == [1.0]


@pytest.mark.parametrize("scratch_bytes", [0, 1000, 1 << 30])
def test_weights_depend_neither_on_pages_nor_on_the_room_for_scores(
    monkeypatch: pytest.MonkeyPatch, scratch_bytes: int
) -> None:
    digests, queries = block_digests(random_pool(9), torch.arange(9)), some_queries(4)
    expected = weights_of(queries, digests, 300)
    monkeypatch.setattr(digests_module, "SCRATCH_BYTES", scratch_bytes)
    torch.testing.assert_close(weights_of(queries, digests, 300, 1, 7), expected)


@pytest.mark.parametrize(("heads", "dim"), [(1, 16), (3, 80), (8, 128)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_kernel_makes_the_same_digests(heads: int, dim: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    pool = torch.randn(7, 2, 2, heads, BLOCK_SIZE, dim, generator=generator).to(dtype)
    pool[[1, 6]], pool[:, :, 1] = math.nan, math.nan
    ids = torch.tensor([5, 0, 3])
    found = gpu_digest.block_digests(pool.to(DEVICE), ids.to(DEVICE))
    torch.testing.assert_close(found.cpu(), block_digests(pool, ids), atol=1e-5, rtol=1e-5)
    assert gpu_digest.block_digests(pool.to(DEVICE), ids[:0].to(DEVICE)).shape == (0, 2, heads, dim)


def test_values_do_not_count() -> None:
    pool = random_pool(3)
    before = block_digests(pool, torch.arange(3))
    pool[:, :, 1] = math.nan
    assert torch.equal(block_digests(pool, torch.arange(3)), before)
