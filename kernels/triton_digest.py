"""Digests of full blocks: the mean of the keys of each layer and KV head."""

import triton
import triton.language as tl


@triton.jit
def digest_kernel(
    pool,
    block_ids,
    out,
    block_stride,
    num_layers,
    NUM_KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One head of one layer of one block: `out` float32 [n, layers, KV heads, DIM]."""
    row, layer, head = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    slots, d = tl.arange(0, BLOCK), tl.arange(0, DIM_PAD)
    is_element = d < DIM
    keys = pool + tl.load(block_ids + row) * block_stride
    keys += (layer * 2 * NUM_KV_HEADS + head) * (BLOCK * DIM)
    # [BLOCK, DIM_PAD]
    key = tl.load(keys + slots[:, None] * DIM + d[None, :], mask=is_element[None, :], other=0.0)
    mean = tl.sum(key.to(tl.float32), 0) / BLOCK
    place = ((row * num_layers + layer) * NUM_KV_HEADS + head) * DIM
    tl.store(out + place + d, mean, mask=is_element)
