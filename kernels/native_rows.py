"""RMS norms and gated SiLU of many rows as native calls: `rows.c`, compiled when first needed."""

import ctypes
from pathlib import Path

import torch
from torch import Tensor

from streamkv.kernels.native_build import NativeUnavailableError

LANES = 16
_TYPES = {torch.float32: 0, torch.bfloat16: 1}


class NativeRows:
    """What a decoder computes row by row between its products.

    Args:
        library: what `native_build.build` returned.
        dtype: of the rows.
        num_threads: threads of a call.

    Raises:
        NativeUnavailableError: rows of a type that it does not know.
    """

    def __init__(self, library: Path, dtype: torch.dtype, num_threads: int) -> None:
        if dtype not in _TYPES:
            raise NativeUnavailableError(f"native rows do not know {dtype}")
        self._library = ctypes.CDLL(str(library))
        self._dtype = dtype
        self._type = ctypes.c_int64(_TYPES[dtype])
        self._num_threads = ctypes.c_int64(num_threads)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """`x` [..., width] over the root mean square of its last dimension, times `weight`.

        Args:
            x: rows of one stride, the last dimension contiguous.
            weight: float32 [width]; the width is a multiple of 16.
            eps: added to the mean square.
        """
        width, num_rows = x.shape[-1], x.numel() // x.shape[-1]
        assert x.dtype == self._dtype and weight.dtype == torch.float32
        assert x.stride(-1) == 1 and width % LANES == 0
        flat = x.reshape(num_rows, width)
        out = torch.empty(x.shape, dtype=x.dtype)
        self._library.skv_rms_norm(
            ctypes.c_void_p(flat.data_ptr()),
            ctypes.c_int64(flat.stride(0)),
            ctypes.c_void_p(weight.data_ptr()),
            ctypes.c_void_p(out.data_ptr()),
            ctypes.c_int64(num_rows),
            ctypes.c_int64(width),
            ctypes.c_float(eps),
            self._type,
            self._num_threads,
        )
        return out

    def gated_silu(self, gate: Tensor, up: Tensor) -> Tensor:
        """silu(gate) * up; both [T, width], of one stride."""
        num_rows, width = gate.shape
        assert gate.dtype == up.dtype == self._dtype and width % LANES == 0
        assert gate.stride() == up.stride() and gate.stride(1) == 1
        out = torch.empty(gate.shape, dtype=gate.dtype)
        self._library.skv_gated_silu(
            ctypes.c_void_p(gate.data_ptr()),
            ctypes.c_void_p(up.data_ptr()),
            ctypes.c_int64(gate.stride(0)),
            ctypes.c_void_p(out.data_ptr()),
            ctypes.c_int64(num_rows),
            ctypes.c_int64(width),
            self._type,
            self._num_threads,
        )
        return out
