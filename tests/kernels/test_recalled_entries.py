"""Recalled entries in every way to attend, against masks and distances made pair by pair.

A query sees of a recalled entry what its window does not show, however far it lies behind; blocks
that are leaving the window have a window entry and a recalled one.
"""

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from streamkv.kernels import cpu, gpu, reference
from streamkv.kernels.batch_table import batch_table
from streamkv.kernels.gpu_decode import check_queries
from streamkv.kernels.native import _seen
from streamkv.kernels.native_attention import NativeAttention
from streamkv.kernels.native_build import NativeUnavailableError, build
from streamkv.kernels.rope import RopeTables
from streamkv.kernels.table import NO_CAP, SequenceTable
from streamkv.kernels.window_plan import window_plan

B, LAYERS, KV_HEADS, HEADS, DIM = 64, 1, 2, 4, 16
SCALE = 0.3
ROPE = RopeTables(10000.0 ** -(torch.arange(8).double() / 8), 4096)


@dataclass(frozen=True, slots=True, eq=False)
class Case:
    """A stream, the pool of its blocks (block i lies at i), and its entries in a table."""

    pool: Tensor
    q: Tensor
    query_start: int
    window_size: int
    table: SequenceTable

    def seen(self) -> tuple[Tensor, Tensor]:
        """Which slots each query sees, and distances, pair by pair."""
        num_queries, num_entries = self.q.shape[0], self.table.num_entries
        visible = torch.zeros(num_queries, num_entries, B, dtype=torch.bool)
        distances = torch.zeros(num_queries, num_entries, dtype=torch.int64)
        columns = (self.table.starts, self.table.caps, self.table.first_valid, self.table.end_valid)
        for entry, (start, cap, first, end) in enumerate(zip(*(c.tolist() for c in columns))):  # noqa: B905  # columns of one length
            for row in range(num_queries):
                query = self.query_start + row
                distances[row, entry] = min(query - start, cap)
                for slot in range(first, end):
                    token = start + slot
                    in_window = query - self.window_size < token <= query
                    if entry < self.table.num_sink_entries:
                        visible[row, entry, slot] = token <= query
                    elif entry < self.table.num_lasting_entries:
                        visible[row, entry, slot] = token <= query and not in_window
                    else:
                        visible[row, entry, slot] = in_window
        return visible, distances

    def expected(self) -> Tensor:
        visible, distances = self.seen()
        slices = self.pool[self.table.block_ids, 0].nan_to_num(0.0)
        return reference.attend_slices(self.q, slices, visible, distances, ROPE, SCALE)[0]


