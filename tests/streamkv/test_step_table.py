"""What a captured step reads: rows that stay, rows that are filled anew, rows that are unused."""

import itertools
import math
import random

import pytest
import torch
from gpu_cases import BLOCK_SIZE, DEVICE, ON_GPU
from torch import Tensor

from streamkv.batch import SequenceStep, Wanted
from streamkv.block_table import BlockTable
from streamkv.entry_columns import EntryColumns
from streamkv.kernels import gpu, reference
from streamkv.kernels.batch_table import BatchTable, batch_table, block_addresses
from streamkv.kernels.rope import RopeTables
from streamkv.runner import build_table
from streamkv.sequence import Sequence
from streamkv.step_table import StepTable
from streamkv.tiers.spec import BlockKey
from streamkv.window import NO_CAP, Window

pytestmark = pytest.mark.gpu if ON_GPU else []
needs_gpu = pytest.mark.skipif(not ON_GPU, reason="needs a CUDA device")

B = BLOCK_SIZE
HEADS, DIM = 1, 16
CAPACITY = 24
WINDOW = Window(2 * B, ((0, 4),))
NUM_BLOCKS = 40


class Bench:
    """Sequences over one pool of random KV; blocks are handed out in no order."""

    def __init__(self, num_rows: int, capacity: int = CAPACITY) -> None:
        shape = (NUM_BLOCKS + 1, 1, 2, HEADS, B, DIM)
        pool = torch.randn(shape, generator=torch.Generator().manual_seed(3))
        pool[NUM_BLOCKS] = math.nan
        self.pool = pool.to(DEVICE)
        self.table = StepTable(num_rows, capacity, self.pool)
        self.rope = RopeTables(10000.0 ** -(torch.arange(8).double() / 8).to(DEVICE), 40 * B)
        self._free = list(range(NUM_BLOCKS))
        random.Random(7).shuffle(self._free)
        self._num_opened = 0

    def sequence(self, num_tokens: int, window: Window = WINDOW) -> Sequence:
        """A stream with its last token pending; what has expired is gone."""
        self._num_opened += 1
        made = Sequence(self._num_opened, window, B, BlockKey(b"r" * 16))
        made.append([self._num_opened + token for token in range(num_tokens)])
        self.make_live(made, num_tokens - 1)
        made.advance(num_tokens - 1)
        self.drop_expired(made)
        return made

    def make_live(self, sequence: Sequence, count: int) -> None:
        start = sequence.num_computed
        for index in sequence.table.missing(start, start + count) if count else []:
            sequence.table.add(index, self._free.pop())

    def drop_expired(self, sequence: Sequence) -> None:
        self._free.extend(block_id for block_id, _ in sequence.take_expired())

    def step(self, sequence: Sequence, token: int = 5) -> SequenceStep:
        """Of the pending token, or of one more."""
        if not sequence.num_pending:
            sequence.append([token])
        self.make_live(sequence, 1)
        return SequenceStep(sequence, 1, Wanted.LOGITS)

    def count(self, *steps: SequenceStep) -> None:
        for step in steps:
            step.sequence.advance(1)
            self.drop_expired(step.sequence)

    def expected(self, steps: list[SequenceStep], capacity: int = CAPACITY) -> BatchTable:
        """Made anew for exactly these queries."""
        tables = [
            build_table(s.sequence.table.entries(s.sequence.window, s.start, s.start + 1))
            for s in steps
        ]
        windows = [step.sequence.window.window_size for step in steps]
        return batch_table(tables, windows, [self.pool], capacity, DEVICE)

    def attend(self, table: BatchTable, query_starts: Tensor) -> Tensor:
        num_rows = len(query_starts)
        q = torch.randn(num_rows, HEADS, DIM, generator=torch.Generator().manual_seed(4))
        shape = gpu.Shape.of(self.pool, HEADS, self.rope)
        scratch = gpu.decode_scratch(shape, num_rows, 1, 1, DEVICE)
        seen = gpu.plan_decode(table, query_starts, 1)
        softmax = gpu.Softmax(0.25)
        return gpu.decode(q.to(DEVICE), self.pool, 0, table, seen, self.rope, softmax, scratch)[0]

    def check(self, steps: list[SequenceStep]) -> None:
        """Each row shows its query what it is to see; unused rows show nothing."""
        table = self.table.table
        host = BatchTable(*(getattr(table, name).cpu() for name in BatchTable.__slots__))
        for row, step in enumerate(steps):
            assert self.table.query_starts[row] == step.start
            assert shown(host, row, step.start, self.pool) == to_be_seen(step)
        assert not host.num_entries[len(steps) :].any()

    def check_attention(self, steps: list[SequenceStep]) -> None:
        """Attention through the table is that through one made anew for these queries."""
        self.check(steps)
        found = self.attend(self.table.table, self.table.query_starts)
        assert not found[len(steps) :].any()
        if not steps:
            return
        starts = torch.tensor([step.start for step in steps], device=DEVICE)
        expected = self.attend(self.expected(steps), starts)
        torch.testing.assert_close(found[: len(steps)], expected, atol=1e-5, rtol=1e-5)


