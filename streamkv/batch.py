"""What one step computes: plain data between scheduler and runner."""

from dataclasses import dataclass
from enum import Enum

import torch

from streamkv.sequence import Sequence


class Wanted(Enum):
    """What a step of a sequence has to return besides writing its KV."""

    NOTHING = "nothing"
    SCORES = "scores"  # log-probability of the token after each query
    LOGITS = "logits"  # logits after the last query


@dataclass(frozen=True, slots=True)
class SequenceStep:
    """The part of one sequence in a step: its first `query_len` pending tokens."""

    sequence: Sequence
    query_len: int
    wanted: Wanted = Wanted.NOTHING


@dataclass(frozen=True, slots=True)
class Batch:
    """All sequences of one step, side by side in one packed row."""

    steps: tuple[SequenceStep, ...]

    @property
    def num_tokens(self) -> int:
        """Tokens of the packed row."""
        return sum(step.query_len for step in self.steps)


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step returned for one sequence.

    Attributes:
        scores: float32 [n] log-probabilities of the tokens after the queries, if wanted; n is
            `query_len`, or one less when nothing follows the last query yet.
        logits: float32 [vocab_size] after the last query, if wanted.
    """

    scores: torch.Tensor | None = None
    logits: torch.Tensor | None = None
