"""Two runs over the same tokens: how far apart they are on average, and how sure that is.

Neighbouring tokens are alike, so that single differences are no independent draws: whole blocks of
tokens are drawn instead (H. R. Künsch, "The jackknife and the bootstrap for general stationary
observations", Annals of Statistics 17 (1989); here the blocks do not overlap). Pure arithmetic.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from streamkv.recall_bench.statistics import Interval

NUM_DRAWS = 10_000


class MeanDifference(NamedTuple):
    """Mean of paired differences and its 95 % interval."""

    mean: float
    interval: Interval


def mean_difference(
    first: Sequence[float], second: Sequence[float], block: int, seed: int = 0
) -> MeanDifference:
    """Mean of `first - second` with its 95 % percentile interval by block bootstrap.

    Args:
        first, second: values of the same tokens, in order; at least one.
        block: neighbouring tokens that are drawn together; the last block may be shorter.
        seed: of the draws.
    """
    assert len(first) == len(second) > 0
    assert block >= 1
    differences = np.asarray(first, np.float64) - np.asarray(second, np.float64)
    starts = np.arange(0, len(differences), block)
    sums = np.add.reduceat(differences, starts)
    counts = np.diff(np.append(starts, len(differences)))
    drawn = np.random.default_rng(seed).integers(len(starts), size=(NUM_DRAWS, len(starts)))
    means = sums[drawn].sum(axis=1) / counts[drawn].sum(axis=1)
    low, high = np.percentile(means, (2.5, 97.5))
    return MeanDifference(float(differences.mean()), Interval(float(low), float(high)))
