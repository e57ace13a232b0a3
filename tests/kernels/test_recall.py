"""Old blocks that sequences recall, attended by the kernels of a GPU and by their twin."""

from dataclasses import replace

import pytest
import torch
from gpu_cases import BLOCK_SIZE, DTYPES, NUM_LAYERS, ON_GPU, TOLERANCES, Stream
from recall_cases import assert_near, build
from recall_oracle import Policy, Recalling

pytestmark = pytest.mark.gpu if ON_GPU else []

B = BLOCK_SIZE
LONG = Recalling(Stream(7 * B + 5, window_size=2 * B), (0, 2, 5))
SHORT = Recalling(Stream(3 * B, window_size=B), (1,))
NEW = Recalling(Stream(3, window_size=B), ())
HEADS = [
    pytest.param(1, 1, 16, 16, id="one-head"),
    pytest.param(3, 3, 64, 64, id="group-3"),
    pytest.param(1, 16, 32, 32, id="group-16"),
    pytest.param(2, 7, 80, 80, id="head-80"),
    pytest.param(1, 2, 96, 48, id="partial-rotary"),
    pytest.param(1, 4, 128, 128, id="head-128"),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("num_kv_heads", "group", "head_dim", "rotary_dim"), HEADS)
def test_every_kind_of_head(
    num_kv_heads: int, group: int, head_dim: int, rotary_dim: int, dtype: torch.dtype
) -> None:
    build(
        (LONG, SHORT, NEW),
        num_kv_heads=num_kv_heads,
        group=group,
        head_dim=head_dim,
        rotary_dim=rotary_dim,
        dtype=dtype,
    ).check()


def test_every_residue_of_the_window_edge_in_a_recalled_block() -> None:
    """Of the blocks recalled one is old, one is cut by the edge, and one is in the window still."""
    sequences = tuple(
        Recalling(Stream(5 * B + residue, window_size=2 * B + 3), (1, 2, 3, 4))
        for residue in range(1, B + 1)
    )
    build(sequences, num_kv_heads=1).check(1, 3)


@pytest.mark.parametrize("num_queries", [2, 3, 8])
@pytest.mark.parametrize("edge", [-1, 0, 1, 5])
def test_the_edge_is_each_querys_own(num_queries: int, edge: int) -> None:
    """The first query's window begins around the start of block 3; the others' further on."""
    window = 2 * B
    tokens = 3 * B + edge + window - 1 + num_queries
    stream = Stream(tokens, num_queries, window_size=window)
    sequences = (
        Recalling(stream, (0, 1, 2, 3, 4)),
        Recalling(replace(stream, num_tokens=num_queries), ()),
    )
    build(sequences).check(1, 3)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_several_queries_of_several_heads(dtype: torch.dtype) -> None:
    sequences = tuple(
        Recalling(replace(stream, num_queries=3), blocks) for stream, blocks in (LONG, SHORT, NEW)
    )
    build(sequences, group=7, head_dim=80, rotary_dim=32, dtype=dtype).check(4)


@pytest.mark.parametrize("policy", ["absolute", "far", "cache"])
@pytest.mark.parametrize("num_queries", [1, 4])
def test_position_policies_are_caps(policy: Policy, num_queries: int) -> None:
    sequences = tuple(
        Recalling(Stream(n * B + 7, num_queries, window_size=B + 9), (1, 3, 4)) for n in (6, 11)
    )
    build(sequences, policy).check()


@pytest.mark.parametrize("splits", [1, 2, 5, 16])
def test_splits_that_hold_entries_of_one_kind_or_of_several(splits: int) -> None:
    build((LONG, SHORT, NEW)).check(splits)


@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("num_queries", [1, 2])
def test_soft_cap_and_learned_sink_logits(softcap: float | None, num_queries: int) -> None:
    sequences = tuple(
        Recalling(replace(stream, num_queries=num_queries), blocks)
        for stream, blocks in (LONG, NEW)
    )
    build(sequences, softcap=softcap, has_sink_logits=True).check(1, 4)


@pytest.mark.parametrize("num_sinks", [0, 1, B - 1, B, B + 3])
def test_sink_tokens_of_a_recalled_block_count_once(num_sinks: int) -> None:
    stream = Stream(5 * B + 2, window_size=B, num_sinks=num_sinks)
    build((Recalling(stream, (0, 1)),)).check()


@pytest.mark.parametrize("num_queries", [1, 3])
def test_a_window_and_every_old_block_are_the_whole_stream(num_queries: int) -> None:
    stream = Stream(6 * B + 3, num_queries, window_size=B + 5, num_sinks=2)
    built = build((Recalling(stream, (0, 1, 2, 3, 4, 5)),))
    whole = build((Recalling(replace(stream, window_size=7 * B), ()),))
    for layer in range(NUM_LAYERS):
        expected = whole.case.expected(layer)
        # The capped sinks are the only tokens that stand elsewhere.
        built.table.caps.fill_(1 << 62)
        assert_near(built.decode(layer), expected, TOLERANCES[torch.float32])
        assert_near(built.twin(layer), expected, TOLERANCES[torch.float32])
