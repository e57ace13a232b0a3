"""What an engine counts and times of its own work, beside what its tiers count. No torch, no clock.

Whoever is at work tells it here, and nothing is made of it until somebody asks
(`streamkv.metrics`). Invariant: every name is there from the start, with nothing counted.
"""

from streamkv.batch import Batch, Wanted
from streamkv.histogram import Histogram, Observed
from streamkv.tiers.usage import Counters

ACCEPTED = ("system_tokens", "said_tokens", "fed_tokens", "generated_tokens")
"""Tokens by how they came into a stream."""

COMPUTED = ("decode_tokens", "prefill_tokens", "recomputed_tokens")
"""Tokens by the kind of step that computed them."""

OUTCOMES = ("operations_finished", "operations_failed", "operations_cancelled")
"""How operations on sessions ended."""

COUNTED = (*ACCEPTED, *COMPUTED, *OUTCOMES, "steps", "preemptions")

HISTOGRAMS = ("first_token_s", "next_token_s", "queue_s", "wake_s", "batch_size")

FIRST_TOKEN_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
NEXT_TOKEN_S = (
    *(0.001, 0.0025, 0.005, 0.0075, 0.01, 0.0125, 0.015, 0.02, 0.03, 0.04),
    *(0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 10.0),
)
QUEUE_S = (0.0001, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0, 30.0)
BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)


class Instruments:
    """The counters and histograms of one engine. Safe to use from several threads.

    Attributes:
        counted: counters, by the names in `COUNTED`.
        first_token_s: seconds that callers waited for the first token of an answer.
        next_token_s: seconds that they waited for each token after it.
        queue_s: seconds from asking for something to be computed to its first step.
        wake_s: the part of it, and of calls, spent waiting for a session to wake.
        batch_size: sequences of each step.
    """

    def __init__(self) -> None:
        self.counted = Counters(COUNTED)
        self.first_token_s = Histogram(FIRST_TOKEN_S)
        self.next_token_s = Histogram(NEXT_TOKEN_S)
        self.queue_s = Histogram(QUEUE_S)
        self.wake_s = Histogram(QUEUE_S)
        self.batch_size = Histogram(BATCH_SIZES)

    def histograms(self) -> dict[str, Observed]:
        """What all histograms have seen, by their names here."""
        return {name: getattr(self, name).observed() for name in HISTOGRAMS}

    def launched(self, batch: Batch) -> int:
        """A step is under way; returns its tokens."""
        num_decoded = num_again = num_tokens = 0
        for step in batch.steps:
            query_len = step.query_len
            num_tokens += query_len
            again = step.sequence.was_computed_until - step.start
            if again > 0:
                num_again += min(again, query_len)
            elif query_len == 1 and step.wanted is Wanted.LOGITS:
                num_decoded += 1
        self.batch_size.observe(len(batch.steps))
        self.counted.add_all(
            {
                "steps": 1,
                "decode_tokens": num_decoded,
                "recomputed_tokens": num_again,
                "prefill_tokens": num_tokens - num_decoded - num_again,
            }
        )
        return num_tokens
