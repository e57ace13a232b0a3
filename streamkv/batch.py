"""What one step computes: plain data between scheduler and runner."""

from collections.abc import Sequence as Many
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

import torch

from streamkv.errors import StreamKVError
from streamkv.sampling import SampledToken
from streamkv.sampling_params import SamplingParams
from streamkv.sequence import Sequence


class Wanted(Enum):
    """What a step of a sequence has to return besides writing its KV."""

    NOTHING = "nothing"
    SCORES = "scores"  # log-probability of the token after each query
    LOGITS = "logits"  # logits after the last query


# Not frozen: that is three times as slow to make, and each row of each step has one.
@dataclass(slots=True)
class SequenceStep:
    """The part of one sequence in a step; nobody changes it.

    Attributes:
        sequence: whose tokens.
        query_len: how many: the first pending ones.
        wanted: what is to be returned.
        params: with LOGITS: choose the next token on the device, if the runner can.
        start: token index of the first query.
        source: the one token is that which the step before chose in this row, on the device; it is
            not among the pending ones yet.
    """

    sequence: Sequence
    query_len: int
    wanted: Wanted = Wanted.NOTHING
    params: SamplingParams | None = None
    start: int = -1
    source: int | None = None

    def __post_init__(self) -> None:
        if self.start < 0:
            self.start = self.sequence.num_computed


@dataclass(frozen=True, slots=True)
class Batch:
    """All sequences of one step, side by side in one packed row."""

    steps: tuple[SequenceStep, ...]

    @property
    def num_tokens(self) -> int:
        """Tokens of the packed row."""
        return sum(step.query_len for step in self.steps)


@dataclass(slots=True)
class StepResult:
    """What a step returned for one sequence; nobody changes it.

    Attributes:
        scores: float32 [n] log-probabilities of the tokens after the queries, if wanted; n is
            `query_len`, or one less when nothing follows the last query yet.
        logits: float32 [vocab_size] after the last query, if wanted and no token was chosen.
        token: the next token, if it was chosen on the device.
        error: why there is none, though the step itself went well.
    """

    scores: torch.Tensor | None = None
    logits: torch.Tensor | None = None
    token: SampledToken | None = None
    error: StreamKVError | None = None


class Flight(Protocol):
    """A step that was started."""

    @property
    def sources(self) -> Many[int | None]:
        """For each part of the batch: where the token after it is on the device, if it is."""

    def done(self) -> bool:
        """Whether it has ended; never waits."""

    def results(self) -> list[StepResult]:
        """Wait for its end; one result for each part, in the batch's order."""

    def device_s(self) -> float | None:
        """Once it has ended: seconds that a device was at it; `None`: not known apart."""


class Landed:
    """A step that was carried out where it was started."""

    def __init__(self, results: list[StepResult]) -> None:
        self._results = results

    @property
    def sources(self) -> Many[int | None]:
        """No token stays on a device."""
        return [None] * len(self._results)

    def done(self) -> bool:
        """Always True."""
        return True

    def results(self) -> list[StepResult]:
        """What it returned."""
        return self._results

    def device_s(self) -> float | None:
        """Not known: it took the time of who started it."""
        return None
