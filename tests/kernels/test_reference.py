"""The oracle against a dense float64 computation with one position per (query, key) pair."""

import itertools
import math
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from streamkv.kernels.reference import attend, merge, write_kv
from streamkv.kernels.rope import RopeTables
from streamkv.kernels.table import NO_CAP, SequenceTable

NUM_LAYERS = 2
LAYER = 1


@dataclass(frozen=True)
class Stream:
    """A random stream and how it is attended; positions and visibility come from plain loops."""

    num_tokens: int
    window_size: int
    sink_ranges: tuple[tuple[int, int], ...] = ()
    capped: bool = True
    block_size: int = 8
    num_kv_heads: int = 2
    group: int = 2
    head_dim: int = 16
    rotary_dim: int = 16

    @property
    def inv_freq(self) -> Tensor:
        half = self.rotary_dim // 2
        exponents = torch.arange(half, dtype=torch.float64) / max(half, 1)
        return 100.0**-exponents

    @property
    def sink_tokens(self) -> list[int]:
        return [token for first, end in self.sink_ranges for token in range(first, end)]

    def qkv(self) -> tuple[Tensor, Tensor, Tensor]:
        generator = torch.Generator().manual_seed(7)
        shape = (self.num_tokens, self.num_kv_heads, self.head_dim)
        q_shape = (self.num_tokens, self.num_kv_heads * self.group, self.head_dim)
        return tuple(
            torch.randn(s, generator=generator, dtype=torch.float64)
            for s in (q_shape, shape, shape)
        )

    def cap_of_block(self, block: int) -> int:
        """The cache holds the sink tokens, then the window; slot j of a block is j places on."""
        if not self.capped:
            return NO_CAP
        before = sum(token < block * self.block_size for token in self.sink_tokens)
        inside = [t for t in self.sink_tokens if t // self.block_size == block]
        place = before - (inside[0] - block * self.block_size)
        return len(self.sink_tokens) + self.window_size - 1 - place

    def sees(self, query: int, token: int) -> bool:
        if token > query:
            return False
        return token in self.sink_tokens or token > query - self.window_size

    def relative_position(self, query: int, token: int) -> int:
        if token not in self.sink_tokens:
            return query - token
        block, slot = divmod(token, self.block_size)
        return min(query - block * self.block_size, self.cap_of_block(block)) - slot


def turned(x: Tensor, position: int, inv_freq: Tensor) -> Tensor:
    """`x` [head_dim] rotated pair by pair, as complex numbers."""
    half = len(inv_freq)
    pairs = torch.complex(x[:half], x[half : 2 * half])
    pairs = pairs * torch.exp(1j * position * inv_freq)
    return torch.cat((pairs.real, pairs.imag, x[2 * half :]))


def brute_force(stream: Stream, queries: range, scale: float) -> tuple[Tensor, Tensor]:
    q, k, v = stream.qkv()
    out = torch.zeros(len(queries), *q.shape[1:], dtype=torch.float64)
    lse = torch.full((len(queries), q.shape[1]), -math.inf, dtype=torch.float64)
    for row, t in enumerate(queries):
        tokens = [i for i in range(stream.num_tokens) if stream.sees(t, i)]
        for head in range(q.shape[1]):
            kv_head = head // stream.group
            scores = torch.stack(
                [
                    turned(q[t, head], stream.relative_position(t, i), stream.inv_freq)
                    @ k[i, kv_head]
                    * scale
                    for i in tokens
                ]
            )
            lse[row, head] = scores.logsumexp(0)
            out[row, head] = scores.softmax(0) @ v[tokens, kv_head]
    return out, lse


def written_pool(stream: Stream, rope: RopeTables) -> tuple[Tensor, list[int]]:
    """A pool of NaN with the whole stream written to it, and the block ids in stream order."""
    num_blocks = -(-stream.num_tokens // stream.block_size)
    shape = (num_blocks + 3, NUM_LAYERS, 2, stream.num_kv_heads, stream.block_size, stream.head_dim)
    pool = torch.full(shape, math.nan, dtype=torch.float64)
    order = torch.randperm(num_blocks + 2, generator=torch.Generator().manual_seed(3)).tolist()
    _, k, v = stream.qkv()
    slots = torch.tensor(
        [
            order[t // stream.block_size] * stream.block_size + t % stream.block_size
            for t in range(stream.num_tokens)
        ]
    )
    write_kv(pool, k, v, slots, LAYER, rope)
    return pool, order


def table_of(stream: Stream, order: list[int], guard: int) -> SequenceTable:
    """Sink entries, then window entries over the other slots, then an unused entry."""
    sinks, window = [], []
    for block in range(-(-stream.num_tokens // stream.block_size)):
        start = block * stream.block_size
        end = min(stream.block_size, stream.num_tokens - start)
        kinds = [start + slot in stream.sink_tokens for slot in range(end)]
        edges = [0] + [s for s in range(1, end) if kinds[s] != kinds[s - 1]] + [end]
        for first, last in itertools.pairwise(edges):
            cap = stream.cap_of_block(block) if kinds[first] else NO_CAP
            (sinks if kinds[first] else window).append((order[block], start, cap, first, last))
    entries = torch.tensor([*sinks, *window, (guard, 0, NO_CAP, 0, 0)], dtype=torch.int64)
    return SequenceTable(*entries.unbind(1), num_sink_entries=len(sinks))


STREAMS = {
    "window-1": Stream(20, 21),
    "window+0": Stream(21, 21),
    "window+1": Stream(22, 21),
    "dense": Stream(30, 1000, ((0, 4),)),
    "no-sinks": Stream(40, 13),
    "capped": Stream(60, 16, ((0, 4),)),
    "uncapped": Stream(60, 16, ((0, 4),), capped=False),
    "one-token-window": Stream(30, 1, ((0, 3),)),
    "whole-blocks-of-sinks": Stream(60, 16, ((0, 16),)),
    "sinks-over-a-block-edge": Stream(60, 16, ((0, 11),)),
    "later-sinks": Stream(70, 12, ((0, 4), (18, 21), (29, 35))),
    "partial-rotary": Stream(50, 16, ((0, 4),), rotary_dim=8),
    "no-rotary": Stream(50, 16, ((0, 4),), rotary_dim=0),
    "one-head": Stream(50, 16, ((0, 4),), num_kv_heads=1, group=1),
    "group-of-five": Stream(50, 16, ((0, 4),), num_kv_heads=1, group=5),
    "block-of-one": Stream(30, 9, ((0, 4),), block_size=1),
}


@pytest.mark.parametrize("stream", STREAMS.values(), ids=STREAMS.keys())
def test_equals_one_position_per_pair(stream: Stream) -> None:
    rope = RopeTables(stream.inv_freq, 128)
    pool, order = written_pool(stream, rope)
    queries = range(stream.num_tokens // 3, stream.num_tokens)
    q = stream.qkv()[0][queries.start : queries.stop]
    table = table_of(stream, order, guard=pool.shape[0] - 1)
    out, lse = attend(
        q, pool, LAYER, table, queries.start, stream.window_size, rope, 0.3, return_lse=True
    )
    expected_out, expected_lse = brute_force(stream, queries, 0.3)
    # Only the float32 tables separate the two.
    torch.testing.assert_close(out, expected_out, atol=2e-6, rtol=0)
    torch.testing.assert_close(lse.double(), expected_lse, atol=2e-6, rtol=0)


def test_float32_stays_near_float64() -> None:
    stream = STREAMS["later-sinks"]
    rope = RopeTables(stream.inv_freq, 128)
    pool, order = written_pool(stream, rope)
    table = table_of(stream, order, guard=pool.shape[0] - 1)
    q = stream.qkv()[0]
    exact = attend(q, pool, LAYER, table, 0, stream.window_size, rope, 0.3)
    out = attend(q.float(), pool.float(), LAYER, table, 0, stream.window_size, rope, 0.3)
    torch.testing.assert_close(out, exact.float(), atol=5e-6, rtol=0)


def test_only_the_layer_and_the_slots_named_are_written() -> None:
    pool = torch.full((3, NUM_LAYERS, 2, 1, 4, 2), math.nan)
    k, v = torch.tensor([[[1.0, 0.0]]]), torch.tensor([[[5.0, 6.0]]])
    rope = RopeTables(torch.tensor([math.pi / 2], dtype=torch.float64), 4)
    write_kv(pool, k, v, torch.tensor([1 * 4 + 1]), LAYER, rope)
    torch.testing.assert_close(pool[1, LAYER, 0, 0, 1], torch.tensor([0.0, 1.0]))
    assert pool[1, LAYER, 1, 0, 1].tolist() == [5.0, 6.0]
    assert int(pool.isnan().sum()) == pool.numel() - 4


def test_query_that_sees_nothing_gets_zeros_and_minus_infinity() -> None:
    pool = torch.full((2, 1, 2, 1, 4, 2), math.nan)
    rope = RopeTables(torch.ones(1, dtype=torch.float64), 8)
    unused = torch.tensor([[1, 0, NO_CAP, 0, 0]])
    for rows in (unused, unused[:0]):
        table = SequenceTable(*rows.unbind(1), num_sink_entries=0)
        out, lse = attend(torch.ones(3, 2, 2), pool, 0, table, 5, 4, rope, 1.0, return_lse=True)
        assert out.tolist() == torch.zeros(3, 2, 2).tolist()
        assert lse.tolist() == [[-math.inf, -math.inf]] * 3


def test_merge_of_two_parts_equals_the_whole() -> None:
    stream = STREAMS["capped"]
    rope = RopeTables(stream.inv_freq, 128)
    pool, order = written_pool(stream, rope)
    whole = table_of(stream, order, guard=pool.shape[0] - 1)
    columns = (whole.block_ids, whole.starts, whole.caps, whole.first_valid, whole.end_valid)
    sinks = SequenceTable(*(c[:1] for c in columns), num_sink_entries=1)
    window = SequenceTable(*(c[1:] for c in columns), num_sink_entries=0)
    q = stream.qkv()[0][40:]
    parts = [
        attend(q, pool, LAYER, t, 40, stream.window_size, rope, 0.3, return_lse=True)
        for t in (whole, sinks, window)
    ]
    out, lse = merge(*parts[1], *parts[2])
    torch.testing.assert_close(out, parts[0][0], atol=1e-6, rtol=0)
    torch.testing.assert_close(lse, parts[0][1], atol=1e-6, rtol=0)


def test_merge_of_two_empty_parts_is_empty() -> None:
    nothing = torch.zeros(3, 2, 8), torch.full((3, 2), -math.inf)
    out, lse = merge(*nothing, *nothing)
    assert not out.any()
    assert lse.tolist() == [[-math.inf] * 2] * 3


def test_merge_with_an_empty_part_is_the_other_part() -> None:
    out, lse = torch.randn(3, 2, 8), torch.randn(3, 2) - 60000.0
    nothing = torch.zeros(3, 2, 8), torch.full((3, 2), -math.inf)
    for parts in ((out, lse, *nothing), (*nothing, out, lse)):
        merged_out, merged_lse = merge(*parts)
        torch.testing.assert_close(merged_out, out)
        torch.testing.assert_close(merged_lse, lse)
