"""The fastest exact way to run a model on its GPU: our own steps where its shape is known.

Our steps are compared with the model's own code, on its own weights, before they are used; where
they differ, or where the shape is another, transformers' code runs instead, with one logged reason.
"""

import logging
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from streamkv.gpu_decoder import GpuDecoder
from streamkv.gpu_forward import GpuForward
from streamkv.gpu_weights import GpuWeights, gpu_weights
from streamkv.kernels.native_build import NativeUnavailableError
from streamkv.kernels.tile_choice import TileChoice
from streamkv.model import ModelAdapter
from streamkv.model_attention import Attend

_log = logging.getLogger(__name__)

CHECKED_ROWS = 16
CHECKED_DRAWS = 9
"""Times that every row is checked, with other tokens; the median counts.

Rounding alone moves the result of some tokens by far more than a tolerance: where large numbers
cancel, SmolLM2 in bfloat16 differs from itself in float32 by up to 0.7 of a row's length, while the
median is 0.02. What is wrong in our steps shows in a row whatever its token.
"""
_TOLERANCES = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 8e-2}
_DECODER_TYPES = (torch.bfloat16,)
"""float16 could overflow in a row that is scaled after the product; float32 is for checks."""


class GpuModel:
    """A model on a GPU.

    Args:
        adapter: on the GPU.
        max_rows: most sequences of a decode step.
        cache: directory for what was measured on this device.
        decodes: make the decode step too.
    """

    def __init__(
        self, adapter: ModelAdapter, max_rows: int, cache: Path | None, decodes: bool
    ) -> None:
        self._adapter = adapter
        self._forward: GpuForward | None = None
        self._decoder: GpuDecoder | None = None
        try:
            weights = gpu_weights(adapter)
        except NativeUnavailableError as error:
            _log.info("the model's own code runs on the GPU: %s", error)
            return
        if adapter.model.device.type == "cuda":
            # The parts that were merged are gone, but torch would keep their memory for itself.
            torch.cuda.empty_cache()
        self._forward = self._checked_forward(GpuForward(weights))
        if decodes and self._forward is not None and adapter.model.dtype in _DECODER_TYPES:
            try:
                self._decoder = self._checked_decoder(weights, max_rows, cache)
            # Whatever keeps kernels from being made for a shape or a device, the model still runs.
            except Exception as error:
                _log.warning("our own decode step cannot be made and is not used: %s", error)

    @property
    def decoder(self) -> GpuDecoder | None:
        """The decode step of our own, if it can be used."""
        return self._decoder

    def hidden(self, input_ids: Tensor, attend: Attend) -> Tensor:
        """As `ModelAdapter.hidden`."""
        return (self._forward or self._adapter).hidden(input_ids, attend)

    def _checked_forward(self, forward: GpuForward) -> GpuForward | None:
        def difference(ids: Tensor) -> Tensor:
            expected = self._adapter.hidden(ids[None], mix)
            return relative_difference(forward.hidden(ids[None], mix), expected)

        return forward if self._agree("forward", CHECKED_ROWS, difference) else None

    def _checked_decoder(
        self, weights: GpuWeights, max_rows: int, cache: Path | None
    ) -> GpuDecoder | None:
        device = torch.cuda.get_device_properties(self._adapter.model.device)
        choice = TileChoice(cache, device.name)
        decoder = GpuDecoder(weights, max_rows, choice, pdl=device.major >= 9)

        def difference(ids: Tensor) -> Tensor:
            found = decoder.logits(ids, torch.full_like(ids, -1), torch.zeros_like(ids), mix)
            return relative_difference(
                found, self._adapter.head(self._adapter.hidden(ids[None], mix))
            )

        # Rows are padded to these sizes, and each has tiles of its own.
        for num_rows in sorted({min(max_rows, rows) for rows in (16, 32, 64)}):
            decoder.prepare(num_rows)
            if not self._agree(f"decode step of {num_rows} rows", num_rows, difference):
                return None
        return decoder

    def _agree(self, what: str, num_rows: int, difference: Callable[[Tensor], Tensor]) -> bool:
        """Whether ours is the model's: `difference` is that of each row, for ids [num_rows]."""
        generator = torch.Generator().manual_seed(5)
        ids = torch.randint(
            self._adapter.vocab_size, (CHECKED_DRAWS, num_rows), generator=generator
        ).to(self._adapter.model.device)
        # By row: among many, one that is wrong would hardly show. NaN makes a median NaN.
        worst = float(torch.stack([difference(drawn) for drawn in ids]).median(0).values.max())
        # A NaN agrees with nothing.
        if worst <= _TOLERANCES[self._adapter.model.dtype]:
            return True
        _log.warning("our own %s differs from the model by %g and is not used", what, worst)
        return False


def relative_difference(found: Tensor, expected: Tensor) -> Tensor:
    """[rows]: how far each row is from the expected one, as a part of that one's length.

    Two rows of zeros, as padding's embedding gives, do not differ.
    """
    lengths = expected.float().norm(dim=1).clamp_min(torch.finfo(torch.float32).tiny)
    differences: Tensor = (found.float() - expected.float()).norm(dim=1) / lengths
    return differences


def mix(layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Stands in for attention: every element of q, k and v changes what comes out."""
    group = q.shape[1] // k.shape[1]
    return (0.5 * q + (0.25 * k + v).repeat_interleave(group, 1)).to(q.dtype)
