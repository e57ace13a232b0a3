"""Twins of the GPU kernels: the same arguments, computed sequence by sequence by the oracle."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from streamkv.kernels import reference
from streamkv.kernels.batch_table import BatchTable
from streamkv.kernels.rope import RopeTables


def attend(
    q: Tensor,
    pools: Sequence[Tensor],
    layer: int,
    table: BatchTable,
    query_starts: Tensor,
    num_queries: Sequence[int],
    rope: RopeTables,
    scale: float,
    *,
    softcap: float | None = None,
    sink_logits: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """What `gpu.decode` and `gpu.prefill` compute, over blocks of all pools.

    Args:
        q: [T, num_q_heads, head_dim], packed sequence by sequence.
        pools: those that the table's ids count through.
        layer, table, query_starts, rope: as there.
        num_queries: of each sequence.
        scale, softcap, sink_logits: how scores become weights.
    """
    blocks = torch.cat([pool.to(q.device) for pool in pools])
    outs, lses, begin = [q[:0]], [q.new_zeros(0, q.shape[1], dtype=torch.float32)], 0
    for index, count in enumerate(num_queries):
        tokens = int(query_starts[index]) + torch.arange(count, device=q.device)
        window_size, block_size = int(table.window_sizes[index]), blocks.shape[4]
        shared = table.sequence(index)
        slices, distances = blocks[shared.block_ids, layer], shared.distances(tokens)
        visible = shared.visible(tokens, window_size, block_size)
        out, lse = reference.attend_slices(
            q[begin : begin + count], slices, visible, distances, rope, scale, softcap=softcap
        )
        outs.append(out)
        lses.append(lse)
        begin += count
    out, lse = torch.cat(outs), torch.cat(lses)
    if sink_logits is None:
        return out, lse
    nothing = torch.zeros_like(out)
    return reference.merge(out, lse, nothing, sink_logits.float().expand_as(lse))


def merge(outs: Tensor, lses: Tensor, sink_logits: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """What `gpu.merge` computes: attention over disjoint sets of keys, from that over each.

    Args:
        outs: [P, T, num_q_heads, head_dim].
        lses: float32 [P, T, num_q_heads], -inf where a part saw nothing.
        sink_logits: float [num_q_heads], a logit that takes weight once and gives no value.
    """
    values = outs.double().masked_fill(lses.isneginf()[..., None], 0.0)
    logits = torch.full(lses.shape[2:], -math.inf) if sink_logits is None else sink_logits
    one_more = logits.to(lses.device, torch.float64).expand(1, *lses.shape[1:])
    each = torch.cat([one_more, lses.double()])
    lse = each.logsumexp(0)
    weights = (each - lse.nan_to_num(neginf=0.0)).exp()[1:]
    return (values * weights[..., None]).sum(0).to(outs.dtype), lse.float()


def copy_blocks(sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
    """What `gpu.copy_blocks` does, over tensors in place of addresses."""
    for source, target in zip(sources, targets, strict=True):
        target.copy_(source)
