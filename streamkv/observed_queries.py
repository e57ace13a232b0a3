"""The newest queries of a stream, by which blocks are chosen for recall.

A ring of rows for each layer, by token index; `QueryRing` says which token lies where. On a CPU the
runner copies rows into it, on a GPU the kernel that writes KV does so at the addresses it is given,
so that no step waits for the host.
"""

import torch
from torch import Tensor

from streamkv.query_ring import NUM_OBSERVED, NUM_PLACES, QueryRing

__all__ = ["NUM_OBSERVED", "ObservedQueries"]


class ObservedQueries:
    """Queries of one stream.

    Args:
        num_layers, num_q_heads, head_dim: of the model.
        device: where queries are.
        dtype: of what is kept; float32, or that of the model where a kernel writes it.
    """

    def __init__(
        self,
        num_layers: int,
        num_q_heads: int,
        head_dim: int,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        shape = (num_layers, NUM_PLACES, num_q_heads, head_dim)
        self._rows = torch.zeros(shape, dtype=dtype, device=device)
        self._ring = QueryRing()

    @property
    def dtype(self) -> torch.dtype:
        """Of what is kept."""
        return self._rows.dtype

    def take(self, first_index: int, count: int) -> list[int]:
        """Places of the newest of some tokens whose queries are to be kept, in order."""
        return self._ring.take(first_index, count)

    def keep(self, layer: int, q: Tensor, places: list[int]) -> None:
        """Keep the last of `q` [T, num_q_heads, head_dim], un-rotated, in the places taken."""
        self._rows[layer, places] = q[q.shape[0] - len(places) :].to(self._rows.dtype)

    def addresses(self, first_index: int, count: int) -> list[int]:
        """Where a kernel is to write the queries of layer 0 of some tokens; 0: nowhere.

        Those of layer l follow `l * layer_stride` elements behind.
        """
        base = self._rows.data_ptr()
        row_bytes = self._rows.stride(1) * self._rows.element_size()
        places = self._ring.take(first_index, count)
        return [0] * (count - len(places)) + [base + place * row_bytes for place in places]

    def clear(self) -> None:
        """Forget all: the stream goes on elsewhere."""
        self._ring.clear()

    def copy(self) -> "ObservedQueries":
        """The same for a fork."""
        other = object.__new__(ObservedQueries)
        other._rows = self._rows.clone()
        other._ring = self._ring.copy()
        return other

    def before(self, end_index: int) -> Tensor | None:
        """[num_layers, n, num_q_heads, head_dim]: the newest queries before a token, in order.

        As many as follow each other without a gap; `None` without any.
        """
        places = self._ring.before(end_index)
        if not places:
            return None
        # Slices and not a list of places: a list would travel to a GPU, and the host would wait.
        turn = places.index(0) if 0 in places else 0
        parts = [part for part in (places[:turn], places[turn:]) if part]
        return torch.cat([self._rows[:, part[0] : part[-1] + 1] for part in parts], 1)


def layer_stride(num_q_heads: int, head_dim: int) -> int:
    """Elements from a layer's queries to those of the next."""
    return NUM_PLACES * num_q_heads * head_dim
