"""What an engine does, counted by a test itself, to compare its metrics with."""

from collections import Counter, defaultdict
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from streamkv import Engine
from streamkv.batch import Batch, Flight, Wanted
from streamkv.operations import Call, Compute

Values = dict[tuple[str, str], float]
"""Value of each sample, by its name and the value of its label."""


def values_of(engine: Engine) -> Values:
    """All samples of an engine's metrics but for the buckets, read from the text."""
    found: Values = {}
    for family in text_string_to_metric_families(engine.metrics()):
        for sample in family.samples:
            if not sample.name.endswith("_bucket"):
                [label] = sample.labels.values() or [""]
                found[sample.name.removeprefix("streamkv_"), label] = sample.value
    return found


@dataclass
class ByHand:
    """What was seen, of all engines that were watched.

    Attributes:
        tokens: computed tokens by kind, of the engine that is watched now.
        batch_sizes: sequences of each of its steps.
        asked: futures of what was to be computed.
        computed: token indices that were computed, by session.
        lost: of these, what was no more there when the session was opened or went back.
    """

    tokens: Counter[str] = field(default_factory=Counter)
    batch_sizes: list[int] = field(default_factory=list)
    asked: list[Future[Any]] = field(default_factory=list)
    computed: dict[str, set[int]] = field(default_factory=lambda: defaultdict(set))
    lost: dict[str, set[int]] = field(default_factory=lambda: defaultdict(set))

    @property
    def num_begun(self) -> int:
        """How often something was to be computed and not called off before it began."""
        return sum(not future.cancelled() for future in self.asked)

    def lose(self, name: str, num_tokens: int) -> None:
        """A session begins again at the end of so many tokens, of which the last is pending."""
        self.lost[name] = {index for index in self.computed[name] if index < num_tokens - 1}

    @contextmanager
    def watching(self, engine: Engine) -> Iterator[None]:
        """See what an engine's model computes, token by token, and what its loop is asked."""
        self.tokens, self.batch_sizes, self.asked = Counter(), [], []
        launch, submit = engine._runner.launch, engine._loop.submit

        def watched_launch(batch: Batch) -> Flight:
            self._see(engine, batch)
            return launch(batch)

        def watched_submit(operation: Compute | Call) -> Future[Any]:
            future = submit(operation)
            if isinstance(operation, Compute):
                self.asked.append(future)
            return future

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(engine._runner, "launch", watched_launch)
            patch.setattr(engine._loop, "submit", watched_submit)
            yield

    def _see(self, engine: Engine, batch: Batch) -> None:
        names = {session._live.sequence: name for name, session in engine._sessions.items()}
        self.batch_sizes.append(len(batch.steps))
        for step in batch.steps:
            name = names[step.sequence]
            is_decode = step.query_len == 1 and step.wanted is Wanted.LOGITS
            for index in range(step.start, step.start + step.query_len):
                kind = "decode" if is_decode else "prefill"
                self.tokens["recomputed" if index in self.lost[name] else kind] += 1
                self.computed[name].add(index)
