"""Copies to and from a device that nothing waits for, and marks of when they have arrived."""

from typing import Any

import torch
from torch import Tensor


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """A copy on the device that nothing waits for: torch keeps the pinned one until it is made."""
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def to_host(tensor: Tensor) -> Tensor:
    """A copy on the host, there once an `Arrival` made after it is done."""
    if tensor.device.type != "cuda":
        return tensor.clone()
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)


class Stopwatch:
    """How long the device is at what it is given between here and `stop`; told of a GPU only.

    Args:
        device: whose current stream it is about.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._begin = self._mark()
        self._end: Any = None

    def stop(self) -> None:
        """What is given to the device from here on does not count."""
        self._end = self._mark()

    def seconds(self) -> float | None:
        """Once the device has come to the stop; `None` where there is no GPU."""
        if self._begin is None or self._end is None:
            return None
        return float(self._begin.elapsed_time(self._end)) / 1000

    def _mark(self) -> Any:
        if self._device.type != "cuda":
            return None
        event: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch's
        event.record(torch.cuda.current_stream(self._device))
        return event


class Arrival:
    """Marks a place in the stream of the device; everywhere else nothing is pending."""

    def __init__(self, device: torch.device) -> None:
        self._event: Any = None
        if device.type == "cuda":
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch's
            self._event.record(torch.cuda.current_stream(device))

    def done(self) -> bool:
        """Whether the device has come this far; never waits."""
        return self._event is None or bool(self._event.query())

    def wait(self) -> None:
        """Return when it has."""
        if self._event is not None:
            self._event.synchronize()
