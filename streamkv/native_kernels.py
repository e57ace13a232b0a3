"""Makes the native kernels ready in the background, checks them, and hands them over.

An engine starts at once on torch's kernels and transformers' own code; compiling, narrowing the
weights and comparing happen on an owned thread. Attention serves any model and is compared with the
oracle; the decode step serves Llama-shaped models and is compared with the model. What does not
agree is not used, and the log says why; a check of the decode step that was passed is noted for
these weights, so that later starts skip it.
"""

import logging
import threading
from collections.abc import Callable
from pathlib import Path

import torch

from streamkv.kernels import reference
from streamkv.kernels.native import DecodeRow, NativeDecoder
from streamkv.kernels.native_attention import NativeAttention
from streamkv.kernels.native_attention_check import check_attention
from streamkv.kernels.native_build import NativeUnavailableError, build
from streamkv.kernels.native_rows import NativeRows
from streamkv.kernels.native_scores import NativeScores, check_scores
from streamkv.kernels.rope import RopeTables
from streamkv.kernels.table import NO_CAP, SequenceTable
from streamkv.model import ModelAdapter
from streamkv.model_attention import Attend
from streamkv.model_cache import cache_root, read_note, write_note
from streamkv.model_native import NativeWeights, native_weights
from streamkv.native_forward import NativeForward
from streamkv.tiers.gpu_pool import GpuPool

_log = logging.getLogger(__name__)

CHECK_TOKENS = 70
"""Tokens of the comparison: more than one block."""

CHECK_ROWS = 11
"""Rows of the comparison of a step of several: more than a tile of `products.h`, and some more."""

ALLOWED = {torch.float32: 1e-3, torch.bfloat16: 0.15}
"""Allowed root mean square of the difference, as a share of that of the logits. bfloat16: what the
model's own rounding of activations does to its logits (3-7 % measured), doubled."""


class NativeKernels:
    """Owns the thread that prepares the native kernels.

    Args:
        adapter: the model.
        pool: the engine's pool, to which the step is bound.
        rope: tables for every distance in use.
        num_threads: threads of a call.
    """

    def __init__(
        self, adapter: ModelAdapter, pool: torch.Tensor, rope: RopeTables, num_threads: int
    ) -> None:
        self._adapter = adapter
        self._pool = pool
        self._rope = rope
        self._num_threads = num_threads
        self._closing = False
        self._decoder: NativeDecoder | None = None
        self._weights: NativeWeights | None = None
        self._attention: NativeAttention | None = None
        self._scores: NativeScores | None = None
        self._forward: NativeForward | None = None
        self.reason = "the native decode step is still being prepared"
        self._thread = threading.Thread(target=self._main, name="streamkv-native", daemon=True)
        self._thread.start()

    def claim(self) -> NativeDecoder | None:
        """The native step, once it is ready and has passed its check.

        Called between steps by whoever runs the model.
        """
        if self._weights is not None and self._decoder is not None:
            self._weights.give_to_model()
            self._weights = None
        return self._decoder

    @property
    def attention(self) -> NativeAttention | None:
        """Native attention, once it is ready and has passed its check."""
        return self._attention

    @property
    def scores(self) -> NativeScores | None:
        """Native scores, once they are ready and have passed their check."""
        return self._scores

    @property
    def forward(self) -> NativeForward | None:
        """Native steps of many tokens, once they have passed their check."""
        return self._forward

    def wait(self) -> bool:
        """Wait until it is decided; whether there is a native step."""
        self._thread.join()
        return self._decoder is not None

    def close(self) -> None:
        """End the thread, after the stage in hand."""
        self._closing = True
        self._thread.join()

    def _main(self) -> None:
        try:
            self._prepare()
        except NativeUnavailableError as error:
            self.reason = str(error)
            _log.info("decode steps run on transformers' own code: %s", error)
        except Exception as error:  # whatever it is, the engine runs without
            self.reason = repr(error)
            _log.warning("decode steps run on transformers' own code", exc_info=True)

    def _prepare(self) -> None:
        library = build(cache_root() / "native")
        if self._closing:
            return
        self._prepare_attention(library)
        scores = NativeScores(library, self._num_threads)
        check_scores(scores, self._adapter.model.dtype)
        self._scores = scores
        weights = native_weights(self._adapter)

        def bind(pool: torch.Tensor) -> NativeDecoder:
            return NativeDecoder(library, weights.decoder, pool, self._rope, self._num_threads)

        forward = self._make_forward(library, weights)
        note = f"native-{self._adapter.fingerprint.hex()}-{library.stem}"
        if read_note(note) is None and not self._closing:
            check(self._adapter, bind, self._rope)
            check_forward(self._adapter, forward, self._rope)
            write_note(note, {"passed": True, "library": Path(library).name})
        if not self._closing:
            self._weights = weights
            self._decoder = bind(self._pool)
            self._forward = forward
            self.reason = ""

    def _make_forward(self, library: Path, weights: NativeWeights) -> NativeForward:
        adapter, decoder = self._adapter, weights.decoder
        return NativeForward(
            adapter.base,
            NativeRows(library, adapter.model.dtype, self._num_threads),
            decoder.num_q_heads,
            decoder.num_kv_heads,
            decoder.head_dim,
            decoder.eps,
            decoder.scale,
        )

    def _prepare_attention(self, library: Path) -> None:
        def bind(pool: torch.Tensor) -> NativeAttention:
            heads = self._adapter.num_q_heads
            return NativeAttention(library, pool, self._rope, heads, self._num_threads)

        try:
            check_attention(bind, GpuPool(self._adapter.spec, 5).data, self._rope)
            self._attention = bind(self._pool)
        except NativeUnavailableError as error:
            _log.info("steps of many tokens attend by torch's kernels: %s", error)


