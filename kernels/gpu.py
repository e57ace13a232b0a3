"""Attention, writing and copying on a GPU: the Triton kernels behind checked wrappers.

    pool    [num_blocks + 1, num_layers, 2, num_kv_heads, block_size, head_dim], contiguous; the
            last block of the first pool is the guard block
    table   a `BatchTable`; its addresses may lie in any pool of that layout that the GPU can read

Every wrapper has a twin in `batch_reference` with the same arguments. Head sizes up to 256, any
rotary dimension, groups of 1 to 16 query heads. Element types float16, bfloat16 and float32; scores
and sums are float32. float32 is exact (no TF32), for checks rather than for speed.
"""

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from streamkv.kernels.decode_plan import plan_decode
from streamkv.kernels.gpu_decode import (
    DecodeScratch,
    decode,
    decode_launch,
    decode_rows,
    decode_scratch,
    decode_splits,
    processors,
)
from streamkv.kernels.gpu_merge import merge
from streamkv.kernels.gpu_prefill import (
    TILE_COLUMNS,
    PrefillScratch,
    prefill,
    prefill_launch,
    prefill_scratch,
    prefill_tiles,
)
from streamkv.kernels.gpu_shape import Launch, Shape, Softmax, check_layer, pdl_option, require
from streamkv.kernels.rope import RopeTables
from streamkv.kernels.triton_copy import copy_kernel
from streamkv.kernels.triton_write import write_kernel

__all__ = [
    "TILE_COLUMNS",
    "DecodeScratch",
    "Launch",
    "Observed",
    "PrefillScratch",
    "Shape",
    "Softmax",
    "copy_blocks",
    "decode",
    "decode_launch",
    "decode_rows",
    "decode_scratch",
    "decode_splits",
    "merge",
    "plan_decode",
    "prefill",
    "prefill_launch",
    "prefill_scratch",
    "prefill_tiles",
    "processors",
    "write_kv",
]

_COPY_WORDS = 1024


class Observed(NamedTuple):
    """Queries that are kept for the choice of old blocks.

    Attributes:
        q: [T, num_q_heads, head_dim], un-rotated; the last dimension is contiguous.
        targets: int64 [T], the address of where those of layer 0 go, a multiple of 16; 0: nowhere.
        layer_stride: elements from there to where those of the next layer go.
    """

    q: Tensor
    targets: Tensor
    layer_stride: int


def write_kv(
    pool: Tensor,
    k: Tensor,
    v: Tensor,
    slot_mapping: Tensor,
    layer: int,
    rope: RopeTables,
    pdl: bool = False,
    observed: Observed | None = None,
) -> None:
    """Write un-rotated `k` and `v` of a packed row into their slots of one layer.

    Args:
        pool: changed in place.
        k, v: [T, num_kv_heads, head_dim]; the last dimension is contiguous.
        slot_mapping: int64 [T], block_id * block_size + offset; no slot twice; a token whose slot
            is negative is not written.
        layer: of the pool.
        rope: tables on the pool's device, for at least block_size positions.
        pdl: overlap with the kernel before (Hopper and later).
        observed: queries that are kept besides.
    """
    shape = Shape.of(pool, pool.shape[3], rope)
    check_layer(shape, layer)
    expected = (slot_mapping.shape[0], shape.num_kv_heads, shape.head_dim)
    for name, rows in (("k", k), ("v", v)):
        require(name, list(rows.shape), tuple(rows.shape) == expected, f"Pass {list(expected)}.")
        require(name, rows.stride(), rows.stride(2) == 1, "Its last stride must be 1.")
    require("slot_mapping", slot_mapping.dtype, slot_mapping.dtype == torch.int64, "Pass int64.")
    # Where nothing is observed, any tensors will do: they are not read.
    q, targets, stride = (k, slot_mapping, 0) if observed is None else observed
    if observed is not None:
        _check_observed(observed, expected[0], shape)
    if not slot_mapping.shape[0]:
        return
    constants = shape.constants()
    del constants["GROUP"], constants["EXACT"]
    write_kernel[(slot_mapping.shape[0],)](
        pool,
        k,
        v,
        slot_mapping,
        rope.cos,
        rope.sin,
        layer * 2 * shape.value_offset,
        shape.value_offset,
        pool.stride(0),
        *k.stride()[:2],
        *v.stride()[:2],
        q,
        targets,
        layer * stride,
        *q.stride()[:2],
        HEADS_PAD=triton.next_power_of_2(shape.num_kv_heads),
        **constants,
        NUM_Q_HEADS=q.shape[1],
        Q_HEADS_PAD=triton.next_power_of_2(q.shape[1]),
        OBSERVES=observed is not None,
        PDL=pdl,
        num_warps=4,
        **pdl_option(pdl),
    )


def _check_observed(observed: Observed, num_tokens: int, shape: Shape) -> None:
    q, targets, _ = observed
    fits = q.dim() == 3 and q.shape[0] == num_tokens and q.shape[2] == shape.head_dim
    wanted = f"Pass [{num_tokens}, num_q_heads, {shape.head_dim}]."
    require("q", list(q.shape), fits, wanted)
    require("q", q.stride(), q.stride(2) == 1, "Its last stride must be 1.")
    fits = targets.shape == (num_tokens,) and targets.dtype == torch.int64
    require("targets", list(targets.shape), fits, f"Pass int64 [{num_tokens}].")


def copy_blocks(sources: Tensor, targets: Tensor, num_bytes: int) -> None:
    """Copy pieces of memory, all in one launch.

    Args:
        sources, targets: int64 [N], addresses that the GPU can read and write, multiples of 16.
        num_bytes: of each piece, a multiple of 16.
    """
    require("num_bytes", num_bytes, num_bytes % 16 == 0, "Use a multiple of 16.")
    same = sources.shape == targets.shape and sources.dim() == 1
    require("targets", list(targets.shape), same, "Pass one target for each source.")
    for name, tensor in (("sources", sources), ("targets", targets)):
        require(name, tensor.dtype, tensor.dtype == torch.int64, "Pass int64.")
    if not sources.shape[0] or not num_bytes:
        return
    words = num_bytes // 8
    grid = (sources.shape[0], triton.cdiv(words, _COPY_WORDS))
    copy_kernel[grid](sources, targets, words, WORDS=_COPY_WORDS, num_warps=4)
