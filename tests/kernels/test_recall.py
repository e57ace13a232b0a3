"""Old blocks that each layer recalls, attended by the decode kernel and by its twin."""

from dataclasses import replace

import pytest
import torch
from gpu_cases import BLOCK_SIZE, DEVICE, DTYPES, LAYER, NUM_LAYERS, ON_GPU, TOLERANCES, Stream
from recall_cases import assert_near, build
from recall_oracle import Policy, Recalling

from streamkv.errors import ConfigError
from streamkv.kernels import gpu
from streamkv.kernels.recall_table import recall_table, slice_addresses

pytestmark = pytest.mark.gpu if ON_GPU else []

B = BLOCK_SIZE
LONG = Recalling(Stream(7 * B + 5, window_size=2 * B), ((0, 2, 5), (1, 3, 4, 5)))
SHORT = Recalling(Stream(3 * B, window_size=B), ((1,), ()))
NEW = Recalling(Stream(3, window_size=B), ((), ()))
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
        Recalling(Stream(5 * B + residue, window_size=2 * B + 3), ((1, 2, 3, 4), (2, 3)))
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
        Recalling(stream, ((2, 3), (0, 1, 2, 3, 4))),
        Recalling(replace(stream, num_tokens=num_queries), ((), ())),
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
        Recalling(Stream(n * B + 7, num_queries, window_size=B + 9), ((1, 3), (0, 2, 4)))
        for n in (6, 11)
    )
    build(sequences, policy).check()


@pytest.mark.parametrize("splits", [1, 2, 5, 16])
def test_splits_that_hold_shared_or_recalled_entries_or_both(splits: int) -> None:
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
    build((Recalling(stream, ((0, 1), (0,))),)).check()


@pytest.mark.parametrize("num_queries", [1, 3])
def test_a_window_and_every_old_block_are_the_whole_stream(num_queries: int) -> None:
    stream = Stream(6 * B + 3, num_queries, window_size=B + 5, num_sinks=2)
    built = build((Recalling(stream, ((0, 1, 2, 3, 4, 5), (0, 1, 2, 3, 4, 5))),))
    whole = build((Recalling(replace(stream, window_size=7 * B), ((), ())),))
    for layer in range(NUM_LAYERS):
        expected = whole.case.expected(layer)
        # The capped sinks are the only tokens that stand elsewhere.
        built.table.caps.fill_(1 << 62)
        assert_near(built.decode(layer), expected, TOLERANCES[torch.float32])
        assert_near(built.twin(layer), expected, TOLERANCES[torch.float32])


@pytest.mark.parametrize("splits", [1, 3])
def test_recall_of_nothing_changes_no_bit(splits: int) -> None:
    built = build((Recalling(LONG.stream, ((), ())), Recalling(SHORT.stream, ((), ()))))
    for one, other in zip(
        built.decode(LAYER, splits), built.decode(LAYER, splits, False), strict=True
    ):
        assert torch.equal(one, other)


@pytest.mark.parametrize("splits", [1, 3])
def test_recalled_entries_alone(splits: int) -> None:
    built = build((LONG, NEW))
    built.table.num_entries.zero_()
    built.table.num_sink_entries.zero_()
    out, lse = built.decode(LAYER, splits)
    assert_near((out, lse), built.twin(LAYER), TOLERANCES[torch.float32])
    assert out[0].any() and lse[0].isfinite().all()
    assert not out[1].any() and lse[1].eq(-torch.inf).all()


def test_addresses_name_the_first_byte_of_a_slice() -> None:
    pool = torch.zeros(4, 3, 2, 1, 16, 8)
    staging = torch.zeros(5, 1, 2, 1, 16, 8)
    ids = torch.tensor([[0, 7, 11], [12, 13, 16]])
    expected = [pool[0, 0], pool[2, 1], pool[3, 2], staging[0], staging[1], staging[4]]
    found = slice_addresses(ids, [pool, staging]).flatten().tolist()
    assert found == [tensor.data_ptr() for tensor in expected]


def test_no_sequences() -> None:
    built = build((NEW,))
    recall = recall_table([], [*built.pools, built.staging], 3, DEVICE)
    assert recall.addresses.shape == (0, 0, 3)
    layers = type(recall)(*(getattr(built.recall, name)[:0] for name in type(recall).__slots__))
    table = type(built.table)(
        *(getattr(built.table, name)[:0] for name in type(built.table).__slots__)
    )
    rope, starts = built.case.heads.rope(), built.query_starts[:0]
    seen = gpu.plan_decode(table, starts, 1)
    planned = gpu.plan_recall(layers, table, starts, 1)
    q = built.case.q[:0].to(DEVICE)
    out, lse = gpu.decode(
        q, built.pools[0], LAYER, table, seen, rope, built.softmax,
        recall=layers, recall_seen=planned,
    )  # fmt: skip
    assert out.shape == (0, 4, 16) and lse.shape == (0, 4)


def test_what_does_not_fit_is_refused() -> None:
    built, other = build((LONG, NEW)), build((LONG,))
    table, starts, rope = built.table, built.query_starts, built.case.heads.rope()
    seen, q = gpu.plan_decode(table, starts, 1), built.case.q.to(DEVICE)
    planned = gpu.plan_recall(built.recall, table, starts, 1)
    one_layer = type(built.recall)(
        *(getattr(built.recall, name)[:, :1] for name in type(built.recall).__slots__)
    )
    refused = [
        (built.recall, None, "plan_recall"),
        (built.recall, planned[:1], "recall_seen"),
        (built.recall, planned.long(), "int32"),
        (other.recall, planned, r"Pass .2, 2, "),
        (one_layer, planned, r"Pass .2, 2, "),
    ]
    for recall, plan, remedy in refused:
        with pytest.raises(ConfigError, match=remedy):
            gpu.decode(
                q, built.pools[0], LAYER, table, seen, rope, built.softmax,
                recall=recall, recall_seen=plan,
            )  # fmt: skip
    with pytest.raises(ConfigError, match=r"Pass .2, 2, "):
        gpu.plan_recall(other.recall, table, starts, 1)
    with pytest.raises(ConfigError, match="1 to 8"):
        gpu.plan_recall(built.recall, table, starts, 9)
    with pytest.raises(ConfigError, match="seen"):
        gpu.plan_recall(built.recall, table, starts, 1, planned[:, :1])
