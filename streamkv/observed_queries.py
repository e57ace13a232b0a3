"""The newest queries of a stream, by which blocks are chosen for recall.

A ring of `NUM_OBSERVED` rows for each head that chooses, by token index, so that what is kept does
not depend on how the input was cut into steps. A token that is computed twice, because its logits
were wanted later, overwrites its own row.
"""

import torch
from torch import Tensor

from streamkv.retrieval_heads import RetrievalHeads

NUM_OBSERVED = 16
"""Queries that choose together: with one or four, fewer needles were answered (docs/recall.md)."""


class ObservedQueries:
    """Queries of one stream.

    Args:
        heads: that choose.
        head_dim: of the model.
        device: where queries are.
    """

    def __init__(
        self, heads: RetrievalHeads, head_dim: int, device: torch.device | str = "cpu"
    ) -> None:
        self._heads = heads
        self._ring = torch.zeros(len(heads.heads), NUM_OBSERVED, head_dim, device=device)
        self._indices = {layer: [-1] * NUM_OBSERVED for layer in heads.layers}

    def observe(self, layer: int, q: Tensor, first_index: int) -> None:
        """Keep the newest of `q` [T, num_q_heads, head_dim], un-rotated, from `first_index` on."""
        if layer not in self._indices:
            return
        skipped = max(0, q.shape[0] - NUM_OBSERVED)
        first = first_index + skipped
        columns = [index % NUM_OBSERVED for index in range(first, first_index + q.shape[0])]
        places, q_heads = self._heads.of_layer(layer)
        for place, q_head in zip(places, q_heads, strict=True):
            self._ring[place, columns] = q[skipped:, q_head].float()
        for index, column in enumerate(columns, first):
            self._indices[layer][column] = index

    def clear(self) -> None:
        """Forget all: the stream goes on elsewhere."""
        self._indices = {layer: [-1] * NUM_OBSERVED for layer in self._indices}

    def copy(self) -> "ObservedQueries":
        """The same for a fork."""
        other = object.__new__(ObservedQueries)
        other._heads = self._heads
        other._ring = self._ring.clone()
        other._indices = {layer: list(kept) for layer, kept in self._indices.items()}
        return other

    def before(self, end_index: int) -> Tensor | None:
        """[heads, n, head_dim]: the newest queries before a token, in order.

        As many as follow each other without a gap; `None` without any.
        """
        count = 0
        while count < NUM_OBSERVED and self._has(end_index - 1 - count):
            count += 1
        if count == 0:
            return None
        return self._ring[
            :, [index % NUM_OBSERVED for index in range(end_index - count, end_index)]
        ]

    def _has(self, index: int) -> bool:
        column = index % NUM_OBSERVED
        return index >= 0 and all(kept[column] == index for kept in self._indices.values())
