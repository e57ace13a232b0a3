"""The newest queries, however the input was cut."""

import random

import pytest
import torch
from torch import Tensor

from streamkv.observed_queries import (
    NUM_OBSERVED,
    ObservedQueries,
    layer_stride,
)

LAYERS, HEADS, DIM = 3, 2, 4


def query(layer: int, index: int) -> Tensor:
    return torch.full((HEADS, DIM), 100.0 * layer + index)


def keep(made: ObservedQueries, rows: list[list[Tensor]], first_index: int) -> None:
    """A step that computed `rows`, by layer."""
    places = made.take(first_index, len(rows[0]))
    for layer, queries in enumerate(rows):
        made.keep(layer, torch.stack(queries), places)


def fed(cuts: list[int]) -> ObservedQueries:
    """Steps of these lengths, one after another."""
    made, first = ObservedQueries(LAYERS, HEADS, DIM), 0
    for length in cuts:
        keep(
            made,
            [[query(layer, first + i) for i in range(length)] for layer in range(LAYERS)],
            first,
        )
        first += length
    return made


def expected(end: int) -> Tensor:
    first = max(0, end - NUM_OBSERVED)
    return torch.stack(
        [torch.stack([query(layer, i) for i in range(first, end)]) for layer in range(LAYERS)]
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
    found = made.before(17)
    assert found is not None and torch.equal(found, expected(20)[:, :13])
    assert made.before(4) is None and made.before(21) is None
    assert ObservedQueries(LAYERS, HEADS, DIM).before(0) is None


def test_a_token_computed_again_replaces_itself() -> None:
    made = fed([30])
    keep(made, [[-query(layer, 29)] for layer in range(LAYERS)], 29)
    found = made.before(30)
    assert found is not None and torch.equal(found[:, -1], -expected(30)[:, -1])
    assert torch.equal(found[:, :-1], expected(30)[:, :-1])


def test_a_stream_that_goes_on_elsewhere_has_only_what_follows() -> None:
    """After a jump in token indices nothing before it counts."""
    made = fed([10])
    keep(made, [[query(layer, 500), query(layer, 501)] for layer in range(LAYERS)], 500)
    found = made.before(502)
    assert found is not None and found.shape[1] == 2


def test_tokens_computed_ahead_push_none_out_that_chooses() -> None:
    """What choices see must not depend on how far a device has run ahead of its callers."""
    made, ahead = fed([40]), fed([40])
    keep(ahead, [[query(layer, 40), query(layer, 41)] for layer in range(LAYERS)], 40)
    ours, theirs = made.before(40), ahead.before(40)
    assert ours is not None and theirs is not None and torch.equal(ours, theirs)
    assert ours.shape[1] == NUM_OBSERVED


def test_addresses_are_those_of_the_places_and_older_tokens_have_none() -> None:
    made = ObservedQueries(LAYERS, HEADS, DIM, dtype=torch.float16)
    count = NUM_OBSERVED + 5
    addresses = made.addresses(7, count)
    assert addresses[:5] == [0] * 5
    row_bytes, rows = HEADS * DIM * 2, made._rows
    for layer in range(LAYERS):
        for token, address in enumerate(addresses[5:], 7 + 5):
            offset = address - rows.data_ptr() + layer * layer_stride(HEADS, DIM) * 2
            rows.view(-1, HEADS, DIM)[offset // row_bytes] = query(layer, token)
    found = made.before(7 + count)
    assert found is not None and torch.equal(found.float(), expected(7 + count))


def test_a_fork_keeps_what_its_origin_overwrites() -> None:
    made = fed([30])
    fork = made.copy()
    keep(made, [[-query(layer, 29)] for layer in range(LAYERS)], 29)
    made.clear()
    assert made.before(30) is None
    found = fork.before(30)
    assert found is not None and torch.equal(found, expected(30))
