"""Window attention by causal squares against its twin: on a GPU, else small in the interpreter."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from gpu_cases import BLOCK_SIZE, DEVICE, DTYPES, LAYER, ON_GPU, Batch, Built, Stream, build

from streamkv.errors import ConfigError
from streamkv.kernels.batch_table import BatchTable, batch_table
from streamkv.kernels.causal import choose_squares
from streamkv.kernels.gpu import Launch, Shape, Softmax
from streamkv.kernels.table import NO_CAP, SequenceTable
from streamkv.kernels.window_cut import SIZE_STEP
from streamkv.kernels.window_plan import WindowPlan, window_plan
from streamkv.kernels.window_prefill import num_positions, window_prefill, window_scratch

pytestmark = pytest.mark.gpu if ON_GPU else []

B = BLOCK_SIZE
STEP = B // 2
"""Sizes of pieces: small enough for rectangles."""
LENGTHS = range(1, 3 * 32 + 1) if ON_GPU else [1, 2, 7, 8, 9, 31, 32, 33, 63, 64, 65, 95, 96]


def plan_of(built: Built, step: int = STEP) -> WindowPlan:
    host = BatchTable(*(getattr(built.table, name).cpu() for name in BatchTable.__slots__))
    (count,), start = built.num_queries, int(built.query_starts[0])
    plan = window_plan(
        host, 0, start, count, B, DEVICE, min_queries=1, min_window=1, size_step=step
    )
    assert plan is not None
    return plan


def attend(built: Built, step: int = STEP) -> tuple[torch.Tensor, torch.Tensor]:
    """By the kernels, in scratch that holds NaN."""
    (stream,) = built.batch.streams
    scratch = window_scratch(shape_of(built), stream.num_queries, stream.window_size, DEVICE)
    for name in type(scratch).__slots__:
        getattr(scratch, name).fill_(float("nan"))
    out = torch.full_like(built.q, float("nan"))
    arguments = arguments_of(built) | {"plan": plan_of(built, step)}
    return window_prefill(**arguments, scratch=scratch, out=out)


def shape_of(built: Built) -> Shape:
    return Shape.of(built.pools[0], built.batch.num_q_heads, built.batch.rope())


def arguments_of(built: Built) -> dict[str, Any]:
    return {
        "q": built.q,
        "pool": built.pools[0],
        "layer": LAYER,
        "plan": plan_of(built),
        "rope": built.batch.rope(),
        "softmax": Softmax(built.batch.scale, None, built.sink_logits),
        "squares": choose_squares(shape_of(built), DEVICE),
    }


def check(stream: Stream, **sizes: object) -> None:
    built = build(Batch((stream,), **sizes))  # type: ignore[arg-type]
    built.check(attend(built))


@pytest.mark.parametrize("num_queries", LENGTHS)
def test_chunks_of_any_length_deep_in_a_stream(num_queries: int) -> None:
    check(Stream(5 * 32 + 3 + num_queries, num_queries, window_size=32))


@pytest.mark.parametrize("window_size", [32, 40, 64, B + 1, 3 * B])
@pytest.mark.parametrize("before", [0, 1, 5, 30, 31, 32, 39])
def test_chunks_near_the_start_of_a_stream(before: int, window_size: int) -> None:
    """The sink tokens are keys of the window first, leave it, and are capped soon after."""
    check(Stream(before + 2 * window_size + 3, 2 * window_size + 3, window_size))


@pytest.mark.parametrize("num_queries", [1, 4, 5, 20])
def test_chunks_that_end_within_the_first_window(num_queries: int) -> None:
    check(Stream(num_queries, num_queries, window_size=40))
    check(Stream(11 + num_queries, num_queries, window_size=40))


@pytest.mark.parametrize("num_sinks", [0, 1, 4, B - 1, B, B + 4, 2 * B + 3])
def test_sinks_of_any_number(num_sinks: int) -> None:
    check(Stream(4 * B, 4 * B, window_size=2 * B, num_sinks=num_sinks))
    check(Stream(7 * B + 1, B + 3, window_size=B + 8, num_sinks=num_sinks))


def test_sinks_of_many_tiles_within_a_window() -> None:
    check(Stream(3 * B, 2 * B + 5, window_size=B, num_sinks=2 * B))


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


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("num_kv_heads", "group", "head_dim", "rotary_dim"), HEADS)
def test_every_kind_of_head(
    num_kv_heads: int, group: int, head_dim: int, rotary_dim: int, dtype: torch.dtype
) -> None:
    check(
        Stream(4 * B + 5, 3 * B, window_size=B + 2),
        num_kv_heads=num_kv_heads,
        group=group,
        head_dim=head_dim,
        rotary_dim=rotary_dim,
        dtype=dtype,
    )


@pytest.mark.skipif(not ON_GPU, reason="too large for the interpreter")
@pytest.mark.parametrize("before", [0, 3000])
def test_chunks_of_the_sizes_that_are_cut_in_practice(before: int) -> None:
    stream = Stream(before + 5000, 5000, window_size=2048)
    built = build(Batch((stream,), group=4, head_dim=128, rotary_dim=128, dtype=torch.bfloat16))
    plan = plan_of(built, SIZE_STEP)
    assert any(segment.rectangle for segment in plan.cut.segments)
    built.check(attend(built, SIZE_STEP))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_blocks_of_two_pools_in_one_launch(dtype: torch.dtype) -> None:
    built = build(Batch((Stream(8 * B + 3, 3 * B, window_size=2 * B),), dtype=dtype, pinned=True))
    assert len(built.pools) == 2
    built.check(attend(built))


def test_learned_sink_logits_count_once() -> None:
    check(Stream(5 * B, 3 * B, window_size=B), has_sink_logits=True)


@pytest.mark.parametrize("step", [1, B, 256])
def test_results_do_not_depend_on_the_padding(step: int) -> None:
    built = build(Batch((Stream(6 * B, 2 * B + 9, window_size=2 * B - 3),)))
    built.check(attend(built, step))


@pytest.mark.parametrize("before", [0, 7, 5 * B])
@pytest.mark.parametrize("cut", [1, B, 2 * B - 1, 2 * B, 3 * B + 5])
def test_results_do_not_depend_on_the_cut(before: int, cut: int) -> None:
    stream = Stream(before + 5 * B, 5 * B, window_size=2 * B)
    whole = attend(build(Batch((stream,))))
    ends = [before + cut, stream.num_tokens]
    parts = []
    for begin, end in zip([before, *ends], ends, strict=False):
        built = build(Batch((replace(stream, num_tokens=end, num_queries=end - begin),)))
        q = build(Batch((stream,))).q[begin - before : end - before]
        parts.append(attend(replace(built, q=q)))
    for one, halves in zip(whole, zip(*parts, strict=True), strict=True):
        torch.testing.assert_close(one, torch.cat(halves), atol=1e-5, rtol=1e-5)


def kept_in_mid_stream(built: Built, kept: tuple[int, int]) -> Built:
    """The same stream, of which `kept` are sink tokens too: blocks with several entries."""
    (low, high), window = kept, built.batch.streams[0].window_size
    entries = built.table.to("cpu").sequence(0)
    sinks, others = [], []
    for index in range(entries.num_entries):
        columns = (entries.block_ids, entries.starts, entries.caps)
        block, start, cap = (int(column[index]) for column in columns)
        first, end = int(entries.first_valid[index]), int(entries.end_valid[index])
        if index < entries.num_sink_entries:
            sinks.append((block, start, cap + high - low, first, end))
            continue
        a, b = (min(max(token - start, first), end) for token in kept)
        cap = high - low + window - 1 - max(0, start - low) + max(0, low - start)
        sinks += [(block, start, cap, a, b)] if a < b else []
        others += [
            (block, start, NO_CAP, *run) for run in ((first, a), (b, end)) if run[0] < run[1]
        ]
    columns = torch.tensor([*sinks, *others]).t().contiguous()
    table = SequenceTable(*columns.unbind(0), num_sink_entries=len(sinks))
    capacity = table.num_entries + 1
    return replace(built, table=batch_table([table], [window], built.pools, capacity, DEVICE))


@pytest.mark.parametrize("first", [5 * B, 6 * B + 3])
@pytest.mark.parametrize("size", [3, B, B + 7])
def test_tokens_kept_in_mid_stream_are_counted_once(first: int, size: int) -> None:
    built = build(Batch((Stream(9 * B, 5 * B, window_size=2 * B),)))
    built = kept_in_mid_stream(built, (first, first + size))
    assert built.table.sequence(0).num_sink_entries > 1
    built.check(attend(built))


@pytest.mark.parametrize("rows", [16, 32, 128])
def test_tiles_of_the_join_of_any_size(rows: int) -> None:
    built = build(Batch((Stream(5 * B, 5 * B, window_size=2 * B),)))
    arguments = arguments_of(built) | {"launch": Launch(4, 1, rows)}
    built.check(window_prefill(**arguments))


def test_queries_between_others_of_a_wider_row() -> None:
    built = build(Batch((Stream(4 * B, 2 * B, window_size=B),)))
    wide = torch.full((2 * B, 7, 16), float("nan"), device=DEVICE)
    wide[:, 2:6] = built.q
    built.check(attend(replace(built, q=wide[:, 2:6])))


REFUSED = [
    (lambda b: {"softmax": Softmax(0.25, 5.0)}, "gpu.prefill"),
    (lambda b: {"q": b.q[1:]}, "T and head_dim"),
    (lambda b: {"q": b.q.half()}, "as the pool has"),
    (lambda b: {"layer": 2}, "Use 0 to 1"),
    (lambda b: {"out": b.q.transpose(0, 1)}, "Pass contiguous"),
    (lambda b: {"scratch": window_scratch(shape_of(b), 1, 1, DEVICE)}, "a window of"),
    (lambda b: {"rope": type(b.batch.rope())(b.batch.rope().inv_freq, 3 * B)}, "Make tables"),
]


@pytest.mark.parametrize(("change", "remedy"), REFUSED)
def test_what_the_kernels_are_not_made_for_is_refused(change, remedy: str) -> None:  # type: ignore[no-untyped-def]
    built = build(Batch((Stream(60 * B, 9 * B, window_size=40 * B),)))
    arguments = arguments_of(built)
    with pytest.raises(ConfigError, match=remedy):
        window_prefill(**(arguments | change(built)))


def test_positions_that_the_tables_must_have() -> None:
    assert num_positions(8192, 4096, 64) == 8193
    assert num_positions(512, 4096, 64) == 4160
