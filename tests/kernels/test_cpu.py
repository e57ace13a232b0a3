"""The fast CPU paths, torch's and native, against the oracle, over every edge."""

import itertools
import math
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from streamkv.kernels import cpu, reference
from streamkv.kernels.native_attention import NativeAttention
from streamkv.kernels.native_build import NativeUnavailableError, build, find_compiler
from streamkv.kernels.rope import RopeTables
from streamkv.kernels.table import NO_CAP, SequenceTable

NUM_LAYERS = 3
LAYER = 1
BLOCK_SIZE = 64
TOLERANCES = {torch.float32: (2e-6, 2e-6), torch.bfloat16: (1e-2, 1e-2)}


LIBRARY: Path | None = None
"""The native kernels, while a test is to use them."""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("native"))


@pytest.fixture(params=["torch", "native"], autouse=True)
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test of this file runs on both paths."""
    if request.param == "native":
        if find_compiler() is None:
            pytest.skip("there is no C compiler")
        monkeypatch.setattr(sys.modules[__name__], "LIBRARY", request.getfixturevalue("library"))


@dataclass(frozen=True)
class Case:
    """The last `num_queries` tokens of a stream of `num_tokens` attend to it."""

    num_tokens: int = 200
    num_queries: int = 1
    window_size: int = 130
    sink_ranges: tuple[tuple[int, int], ...] = ((0, 4),)
    capped: bool = True
    num_kv_heads: int = 2
    group: int = 2
    head_dim: int = 16
    rotary_dim: int = 16
    dtype: torch.dtype = torch.float32

    @property
    def rope(self) -> RopeTables:
        half = self.rotary_dim // 2
        return RopeTables(10000.0 ** -(torch.arange(half, dtype=torch.float64) / half), 64)

    @property
    def scale(self) -> float:
        return self.head_dim**-0.5

    @property
    def query_start(self) -> int:
        return self.num_tokens - self.num_queries

    @property
    def num_blocks(self) -> int:
        return -(-self.num_tokens // BLOCK_SIZE)

    def random(self, *shape: int, seed: int) -> Tensor:
        return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(self.dtype)

    def block_ids(self) -> list[int]:
        generator = torch.Generator().manual_seed(5)
        return torch.randperm(self.num_blocks + 2, generator=generator).tolist()

    def slots(self, first: int, end: int) -> Tensor:
        ids, tokens = torch.tensor(self.block_ids()), torch.arange(first, end)
        return ids[tokens // BLOCK_SIZE] * BLOCK_SIZE + tokens % BLOCK_SIZE

    def empty_pool(self) -> Tensor:
        shape = (self.num_blocks + 3, NUM_LAYERS, 2, self.num_kv_heads, BLOCK_SIZE, self.head_dim)
        return torch.full(shape, math.nan, dtype=self.dtype)

    def kv(self) -> tuple[Tensor, Tensor]:
        shape = (self.num_tokens, self.num_kv_heads, self.head_dim)
        return self.random(*shape, seed=1), self.random(*shape, seed=2)

    def pool(self) -> Tensor:
        """NaN wherever no token was written, the guard block included."""
        pool, (k, v) = self.empty_pool(), self.kv()
        reference.write_kv(pool, k, v, self.slots(0, self.num_tokens), LAYER, self.rope)
        return pool

    def queries(self) -> Tensor:
        shape = (self.num_tokens, self.num_kv_heads * self.group, self.head_dim)
        return self.random(*shape, seed=3)[self.query_start :]

    def table(self, end: int | None = None) -> SequenceTable:
        """Entries of the first `end` tokens; then one of the guard block, as unused ones are."""
        end = self.num_tokens if end is None else end
        num_sinks = sum(last - first for first, last in self.sink_ranges)
        sinks, window = [], []
        for index, block_id in enumerate(self.block_ids()[: -(-end // BLOCK_SIZE)]):
            start, size = index * BLOCK_SIZE, min(BLOCK_SIZE, end - index * BLOCK_SIZE)
            cuts = {0, size}
            for first, last in self.sink_ranges:
                cuts |= {min(max(edge - start, 0), size) for edge in (first, last)}
            for low, high in itertools.pairwise(sorted(cuts)):
                if not any(first <= start + low < last for first, last in self.sink_ranges):
                    window.append((block_id, start, NO_CAP, low, high))
                    continue
                before = sum(
                    min(max(start + low - first, 0), last - first)
                    for first, last in self.sink_ranges
                )
                cap = num_sinks + self.window_size - 1 - (before - low)
                sinks.append((block_id, start, cap if self.capped else NO_CAP, low, high))
        rows = [*sinks, *window, (self.num_blocks + 2, 0, NO_CAP, 0, 0)]
        return SequenceTable(*torch.tensor(rows).unbind(1), num_sink_entries=len(sinks))


def make_plan(case: Case, q: Tensor, pool: Tensor, table: SequenceTable, start: int) -> cpu.Plan:
    native = None
    if LIBRARY is not None:
        try:
            native = NativeAttention(LIBRARY, pool, case.rope, q.shape[1], 2)
        except NativeUnavailableError as error:
            pytest.skip(str(error))
    return cpu.plan_attention(
        table, start, q.shape[0], case.window_size, case.rope, pool, q.shape[1], native
    )


def fast(
    case: Case, q: Tensor, pool: Tensor, table: SequenceTable, start: int
) -> tuple[Tensor, ...]:
    plan = make_plan(case, q, pool, table, start)
    return cpu.attend(q, pool, LAYER, plan, case.scale, return_lse=True)


def assert_equals_reference(case: Case, table: SequenceTable | None = None) -> None:
    q, pool, table = case.queries(), case.pool(), table or case.table()
    out, lse = fast(case, q, pool, table, case.query_start)
    expected_out, expected_lse = reference.attend(
        q,
        pool,
        LAYER,
        table,
        case.query_start,
        case.window_size,
        case.rope,
        case.scale,
        return_lse=True,
    )
    atol, rtol = TOLERANCES[case.dtype]
    torch.testing.assert_close(out, expected_out, atol=atol, rtol=rtol)
    torch.testing.assert_close(lse, expected_lse, atol=atol, rtol=rtol)
    assert lse.dtype == torch.float32


EDGES = {
    "block-edge": [Case(n, window_size=1000) for n in (63, 64, 65, 127, 128, 129)],
    "window-edge": [Case(n, window_size=100, sink_ranges=()) for n in (99, 100, 101)],
    "oldest-block-leaves": [Case(n, window_size=72) for n in (134, 135, 136, 137)],
    "cap-begins": [Case(n, window_size=100) for n in (103, 104, 105, 106)],
    "one-token": [Case(1), Case(1, sink_ranges=())],
    "window-of-one": [Case(150, window_size=1), Case(150, window_size=1, sink_ranges=())],
    "many-sinks": [
        Case(300, window_size=70, sink_ranges=((0, n),)) for n in (63, 64, 65, 127, 128, 129)
    ],
    "only-sinks-so-far": [Case(40, sink_ranges=((0, 50),)), Case(50, sink_ranges=((0, 50),))],
    "later-sinks": [
        Case(n, window_size=70, sink_ranges=((0, 4), (100, 110), (126, 131)))
        for n in (109, 131, 180, 250, 330)
    ],
}


@pytest.mark.parametrize("num_queries", [1, 8, 9, 300])
@pytest.mark.parametrize("edge", EDGES.keys())
def test_edges(edge: str, num_queries: int) -> None:
    for case in EDGES[edge]:
        case = replace(case, num_queries=min(num_queries, case.num_tokens))
        assert_equals_reference(case)
        assert_equals_reference(replace(case, capped=False))


@pytest.mark.parametrize("num_queries", [1, 3, 150])
@pytest.mark.parametrize("dtype", TOLERANCES.keys(), ids=str)
@pytest.mark.parametrize(
    ("head_dim", "rotary_dim"), [(64, 64), (80, 80), (96, 96), (128, 128), (80, 32), (64, 16)]
)
def test_head_sizes(head_dim: int, rotary_dim: int, dtype: torch.dtype, num_queries: int) -> None:
    assert_equals_reference(
        Case(260, num_queries=num_queries, head_dim=head_dim, rotary_dim=rotary_dim, dtype=dtype)
    )


@pytest.mark.parametrize("num_queries", [1, 3, 150])
@pytest.mark.parametrize(("num_kv_heads", "group"), [(1, 1), (1, 8), (3, 3), (4, 1)])
def test_groups_of_query_heads(num_kv_heads: int, group: int, num_queries: int) -> None:
    assert_equals_reference(
        Case(260, num_queries=num_queries, num_kv_heads=num_kv_heads, group=group)
    )


@pytest.mark.parametrize("num_queries", [1, 150])
def test_no_rotary(num_queries: int) -> None:
    assert_equals_reference(Case(260, num_queries=num_queries, rotary_dim=2))


@pytest.mark.parametrize("num_queries", [1, 9])
def test_distances_far_beyond_the_tables(num_queries: int) -> None:
    case = Case(300, num_queries=num_queries, window_size=280, capped=False)
    table = case.table()
    assert case.rope.num_positions == 64
    moved = replace(table, starts=table.starts + 1_000_000)
    q, pool = case.queries(), case.pool()
    near = fast(case, q, pool, table, case.query_start)
    far = fast(case, q, pool, moved, case.query_start + 1_000_000)
    torch.testing.assert_close(far, near)


@pytest.mark.parametrize("num_queries", [1, 9])
@pytest.mark.parametrize("keep", [0, 1], ids=["no-entry", "guard-only"])
def test_queries_that_see_nothing_get_zeros_and_minus_infinity(num_queries: int, keep: int) -> None:
    case = Case(200, num_queries=num_queries)
    whole = case.table()
    columns = (whole.block_ids, whole.starts, whole.caps, whole.first_valid, whole.end_valid)
    table = SequenceTable(*(c[len(c) - keep :] for c in columns), num_sink_entries=0)
    out, lse = fast(case, case.queries(), case.pool(), table, case.query_start)
    assert not out.any()
    assert lse.eq(-math.inf).all()


@pytest.mark.parametrize("num_queries", [3, 40])
def test_some_queries_see_nothing(num_queries: int) -> None:
    """Only the newest block is in the table: queries before it are blind."""
    case = Case(194, num_queries=num_queries)
    whole = case.table()
    columns = (whole.block_ids, whole.starts, whole.caps, whole.first_valid, whole.end_valid)
    table = SequenceTable(*(c[-2:] for c in columns), num_sink_entries=0)
    assert_equals_reference(case, table)
    out, lse = fast(case, case.queries(), case.pool(), table, case.query_start)
    blind = num_queries - 2
    assert not out[:blind].any() and out[blind:].all()
    assert lse[:blind].eq(-math.inf).all() and lse[blind:].isfinite().all()


@pytest.mark.parametrize("order", ["reversed", "shuffled"])
def test_order_of_window_entries_does_not_matter(order: str) -> None:
    for num_queries in (1, 100):
        case = Case(400, num_queries=num_queries, window_size=300)
        table = case.table()
        count = table.num_entries - 1
        moved = torch.arange(count).flip(0) if order == "reversed" else torch.randperm(count)
        keep = torch.cat((torch.zeros(1, dtype=torch.int64), 1 + moved))
        columns = (table.block_ids, table.starts, table.caps, table.first_valid, table.end_valid)
        assert_equals_reference(
            case, SequenceTable(*(c[keep] for c in columns), num_sink_entries=1)
        )


def test_a_block_at_the_far_end_of_a_large_pool_is_found() -> None:
    """More than 2**31 elements lie before the block; the memory is mapped, not touched."""
    case = Case(64, window_size=100)
    small, table = case.pool(), case.table()
    num_blocks = 2**31 // small[0].numel() + 2
    storage = torch.empty(num_blocks, *small.shape[1:])
    storage[-1] = small[int(table.block_ids[1])]
    far = replace(table, block_ids=torch.tensor([num_blocks - 1] * table.num_entries))
    for num_queries in (1, 20):
        case = replace(case, num_queries=num_queries)
        out = fast(case, case.queries(), storage, far, case.query_start)
        torch.testing.assert_close(out, fast(case, case.queries(), small, table, case.query_start))


@pytest.mark.parametrize("chunk", [1, 7, 64, 1000])
def test_chunks_give_the_same(chunk: int) -> None:
    """Each chunk is written, then attends; earlier chunks see later slots as never written."""
    case = Case(400, num_queries=400, window_size=130, sink_ranges=((0, 4), (150, 160)))
    q, (k, v), pool = case.queries(), case.kv(), case.empty_pool()
    parts = []
    for start in range(0, case.num_tokens, chunk):
        end = min(start + chunk, case.num_tokens)
        plan = cpu.plan_write(case.slots(start, end), case.rope, pool)
        cpu.write_kv(pool, k[start:end], v[start:end], LAYER, plan)
        parts.append(fast(case, q[start:end], pool, case.table(end), start))
    expected = reference.attend(
        q, pool, LAYER, case.table(), 0, case.window_size, case.rope, case.scale, return_lse=True
    )
    for whole, pieces in zip(expected, zip(*parts, strict=True), strict=True):
        torch.testing.assert_close(torch.cat(pieces), whole, atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize("dtype", TOLERANCES.keys(), ids=str)
@pytest.mark.parametrize("rotary_dim", [16, 8])
def test_write_equals_reference(dtype: torch.dtype, rotary_dim: int) -> None:
    case = Case(150, dtype=dtype, rotary_dim=rotary_dim)
    pool, (k, v) = case.empty_pool(), case.kv()
    slots = case.slots(0, case.num_tokens)
    cpu.write_kv(pool, k, v, LAYER, cpu.plan_write(slots, case.rope, pool))
    torch.testing.assert_close(pool, case.pool(), equal_nan=True)


def test_one_plan_serves_every_layer() -> None:
    case = Case(200, num_queries=20)
    pool, (k, v) = case.empty_pool(), case.kv()
    slots, q = case.slots(0, case.num_tokens), case.queries()
    for layer in range(NUM_LAYERS):
        reference.write_kv(pool, k * (layer + 1), v + layer, slots, layer, case.rope)
    for num_queries in (1, 20):
        start = case.num_tokens - num_queries
        table = case.table()
        plan = make_plan(case, q[-num_queries:], pool, table, start)
        for layer in (2, 0, 1):
            expected = reference.attend(
                q[-num_queries:], pool, layer, table, start, case.window_size, case.rope, case.scale
            )
            out = cpu.attend(q[-num_queries:], pool, layer, plan, case.scale)
            torch.testing.assert_close(out, expected, atol=2e-6, rtol=2e-6)