def to_be_seen(step: SequenceStep) -> dict[int, int]:
    """Distance of each token that a query sees, by slot: as `Window` defines it."""
    sequence, window, query = step.sequence, step.sequence.window, step.start
    sinks = {token for start, end in window.sink_ranges for token in range(start, end)}
    found = {}
    for token in range(query + 1):
        is_sink = token in sinks
        if is_sink or query - token < window.window_size:
            cap = window.sink_cap(token) if is_sink else NO_CAP
            found[sequence.table.slot(token)] = min(query - token, cap)
    return found


def shown(table: BatchTable, row: int, query: int, pool: Tensor) -> dict[int, int]:
    """The same, as a row of a table says it."""
    entries, window = table.sequence(row), int(table.window_sizes[row])
    query_index = torch.tensor([query])
    visible = entries.visible(query_index, window, B)[0]
    distances = entries.distances(query_index)[0]
    slots = (entries.block_ids - pool.data_ptr()) // (pool.stride(0) * pool.element_size()) * B
    return {
        int(slots[entry]) + slot: int(distances[entry]) - slot
        for entry, slot in visible.nonzero().tolist()
    }


def columns_of(table: BatchTable) -> dict[str, list[object]]:
    return {name: getattr(table, name).tolist() for name in BatchTable.__slots__}


