"""Launches that fit into the shared memory of a GPU: smaller where it is small, equal results."""

import pytest
import torch
from gpu_cases import BLOCK_SIZE, DEVICE, LAYER, ON_GPU, Batch, Stream, build

from streamkv.errors import ConfigError
from streamkv.kernels import gpu
from streamkv.kernels.gpu import Launch, Shape, Softmax, decode_launch, prefill_launch
from streamkv.kernels.gpu_shape import (
    H100_SHARED_BYTES,
    decode_bytes,
    fitting_launch,
    prefill_bytes,
    shared_bytes,
)
from streamkv.kernels.small_batch import MAX_ROWS, Matrix, Tile, fitting_tiles, tile_bytes

pytestmark = pytest.mark.gpu if ON_GPU else []

B = BLOCK_SIZE
KIB = 1024
ADA_SHARED_BYTES = 99 * KIB
BF16, FP32 = torch.bfloat16, torch.float32


def shape_of(head_dim: int, dtype: torch.dtype, limit: int, group: int = 4) -> Shape:
    return Shape(1, 2, 64, head_dim, 2 * group, head_dim // 2, dtype, limit)


# What Triton 3.9 reports for compute capability 9.0 and blocks of 64: (head_dim, dtype, launch,
# queries of a sequence, bytes).
DECODE_COMPILED = [
    (64, BF16, Launch(2, 1, 16), 1, 10240),
    (64, BF16, Launch(2, 2, 16), 1, 18964),
    (128, BF16, Launch(2, 2, 16), 1, 37908),
    (256, BF16, Launch(4, 2, 16), 1, 75796),
    (64, BF16, Launch(4, 2, 128), 8, 115712),
    (128, BF16, Launch(4, 1, 128), 8, 65536),
    (128, BF16, Launch(4, 2, 128), 8, 230400),
    (256, BF16, Launch(4, 1, 128), 8, 131072),
    (256, BF16, Launch(4, 2, 128), 8, 459776),
    (128, FP32, Launch(4, 1, 16), 1, 73728),
    (128, FP32, Launch(4, 2, 16), 1, 74772),
    (256, FP32, Launch(4, 2, 16), 1, 149524),
    (128, FP32, Launch(4, 2, 128), 8, 263168),
    (256, FP32, Launch(4, 1, 128), 8, 262144),
]
PREFILL_COMPILED = [
    (64, BF16, Launch(8, 1, 128), 49152),
    (64, BF16, Launch(8, 2, 128), 57856),
    (128, BF16, Launch(8, 1, 128), 98304),
    (128, BF16, Launch(8, 2, 128), 115712),
    (128, BF16, Launch(8, 2, 64), 99328),
    (128, BF16, Launch(8, 2, 16), 70656),
    (256, BF16, Launch(8, 2, 64), 198656),
    (256, BF16, Launch(8, 1, 32), 81920),
    (256, BF16, Launch(8, 1, 16), 73728),
    (64, FP32, Launch(4, 2, 32), 74240),
    (128, FP32, Launch(4, 1, 32), 98304),
    (256, FP32, Launch(4, 1, 32), 196608),
    (256, FP32, Launch(4, 1, 16), 163840),
]


@pytest.mark.parametrize(
    ("head_dim", "dtype", "launch", "num_queries", "compiled"), DECODE_COMPILED
)
def test_a_decode_program_is_not_reckoned_smaller_than_it_is(
    head_dim: int, dtype: torch.dtype, launch: Launch, num_queries: int, compiled: int
) -> None:
    reckoned = decode_bytes(shape_of(head_dim, dtype, 0), launch, num_queries)
    assert compiled <= reckoned <= 2 * compiled


@pytest.mark.parametrize(("head_dim", "dtype", "launch", "compiled"), PREFILL_COMPILED)
def test_a_prefill_program_is_not_reckoned_smaller_than_it_is(
    head_dim: int, dtype: torch.dtype, launch: Launch, compiled: int
) -> None:
    reckoned = prefill_bytes(shape_of(head_dim, dtype, 0), launch)
    assert compiled <= reckoned <= 2 * compiled


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
def test_an_h100_takes_the_best_launches_as_they_are(head_dim: int) -> None:
    half, full = (shape_of(head_dim, dtype, H100_SHARED_BYTES) for dtype in (BF16, FP32))
    best = Launch(8, 2, 128) if head_dim <= 128 else Launch(8, 2, 64)
    assert prefill_launch(half) == best
    assert prefill_launch(full) == Launch(4, 1, 32)
    assert decode_launch(half, 16).num_stages == decode_launch(full, 16).num_stages == 2


@pytest.mark.parametrize(
    ("limit", "head_dim", "dtype", "expected"),
    [
        (ADA_SHARED_BYTES, 64, BF16, Launch(8, 2, 128)),
        (ADA_SHARED_BYTES, 128, BF16, Launch(8, 1, 128)),
        (64 * KIB, 128, BF16, Launch(8, 1, 64)),
        (64 * KIB, 64, BF16, Launch(8, 2, 128)),
        (ADA_SHARED_BYTES, 256, BF16, Launch(8, 1, 32)),
        (ADA_SHARED_BYTES, 128, FP32, Launch(4, 1, 32)),
        (96 * KIB - 1, 128, FP32, Launch(4, 1, 16)),
    ],
)
def test_less_shared_memory_gives_a_smaller_prefill_tile(
    limit: int, head_dim: int, dtype: torch.dtype, expected: Launch
) -> None:
    shape = shape_of(head_dim, dtype, limit)
    assert prefill_launch(shape) == expected
    assert prefill_bytes(shape, expected) <= limit


def test_a_decode_program_of_many_rows_loads_less_ahead() -> None:
    many = shape_of(256, BF16, H100_SHARED_BYTES, group=16)
    assert decode_launch(many, 128, 8) == Launch(4, 1, 128)
    assert decode_launch(shape_of(256, BF16, 64 * KIB), 16) == Launch(4, 1, 16)
    assert decode_launch(shape_of(128, BF16, 37920), 16) == Launch(2, 2, 16)
    assert decode_launch(shape_of(128, BF16, 37919), 16) == Launch(2, 1, 16)


def test_what_no_launch_fits_is_refused_with_the_sizes() -> None:
    with pytest.raises(ConfigError, match=r"shared memory.*1024.* 16 rows takes .* 16 bits"):
        prefill_launch(shape_of(128, BF16, KIB))
    with pytest.raises(ConfigError, match="128 rows takes 262144 bytes"):
        decode_launch(shape_of(256, FP32, H100_SHARED_BYTES, group=16), 128, 8)


def test_stages_go_before_rows_and_nothing_goes_without_need() -> None:
    shape = shape_of(128, BF16, 100)
    sizes = {(3, 64): 300, (2, 64): 200, (1, 64): 150, (1, 32): 100}
    fitted = fitting_launch(
        shape, Launch(8, 3, 64), lambda each: sizes[each.num_stages, each.rows], 16
    )
    assert fitted == Launch(8, 1, 32)


@pytest.mark.parametrize("rows", [16, 32, 64])
def test_a_smaller_prefill_tile_computes_the_same(rows: int) -> None:
    streams = (Stream(3 * B + 5, 2 * B + 1, window_size=B + 7), Stream(B + 2, B + 2))
    built = build(Batch(streams, group=3))
    batch, pool, launch = built.batch, built.pools[0], Launch(4, 1, rows)
    shape, starts = Shape.of(pool, batch.num_q_heads, batch.rope()), built.query_starts
    tiles = gpu.prefill_tiles(
        built.table.to("cpu"), starts.cpu(), built.num_queries, shape, rows
    ).to(DEVICE)
    softmax = Softmax(batch.scale)
    built.check(
        gpu.prefill(built.q, pool, LAYER, built.table, starts, tiles, batch.rope(), softmax, launch)
    )


def test_a_decode_program_with_one_stage_computes_the_same() -> None:
    built = build(Batch((Stream(3 * B + 5, window_size=B + 7), Stream(B + 2))))
    batch = built.batch
    seen = gpu.plan_decode(built.table, built.query_starts, 1)
    softmax, launch = Softmax(batch.scale), Launch(4, 1, 16)
    built.check(
        gpu.decode(
            built.q, built.pools[0], LAYER, built.table, seen, batch.rope(), softmax, launch=launch
        )
    )


@pytest.mark.parametrize("limit", [H100_SHARED_BYTES, ADA_SHARED_BYTES, 64 * KIB, 48 * KIB])
@pytest.mark.parametrize("num_rows", [1, 17, MAX_ROWS])
@pytest.mark.parametrize("is_gated", [False, True])
@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_a_product_always_has_a_tile(
    limit: int, num_rows: int, is_gated: bool, dtype: torch.dtype
) -> None:
    matrix = Matrix(torch.empty(512, 256, dtype=dtype), gated=is_gated)
    tiles = fitting_tiles(matrix, num_rows, limit)
    assert tiles
    assert all(tile_bytes(matrix, num_rows, tile) < limit for tile in tiles)


def test_a_product_on_a_small_device_gets_the_smallest_tile_with_fewer_stages() -> None:
    matrix = Matrix(torch.empty(512, 256, dtype=FP32), gated=True)
    assert fitting_tiles(matrix, MAX_ROWS, 64 * KIB) == [Tile(16, 64, 4, 1, False)]
    assert len(fitting_tiles(matrix, 1, H100_SHARED_BYTES)) > 1


def test_the_limit_is_that_of_the_device_of_the_pool() -> None:
    built = build(Batch((Stream(5),)))
    shape = Shape.of(built.pools[0], built.batch.num_q_heads, built.batch.rope())
    assert shape.shared_bytes == shared_bytes(torch.device(DEVICE)) >= 48 * KIB
