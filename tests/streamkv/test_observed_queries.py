"""The newest queries, however the input was cut."""

import random

import pytest
import torch
from torch import Tensor

from streamkv.observed_queries import NUM_OBSERVED, ObservedQueries
from streamkv.retrieval_heads import Head, RetrievalHeads

LAYERS, HEADS, DIM = 4, 5, 4
CHOOSING = RetrievalHeads((Head(1, 0), Head(1, 4), Head(3, 2)), group=5)


def query(layer: int, index: int) -> Tensor:
    """Of all heads of a layer."""
    heads = torch.arange(HEADS).float()[:, None].expand(HEADS, DIM)
    return 1000.0 * layer + index + heads / 10


def fed(cuts: list[int]) -> ObservedQueries:
    """Steps of these lengths, one after another."""
    made, first = ObservedQueries(CHOOSING, DIM), 0
    for length in cuts:
        for layer in range(LAYERS):
            rows = torch.stack([query(layer, first + i) for i in range(length)])
            made.observe(layer, rows, first)
        first += length
    return made


def expected(end: int) -> Tensor:
    first = max(0, end - NUM_OBSERVED)
    return torch.stack(
        [
            torch.stack([query(layer, i)[head] for i in range(first, end)])
            for layer, head in CHOOSING.heads
        ]
    )


@pytest.mark.parametrize("total", [1, 15, 16, 17, 40, 100])
def test_the_last_are_kept_however_the_input_was_cut(total: int) -> None:
    rng = random.Random(total)
    for cuts in ([total], [1] * total, [7] * (total // 7) + [total % 7 or 7]):
        found = fed(cuts).before(sum(cuts))
        assert found is not None and torch.equal(found, expected(sum(cuts)))
    left, cuts = total, []
    while left:
        cuts.append(rng.randint(1, left))
        left -= cuts[-1]
    found = fed(cuts).before(total)
    assert found is not None and torch.equal(found, expected(total))


def test_fewer_are_given_where_older_ones_are_not_there() -> None:
    made = fed([20])
    found = made.before(18)
    assert found is not None and torch.equal(found, expected(20)[:, :14])
    assert made.before(4) is None and made.before(21) is None
    assert ObservedQueries(CHOOSING, DIM).before(0) is None


def test_a_token_computed_again_replaces_itself() -> None:
    made = fed([30])
    for layer in range(LAYERS):
        made.observe(layer, -query(layer, 29)[None], 29)
    found = made.before(30)
    assert found is not None and torch.equal(found[:, -1], -expected(30)[:, -1])
    assert torch.equal(found[:, :-1], expected(30)[:, :-1])


def test_a_stream_that_goes_on_elsewhere_has_only_what_follows() -> None:
    """After a jump in token indices nothing before it counts."""
    made = fed([10])
    for layer in range(LAYERS):
        made.observe(layer, torch.stack([query(layer, 500), query(layer, 501)]), 500)
    found = made.before(502)
    assert found is not None and found.shape[1] == 2
