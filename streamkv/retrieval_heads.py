"""The heads of a model by which recall chooses blocks. Pure bookkeeping.

A few attention heads copy from wherever in the context an answer stands ("retrieval heads", Wu et
al. 2024, arXiv:2404.15574); the others look at what is near, or first, or frequent, and say nothing
about which old block is wanted. `head_measuring` finds them.
"""

from dataclasses import dataclass
from typing import NamedTuple

NUM_HEADS = 8
"""Heads that choose: digests grow with them (docs/recall.md has what more and fewer find)."""


class Head(NamedTuple):
    """A query head.

    Attributes:
        layer: which layer.
        q_head: which of its query heads.
    """

    layer: int
    q_head: int


@dataclass(frozen=True, slots=True)
class RetrievalHeads:
    """Query heads that choose blocks, and the KV heads whose keys they read.

    Attributes:
        heads: by layer, then head.
        group: query heads that share a KV head.
    """

    heads: tuple[Head, ...]
    group: int

    def __post_init__(self) -> None:
        assert self.heads and list(self.heads) == sorted(set(self.heads))

    @property
    def layers(self) -> tuple[int, ...]:
        """Layers that have one, ascending."""
        return tuple(sorted({head.layer for head in self.heads}))

    @property
    def kv_heads(self) -> tuple[tuple[int, int], ...]:
        """(layer, KV head) of every key that is read, ascending."""
        return tuple(sorted({self._read_by(head) for head in self.heads}))

    @property
    def rows(self) -> tuple[int, ...]:
        """Of each of `heads`, where in `kv_heads` the keys are that it reads."""
        places = {kv_head: row for row, kv_head in enumerate(self.kv_heads)}
        return tuple(places[self._read_by(head)] for head in self.heads)

    def of_layer(self, layer: int) -> tuple[list[int], list[int]]:
        """Where in `heads` those of a layer are, and which query heads they are."""
        places = [place for place, head in enumerate(self.heads) if head.layer == layer]
        return places, [self.heads[place].q_head for place in places]

    def _read_by(self, head: Head) -> tuple[int, int]:
        return head.layer, head.q_head // self.group
