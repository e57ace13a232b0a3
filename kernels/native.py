"""A decode step as one native call: `decoder.c`, compiled for this processor when first needed.

Whoever has no compiler (`native_build`), or a model of another shape, gets
`NativeUnavailableError` with the reason and stays on the other path. This module knows neither
models of transformers nor sessions.
"""

import ctypes
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from streamkv.kernels.native_build import NativeUnavailableError
from streamkv.kernels.rope import RopeTables
from streamkv.kernels.table import SequenceTable
from streamkv.kernels.thread_choice import ThreadChoice

LANES = 16
MAX_GROUP = 16
MAX_HEAD_DIM = 256
BLOCK_SIZE = 64
ENTRIES_PER_SPLIT = 8
"""Entries whose attention is one task of a thread."""

_TYPES = {torch.float32: 0, torch.bfloat16: 1}


@dataclass(frozen=True, slots=True, eq=False)
class LayerWeights:
    """Weights of a decoder layer; projections [out, in] in one type, norms and biases float32."""

    input_norm: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    o: Tensor
    mlp_norm: Tensor
    gate: Tensor
    up: Tensor
    down: Tensor
    q_bias: Tensor | None = None
    k_bias: Tensor | None = None
    v_bias: Tensor | None = None
    o_bias: Tensor | None = None
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None


@dataclass(frozen=True, slots=True, eq=False)
class DecoderWeights:
    """Weights and sizes of a Llama-shaped decoder: RMS norms, rotary attention, gated SiLU.

    Attributes:
        layers: in order.
        embed, head: [vocab_size, hidden], of the projections' type.
        norm: float32 [hidden], before the head.
        num_q_heads, num_kv_heads, head_dim: of attention.
        eps: of the norms.
        scale: of the scores.
    """

    layers: tuple[LayerWeights, ...]
    embed: Tensor
    head: Tensor
    norm: Tensor
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    eps: float
    scale: float


_LAYER_FIELDS = (
    *("input_norm", "q_bias", "k_bias", "v_bias", "q_norm", "k_norm", "o_bias", "mlp_norm"),
    *("q", "k", "v", "o", "gate", "up", "down"),
)


class _Layer(ctypes.Structure):
    _fields_ = [(name, ctypes.c_void_p) for name in _LAYER_FIELDS]


class _Model(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int64) for name in ("num_layers", "hidden", "intermediate")),
        *((name, ctypes.c_int64) for name in ("num_q_heads", "num_kv_heads", "head_dim")),
        *((name, ctypes.c_int64) for name in ("rotary_half", "vocab_size", "block_size")),
        *((name, ctypes.c_int64) for name in ("weight_type", "kv_type", "num_threads", "in_pairs")),
        ("eps", ctypes.c_float),
        ("scale", ctypes.c_float),
        ("layers", ctypes.POINTER(_Layer)),
        *((name, ctypes.c_void_p) for name in ("embed", "head", "norm", "cos", "sin", "pool")),
    ]


class _Row(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int64) for name in ("token_id", "block_id", "offset")),
        *((name, ctypes.c_int64) for name in ("num_entries", "num_splits", "first_split")),
        *((name, ctypes.c_void_p) for name in ("block_ids", "distances", "first", "end")),
        ("queries", ctypes.c_void_p),
    ]


class _Step(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int64) for name in ("num_rows", "num_splits", "num_logits")),
        ("rows", ctypes.POINTER(_Row)),
        *((name, ctypes.c_void_p) for name in ("state", "logits")),
    ]


@dataclass(frozen=True, slots=True, eq=False)
class DecodeRow:
    """One token of one sequence in a decode step.

    Attributes:
        token_id: the token.
        query_index: its token index.
        slot: its slot in the pool, block_id * block_size + offset.
        table: entries that the query sees, its own slot included.
        window_size: tokens that window entries show.
        want_logits: whether the logits after it are wanted.
        queries: float32 [num_layers, num_q_heads, head_dim] that is given the token's queries,
            un-rotated.
    """

    token_id: int
    query_index: int
    slot: int
    table: SequenceTable
    window_size: int
    want_logits: bool = True
    queries: Tensor | None = None


