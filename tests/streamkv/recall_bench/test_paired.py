"""The interval of a paired difference, against what is known of its data."""

import numpy as np
import pytest

from streamkv.recall_bench.paired import mean_difference


def test_the_mean_is_that_of_all_tokens_a_short_last_block_included() -> None:
    found = mean_difference([1.0, 2.0, 3.0, 9.0, 5.0], [0.0, 0.0, 0.0, 0.0, 1.0], block=2)
    assert found.mean == pytest.approx(19 / 5)
    assert found.interval.low < found.mean < found.interval.high


def test_equal_differences_leave_no_doubt() -> None:
    found = mean_difference([2.5] * 100, [2.0] * 100, block=10)
    assert found == (0.5, (0.5, 0.5))
    assert mean_difference([1.0], [3.0], block=512) == (-2.0, (-2.0, -2.0))


def test_independent_differences_get_the_normal_interval() -> None:
    noise = np.random.default_rng(3).normal(size=4096)
    found = mean_difference(noise.tolist(), [0.0] * 4096, block=16)
    half = 1.96 * noise.std() / 64
    low, high = found.interval
    assert (low, high) == pytest.approx((noise.mean() - half, noise.mean() + half), abs=0.1 * half)


def test_differences_that_are_alike_within_blocks_get_a_wider_one() -> None:
    noise = np.repeat(np.random.default_rng(4).normal(size=64), 64)
    zeros = [0.0] * len(noise)
    alone = mean_difference(noise.tolist(), zeros, block=1).interval
    together = mean_difference(noise.tolist(), zeros, block=64).interval
    ratio = (together.high - together.low) / (alone.high - alone.low)
    assert ratio == pytest.approx(8, rel=0.15)


def test_the_same_seed_gives_the_same_interval() -> None:
    values = np.random.default_rng(5).normal(size=600).tolist()
    zeros = [0.0] * 600
    assert mean_difference(values, zeros, 50) == mean_difference(values, zeros, 50)
    assert mean_difference(values, zeros, 50) != mean_difference(values, zeros, 50, seed=1)
