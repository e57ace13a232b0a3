"""Log-probabilities of given tokens as a native call: `scores.c`, compiled when first needed."""

import ctypes
from pathlib import Path

import torch
from torch import Tensor

from streamkv.kernels.native_build import NativeUnavailableError

_TYPES = {torch.float32: 0, torch.bfloat16: 1}


class NativeScores:
    """Scores rows of logits.

    Args:
        library: what `native_build.build` returned.
        num_threads: threads of a call.
    """

    def __init__(self, library: Path, num_threads: int) -> None:
        self._library = ctypes.CDLL(str(library))
        self._num_threads = num_threads

    def knows(self, logits: Tensor) -> bool:
        """Whether `score` takes logits of this type and memory."""
        return logits.dtype in _TYPES and logits.is_contiguous() and logits.device.type == "cpu"

    def score(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Log-probability float32 [R] of `targets` int64 [R] in `logits` [R, vocab_size]."""
        num_rows, width = logits.shape
        assert self.knows(logits) and targets.shape == (num_rows,)
        assert not num_rows or 0 <= int(targets.min()) <= int(targets.max()) < width
        targets, out = targets.contiguous(), torch.empty(num_rows)
        self._library.skv_scores(
            ctypes.c_void_p(logits.data_ptr()),
            *(ctypes.c_int64(n) for n in (_TYPES[logits.dtype], num_rows, width)),
            ctypes.c_void_p(targets.data_ptr()),
            ctypes.c_void_p(out.data_ptr()),
            ctypes.c_int64(self._num_threads),
        )
        return out


def check_scores(scores: NativeScores, dtype: torch.dtype) -> None:
    """Compare with torch on a row that is no whole number of vectors.

    Raises:
        NativeUnavailableError: they differ, or it does not know the type.
    """
    generator = torch.Generator().manual_seed(1)
    logits = (10.0 * torch.randn(3, 5003, generator=generator)).to(dtype)
    targets = torch.tensor([0, 17, 5002])
    if not scores.knows(logits):
        raise NativeUnavailableError(f"native scores do not know logits of type {dtype}")
    expected = logits.double().log_softmax(1).gather(1, targets[:, None])[:, 0]
    difference = (scores.score(logits, targets) - expected).abs().max()
    if not difference <= 1e-4:
        raise NativeUnavailableError(f"native scores differ by {difference:.2g}")
