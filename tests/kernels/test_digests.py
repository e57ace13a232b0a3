"""Digests and the choice of blocks, against loops over tokens, heads and blocks in float64."""

import math
import random

import pytest
import torch
from torch import Tensor

from streamkv.kernels.digests import block_digests, block_weights
from streamkv.kernels.rope import RopeTables

LAYERS, KV_HEADS, GROUP, B, DIM = 3, 2, 2, 64, 16
INV_FREQ = 10000.0 ** -(torch.arange(8).double() / 8)
ROPE = RopeTables(INV_FREQ, 1000)
SCALES = [0.25, 0.5, 0.125]


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
    found = block_weights(queries, digests, distance, ROPE, SCALES)
    expected = expected_weights(queries, pool, ids, distance)
    torch.testing.assert_close(found.double(), expected, atol=1e-6, rtol=1e-5)
    assert found.sum().item() == pytest.approx(1.0)


def test_digests_of_16_bits_are_made_and_read_in_32() -> None:
    pool = random_pool(4).to(torch.bfloat16)
    digests = block_digests(pool, torch.tensor([2]))
    assert digests.dtype == torch.float32 and digests.shape == (1, LAYERS, KV_HEADS, DIM)
    torch.testing.assert_close(digests[0], pool[2, :, 0].double().mean(-2).float())
    half = block_weights(some_queries(2), digests.half(), 100, ROPE, SCALES)
    assert half.dtype == torch.float32


def test_a_single_block_gets_all() -> None:
    digests = block_digests(random_pool(1), torch.tensor([0]))
    assert block_weights(some_queries(3), digests, 9, ROPE, SCALES).tolist() == [1.0]


def test_values_do_not_count() -> None:
    pool = random_pool(3)
    before = block_digests(pool, torch.arange(3))
    pool[:, :, 1] = math.nan
    assert torch.equal(block_digests(pool, torch.arange(3)), before)
