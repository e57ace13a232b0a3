"""A Llama-shaped decoder on a GPU for up to 64 rows: five products a layer, nothing between them.

All results lie in buffers that are made once, so that a captured graph finds them. Norms, gates and
residual additions happen inside the products (`triton_small_batch`). Rows of a step are padded to
16, 32 or 64; for each of these the fastest tiles are measured once per device.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from streamkv.gpu_forward import norm_heads, split_heads
from streamkv.gpu_weights import GpuWeights
from streamkv.kernels import rows
from streamkv.kernels.small_batch import (
    Matrix,
    Norm,
    Product,
    Squares,
    Tile,
    fitting_tiles,
    padded_rows,
)
from streamkv.kernels.tile_choice import TileChoice
from streamkv.model_attention import Attend

_REPLAYS = 5


@dataclass(frozen=True, slots=True, eq=False)
class _Products:
    """The products of one layer for one number of padded rows."""

    qkv: Product
    o: Product
    gate_up: Product
    down: Product


class _Buffers:
    """Rows between the products."""

    def __init__(self, weights: GpuWeights, max_rows: int) -> None:
        layer, like = weights.layers[0], weights.embed
        num_rows = padded_rows(max_rows)

        def make(width: int) -> Tensor:
            return like.new_zeros(num_rows, width)

        self.stream = make(weights.embed.shape[1])
        self.scaled = make(weights.embed.shape[1])
        self.qkv = make(layer.qkv.num_out)
        self.mixed = make(layer.o.width)
        self.gated = make(layer.gate_up.num_out)
        self.logits = make(weights.head.num_out)
        # A program of a product has at least 16 outputs.
        parts = -(-weights.embed.shape[1] // 16)
        self.squares = torch.zeros(parts * num_rows, device=like.device)


class GpuDecoder:
    """Token ids to logits.

    Args:
        weights: on the GPU.
        max_rows: rows of the largest step, at most 64.
        choice: the tiles of this device.
        pdl: overlap each kernel with the one before (Hopper and later).

    Attributes:
        pdl: as given.
    """

    def __init__(self, weights: GpuWeights, max_rows: int, choice: TileChoice, pdl: bool) -> None:
        self.pdl = pdl
        self._weights = weights
        self._choice = choice
        self._buffers = _Buffers(weights, max_rows)
        self._products: dict[int, list[_Products]] = {}
        self._heads: dict[int, Product] = {}

    @property
    def mixed(self) -> Tensor:
        """[max rows, num_q_heads, head_dim]: where attention is to write."""
        heads = (self._weights.num_q_heads, self._weights.head_dim)
        return self._buffers.mixed.view(-1, *heads)

    def prepare(self, num_rows: int) -> None:
        """Choose the tiles for steps of so many rows; measures what is not known."""
        padded = padded_rows(num_rows)
        if padded in self._heads:
            return
        weights, buffers = self._weights, self._buffers
        layers = weights.layers
        of_kind = {
            name: self._tile(name, buffer, [getattr(layer, name) for layer in layers], padded)
            for name, buffer in (
                ("qkv", buffers.scaled),
                ("o", buffers.mixed),
                ("gate_up", buffers.scaled),
                ("down", buffers.gated),
            )
        }
        head = self._tile("head", buffers.scaled, [weights.head], padded)
        self._products[padded] = [
            _Products(
                Product(buffers.scaled, layer.qkv, of_kind["qkv"], self.pdl),
                Product(buffers.mixed, layer.o, of_kind["o"], self.pdl),
                Product(buffers.scaled, layer.gate_up, of_kind["gate_up"], self.pdl),
                Product(buffers.gated, layer.down, of_kind["down"], self.pdl),
            )
            for layer in weights.layers
        ]
        self._heads[padded] = Product(buffers.scaled, weights.head, head, self.pdl)
        self._choice.save()

    @torch.inference_mode()
    def logits(self, ids: Tensor, sources: Tensor, sampled: Tensor, attend: Attend) -> Tensor:
        """Logits [rows, vocab_size] in the model's type; a view that the next step overwrites.

        Args:
            ids, sources: int64 [rows], as `rows.embed` takes them.
            sampled: int64 [max rows].
            attend: as `ModelAdapter.hidden` takes it; may write into `mixed` and return that.
        """
        weights, buffers, num_rows = self._weights, self._buffers, ids.shape[0]
        padded = padded_rows(num_rows)
        products, eps = self._products[padded], weights.eps
        norms = [layer.input_norm for layer in weights.layers[1:]] + [weights.norm]
        rows.embed(
            ids,
            sources,
            sampled,
            weights.embed,
            weights.layers[0].input_norm,
            buffers.stream,
            buffers.scaled,
            # One part, as wide as the padded rows.
            buffers.squares,
            self.pdl,
        )
        parts = 1
        for index, (layer, product) in enumerate(zip(weights.layers, products, strict=True)):
            squares = Squares(buffers.squares, parts, eps)
            product.qkv.run(buffers.qkv, num_rows, squares)
            q, k, v = split_heads(buffers.qkv[:num_rows], weights)
            q, k = norm_heads(q, k, layer, eps)
            mixed = attend(index, q, k, v, weights.scale).flatten(1)
            if mixed.data_ptr() != buffers.mixed.data_ptr():
                buffers.mixed[:num_rows] = mixed
            self._add(product.o, num_rows, layer.mlp_norm)
            squares = Squares(buffers.squares, product.o.num_programs, eps)
            product.gate_up.run(buffers.gated, num_rows, squares)
            self._add(product.down, num_rows, norms[index])
            parts = product.down.num_programs
        head = self._heads[padded]
        head.run(buffers.logits, num_rows, Squares(buffers.squares, parts, eps))
        return buffers.logits[:num_rows]

    def _add(self, product: Product, num_rows: int, norm: Tensor) -> None:
        """Add a product to the residual stream, and prepare it for the norm that follows."""
        buffers = self._buffers
        following = Norm(norm, buffers.scaled, buffers.squares)
        product.run(buffers.stream, num_rows, added=buffers.stream, norm=following)

    def _tile(self, kind: str, buffer: Tensor, matrices: Sequence[Matrix], padded: int) -> Tile:
        matrix = matrices[0]
        tiles = fitting_tiles(matrix, padded)
        if buffer.device.type != "cuda":
            return tiles[-1]
        dtype = str(buffer.dtype).removeprefix("torch.")
        name = f"{kind} {matrix.num_out}x{matrix.width} {dtype} {padded} rows"
        out = buffer.new_empty(padded, matrix.num_out)

        def timing(tile: Tile) -> float:
            products = [Product(buffer, each, tile, self.pdl) for each in matrices]

            def run_all() -> None:
                for product in products:
                    product.run(out, padded)

            return _time(run_all)

        return self._choice.choose(name, tiles, timing)


def _time(call: Callable[[], object]) -> float:
    """Milliseconds of a call, the best of a few replays of its graph."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    best = float("inf")
    for _ in range(_REPLAYS):
        begin: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch's
        end: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # too
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        best = min(best, begin.elapsed_time(end))
    return best
