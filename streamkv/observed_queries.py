"""The newest queries of a stream, by which blocks are chosen for recall.

A ring of `NUM_OBSERVED` rows for each layer, by token index, so that what is kept does not depend
on how the input was cut into steps. A token that is computed twice, because its logits were wanted
later, overwrites its own row.
"""

import torch
from torch import Tensor

NUM_OBSERVED = 16
"""Queries that choose together: with one or four, fewer needles were answered (docs/recall.md)."""


class ObservedQueries:
    """Queries of one stream.

    Args:
        num_layers, num_q_heads, head_dim: of the model.
        device: where queries are.
    """

    def __init__(
        self, num_layers: int, num_q_heads: int, head_dim: int, device: torch.device | str = "cpu"
    ) -> None:
        shape = (num_layers, NUM_OBSERVED, num_q_heads, head_dim)
        self._ring = torch.zeros(shape, device=device)
        self._indices = [[-1] * NUM_OBSERVED for _ in range(num_layers)]

    def observe(self, layer: int, q: Tensor, first_index: int) -> None:
        """Keep the newest of `q` [T, num_q_heads, head_dim], un-rotated, from `first_index` on."""
        skipped = max(0, q.shape[0] - NUM_OBSERVED)
        first = first_index + skipped
        places = [index % NUM_OBSERVED for index in range(first, first_index + q.shape[0])]
        self._ring[layer, places] = q[skipped:].float()
        for index, place in enumerate(places, first):
            self._indices[layer][place] = index

    def before(self, end_index: int) -> Tensor | None:
        """[num_layers, n, num_q_heads, head_dim]: the newest queries before a token, in order.

        As many as follow each other without a gap; `None` without any.
        """
        count = 0
        while count < NUM_OBSERVED and self._has(end_index - 1 - count):
            count += 1
        if count == 0:
            return None
        places = [index % NUM_OBSERVED for index in range(end_index - count, end_index)]
        return self._ring[:, places]

    def _has(self, index: int) -> bool:
        place = index % NUM_OBSERVED
        return index >= 0 and all(kept[place] == index for kept in self._indices)