def test_columns_are_the_entries_of_the_block_table() -> None:
    bench = Bench(3)
    steps = [bench.step(bench.sequence(3 * B + 5)), bench.step(bench.sequence(7))]
    bench.table.write(steps)
    table = columns_of(bench.table.table)
    for row, step in enumerate(steps):
        sequence = step.sequence
        # The whole block of the query, so that the row holds for each query in it.
        end = (step.start // B + 1) * B
        sinks, _, recent = sequence.table.entries(sequence.window, step.start // B * B, end)
        entries, count = [*sinks, *recent], len(sinks) + len(recent)
        assert table["num_entries"][row] == count
        assert table["num_sink_entries"][row] == len(sinks) == 1
        assert table["window_sizes"][row] == 2 * B
        places = block_addresses(torch.tensor([entry.block_id for entry in entries]), [bench.pool])
        for name, values in (
            ("addresses", places.tolist()),
            ("starts", [entry.start for entry in entries]),
            ("caps", [entry.cap for entry in entries]),
            ("first_valid", [entry.first_valid for entry in entries]),
            ("end_valid", [entry.end_valid for entry in entries]),
        ):
            assert table[name][row][:count] == values, name  # type: ignore[index]
    assert table["caps"][0][:2] == [2 * B + 3, NO_CAP]  # type: ignore[index]
    assert bench.table.query_starts.tolist()[:2] == [3 * B + 4, 6]
    assert bench.table.ids.tolist()[:2] == [1 + 3 * B + 4, 2 + 6]
    assert bench.table.sources.tolist()[:2] == [-1, -1]
    assert bench.table.slots.tolist()[:2] == [s.sequence.table.slot(s.start) for s in steps]


@pytest.mark.parametrize("source", [0, 1])
def test_a_token_that_only_the_device_knows_is_named_by_its_place(source: int) -> None:
    bench = Bench(2)
    first, second = bench.sequence(9), bench.sequence(B)
    bench.make_live(second, 2)
    steps = [
        bench.step(first),
        SequenceStep(second, 1, Wanted.LOGITS, start=second.num_computed + 1, source=source),
    ]
    bench.table.write(steps)
    assert bench.table.sources.tolist() == [-1, source]
    assert bench.table.ids.tolist() == [first.pending[0], 0]
    assert bench.table.query_starts.tolist() == [8, B]
    assert bench.table.slots.tolist()[1] == second.table.slot(B)
    bench.check(steps)


@pytest.mark.parametrize(
    "window",
    [
        WINDOW,
        Window(B),
        Window(2 * B + 1, ((0, 4),)),
        Window(B + 7, ((3, 9), (B + 2, B + 5), (2 * B + 1, 2 * B + 2))),
        Window(1, ((0, B + 1),)),
    ],
    ids=["one-sink-range", "no-sinks", "block-plus-one", "many-ranges", "only-itself"],
)
def test_a_stream_sees_the_same_through_a_row_that_stays(window: Window) -> None:
    """Every query of three blocks; beside it rows come and go, and blocks expire."""
    bench = Bench(2)
    one, other = bench.sequence(2 * B - 3, window), bench.sequence(5 * B - 2, window)
    for turn in range(3 * B):
        steps = [bench.step(one)]
        if turn % 7 < 5:
            steps.append(bench.step(other))
        bench.table.write(steps)
        bench.check(steps)
        if turn % 11 == 0 or one.num_computed % B in (0, B - 1):
            bench.check_attention(steps)
        bench.count(*steps)


def counted_columns(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """First queries that columns of entries are made for from now on."""
    made, make = list[int](), BlockTable._columns

    def counted(table: BlockTable, window: Window, query_start: int, end: int) -> EntryColumns:
        made.append(query_start)
        return make(table, window, query_start, end)

    monkeypatch.setattr(BlockTable, "_columns", counted)
    return made


def test_a_row_is_filled_once_for_all_queries_of_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    bench, made = Bench(1), counted_columns(monkeypatch)
    sequence = bench.sequence(2 * B + 3)
    for _ in range(2 * B):
        steps = [bench.step(sequence)]
        bench.table.write(steps)
        bench.count(*steps)
    # Where a block comes; one that expires goes just before.
    assert made == [2 * B, 3 * B, 4 * B]


def test_sequences_that_change_rows_and_tables_bring_their_entries_along(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench, made = Bench(3), counted_columns(monkeypatch)
    smaller = StepTable(2, CAPACITY, bench.pool)
    steps = [bench.step(bench.sequence(number * B + 3)) for number in (1, 3, 5)]
    for order in itertools.permutations(steps):
        bench.table.write(order)
        bench.check(list(order))
        smaller.write(order[1:])
        found = smaller.table.num_entries.tolist()
        assert found == bench.table.table.num_entries.tolist()[1:]
    assert sorted(made) == [B, 3 * B, 5 * B]


def test_a_row_is_filled_anew_when_the_window_changes() -> None:
    bench = Bench(1)
    sequence = bench.sequence(2 * B + 5)
    steps = [bench.step(sequence)]
    bench.table.write(steps)
    bench.count(*steps)
    sequence.change_window(sequence.num_computed, Window(B // 2, ((0, 4), (B, B + 3))))
    steps = [bench.step(sequence)]
    bench.table.write(steps)
    bench.check_attention(steps)


def test_a_row_is_filled_anew_when_its_blocks_came_back_elsewhere() -> None:
    """A sequence that gave up its blocks and got them again stands at the same query."""
    bench = Bench(1)
    sequence = bench.sequence(2 * B + 5)
    steps = [bench.step(sequence)]
    bench.table.write(steps)
    moved = [(block.block_index, block.block_id) for block in sequence.table.take_all()]
    for (index, _), (_, block_id) in zip(moved, reversed(moved), strict=True):
        sequence.table.add(index, block_id)
    bench.table.write(steps)
    bench.check_attention(steps)


def test_a_row_goes_to_another_sequence_of_the_same_version() -> None:
    bench = Bench(2)
    one, two = bench.sequence(2 * B + 9), bench.sequence(2 * B + 9)
    assert one.table.version == two.table.version
    for order in ([one, two], [two, one], [two], [one], [one, two]):
        steps = [bench.step(sequence) for sequence in order]
        bench.table.write(steps)
        bench.check(steps)


def test_unused_rows_have_no_entries_and_no_slot() -> None:
    bench = Bench(4)
    steps = [bench.step(bench.sequence(3 * B + row)) for row in range(4)]
    for count in (1, 4, 2, 3, 0, 2):
        bench.table.write(steps[:count])
        table = bench.table
        assert table.table.num_entries.gt(0).tolist() == [row < count for row in range(4)]
        assert table.slots.ge(0).tolist() == [row < count for row in range(4)]
        assert table.slots[count:].eq(-1).all()
        assert table.sources.eq(-1).all() and not table.ids[count:].any()
        bench.check_attention(steps[:count])


def test_rows_say_where_their_queries_are_kept_and_unused_ones_nowhere() -> None:
    bench = Bench(4)
    steps = [bench.step(bench.sequence(3 * B + row)) for row in range(4)]
    bench.table.write(steps, [160, 0, 320, 480])
    assert bench.table.targets.tolist() == [160, 0, 320, 480]
    bench.table.write(steps[:2], [0, 640])
    assert bench.table.targets.tolist() == [0, 640, 0, 0]
    bench.table.write(steps)
    assert not bench.table.targets.any()


def test_a_row_is_filled_anew_when_other_blocks_are_recalled() -> None:
    bench = Bench(1)
    sequence = bench.sequence(6 * B + 3)
    old = [bench._free.pop() for _ in range(3)]
    for blocks in ({1: old[0]}, {1: old[0], 2: old[1]}, {2: old[2]}, {}):
        sequence.table.recalled.set(blocks)
        steps = [bench.step(sequence)]
        bench.table.write(steps)
        entries = bench.table.table
        assert int(entries.num_recalled_entries[0]) == len(blocks)
        found = bench.attend(entries, bench.table.query_starts)
        starts = torch.tensor([step.start for step in steps], device=DEVICE)
        expected = bench.attend(bench.expected(steps), starts)
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_a_step_that_is_asked_for_again_sees_what_it_saw() -> None:
    """The step after it was launched ahead, brought a block, and was not wanted.

    The window's edge lies on a block's edge: the query at the end of a block sees a token of a
    block that the one after it does not see.
    """
    bench = Bench(2)
    sequence = bench.sequence(3 * B, Window(B + 1))
    steps = [bench.step(sequence)]
    assert steps[0].start == 3 * B - 1
    bench.table.write(steps)
    bench.check(steps)
    bench.make_live(sequence, 2)
    ahead = [SequenceStep(sequence, 1, Wanted.LOGITS, start=3 * B, source=0)]
    bench.table.write(ahead)
    bench.check(ahead)
    bench.table.write(steps)
    bench.check(steps)
    bench.table.write(ahead)
    bench.check(ahead)


def test_a_block_that_was_live_before_its_first_query_is_seen_by_it() -> None:
    """The table sees the block come while the query is in the one before, then no change more."""
    bench = Bench(1)
    sequence = bench.sequence(B)
    bench.make_live(sequence, 2)
    steps = [bench.step(sequence)]
    bench.table.write(steps)
    bench.check(steps)
    sequence.advance(1)
    steps = [bench.step(sequence)]
    bench.table.write(steps)
    bench.check_attention(steps)


def test_going_back_within_a_block_shows_what_is_visible_again() -> None:
    """A row that was filled for a later query serves an earlier one of its block."""
    sinks = tuple((start, start + 1) for start in range(0, B, 2))
    bench = Bench(1, capacity=2 * len(sinks) + 4)
    sequence = bench.sequence(B + 9, Window(B, sinks))
    steps = [bench.step(sequence)]
    later = [SequenceStep(sequence, 1, Wanted.LOGITS, start=steps[0].start + 5, source=0)]
    bench.table.write(later)
    bench.table.write(steps)
    bench.check(steps)


def test_what_has_more_entries_than_there_is_room_for_does_not_fit() -> None:
    """By a bound: a live block has an entry, and each run of sink tokens two more at most."""
    bench = Bench(2, capacity=6)
    fitting = bench.step(bench.sequence(4 * B - 1, Window(8 * B, ((2, 5),))))
    assert len(fitting.sequence.table) == 4
    longer = bench.step(bench.sequence(4 * B + 1, Window(8 * B, ((2, 5),))))
    ranges = bench.step(bench.sequence(3 * B - 1, Window(8 * B, ((2, 5), (7, 8)))))
    assert bench.table.fits([fitting])
    assert not bench.table.fits([fitting, longer])
    assert not bench.table.fits([ranges, fitting])
    bench.table.write([fitting])
    assert int(bench.table.table.num_entries[0]) == 6
    torch.testing.assert_close(
        bench.attend(bench.table.table, bench.table.query_starts)[:1],
        bench.attend(bench.expected([fitting], 6), bench.table.query_starts[:1]),
        atol=1e-5,
        rtol=1e-5,
    )


@pytest.mark.parametrize("seed", range(20))
def test_what_fits_has_room(seed: int) -> None:
    """Sink ranges anywhere: the bound is never too small."""
    rng = random.Random(seed)
    edges = sorted(rng.sample(range(5 * B), 2 * rng.randint(1, 5)))
    window = Window(rng.randint(1, 6 * B), tuple(zip(edges[::2], edges[1::2], strict=True)))
    bench = Bench(1)
    step = bench.step(bench.sequence(rng.randint(1, 7 * B), window))
    most = len(step.sequence.table) + 2 * len(window.sink_ranges)
    if seed % 2:
        # Any block may be recalled, those with sink tokens too.
        blocks = {index: bench._free.pop() for index in range(6) if rng.random() < 0.7}
        step.sequence.table.recalled.set(blocks)
        most += len(blocks) + (len(window.sink_ranges) if blocks else 0)
    tight = StepTable(1, most, bench.pool)
    assert tight.fits([step])
    tight.write([step])
    assert not StepTable(1, most - 1, bench.pool).fits([step])


def test_attention_of_the_tables_is_that_of_the_oracle() -> None:
    """The table made anew, with which rows are compared above, against every key by itself."""
    bench = Bench(1)
    step = bench.step(bench.sequence(3 * B + 5))
    bench.table.write([step])
    sequence = step.sequence
    found = bench.attend(bench.table.table, bench.table.query_starts)
    q = torch.randn(1, HEADS, DIM, generator=torch.Generator().manual_seed(4))
    entries = build_table(sequence.table.entries(sequence.window, step.start, step.start + 1))
    rope = RopeTables(bench.rope.inv_freq.cpu(), 40 * B)
    expected = reference.attend(
        q, bench.pool.cpu(), 0, entries, step.start, sequence.window.window_size, rope, 0.25
    )
    torch.testing.assert_close(found.cpu(), expected, atol=1e-5, rtol=1e-5)


@needs_gpu
def test_a_buffer_is_not_rewritten_while_its_copy_is_pending() -> None:
    """The device is kept busy, so that every copy is pending when the next step is written."""
    bench = Bench(2)
    one, two = bench.sequence(B + 3), bench.sequence(2 * B + 8)
    bench.table.write([bench.step(one)])
    torch.cuda.synchronize()
    found, expected = [], []
    for turn in range(6):
        steps = [bench.step(one), bench.step(two)][: 1 + turn % 2]
        torch.cuda._sleep(50_000_000)
        bench.table.write(steps)
        found.append([bench.table.query_starts.clone(), bench.table.table.num_entries.clone()])
        starts = [step.start for step in steps]
        expected.append(starts)
        bench.count(*steps)
    for (starts, counts), wanted in zip(found, expected, strict=True):
        assert starts[: len(wanted)].tolist() == wanted
        assert counts.gt(0).tolist() == [True, len(wanted) == 2]


@needs_gpu
def test_writing_waits_for_nothing() -> None:
    bench = Bench(2)
    steps = [bench.step(bench.sequence(B + 3)), bench.step(bench.sequence(2 * B + 8))]
    bench.table.write(steps)
    torch.cuda.set_sync_debug_mode("error")
    try:
        bench.table.write(steps)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    bench.check(steps)
