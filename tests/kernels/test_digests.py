"""Digests and the choice of blocks, against loops over tokens, heads and blocks in float64."""

import math
import random

import pytest
import torch
from torch import Tensor

from streamkv.kernels import digests as digests_module
from streamkv.kernels.digests import block_digests, block_weights
from streamkv.kernels.rope import RopeTables

LAYERS, KV_HEADS, GROUP, B, DIM = 3, 2, 2, 64, 16
INV_FREQ = 10000.0 ** -(torch.arange(8).double() / 8)
ROPE = RopeTables(INV_FREQ, 1000)
KV = torch.tensor([[0, 1], [2, 0], [2, 1]])
ROWS = [0, 1, 1, 2]
"""Two heads read the keys of one KV head."""
SCALES = [0.25, 0.5, 0.5, 0.125]


def random_pool(num_blocks: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_blocks, LAYERS, 2, KV_HEADS, B, DIM, generator=generator)


def some_queries(count: int, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return 3 * torch.randn(len(ROWS), count, DIM, generator=generator)


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


def expected_weights(
    queries: Tensor, pool: Tensor, ids: list[int], distance: int, num_sinks: int = 0
) -> Tensor:
    """Of one softmax over all tokens of all blocks, the part of each block but sink tokens."""
    found = []
    for head, row in enumerate(ROWS):
        layer, kv_head = KV[row].tolist()
        for query in queries[head]:
            q = turned(query, distance)
            keys = pool[ids, layer, 0, kv_head].double()
            scores = torch.cat([block @ q * SCALES[head] for block in keys])
            parts = scores.softmax(0)
            parts[:num_sinks] = 0
            found.append(parts.view(len(ids), B).sum(1))
    return torch.stack(found).mean(0)


def weights_of(
    queries: Tensor, digests: Tensor, distance: int, *cuts: int, num_sinks: int = 0
) -> Tensor:
    """With the digests in pages that are cut before these blocks."""
    pages, angles = torch.tensor_split(digests, cuts, 1), ROPE.rows(torch.tensor(distance))
    return block_weights(queries, pages, ROWS, *angles, SCALES, num_sinks)


@pytest.mark.parametrize("num_queries", [1, 5])
@pytest.mark.parametrize("distance", [0, 1, 700])
@pytest.mark.parametrize("scratch_bytes", [0, 100_000, 1 << 30])
def test_a_blocks_weight_is_what_its_tokens_would_get(
    num_queries: int, distance: int, scratch_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(digests_module, "SCRATCH_BYTES", scratch_bytes)
    pool, queries = random_pool(9), some_queries(num_queries)
    ids = random.Random(3).sample(range(9), 6)
    digests = block_digests(pool, torch.tensor(ids), KV)
    found = weights_of(queries, digests, distance, 1, 4)
    expected = expected_weights(queries, pool, ids, distance)
    torch.testing.assert_close(found.double(), expected, atol=1e-6, rtol=1e-5)
    assert found.sum().item() == pytest.approx(1.0)


@pytest.mark.parametrize("num_sinks", [1, 4, 63])
@pytest.mark.parametrize("scratch_bytes", [0, 1 << 30])
def test_what_sink_tokens_draw_counts_for_no_block(
    num_sinks: int, scratch_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(digests_module, "SCRATCH_BYTES", scratch_bytes)
    pool, queries, ids = random_pool(9), some_queries(5), [7, 0, 3]
    # The sink tokens draw most of all attention.
    pool[7, :, 0, :, :num_sinks] *= 4
    digests = block_digests(pool, torch.tensor(ids), KV)
    found = weights_of(queries, digests, 700, 1, num_sinks=num_sinks)
    expected = expected_weights(queries, pool, ids, 700, num_sinks)
    assert expected.sum() < 0.9
    torch.testing.assert_close(found.double(), expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("scratch_bytes", [0, 60_000, 1 << 30])
def test_keys_that_are_fetched_give_the_same_weights_to_the_bit_and_each_comes_once(
    scratch_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All pages but the second are away; nothing but what was fetched is read of them."""
    monkeypatch.setattr(digests_module, "SCRATCH_BYTES", scratch_bytes)
    pool, queries = random_pool(9), some_queries(5)
    digests, angles = block_digests(pool, torch.arange(9), KV), ROPE.rows(torch.tensor(700))
    there = [page.clone() for page in torch.tensor_split(digests, [1, 4, 8], 1)]
    pages = [torch.full_like(page, math.nan) for page in there]
    pages[1] = there[1]
    moved: list[tuple[int, int]] = []

    def fetch(keys: Tensor) -> Tensor:
        # Which part of which page it is, by its address.
        for number, (away, page) in enumerate(zip(pages, there, strict=True)):
            start = (keys.data_ptr() - away.data_ptr()) // keys.element_size()
            if 0 <= start < away.numel():
                moved.extend((number, at) for at in range(start, start + keys.numel(), DIM * B))
                return page.flatten()[start : start + keys.numel()].view(keys.shape)
        raise AssertionError("none of these pages")

    found = block_weights(queries, pages, ROWS, *angles, SCALES, 4, fetch)
    plain = block_weights(queries, there, ROWS, *angles, SCALES, 4)
    assert torch.equal(found, plain)
    expected = expected_weights(queries, pool, list(range(9)), 700, 4)
    torch.testing.assert_close(found.double(), expected, atol=1e-6, rtol=1e-5)
    assert len(moved) == len(set(moved)) == 9 * len(set(ROWS))


def test_a_digest_is_the_keys_of_its_heads_as_they_are_stored() -> None:
    pool = random_pool(4).to(torch.bfloat16)
    digests = block_digests(pool, torch.tensor([2, 0]), KV)
    assert digests.dtype == torch.bfloat16 and digests.shape == (len(KV), 2, B, DIM)
    for row, (layer, head) in enumerate(KV.tolist()):
        assert torch.equal(digests[row, 0], pool[2, layer, 0, head])
        assert torch.equal(digests[row, 1], pool[0, layer, 0, head])
    assert weights_of(some_queries(2), digests, 100).dtype == torch.float32


def test_a_single_block_gets_all() -> None:
    digests = block_digests(random_pool(1), torch.tensor([0]), KV)
    found = weights_of(some_queries(3), digests, 9)
    assert found.tolist() == pytest.approx([1.0])


def test_values_and_other_heads_do_not_count() -> None:
    pool = random_pool(3)
    before = block_digests(pool, torch.arange(3), KV)
    pool[:, :, 1] = math.nan
    pool[:, 1] = math.nan
    pool[:, 0, :, 0] = math.nan
    assert torch.equal(block_digests(pool, torch.arange(3), KV), before)
