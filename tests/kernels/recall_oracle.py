"""What queries see of a stream that recalls old blocks, token by token, in float64.

Who sees whom, and from how far, is written out for single tokens; nothing here knows tables or
entries.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

import torch
from gpu_cases import BLOCK_SIZE, NUM_LAYERS, Batch, Stream
from torch import Tensor

from streamkv.kernels.table import NO_CAP

B = BLOCK_SIZE
Policy = Literal["absolute", "far", "cache"]
Result = tuple[Tensor, Tensor]


class Recalling(NamedTuple):
    """A stream, and the blocks, in order, that it recalls."""

    stream: Stream
    blocks: tuple[int, ...]


def cap_of(policy: Policy, window_size: int, place: int, count: int) -> int:
    """The cap of recalled block `place` of `count`."""
    if policy == "absolute":
        return NO_CAP
    return window_size + B * (count - place if policy == "cache" else 1)


def turned(x: Tensor, positions: Tensor, inv_freq: Tensor) -> Tensor:
    """float64 `x` [n, heads, head_dim] rotated pair by pair, as complex numbers."""
    half = len(inv_freq)
    pairs = torch.complex(x[..., :half], x[..., half : 2 * half])
    pairs = pairs * torch.exp(1j * positions[:, None, None] * inv_freq)
    return torch.cat((pairs.real, pairs.imag, x[..., 2 * half :]), -1)


@dataclass(frozen=True, eq=False)
class Case:
    """Sequences that share a decode; `batch` without streams says what their heads are."""

    sequences: tuple[Recalling, ...]
    batch: Batch
    policy: Policy = "absolute"

    @cached_property
    def heads(self) -> Batch:
        """The batch with its streams."""
        values = {name: getattr(self.batch, name) for name in self.batch.__dataclass_fields__}
        return Batch(**(values | {"streams": tuple(s.stream for s in self.sequences)}))

    @cached_property
    def inv_freq(self) -> Tensor:
        return self.heads.rope("cpu").inv_freq

    @cached_property
    def q(self) -> Tensor:
        total = sum(sequence.stream.num_queries for sequence in self.sequences)
        heads = self.heads
        return heads.random(total, heads.num_q_heads, heads.head_dim, seed=7).to(heads.dtype)

    @cached_property
    def sink_logits(self) -> Tensor | None:
        heads = self.heads
        return heads.random(heads.num_q_heads, seed=99) if heads.has_sink_logits else None

    @cached_property
    def stored(self) -> list[Tensor]:
        """Of each sequence K, turned by its offset, and V: [layers, 2, tokens, heads, dim]."""
        heads, every = self.heads, []
        for index, (stream, _) in enumerate(self.sequences):
            rows = (NUM_LAYERS, 2, stream.num_tokens, heads.num_kv_heads, heads.head_dim)
            kv = heads.random(*rows, seed=20 + index).double()
            offsets = torch.arange(stream.num_tokens) % B
            kv[:, 0] = torch.stack([turned(k, offsets, self.inv_freq) for k in kv[:, 0]])
            every.append(kv.to(heads.dtype))
        return every

    def expected(self, layer: int) -> Result:
        """By definition, in float64."""
        rows, outs, lses = iter(self.q.double()), [], []
        for (stream, blocks), kv in zip(self.sequences, self.stored, strict=True):
            offsets = torch.arange(stream.num_tokens) % B
            k = turned(kv[layer, 0].double(), -offsets, self.inv_freq)
            first = stream.num_tokens - stream.num_queries
            for query in range(first, stream.num_tokens):
                seen = self._seen(stream, blocks, query)
                out, lse = self._attend(next(rows), k, kv[layer, 1].double(), seen)
                outs.append(out)
                lses.append(lse)
        return torch.stack(outs), torch.stack(lses)

    def _seen(self, stream: Stream, blocks: tuple[int, ...], query: int) -> dict[int, int]:
        """The tokens that a query sees, and from how far."""
        seen = {}
        for token in range(query + 1):
            block, slot = divmod(token, B)
            start = token - slot
            if token > query - stream.window_size:
                seen[token] = query - token
            elif token < stream.num_sinks:
                seen[token] = min(query - start, stream.num_sinks + stream.window_size - 1) - slot
            elif block in blocks and self.policy == "absolute":
                seen[token] = query - token
            elif block in blocks and self.policy == "far":
                seen[token] = min(query - start, stream.window_size + B) - slot
            elif block in blocks:
                after = len(blocks) - blocks.index(block)
                seen[token] = min(query - start, stream.window_size + after * B) - slot
        return seen

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, seen: dict[int, int]) -> Result:
        heads, tokens = self.heads, list(seen)
        positions = torch.tensor([seen[token] for token in tokens])
        queries = turned(q.expand(len(tokens), -1, -1), positions, self.inv_freq)
        keys = k[tokens].repeat_interleave(heads.group, 1)
        values = v[tokens].repeat_interleave(heads.group, 1)
        scores = (queries * keys).sum(-1) * heads.scale
        if heads.softcap is not None:
            scores = heads.softcap * torch.tanh(scores / heads.softcap)
        if self.sink_logits is not None:
            scores = torch.cat([scores, self.sink_logits.double()[None]])
            values = torch.cat([values, torch.zeros_like(values[:1])])
        return torch.einsum("nh,nhd->hd", scores.softmax(0), values), scores.logsumexp(0)