def case(
    num_tokens: int,
    num_queries: int,
    window_size: int,
    recalled: list[tuple[int, int]],
    sinks: int = 4,
    holes: tuple[int, int] | None = None,
    seed: int = 0,
) -> Case:
    """A stream with a window; `recalled` are (block, cap); slots that hold no token are NaN."""
    generator = torch.Generator().manual_seed(seed)
    num_blocks = -(-num_tokens // B)
    pool = torch.randn(num_blocks + 1, LAYERS, 2, KV_HEADS, B, DIM, generator=generator)
    pool[num_blocks] = torch.nan
    pool[num_blocks - 1, :, :, :, num_tokens - (num_blocks - 1) * B :] = torch.nan
    q = torch.randn(num_queries, HEADS, DIM, generator=generator)
    first = num_tokens - num_queries
    rows = [(0, 0, sinks + window_size - 1, 0, sinks)] if sinks else []
    for block, cap in recalled:
        low = sinks if block == 0 else 0
        if holes is not None and block == holes[0]:
            low = holes[1]
        rows.append((block, block * B, cap, low, B))
    num_recalled = len(rows) - bool(sinks)
    for block in range(max(0, first - window_size + 1) // B, num_blocks):
        low = sinks if block == 0 else 0
        rows.append((block, block * B, NO_CAP, low, min(B, num_tokens - block * B)))
    columns = torch.tensor(rows).t().contiguous().unbind(0)
    table = SequenceTable(*columns, int(bool(sinks)), num_recalled)
    return Case(pool, q, first, window_size, table)


FAR = 96 + B
CASES = {
    "far behind": lambda n: case(700, n, 96, [(1, FAR), (4, FAR)]),
    "beside its window entry": lambda n: case(640, n, 96, [(7, FAR), (8, FAR), (9, FAR)]),
    "all of it, true distances": lambda n: case(500, n, 96, [(i, NO_CAP) for i in range(7)]),
    "capped within the chunk": lambda n: case(600, n, 96, [(5, 230), (6, 161), (7, 97)]),
    "around sink tokens": lambda n: case(400, n, 96, [(0, FAR), (2, FAR)]),
    "no sink tokens": lambda n: case(400, n, 64, [(0, 128), (3, 128)], sinks=0),
    "in part": lambda n: case(400, n, 96, [(1, FAR), (2, FAR)], holes=(1, 40)),
    "nothing seen yet": lambda n: case(300, n, 280, [(1, 344), (3, 344)]),
    "window of one": lambda n: case(200, n, 1, [(0, 65), (1, 65), (2, 65)]),
}
QUERIES = (1, 2, 7, 65, 150)
every_case = pytest.mark.parametrize("name", CASES)
every_count = pytest.mark.parametrize("num_queries", QUERIES)


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=2e-5)


@every_count
@every_case
def test_the_oracle(name: str, num_queries: int) -> None:
    one = CASES[name](num_queries)
    found = reference.attend(
        one.q, one.pool, 0, one.table, one.query_start, one.window_size, ROPE, SCALE
    )
    close(found, one.expected())


@every_count
@every_case
def test_torch_on_the_cpu(name: str, num_queries: int) -> None:
    one = CASES[name](num_queries)
    plan = cpu.plan_attention(
        one.table, one.query_start, num_queries, one.window_size, ROPE, one.pool, HEADS
    )
    close(cpu.attend(one.q, one.pool, 0, plan, SCALE), one.expected())


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    try:
        return build(tmp_path_factory.mktemp("native"))
    except NativeUnavailableError as error:
        pytest.skip(str(error))


@every_count
@every_case
def test_native_attention(library: Path, name: str, num_queries: int) -> None:
    one = CASES[name](num_queries)
    try:
        native = NativeAttention(library, one.pool, ROPE, HEADS, 2)
    except NativeUnavailableError as error:
        pytest.skip(str(error))
    plan = cpu.plan_attention(
        one.table, one.query_start, num_queries, one.window_size, ROPE, one.pool, HEADS, native
    )
    close(cpu.attend(one.q, one.pool, 0, plan, SCALE), one.expected())


@every_case
def test_what_a_native_decode_step_is_told(name: str) -> None:
    one = CASES[name](1)
    visible, distances = one.seen()
    first, end, found = _seen(one.table, one.query_start, one.window_size)
    slots = torch.arange(B)
    assert torch.equal((slots >= first[:, None]) & (slots < end[:, None]), visible[0])
    seen = visible[0].any(-1)
    assert torch.equal(found[seen], distances[0][seen])


@every_case
def test_a_decode_on_a_gpu(name: str) -> None:
    for num_queries in (1, 3):
        one = CASES[name](num_queries)
        table = batch_table([one.table], [one.window_size], [one.pool], 24, "cpu")
        starts = torch.tensor([one.query_start])
        seen = gpu.plan_decode(table, starts, num_queries)
        softmax = gpu.Softmax(SCALE)
        found = gpu.decode(one.q, one.pool, 0, table, seen, ROPE, softmax)[0]
        close(found, one.expected())


@pytest.mark.parametrize("num_queries", (2, 65, 150))
@every_case
def test_a_chunk_on_a_gpu(name: str, num_queries: int) -> None:
    one = CASES[name](num_queries)
    table = batch_table([one.table], [one.window_size], [one.pool], 24, "cpu")
    starts = torch.tensor([one.query_start])
    shape = check_queries(one.q, one.pool, 0, ROPE)
    rows = gpu.prefill_launch(shape).rows
    tiles = gpu.prefill_tiles(table, starts, [num_queries], shape, rows)
    found = gpu.prefill(one.q, one.pool, 0, table, starts, tiles, ROPE, gpu.Softmax(SCALE))[0]
    close(found, one.expected())


@every_case
def test_a_window_by_causal_squares_lists_recalled_entries_with_what_has_left(name: str) -> None:
    one = CASES[name](150)
    table = batch_table([one.table], [one.window_size], [one.pool], 24, "cpu")
    plan = window_plan(
        table, 0, one.query_start, 150, B, "cpu", min_queries=1, min_window=1, size_step=16
    )
    assert plan is not None
    left = one.query_start + 150 - 1 - one.window_size
    listed = {(start, first, end) for _, start, _, first, end in plan.sinks.tolist()}
    for entry in range(one.table.num_lasting_entries):
        start, first = int(one.table.starts[entry]), int(one.table.first_valid[entry])
        some = any(at == start and low == first for at, low, _ in listed)
        assert some == (start + first <= left)
