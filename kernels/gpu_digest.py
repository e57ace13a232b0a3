"""`digests.block_digests` on a GPU: one launch, and no copy of the keys."""

import torch
import triton
from torch import Tensor

from streamkv.kernels.gpu_shape import require
from streamkv.kernels.triton_digest import digest_kernel


def block_digests(pool: Tensor, block_ids: Tensor) -> Tensor:
    """Digests of full blocks: float32 [n, num_layers, num_kv_heads, head_dim].

    Args:
        pool: [blocks, num_layers, 2, num_kv_heads, block_size, head_dim], contiguous.
        block_ids: int64 [n], on the pool's device.
    """
    require("pool", pool.stride(), pool.dim() == 6 and pool.is_contiguous(), "Pass it whole.")
    fits = block_ids.dim() == 1 and block_ids.dtype == torch.int64
    require("block_ids", block_ids.dtype, fits, "Pass int64 [n].")
    num_layers, _, num_kv_heads, block_size, head_dim = pool.shape[1:]
    out = torch.empty(block_ids.shape[0], num_layers, num_kv_heads, head_dim, device=pool.device)
    if out.shape[0]:
        digest_kernel[out.shape[:3]](
            pool,
            block_ids,
            out,
            pool.stride(0),
            num_layers,
            NUM_KV_HEADS=num_kv_heads,
            DIM=head_dim,
            DIM_PAD=triton.next_power_of_2(head_dim),
            BLOCK=block_size,
            num_warps=4,
        )
    return out