class NativeDecoder:
    """A decoder bound to a pool, ready to take decode steps: one token of each of some sequences.

    Args:
        library: what `build` returned.
        weights: kept alive by this object.
        pool: [blocks, layers, 2, kv_heads, 64, head_dim], contiguous, float32 or bfloat16.
        rope: tables that hold every distance in use.
        num_threads: threads of a step.
        in_pairs: round what bfloat16 weights are multiplied with to bfloat16, as a bfloat16 model
            does, where the processor multiplies pairs of them; only if the pool is bfloat16, too.

    Raises:
        NativeUnavailableError: a shape or type that the library does not know.
    """

    def __init__(
        self,
        library: Path,
        weights: DecoderWeights,
        pool: Tensor,
        rope: RopeTables,
        num_threads: int,
        in_pairs: bool = True,
    ) -> None:
        _check_shapes(weights, pool)
        self._weights = weights
        self._pool = pool
        self._cos, self._sin = rope.cos.contiguous(), rope.sin.contiguous()
        self._library = ctypes.CDLL(str(library))
        self._library.skv_state_floats.restype = ctypes.c_int64
        self._layers = (_Layer * len(weights.layers))(*map(_layer, weights.layers))
        self._model = self._make_model(num_threads)
        self._model.in_pairs = in_pairs and pool.dtype == torch.bfloat16
        self._max_threads = num_threads
        self._threads: dict[int, ThreadChoice] = {}
        self._state = torch.empty(0)

    @property
    def pair_width(self) -> int:
        """Widths of products in pairs are multiples of this; 0: there are none."""
        is_narrow = self._weights.embed.dtype == torch.bfloat16
        return int(self._library.skv_pairs()) if is_narrow and self._model.in_pairs else 0

    @property
    def kv_dtype(self) -> torch.dtype:
        """Type of the pool."""
        return self._pool.dtype

    def _make_model(self, num_threads: int) -> _Model:
        weights, pool = self._weights, self._pool
        model = _Model()
        model.num_layers = len(weights.layers)
        model.hidden, model.intermediate = weights.embed.shape[1], weights.layers[0].gate.shape[0]
        model.num_q_heads, model.num_kv_heads = weights.num_q_heads, weights.num_kv_heads
        model.head_dim, model.rotary_half = weights.head_dim, self._cos.shape[1]
        model.vocab_size, model.block_size = weights.head.shape[0], pool.shape[4]
        model.weight_type, model.kv_type = _TYPES[weights.embed.dtype], _TYPES[pool.dtype]
        model.num_threads = num_threads
        model.eps, model.scale = weights.eps, weights.scale
        model.layers = self._layers
        model.embed, model.head = weights.embed.data_ptr(), weights.head.data_ptr()
        model.norm = weights.norm.data_ptr()
        model.cos, model.sin = self._cos.data_ptr(), self._sin.data_ptr()
        model.pool = pool.data_ptr()
        return model

    def decode(self, rows: Sequence[DecodeRow]) -> list[Tensor | None]:
        """Write the KV of each row's token and attend with it through all layers.

        Every row is computed as by itself, to the bit. Rows of one sequence may see each other:
        all KV of a layer is written before anything attends.

        Returns:
            For each row float32 [vocab_size], the logits after its token, if wanted.
        """
        assert rows, "a step without rows"
        # Those with logits lie first, side by side.
        order = sorted(range(len(rows)), key=lambda index: not rows[index].want_logits)
        num_logits = sum(row.want_logits for row in rows)
        made, kept, num_splits = (_Row * len(rows))(), [], 0
        for place, index in enumerate(order):
            kept.append(self._fill(made[place], rows[index], num_splits))
            num_splits += made[place].num_splits
        step = _Step(num_rows=len(rows), num_splits=num_splits, num_logits=num_logits, rows=made)
        step.state = self._scratch(len(rows), num_splits).data_ptr()
        logits = torch.empty(num_logits, self._model.vocab_size)
        step.logits = logits.data_ptr()
        self._run(step)
        del kept  # what the step pointed into
        found: list[Tensor | None] = [None] * len(rows)
        for place, index in enumerate(order[:num_logits]):
            found[index] = logits[place]
        return found

    def _fill(self, made: _Row, row: DecodeRow, first_split: int) -> tuple[Tensor, ...]:
        """Set the fields of a row; returns what they point into."""
        first, end, distances = _seen(row.table, row.query_index, row.window_size)
        block_ids = row.table.block_ids.contiguous()
        made.token_id = row.token_id
        made.block_id, made.offset = divmod(row.slot, self._pool.shape[4])
        made.num_entries = row.table.num_entries
        made.num_splits = max(1, -(-row.table.num_entries // ENTRIES_PER_SPLIT))
        made.first_split = first_split
        made.block_ids, made.distances = block_ids.data_ptr(), distances.data_ptr()
        made.first, made.end = first.data_ptr(), end.data_ptr()
        if row.queries is not None:
            weights = self._weights
            shape = (len(weights.layers), weights.num_q_heads, weights.head_dim)
            assert row.queries.shape == shape and row.queries.dtype == torch.float32
            assert row.queries.is_contiguous()
            made.queries = row.queries.data_ptr()
        return first, end, distances, block_ids

    def _run(self, step: _Step) -> None:
        # Times of steps of other sizes say nothing.
        choice = self._threads.setdefault(step.num_rows, ThreadChoice(self._max_threads))
        self._model.num_threads = choice.next()
        began = time.perf_counter()
        self._library.skv_decode(ctypes.byref(self._model), ctypes.byref(step))
        choice.took(self._model.num_threads, time.perf_counter() - began)

    def _scratch(self, num_rows: int, num_splits: int) -> Tensor:
        self._model.num_threads = self._max_threads
        needed = self._library.skv_state_floats(
            ctypes.byref(self._model), ctypes.c_int64(num_rows), ctypes.c_int64(num_splits)
        )
        if self._state.numel() < needed:
            self._state = torch.empty(needed)
        return self._state


def _seen(table: SequenceTable, query: int, window_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """First and end slot of each entry that a query sees, and the distance to the entry."""
    end = torch.minimum(table.end_valid, query + 1 - table.delays(window_size) - table.starts)
    oldest = query + 1 - window_size - table.starts
    oldest[: table.num_lasting_entries] = 0
    first = torch.maximum(table.first_valid, oldest)
    distances = torch.minimum(query - table.starts, table.caps).clamp_(min=0)
    return first, end, distances


def _layer(weights: LayerWeights) -> _Layer:
    layer = _Layer()
    for name in _LAYER_FIELDS:
        tensor = getattr(weights, name)
        setattr(layer, name, tensor.data_ptr() if tensor is not None else None)
    return layer


def _check_shapes(weights: DecoderWeights, pool: Tensor) -> None:
    hidden, intermediate = weights.embed.shape[1], weights.layers[0].gate.shape[0]
    group = weights.num_q_heads // weights.num_kv_heads
    for name, value in (("hidden", hidden), ("intermediate", intermediate)):
        _require(value % LANES == 0, f"{name} size {value} is no multiple of {LANES}")
    _require(weights.head_dim % LANES == 0, f"head_dim {weights.head_dim}")
    _require(weights.head_dim <= MAX_HEAD_DIM, f"head_dim {weights.head_dim}")
    _require(group <= MAX_GROUP, f"{group} query heads for each KV head")
    _require(pool.shape[4] == BLOCK_SIZE, f"blocks of {pool.shape[4]} tokens")
    _require(pool.dtype in _TYPES, f"KV of type {pool.dtype}")
    _require(pool.is_contiguous(), "a pool that is not contiguous")
    projections = [weights.embed, weights.head]
    for layer in weights.layers:
        projections += [layer.q, layer.k, layer.v, layer.o, layer.gate, layer.up, layer.down]
    for tensor in projections:
        _require(tensor.dtype == weights.embed.dtype, "weights of several types")
        _require(tensor.dtype in _TYPES, f"weights of type {tensor.dtype}")
        _require(tensor.is_contiguous(), "weights that are not contiguous")


def _require(fits: bool, what: str) -> None:
    if not fits:
        raise NativeUnavailableError(f"the native decode step does not know {what}")
