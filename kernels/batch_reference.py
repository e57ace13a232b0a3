"""Twins of the GPU kernels: the same arguments, computed sequence by sequence by the oracle."""

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
        out, lse = reference.attend(
            q[begin : begin + count],
            blocks,
            layer,
            table.sequence(index),
            int(query_starts[index]),
            int(table.window_sizes[index]),
            rope,
            scale,
            softcap=softcap,
            return_lse=True,
        )
        outs.append(out)
        lses.append(lse)
        begin += count
    out, lse = torch.cat(outs), torch.cat(lses)
    if sink_logits is None:
        return out, lse
    nothing = torch.zeros_like(out)
    return reference.merge(out, lse, nothing, sink_logits.float().expand_as(lse))


def copy_blocks(sources: Sequence[Tensor], targets: Sequence[Tensor]) -> None:
    """What `gpu.copy_blocks` does, over tensors in place of addresses."""
    for source, target in zip(sources, targets, strict=True):
        target.copy_(source)
