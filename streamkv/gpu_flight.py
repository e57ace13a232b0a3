"""What a step on a GPU returns: on its way to the host until somebody reads it.

Results are copied into pinned memory behind the step, and an event marks their arrival. There are
more sets of buffers than steps under way, and a step is read before its set is used again.
"""

import math
from collections.abc import Sequence as Many

import torch
from torch import Tensor

from streamkv.batch import SequenceStep, StepResult, Wanted
from streamkv.device_copies import Arrival, Stopwatch, to_host
from streamkv.errors import ModelError
from streamkv.gpu_sampling import GpuSampler, samples_on_gpu
from streamkv.sampling import SampledToken

_NUM_SETS = 4


def is_drawn(step: SequenceStep) -> bool:
    """Whether the device chooses the token after a part."""
    params = step.params if step.wanted is Wanted.LOGITS else None
    return params is not None and samples_on_gpu(params)


class GpuFlight:
    """A step under way on a GPU.

    Args:
        steps: its parts.
        rows: where among the chosen tokens each part is, if the device chose one for it.
        ids, info: of `GpuSampler.sample`, on the host once arrived.
        logits: float32, on the host once arrived, of the parts whose token the host chooses.
        scores: of each part, on the host once arrived.
        arrival: when.
        watch: of the device's work, stopped; `None`: nobody asks for it.
    """

    def __init__(
        self,
        steps: Many[SequenceStep],
        rows: list[int | None],
        ids: Tensor,
        info: Tensor,
        logits: dict[int, Tensor],
        scores: list[Tensor | None],
        arrival: Arrival,
        watch: Stopwatch | None = None,
    ) -> None:
        self._steps = steps
        self._rows = rows
        self._ids, self._info = ids, info
        self._logits = logits
        self._scores = scores
        self._arrival = arrival
        self._watch = watch
        self._results: list[StepResult] | None = None

    @property
    def sources(self) -> Many[int | None]:
        """For each part: where the token after it is on the device, if it is."""
        return self._rows

    def done(self) -> bool:
        """Whether everything has arrived; never waits."""
        return self._arrival.done()

    def results(self) -> list[StepResult]:
        """Wait for everything; one result for each part, in the batch's order."""
        if self._results is None:
            self._arrival.wait()
            ids, info = self._ids.tolist(), self._info.tolist()
            self._results = [
                self._result(index) if row is None else _token(step, ids[row], *info[row])
                for index, (step, row) in enumerate(zip(self._steps, self._rows, strict=True))
            ]
        return self._results

    def device_s(self) -> float | None:
        """Once it has ended: seconds that the device was at it, if somebody looked."""
        return None if self._watch is None else self._watch.seconds()

    def _result(self, index: int) -> StepResult:
        return StepResult(scores=self._scores[index], logits=self._logits.get(index))


def _token(step: SequenceStep, token_id: int, margin: float, highest: float) -> StepResult:
    if math.isfinite(highest):
        return StepResult(token=SampledToken(token_id, margin))
    try:
        GpuSampler.check(highest, step.start + step.query_len)
    except ModelError as error:
        return StepResult(error=error)
    return StepResult(token=SampledToken(token_id, margin))


def _ids_and_info(chosen: Tensor) -> tuple[Tensor, Tensor]:
    """int64 [rows] and float32 [rows, 2], which lie one behind the other in int64 [2, rows]."""
    return chosen[0], chosen[1].view(torch.float32).view(-1, 2)


class Outputs:
    """Where tokens are chosen on the device, and the way to the host.

    Args:
        max_rows: rows of the largest step.
        device: of the steps.

    Attributes:
        ids: int64 [max_rows] on the device, the tokens that the newest step chose.
        info: float32 [max_rows, 2] on the device, as `GpuSampler.sample` writes it.
    """

    def __init__(self, max_rows: int, device: torch.device) -> None:
        # Both in one piece of memory: a copy costs the device ten microseconds between two steps.
        self._chosen = torch.zeros(2, max_rows, dtype=torch.int64, device=device)
        self.ids, self.info = _ids_and_info(self._chosen)
        self._device = device
        pin = device.type == "cuda"
        self._sets = [
            torch.zeros(2, max_rows, dtype=torch.int64, pin_memory=pin) for _ in range(_NUM_SETS)
        ]
        self._turn = 0

    def send(
        self,
        steps: Many[SequenceStep],
        rows: list[int | None],
        logits: Tensor | None,
        scores: list[Tensor | None],
        watch: Stopwatch | None = None,
    ) -> GpuFlight:
        """Send what a step returns to the host; the arguments are those of `GpuFlight`.

        `watch` is stopped here.
        """
        if watch is not None:
            watch.stop()
        arriving = self._sets[self._turn]
        self._turn = (self._turn + 1) % _NUM_SETS
        chosen = [row if is_drawn(step) else None for step, row in zip(steps, rows, strict=True)]
        if any(row is not None for row in chosen):
            arriving.copy_(self._chosen, non_blocking=True)
        ids, info = _ids_and_info(arriving)
        sent = {
            index: to_host(logits[row].float())
            for index, row in enumerate(rows)
            if logits is not None
            and row is not None
            and steps[index].wanted is Wanted.LOGITS
            and chosen[index] is None
        }
        arrived = [None if each is None else to_host(each) for each in scores]
        arrival = Arrival(self._device)
        return GpuFlight(steps, chosen, ids, info, sent, arrived, arrival, watch)
