"""Attention of mixed steps over one pool against the oracle, sequence by sequence."""

import math
import random

import pytest
import torch
from gpu_cases import BLOCK_SIZE, DEVICE, DTYPES, ON_GPU, TOLERANCES
from torch import Tensor

from streamkv.batch import SequenceStep
from streamkv.gpu_attention import GpuAttention
from streamkv.kernels import gpu, reference
from streamkv.kernels.causal import plain_squares
from streamkv.kernels.rope import RopeTables
from streamkv.runner import build_table
from streamkv.sequence import Sequence
from streamkv.tiers.spec import BlockKey
from streamkv.window import Window

pytestmark = pytest.mark.gpu if ON_GPU else []
needs_gpu = pytest.mark.skipif(not ON_GPU, reason="needs a CUDA device")

B = BLOCK_SIZE
NUM_LAYERS, LAYER = 2, 1
DIM = 16
SCALE = 0.25
WINDOWS = (Window(2 * B, ((0, 4),)), Window(B + 3), Window(3 * B + 1, ((0, 4), (B - 2, B + 2))))


class Bench:
    """Sequences whose past is in a pool that the oracle wrote; NaN wherever nothing is."""

    def __init__(
        self,
        dtype: torch.dtype = torch.float32,
        heads: tuple[int, int] = (1, 2),
        num_blocks: int = 40,
    ) -> None:
        self.num_kv_heads, self.num_q_heads = heads
        shape = (num_blocks + 1, NUM_LAYERS, 2, self.num_kv_heads, B, DIM)
        # The oracle keeps its own pool, in which it writes what the kernels write in theirs.
        self.host = torch.full(shape, math.nan, dtype=dtype)
        self.pool = self.host.to(DEVICE, copy=True)
        inv_freq = 10000.0 ** -(torch.arange(DIM // 2).double() / (DIM // 2))
        length = num_blocks * B + 513
        self.rope, self.host_rope = (
            RopeTables(inv_freq.to(device), length) for device in (DEVICE, "cpu")
        )
        sizes = gpu.Shape.of(self.pool, self.num_q_heads, self.rope)
        self.attention = GpuAttention(self.pool, self.rope, sizes, {SCALE: gpu.Softmax(SCALE)})
        self._free = list(range(num_blocks))
        random.Random(2).shuffle(self._free)
        self._num_opened = 0
        self._generator = torch.Generator().manual_seed(6)

    def random(self, num_tokens: int, num_heads: int) -> Tensor:
        rows = torch.randn(num_tokens, num_heads, DIM, generator=self._generator)
        return rows.to(self.host.dtype)

    def step(self, past: int, query_len: int, window: Window | None = None) -> SequenceStep:
        """Of a new stream with so many tokens computed."""
        window = window or WINDOWS[self._num_opened % len(WINDOWS)]
        self._num_opened += 1
        sequence = Sequence(self._num_opened, window, B, BlockKey(b"r" * 16))
        sequence.append([3] * (past + query_len))
        if past:
            self._make_live(sequence, 0, past)
            k, v = (self.random(past, self.num_kv_heads) for _ in range(2))
            slots = torch.tensor(sequence.table.slots(0, past))
            reference.write_kv(self.host, k, v, slots, LAYER, self.host_rope)
            sequence.advance(past)
            self._free.extend(block_id for block_id, _ in sequence.take_expired())
        self._make_live(sequence, past, past + query_len)
        return SequenceStep(sequence, query_len)

    def _make_live(self, sequence: Sequence, start: int, end: int) -> None:
        for index in sequence.table.missing(start, end):
            sequence.table.add(index, self._free.pop())

    def slots(self, steps: list[SequenceStep]) -> list[int]:
        return [
            slot
            for step in steps
            for slot in step.sequence.table.slots(step.start, step.start + step.query_len)
        ]

    def rows(self, steps: list[SequenceStep]) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v of a packed row."""
        count = sum(step.query_len for step in steps)
        k, v = (self.random(count, self.num_kv_heads) for _ in range(2))
        return self.random(count, self.num_q_heads), k, v

    def attend(self, steps: list[SequenceStep], rows: tuple[Tensor, ...]) -> Tensor:
        self.pool.copy_(self.host)
        attend = self.attention.plan(steps, torch.tensor(self.slots(steps), device=DEVICE))
        q, k, v = (each.to(DEVICE) for each in rows)
        return attend(LAYER, q, k, v, SCALE)

    def expected(self, steps: list[SequenceStep], rows: tuple[Tensor, ...]) -> Tensor:
        q, k, v = rows
        slots = torch.tensor(self.slots(steps))
        pool = self.host.clone()
        reference.write_kv(pool, k, v, slots, LAYER, self.host_rope)
        found, begin = [], 0
        for step in steps:
            sequence, end = step.sequence, step.start + step.query_len
            table = build_table(sequence.table.entries(sequence.window, step.start, end))
            part = q[begin : begin + step.query_len]
            size = sequence.window.window_size
            found.append(
                reference.attend(
                    part.float(),
                    pool.float(),
                    LAYER,
                    table,
                    step.start,
                    size,
                    self.host_rope,
                    SCALE,
                )
            )
            begin += step.query_len
        return torch.cat(found)

    def check(self, steps: list[SequenceStep]) -> None:
        rows = self.rows(steps)
        found = self.attend(steps, rows)
        assert found.shape == rows[0].shape and found.dtype == rows[0].dtype
        tolerance = TOLERANCES[self.host.dtype]
        expected = self.expected(steps, rows)
        torch.testing.assert_close(found.float().cpu(), expected, atol=tolerance, rtol=tolerance)


SINGLES = ((0, 1), (B - 1, 1), (B, 1), (4 * B + 5, 1))
CHUNKS = ((0, 2), (0, B + 3), (2 * B - 1, 2), (3 * B + 7, 2 * B + 1))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "parts",
    [
        SINGLES[:1],
        SINGLES,
        CHUNKS[-1:],
        CHUNKS,
        (*SINGLES, *CHUNKS),
        (*SINGLES[:1], *CHUNKS[:1]),
    ],
    ids=["one", "singles", "chunk", "chunks", "both", "first-tokens"],
)
def test_parts_of_every_kind_in_one_row(
    parts: tuple[tuple[int, int], ...], dtype: torch.dtype
) -> None:
    bench = Bench(dtype, (2, 6) if ON_GPU else (1, 2))
    bench.check([bench.step(*part) for part in parts])


def test_a_plan_serves_every_layer_and_writes_that_layer_alone() -> None:
    bench = Bench()
    steps = [bench.step(B + 2, 1), bench.step(3, 4)]
    attend = bench.attention.plan(steps, torch.tensor(bench.slots(steps), device=DEVICE))
    bench.pool.copy_(bench.host)
    for layer in range(NUM_LAYERS):
        before = bench.pool.clone()
        q, k, v = (each.to(DEVICE) for each in bench.rows(steps))
        attend(layer, q, k, v, SCALE)
        changed = ~torch.isclose(bench.pool, before, equal_nan=True, rtol=0, atol=0)
        assert not changed[:, 1 - layer].any()
        written = changed[:, layer].any(4).any(2).any(1)
        assert set(written.flatten().nonzero()[:, 0].tolist()) == set(bench.slots(steps))


def test_a_token_without_a_slot_is_not_written() -> None:
    bench = Bench()
    steps = [bench.step(B + 2, 1), bench.step(2 * B, 1)]
    slots = torch.tensor([bench.slots(steps)[0], -1], device=DEVICE)
    bench.pool.copy_(bench.host)
    q, k, v = (each.to(DEVICE) for each in bench.rows(steps))
    bench.attention.plan(steps, slots)(LAYER, q, k, v, SCALE)
    changed = bench.pool.cpu().isfinite() & ~bench.host.isfinite()
    written = changed[:, LAYER, 0, 0, :, 0].flatten().nonzero()[:, 0].tolist()
    assert written == bench.slots(steps)[:1]


def test_scratch_serves_chunks_that_are_no_longer_and_windows_that_are_no_wider() -> None:
    """A longer chunk of a narrower window has not room enough for the other."""
    num_blocks = 16000 // B
    bench = Bench(num_blocks=num_blocks)
    bench.attention._squares = plain_squares()
    long_narrow = bench.step(0, 2048, Window(2048))
    short_wide = bench.step(9000, 1500, Window(8192))
    made = []
    for step in (long_narrow, short_wide, short_wide, long_narrow, short_wide):
        many = bench.attention._plan_prefill([step])
        assert isinstance(many, tuple) and hasattr(many, "scratch")
        assert many.scratch.q_forward.shape[0] >= many.plan.cut.num_rows
        assert many.scratch.k_reversed.shape[0] >= many.plan.cut.num_previous
        made.append(many.scratch)
    assert made[1] is made[2]
    both = bench.attention._plan_prefill([long_narrow, short_wide])
    assert not hasattr(both, "scratch")


@pytest.mark.parametrize(("window_size", "fits"), [(2048, True), (4096, False)])
def test_a_chunk_that_turns_beyond_the_tables_attends_by_tiles(
    window_size: int, fits: bool
) -> None:
    bench = Bench(num_blocks=3000 // B)
    bench.attention._squares = plain_squares()
    planned = bench.attention._plan_prefill([bench.step(0, 2048, Window(window_size))])
    assert hasattr(planned, "scratch") is fits


@needs_gpu
@pytest.mark.parametrize("past", [0, 64 * 50 + 7])
def test_a_long_chunk_by_squares_is_that_by_tiles(past: int) -> None:
    bench = Bench(torch.bfloat16, (2, 4), num_blocks=120)
    if bench.attention._squares is None:
        pytest.skip("no operator of this device is fast enough")
    window = Window(2048, ((0, 4),))
    steps = [bench.step(70, 1), bench.step(past, 2500, window)]
    bench.check(steps)
    rows = bench.rows(steps)
    by_squares = bench.attend(steps, rows)
    bench.attention._squares = None
    by_tiles = bench.attend(steps, rows)
    torch.testing.assert_close(by_squares, by_tiles, atol=3e-2, rtol=3e-2)
