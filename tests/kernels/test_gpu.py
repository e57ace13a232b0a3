"""The Triton kernels against their twins: on a GPU in full, else small in Triton's interpreter."""

from dataclasses import replace

import pytest
import torch
from gpu_cases import BLOCK_SIZE, DEVICE, DTYPES, LAYER, ON_GPU, Batch, Built, Stream, build

from streamkv.errors import ConfigError
from streamkv.kernels import gpu, reference
from streamkv.kernels.gpu import Shape, Softmax

pytestmark = pytest.mark.gpu if ON_GPU else []

B = BLOCK_SIZE
HEADS = [
    pytest.param(1, 1, 16, 16, id="one-head"),
    pytest.param(3, 3, 64, 64, id="smollm2"),
    pytest.param(2, 7, 64, 64, id="group-7"),
    pytest.param(1, 16, 32, 32, id="group-16"),
    pytest.param(2, 2, 80, 80, id="head-80"),
    pytest.param(1, 2, 96, 48, id="partial-rotary"),
    pytest.param(1, 4, 128, 128, id="head-128"),
    pytest.param(1, 2, 256, 64, id="head-256"),
]


def decode(built: Built, splits: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    batch, scratch = built.batch, None
    if splits is not None:
        shape = Shape.of(built.pools[0], batch.num_q_heads, batch.rope())
        per_sequence = len(built.q) // len(batch.streams)
        scratch = gpu.decode_scratch(shape, len(batch.streams), per_sequence, splits, DEVICE)
        scratch.out.fill_(float("nan"))
        scratch.lse.fill_(float("nan"))
    softmax = Softmax(batch.scale, batch.softcap, built.sink_logits)
    rope, table = batch.rope(), built.table
    seen = gpu.plan_decode(table, built.query_starts, len(built.q) // len(batch.streams))
    return gpu.decode(built.q, built.pools[0], LAYER, table, seen, rope, softmax, scratch)


def prefill(built: Built, parts: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    batch, table = built.batch, built.table
    shape = Shape.of(built.pools[0], batch.num_q_heads, batch.rope())
    host = type(table)(*(getattr(table, name).cpu() for name in type(table).__slots__))
    rows, starts = gpu.prefill_launch(shape).rows, built.query_starts.cpu()
    tiles = gpu.prefill_tiles(host, starts, built.num_queries, shape, rows, parts)
    scratch = None
    if parts > 1:
        scratch = gpu.prefill_scratch(shape, len(built.q), parts, DEVICE)
        scratch.out.fill_(float("nan"))
        scratch.lse.fill_(float("nan"))
    softmax = Softmax(batch.scale, batch.softcap, built.sink_logits)
    return gpu.prefill(
        built.q,
        built.pools[0],
        LAYER,
        table,
        built.query_starts,
        tiles.to(DEVICE),
        batch.rope(),
        softmax,
        scratch=scratch,
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("num_kv_heads", "group", "head_dim", "rotary_dim"), HEADS)
def test_decode_of_every_kind_of_head(
    num_kv_heads: int, group: int, head_dim: int, rotary_dim: int, dtype: torch.dtype
) -> None:
    streams = (Stream(3 * B + 5, window_size=2 * B), Stream(B, window_size=B), Stream(1))
    built = build(Batch(streams, num_kv_heads, group, head_dim, rotary_dim, dtype))
    built.check(decode(built))


@pytest.mark.parametrize("num_queries", [2, 3, 8])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_several_queries_of_each_sequence(num_queries: int, dtype: torch.dtype) -> None:
    streams = tuple(
        Stream(tokens, num_queries, window_size=B + 3) for tokens in (num_queries, B + 4, 4 * B + 1)
    )
    built = build(Batch(streams, dtype=dtype))
    built.check(decode(built, splits=3))
    built.check(decode(built, splits=1))


@pytest.mark.parametrize("edge", [-1, 0, 1])
@pytest.mark.parametrize("splits", [1, 4, 9])
def test_lengths_around_every_edge(edge: int, splits: int) -> None:
    window = 2 * B + 5
    lengths = [B + edge, 2 * B + edge, window + edge, window + 4 + edge, 5 * B + edge]
    built = build(Batch(tuple(Stream(n, window_size=window) for n in lengths)))
    built.check(decode(built, splits))


@pytest.mark.parametrize("num_sinks", [0, 1, B - 1, B, B + 1, 2 * B + 3])
def test_sinks_of_any_number(num_sinks: int) -> None:
    streams = tuple(Stream(n, window_size=B, num_sinks=num_sinks) for n in (5, 4 * B + 2))
    built = build(Batch(streams))
    built.check(decode(built))
    long = tuple(replace(stream, num_queries=5) for stream in streams)
    built = build(Batch(long))
    built.check(prefill(built))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_blocks_of_two_pools_in_one_launch(dtype: torch.dtype) -> None:
    streams = (Stream(6 * B + 3, window_size=6 * B), Stream(4 * B + 1, window_size=3 * B))
    built = build(Batch(streams, dtype=dtype, pinned=True))
    assert len(built.pools) == 2
    built.check(decode(built))
    long = tuple(replace(stream, num_queries=B + 1) for stream in streams)
    built = build(Batch(long, dtype=dtype, pinned=True))
    built.check(prefill(built))


@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("has_sink_logits", [False, True])
def test_soft_cap_and_learned_sink_logits(softcap: float | None, has_sink_logits: bool) -> None:
    streams = (Stream(2 * B + 3, window_size=B), Stream(7), Stream(1))
    batch = Batch(streams, softcap=softcap, has_sink_logits=has_sink_logits)
    built = build(batch)
    built.check(decode(built, splits=4))
    built.check(decode(built, splits=1))
    built = build(replace(batch, streams=(Stream(2 * B + 3, B, window_size=B), Stream(9, 9))))
    built.check(prefill(built))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("num_kv_heads", "group", "head_dim", "rotary_dim"), HEADS)
def test_prefill_of_every_kind_of_head(
    num_kv_heads: int, group: int, head_dim: int, rotary_dim: int, dtype: torch.dtype
) -> None:
    streams = (Stream(3 * B, B + 9, window_size=B + 2), Stream(7, 7), Stream(B + 1, 1))
    built = build(Batch(streams, num_kv_heads, group, head_dim, rotary_dim, dtype))
    built.check(prefill(built))


@pytest.mark.parametrize("parts", [2, 3, 7])
@pytest.mark.parametrize("has_sink_logits", [False, True])
@pytest.mark.parametrize("num_sinks", [0, 4, 2 * B + 3])
def test_prefill_in_parts(parts: int, has_sink_logits: bool, num_sinks: int) -> None:
    """Programs share the entries of a tile; some get none."""
    streams = (
        Stream(5 * B, B + 9, window_size=3 * B + 2, num_sinks=num_sinks),
        Stream(7, 7, num_sinks=num_sinks),
        Stream(B + 1, 1, num_sinks=num_sinks),
    )
    built = build(Batch(streams, has_sink_logits=has_sink_logits))
    built.check(prefill(built, parts))


@pytest.mark.parametrize("window_size", [1, B - 1, B, B + 1, 3 * B])
@pytest.mark.parametrize("num_tokens", [2, B, 4 * B + 3])
def test_prefill_from_the_first_token_on(num_tokens: int, window_size: int) -> None:
    """The cap of the sinks begins in mid-stream, and in mid-tile."""
    built = build(Batch((Stream(num_tokens, num_tokens, window_size),)))
    built.check(prefill(built))


def test_a_query_that_sees_nothing_gets_zeros_and_minus_infinity() -> None:
    built = build(Batch((Stream(5), Stream(3))))
    built.table.num_entries[0] = 0
    built.table.num_sink_entries[0] = 0
    for splits in (1, 2):
        out, lse = decode(built, splits)
        assert not out[0].any() and lse[0].eq(-torch.inf).all()
        assert out[1].isfinite().all() and lse[1].isfinite().all()


def test_no_sequences() -> None:
    built = build(Batch((Stream(5),)))
    table = type(built.table)(
        *(getattr(built.table, name)[:0] for name in type(built.table).__slots__)
    )
    rope, softmax = built.batch.rope(), Softmax(0.25)
    seen = gpu.plan_decode(table, built.query_starts[:0], 1)
    out, lse = gpu.decode(built.q[:0], built.pools[0], LAYER, table, seen, rope, softmax)
    assert out.shape == (0, 4, 16) and lse.shape == (0, 4)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rotary_dim", [16, 8])
def test_write_equals_reference(dtype: torch.dtype, rotary_dim: int) -> None:
    rope = Batch((Stream(1),), rotary_dim=rotary_dim).rope()
    pool = torch.full((5, 2, 2, 3, B, 16), torch.nan, dtype=dtype)
    expected = pool.clone()
    k, v = torch.randn(2, 2 * B, 3, 16).to(dtype)
    slots = torch.randperm(4 * B)[: 2 * B]
    host = Batch((Stream(1),), rotary_dim=rotary_dim).rope("cpu")
    reference.write_kv(expected, k, v, slots, 1, host)
    pool = pool.to(DEVICE)
    by_head = k.to(DEVICE).transpose(0, 1).contiguous().transpose(0, 1)
    gpu.write_kv(pool, by_head, v.to(DEVICE), slots.to(DEVICE), 1, rope)
    tolerance = {"atol": 1e-6, "rtol": 1e-6} if dtype == torch.float32 else {}
    torch.testing.assert_close(pool.cpu(), expected, equal_nan=True, **tolerance)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("num_q_heads", "head_dim"), [(6, 16), (3, 80), (8, 128)])
@pytest.mark.parametrize("layer", [0, 1])
def test_queries_are_kept_at_their_addresses_and_nowhere_else(
    dtype: torch.dtype, num_q_heads: int, head_dim: int, layer: int
) -> None:
    rope = Batch((Stream(1),), head_dim=head_dim).rope()
    pool = torch.zeros(3, 2, 2, 1, B, head_dim, dtype=dtype, device=DEVICE)
    ring = torch.full((2, 7, num_q_heads, head_dim), 3.0, dtype=dtype, device=DEVICE)
    expected = ring.clone()
    rows = torch.randn(5, num_q_heads + 2, head_dim).to(dtype).to(DEVICE)
    q, k, v = rows[:, :num_q_heads], rows[:, num_q_heads:-1], rows[:, -1:]
    places = [4, None, 0, None, 6]
    row_bytes = ring.stride(1) * ring.element_size()
    targets = [0 if place is None else ring.data_ptr() + place * row_bytes for place in places]
    for token, place in enumerate(places):
        if place is not None:
            expected[layer, place] = q[token]
    slots = torch.tensor([3, 1, -1, B, 2 * B - 1], device=DEVICE)
    observed = gpu.Observed(q, torch.tensor(targets, device=DEVICE), ring.stride(0))
    gpu.write_kv(pool, k, v, slots, layer, rope, observed=observed)
    assert torch.equal(ring, expected)
    plain = torch.zeros_like(pool)
    gpu.write_kv(plain, k, v, slots, layer, rope)
    assert torch.equal(pool, plain) and pool.any()


def test_queries_that_do_not_fit_are_refused() -> None:
    rope = Batch((Stream(1),)).rope()
    pool, q = torch.zeros(3, 2, 2, 1, B, 16, device=DEVICE), torch.zeros(2, 4, 16, device=DEVICE)
    k, slots = q[:, :1], torch.zeros(2, dtype=torch.int64, device=DEVICE)
    refused = [
        (q[:1], slots, "num_q_heads"),
        (q[..., :8], slots, "num_q_heads"),
        (q.transpose(1, 2), slots, "num_q_heads"),
        (q, slots.int(), "Pass int64"),
        (q, slots[:1], "Pass int64"),
    ]
    for queries, targets, remedy in refused:
        with pytest.raises(ConfigError, match=remedy):
            gpu.write_kv(pool, k, k, slots, 0, rope, observed=gpu.Observed(queries, targets, 64))


@pytest.mark.parametrize("num_bytes", [16, 48, 8192, 8208, 40960])
def test_copies_reach_their_places_and_no_other(num_bytes: int) -> None:
    words = num_bytes // 8
    source = torch.arange(4 * words, device=DEVICE).view(4, words)
    target = torch.full((6, words), -1, device=DEVICE)
    step = num_bytes
    sources = source.data_ptr() + step * torch.tensor([3, 0, 2], device=DEVICE)
    targets = target.data_ptr() + step * torch.tensor([1, 5, 0], device=DEVICE)
    gpu.copy_blocks(sources, targets, num_bytes)
    expected = torch.full((6, words), -1, device=DEVICE)
    expected[[1, 5, 0]] = source[[3, 0, 2]]
    assert torch.equal(target, expected)


REFUSED = [
    (lambda b: {"pool": b.pools[0].transpose(3, 4)}, "contiguous"),
    (lambda b: {"pool": b.pools[0].double(), "q": b.q.double()}, "float16, bfloat16 or float32"),
    (lambda b: {"q": b.q[:, :3]}, "multiple of 2"),
    (lambda b: {"q": b.q[:, :, :8]}, "head_dim is 16"),
    (lambda b: {"q": b.q.half()}, "as the pool has"),
    (lambda b: {"layer": 2}, "Use 0 to 1"),
    (lambda b: {"q": torch.cat([b.q] * 2)}, "Pass .2, "),
]


@pytest.mark.parametrize(("change", "remedy"), REFUSED)
def test_what_the_kernels_are_not_made_for_is_refused(change, remedy: str) -> None:  # type: ignore[no-untyped-def]
    built = build(Batch((Stream(5),)))
    arguments = {
        "q": built.q,
        "pool": built.pools[0],
        "layer": LAYER,
        "table": built.table,
        "seen": gpu.plan_decode(built.table, built.query_starts, 1),
        "rope": built.batch.rope(),
        "softmax": Softmax(0.25),
    }
    with pytest.raises(ConfigError, match=remedy):
        gpu.decode(**(arguments | change(built)))


def test_room_for_too_few_rows_is_refused() -> None:
    built, other = build(Batch((Stream(5), Stream(6)))), build(Batch((Stream(5),)))
    shape = Shape.of(other.pools[0], 4, other.batch.rope())
    scratch = gpu.decode_scratch(shape, 1, 1, 2, DEVICE)
    seen, rope = gpu.plan_decode(built.table, built.query_starts, 1), built.batch.rope()
    with pytest.raises(ConfigError, match="Make it for 128 rows"):
        gpu.decode(built.q, built.pools[0], LAYER, built.table, seen, rope, Softmax(0.25), scratch)


def test_a_plan_of_wrong_queries_is_refused() -> None:
    built = build(Batch((Stream(5),)))
    with pytest.raises(ConfigError, match="1 to 8"):
        gpu.plan_decode(built.table, built.query_starts, 9)
    with pytest.raises(ConfigError, match="int64"):
        gpu.plan_decode(built.table, built.query_starts.int(), 1)
