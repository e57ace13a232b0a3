"""Times between tokens, cut to whole strides. Pure.

    tokens    |------ skipped ------|----------- measured -----------|
    choices   ^       ^       ^       ^       ^       ^       ^       ^       one for each stride
                                |<--------- n strides --------->|

A session that recalls chooses at multiples of its stride, and attends to a choice one stride later.
So only a measured part of whole strides has its share of choices; it begins and ends in the middle
of a stride, where neither a choice nor its use is at the edge.
"""

import itertools
import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple


class StepTimes(NamedTuple):
    """Milliseconds between tokens.

    Attributes:
        mean, p50, p99, longest: over all of them.
        num_steps: how many.
    """

    mean: float
    p50: float
    p99: float
    longest: float
    num_steps: int

    @classmethod
    def of(cls, spans_ms: Sequence[float]) -> "StepTimes":
        """Of some, at least one."""
        ascending = sorted(spans_ms)

        def at(share: float) -> float:
            return ascending[min(len(ascending) - 1, math.ceil(share * len(ascending)) - 1)]

        mean = statistics.fmean(ascending)
        return cls(mean, at(0.5), at(0.99), ascending[-1], len(ascending))


def whole_strides(at_least: int, stride: int) -> int:
    """The fewest tokens, at least so many, that are whole strides."""
    return -(-at_least // stride) * stride


def tokens_before(num_tokens: int, stride: int, least: int) -> int:
    """Tokens to skip, at least `least`, so that measuring begins in the middle of a stride.

    Args:
        num_tokens: of the stream before the first of them.
        stride: tokens between two choices.
        least: what a change needs to take effect, and clocks to rise.
    """
    return least + (stride // 2 - num_tokens - least) % stride


def spans_ms(stamps: Sequence[float], skipped: int, measured: int) -> list[float]:
    """Milliseconds before each measured token.

    Args:
        stamps: when each token came, in seconds.
        skipped: tokens before the measured ones, at least one.
        measured: how many.
    """
    assert 0 < skipped <= len(stamps) - measured, (len(stamps), skipped, measured)
    part = stamps[skipped - 1 : skipped + measured]
    return [1000 * (after - before) for before, after in itertools.pairwise(part)]


def paired_ratio(pairs: Sequence[tuple[StepTimes, StepTimes]]) -> float:
    """Median, over runs that followed each other, of the first's mean step over the second's."""
    return statistics.median(first.mean / second.mean for first, second in pairs)