@torch.inference_mode()
def check(
    adapter: ModelAdapter, bind: Callable[[torch.Tensor], NativeDecoder], rope: RopeTables
) -> None:
    """Compare the native step with the model, token by token over more than a block.

    Raises:
        NativeUnavailableError: they differ.
    """
    ids = [(7 + 31 * index) % adapter.vocab_size for index in range(CHECK_TOKENS)]
    expected = _model_logits(adapter, ids, CHECK_ROWS, rope)
    decoder = bind(GpuPool(adapter.spec, 2).data)
    rows = [
        DecodeRow(token_id, index, index, _table(index + 1), CHECK_TOKENS)
        for index, token_id in enumerate(ids)
    ]
    for row in rows:
        [found] = decoder.decode([row])
    assert found is not None
    _require_close(found, expected[-1], decoder.kv_dtype)
    # Once more, the last ones side by side: they write the same again.
    for found, wanted in zip(decoder.decode(rows[-CHECK_ROWS:]), expected, strict=True):
        assert found is not None
        _require_close(found, wanted, decoder.kv_dtype)


@torch.inference_mode()
def check_forward(adapter: ModelAdapter, forward: NativeForward, rope: RopeTables) -> None:
    """Compare a native step of many tokens with the model's own.

    Raises:
        NativeUnavailableError: they differ.
    """
    ids = torch.tensor([[(7 + 31 * index) % adapter.vocab_size for index in range(CHECK_TOKENS)]])
    expected = adapter.hidden(ids, _reference_attend(adapter, rope))
    found = forward.hidden(ids, _reference_attend(adapter, rope))
    _require_close(found.float(), expected.float(), adapter.model.dtype)


def _require_close(found: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    allowed = ALLOWED[dtype] * expected.square().mean().sqrt()
    difference = (found - expected).square().mean().sqrt()
    if not difference <= allowed:
        raise NativeUnavailableError(
            f"it differs from the model by {difference:.2g}, {allowed:.2g} is allowed"
        )


def _model_logits(
    adapter: ModelAdapter, ids: list[int], count: int, rope: RopeTables
) -> torch.Tensor:
    """Logits after each of the last tokens, by the model's code over the reference attention."""
    hidden = adapter.hidden(torch.tensor([ids]), _reference_attend(adapter, rope))
    return adapter.logits(hidden[-count:])


def _reference_attend(adapter: ModelAdapter, rope: RopeTables) -> Attend:
    """Attention of the first `CHECK_TOKENS` tokens of a stream, by the oracle."""
    pool, slots = GpuPool(adapter.spec, 2).data, torch.arange(CHECK_TOKENS)
    table = _table(CHECK_TOKENS)

    def attend(
        layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
    ) -> torch.Tensor:
        reference.write_kv(pool, k, v, slots, layer, rope)
        return reference.attend(q, pool, layer, table, 0, CHECK_TOKENS, rope, scale)

    return attend


def _table(num_tokens: int) -> SequenceTable:
    """The first tokens of a stream in the blocks 0 and 1."""
    ends = [min(64, num_tokens - start) for start in range(0, num_tokens, 64)]
    rows = [(index, 64 * index, NO_CAP, 0, end) for index, end in enumerate(ends)]
    block_ids, starts, caps, first_valid, end_valid = torch.tensor(rows).t().contiguous().unbind(0)
    return SequenceTable(block_ids, starts, caps, first_valid, end_valid, num_sink_entries=0)
