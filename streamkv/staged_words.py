"""Numbers that a captured step reads: written on the host, on the device after one copy.

The host writes into one of two pinned buffers while the copy out of the other may still be pending;
a buffer is reused once its copy is done.
"""

from typing import Any

import numpy as np
import numpy.typing as npt
import torch


class StagedWords:
    """64-bit words on the host and on a device.

    Args:
        num_words: how many.
        device: where they are read.

    Attributes:
        host: int64 [num_words], written at leisure; it keeps what it has.
        device: int64 [num_words], what `upload` last brought.
    """

    def __init__(self, num_words: int, device: torch.device) -> None:
        self.host: npt.NDArray[np.int64] = np.zeros(num_words, dtype=np.int64)
        self.device = torch.zeros(num_words, dtype=torch.int64, device=device)
        self._is_cuda = device.type == "cuda"
        self._staging = [
            torch.zeros(num_words, dtype=torch.int64, pin_memory=self._is_cuda) for _ in range(2)
        ]
        self._copied: list[Any] = [None, None]
        self._turn = 0

    def upload(self) -> None:
        """Have the device read what the host has now; the copy is on the current stream."""
        turn = self._turn
        if self._copied[turn] is not None:
            self._copied[turn].synchronize()
        np.copyto(self._staging[turn].numpy(), self.host)
        self.device.copy_(self._staging[turn], non_blocking=True)
        if self._is_cuda:
            if self._copied[turn] is None:
                # torch has no type for it.
                self._copied[turn] = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied[turn].record()
        self._turn = 1 - turn
