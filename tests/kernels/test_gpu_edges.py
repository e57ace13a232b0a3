"""Edges of the Triton kernels: every length around a block, a window and a tile; memory not owned.

On a GPU in full, else small in Triton's interpreter. Whatever a kernel should not read is NaN, and
outputs are NaN until they are written.
"""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from gpu_cases import BLOCK_SIZE, DEVICE, DTYPES, LAYER, ON_GPU, Batch, Built, Stream, build

from streamkv.kernels import gpu, reference
from streamkv.kernels.batch_table import BatchTable
from streamkv.kernels.gpu import Launch, Shape, Softmax

pytestmark = pytest.mark.gpu if ON_GPU else []
needs_gpu = pytest.mark.skipif(not ON_GPU, reason="needs a CUDA device")

B = BLOCK_SIZE
TILE_ROWS = 128 if ON_GPU else 16


@pytest.fixture(autouse=True)
def nan_filled() -> Iterator[None]:
    """Every tensor that is made without a value holds NaN, those inside the wrappers included."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    assert torch.empty(3, device=DEVICE).isnan().all()
    yield
    torch.use_deterministic_algorithms(before)


def decode(built: Built) -> tuple[torch.Tensor, torch.Tensor]:
    batch, per_sequence = built.batch, len(built.q) // len(built.batch.streams)
    softmax, rope = Softmax(batch.scale, batch.softcap, built.sink_logits), batch.rope()
    seen = gpu.plan_decode(built.table, built.query_starts, per_sequence)
    return gpu.decode(built.q, built.pools[0], LAYER, built.table, seen, rope, softmax)


def prefill(built: Built, rows: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    batch, pool = built.batch, built.pools[0]
    shape = Shape.of(pool, batch.num_q_heads, batch.rope())
    launch = gpu.prefill_launch(shape) if rows is None else Launch(4, 1, rows)
    starts, softmax = built.query_starts, Softmax(batch.scale, batch.softcap, built.sink_logits)
    tiles = gpu.prefill_tiles(
        built.table.to("cpu"), starts.cpu(), built.num_queries, shape, launch.rows
    ).to(DEVICE)
    return gpu.prefill(
        built.q, pool, LAYER, built.table, starts, tiles, batch.rope(), softmax, launch
    )


def around(*edges: int) -> list[int]:
    """Each edge less one, itself and plus one."""
    return sorted({edge + step for edge in edges for step in (-1, 0, 1)} - {0, -1})


@pytest.mark.parametrize("num_blocks", [0, 3])
def test_decode_at_every_length_of_the_last_block(num_blocks: int) -> None:
    streams = tuple(Stream(num_blocks * B + n, window_size=2 * B + 3) for n in range(1, B + 1))
    built = build(Batch(streams))
    built.check(decode(built))


@pytest.mark.parametrize("window_size", [B, 2 * B + 1])
def test_prefill_that_ends_at_every_length_of_the_last_block(window_size: int) -> None:
    streams = tuple(Stream(2 * B + n, 3, window_size) for n in range(1, B + 1))
    built = build(Batch(streams, num_kv_heads=1))
    built.check(prefill(built, TILE_ROWS))


@pytest.mark.parametrize("window_size", around(1, B, 2 * B))
def test_decode_around_every_edge_of_a_window(window_size: int) -> None:
    lengths = around(1, window_size, window_size + 4, window_size + B)
    built = build(Batch(tuple(Stream(n, window_size=window_size) for n in lengths)))
    built.check(decode(built))


@pytest.mark.parametrize("group", [1, 2, 3])
def test_prefill_around_every_edge_of_a_tile(group: int) -> None:
    per_tile = TILE_ROWS // group
    counts = around(per_tile, 2 * per_tile)
    streams = [Stream(count + before, count, B + 5) for count in counts for before in (0, B + 1)]
    built = build(Batch(tuple(streams), num_kv_heads=1, group=group))
    built.check(prefill(built, TILE_ROWS))


@pytest.mark.parametrize("first_query", around(B, 3 * B))
def test_prefill_that_begins_around_the_edge_of_a_block(first_query: int) -> None:
    window_size = 2 * B
    counts = around(B, window_size - first_query % B)
    streams = tuple(Stream(first_query + count, count, window_size) for count in counts)
    built = build(Batch(streams, num_kv_heads=1))
    built.check(prefill(built))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("num_kv_heads", "group"), [(5, 1), (3, 5), (1, 13), (7, 3), (1, 9)])
def test_odd_numbers_of_heads(num_kv_heads: int, group: int, dtype: torch.dtype) -> None:
    streams = (Stream(2 * B + 5, 3, window_size=B + 1), Stream(B, 3, window_size=B))
    built = build(Batch(streams, num_kv_heads, group, head_dim=32, rotary_dim=32, dtype=dtype))
    built.check(prefill(built))
    built.check(decode(built))


def test_a_sequence_without_queries_between_others() -> None:
    streams = (Stream(B + 3, 5), Stream(2 * B, 0), Stream(7, 7), Stream(3, 0))
    built = build(Batch(streams))
    built.check(prefill(built))


def test_no_queries_at_all() -> None:
    built = build(Batch((Stream(B, 0), Stream(3, 0))))
    out, lse = prefill(built)
    assert out.shape == (0, 4, 16) and lse.shape == (0, 4)


def test_a_prefill_that_sees_nothing_gets_zeros_and_minus_infinity() -> None:
    built = build(Batch((Stream(5, 5), Stream(B + 3, 4))))
    built.table.num_entries[0] = 0
    built.table.num_sink_entries[0] = 0
    out, lse = prefill(built)
    assert not out[:5].any() and lse[:5].eq(-torch.inf).all()
    assert out[5:].isfinite().all() and lse[5:].isfinite().all()


def as_padding(table: BatchTable, guard: int, address: int, row: int) -> None:
    """Make every unused entry point at the guard block, and leave a row without any."""
    table.num_entries[row] = 0
    table.num_sink_entries[row] = 0
    entry = torch.arange(table.capacity, device=table.addresses.device)
    unused = entry[None] >= table.num_entries[:, None]
    table.addresses[unused] = address
    table.block_ids[unused] = guard


def test_neither_the_guard_block_nor_a_pool_is_touched() -> None:
    """Entries beyond the last, and rows of a graph that no sequence has, may hold anything."""
    built = build(Batch((Stream(B + 3), Stream(5), Stream(2 * B, window_size=B))))
    pool = built.pools[0]
    guard = pool.shape[0] - 1
    assert pool[guard].isnan().all()
    as_padding(built.table, guard, pool[guard].data_ptr(), row=1)
    before = pool.clone()
    out, lse = decode(built)
    found, wanted = (out, lse), built.expected()
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one.float().cpu(), other, atol=1e-5, rtol=1e-5)
    assert not out[1].any() and lse[1].eq(-torch.inf).all()
    assert torch.equal(pool.nan_to_num(-7.0), before.nan_to_num(-7.0))


@pytest.mark.parametrize("is_padding", [(False, True, True), (True, False, True), (True,) * 3])
def test_a_token_without_a_slot_is_not_written(is_padding: tuple[bool, ...]) -> None:
    batch = Batch((Stream(1),))
    pool = torch.full((4, 2, 2, 3, B, 16), torch.nan)
    k, v = torch.randn(2, 3, 3, 16)
    slots = torch.tensor([-1 if each else B + 2 * i for i, each in enumerate(is_padding)])
    expected, kept = pool.clone(), slots >= 0
    reference.write_kv(expected, k[kept], v[kept], slots[kept], 1, batch.rope("cpu"))
    found = pool.to(DEVICE)
    gpu.write_kv(found, k.to(DEVICE), v.to(DEVICE), slots.to(DEVICE), 1, batch.rope())
    torch.testing.assert_close(found.cpu(), expected, equal_nan=True, atol=1e-6, rtol=1e-6)


GIB = 2**30
FAR_BYTES = 4 * GIB + 64 * 2**20
"""Byte offsets pass 2^31 and 2^32; of a two-byte type element offsets pass 2^31, too."""


def far_places(num_blocks: int, block_bytes: int) -> list[int]:
    """Block ids on both sides of 2^31 and of 2^32 bytes, as many as wanted, the last one first."""
    last = FAR_BYTES // block_bytes - 2
    edges = [2**31 // block_bytes, 2**32 // block_bytes]
    near = [edge + step for step in range(num_blocks) for edge in edges]
    below = [edge - 1 for edge in edges]
    return list(dict.fromkeys([last, *below, *near]))[:num_blocks]


def far(built: Built) -> tuple[Built, torch.Tensor]:
    """The same streams in a pool of over 4 GiB, and the id there of each block of the small pool.

    Only the blocks in use are filled; the rest is whatever the device had there.
    """
    small = built.pools[0]
    block_bytes = small[0].numel() * small.element_size()
    num_blocks = FAR_BYTES // block_bytes
    flat = torch.empty(num_blocks * small[0].numel() * small.element_size(), dtype=torch.uint8,
                       device=DEVICE)  # fmt: skip
    pool = flat.view(small.dtype).view(num_blocks, *small.shape[1:])
    ids = torch.tensor(far_places(small.shape[0], block_bytes), device=DEVICE)
    assert len(ids) == small.shape[0]
    for near_id, far_id in enumerate(ids.tolist()):
        pool[far_id].copy_(small[near_id])
    table = replace(
        built.table,
        block_ids=ids[built.table.block_ids.to(torch.int64)],
        addresses=pool.data_ptr() + ids[built.table.block_ids.to(torch.int64)] * block_bytes,
    )
    return replace(built, pools=[pool], table=table), ids


@needs_gpu
@pytest.mark.parametrize("kernel", [decode, prefill])
def test_blocks_beyond_two_and_four_gigabytes(kernel) -> None:  # type: ignore[no-untyped-def]
    queries = 1 if kernel is decode else B + 3
    streams = tuple(Stream(n, queries, window_size=4 * B) for n in (6 * B + 3, 5 * B, 3 * B + 1))
    near = build(Batch(streams, head_dim=64, rotary_dim=64, dtype=torch.bfloat16))
    built, ids = far(near)
    near.check(kernel(built))
    assert int(ids.max()) * near.pools[0][0].numel() > 2**31


@needs_gpu
def test_writing_beyond_two_and_four_gigabytes() -> None:
    near = build(Batch((Stream(3 * B), Stream(2 * B)), head_dim=64, rotary_dim=64,
                       dtype=torch.bfloat16))  # fmt: skip
    built, ids = far(near)
    k, v = torch.randn(2, len(ids) * B, 2, 64, device=DEVICE).bfloat16()
    slots = torch.arange(len(ids) * B, device=DEVICE)
    rope = near.batch.rope()
    gpu.write_kv(near.pools[0], k, v, slots, LAYER, rope)
    gpu.write_kv(built.pools[0], k, v, ids[slots // B] * B + slots % B, LAYER, rope)
    for near_id, far_id in enumerate(ids.tolist()):
        assert torch.equal(built.pools[0][far_id, LAYER], near.pools[0][near_id, LAYER])


@needs_gpu
def test_copies_beyond_two_and_four_gigabytes() -> None:
    near = build(Batch((Stream(3 * B),), head_dim=64, rotary_dim=64, dtype=torch.bfloat16))
    built, ids = far(near)
    small, pool = near.pools[0], built.pools[0]
    block_bytes = small[0].numel() * small.element_size()
    target = torch.zeros_like(small)
    places = torch.arange(len(ids), device=DEVICE) * block_bytes
    gpu.copy_blocks(pool.data_ptr() + ids * block_bytes, target.data_ptr() + places, block_bytes)
    words = (target.view(torch.int16), small.view(torch.int16))
    assert torch.equal(*words)
    turned = ids.flip(0)
    gpu.copy_blocks(target.data_ptr() + places, pool.data_ptr() + turned * block_bytes, block_bytes)
    for near_id, far_id in enumerate(turned.tolist()):
        assert torch.equal(pool[far_id].view(torch.int16), small[near_id].view(torch.int16))
