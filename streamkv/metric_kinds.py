"""What a metric is made of: counters, states or a histogram of an engine, and its words.

The values are those of a snapshot; nothing is kept here, and nothing is known of who serves them.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from streamkv.digest_pages import DigestUsage
from streamkv.histogram import Observed
from streamkv.tiers.usage import TierUsage

PREFIX = "streamkv_"

Unit = Literal["", "blocks", "milliseconds"]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What an engine tells at one moment.

    Attributes:
        counters: as `Engine.counters`.
        tiers: as `Engine.usage`.
        digests: as `Engine.digest_usage`.
        states: how many sessions are in each state.
        num_open: sessions that are open.
        num_running: of these, those that have something to compute.
        block_bytes: of a block.
        histograms: by the names in `HISTOGRAMS`.
    """

    counters: Mapping[str, int]
    tiers: Mapping[str, TierUsage]
    digests: DigestUsage
    states: Mapping[str, int]
    num_open: int
    num_running: int
    block_bytes: int
    histograms: Mapping[str, Observed]


@dataclass(frozen=True, slots=True)
class Counted:
    """A metric made of counters.

    Attributes:
        name: without prefix.
        help: what it counts.
        counter: of an engine; or one for each value of the label.
        label: name of the label, if it has one.
        unit: of the counter: milliseconds are shown as seconds, blocks as bytes.
    """

    name: str
    help: str
    counter: str | Mapping[str, str]
    label: str | None = None
    unit: Unit = ""

    @property
    def counters(self) -> Mapping[str, str]:
        """Counter by the label's value; `""` without a label."""
        return {"": self.counter} if isinstance(self.counter, str) else self.counter

    def empty(self) -> CounterMetricFamily:
        """The metric without values."""
        return CounterMetricFamily(PREFIX + self.name, self.help, labels=_labels(self.label))

    def family(self, now: Snapshot) -> Metric:
        """The metric with its values."""
        family = self.empty()
        for value, counter in self.counters.items():
            at = _labels(None if self.label is None else value)
            family.add_metric(at, _converted(now.counters[counter], self.unit, now.block_bytes))
        return family


@dataclass(frozen=True, slots=True)
class Gauged:
    """A metric that goes up and down.

    Attributes:
        name: without prefix.
        help: what it measures.
        read: its value; or one for each value of the label.
        label: name of the label, if it has one.
    """

    name: str
    help: str
    read: Callable[[Snapshot], Mapping[str, int]]
    label: str | None = None

    def empty(self) -> GaugeMetricFamily:
        """The metric without values."""
        return GaugeMetricFamily(PREFIX + self.name, self.help, labels=_labels(self.label))

    def family(self, now: Snapshot) -> Metric:
        """The metric with its values."""
        family = self.empty()
        for value, number in self.read(now).items():
            family.add_metric(_labels(None if self.label is None else value), number)
        return family


@dataclass(frozen=True, slots=True)
class Timed:
    """A histogram.

    Attributes:
        name: without prefix.
        help: what it observes.
        histogram: attribute of `Instruments`.
    """

    name: str
    help: str
    histogram: str

    label: ClassVar[None] = None

    def empty(self) -> HistogramMetricFamily:
        """The metric without values."""
        return HistogramMetricFamily(PREFIX + self.name, self.help, labels=())

    def family(self, now: Snapshot) -> Metric:
        """The metric with its values."""
        seen = now.histograms[self.histogram]
        bounds = [*(f"{bound:g}" for bound in seen.bounds), "+Inf"]
        buckets = list(zip(bounds, map(float, seen.up_to), strict=True))
        family = self.empty()
        family.add_metric([], buckets, seen.total)
        return family


def _converted(amount: int, unit: Unit, block_bytes: int) -> float:
    """A counter's amount in the base unit in which it is shown."""
    if unit == "milliseconds":
        return amount / 1000
    return amount * block_bytes if unit == "blocks" else amount


def _labels(label: str | None) -> list[str]:
    return [] if label is None else [label]
