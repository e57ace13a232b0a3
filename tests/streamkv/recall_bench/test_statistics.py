"""Shares and intervals against published values and literals."""

import pytest
from recall_answers import answer

from streamkv.recall_bench import statistics
from streamkv.recall_bench.statistics import Cell, Row, Share, wilson


@pytest.mark.parametrize(
    ("found", "asked", "low", "high"),
    [
        # R. G. Newcombe, Statistics in Medicine 17 (1998), table I, method 3.
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0000, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ],
)
def test_wilson_s_interval_is_the_published_one(
    found: int, asked: int, low: float, high: float
) -> None:
    assert wilson(found, asked) == pytest.approx((low, high), abs=5e-5)
    mirrored = wilson(asked - found, asked)
    assert mirrored == pytest.approx((1 - high, 1 - low), abs=5e-5)


def test_the_interval_reaches_the_ends_only_there() -> None:
    assert wilson(0, 7).low == 0.0
    assert wilson(7, 7).high == 1.0
    assert wilson(0, 0) == (0.0, 1.0)
    for found in range(1, 7):
        assert 0 < wilson(found, 7).low < found / 7 < wilson(found, 7).high < 1


ANSWERS = [
    answer(index=0, depth=0.1, mode="full", found=True, beyond_window=True),
    answer(index=1, depth=0.9, mode="full", found=True),
    answer(index=2, depth=0.1, mode="full", found=False, beyond_window=True),
    answer(index=3, depth=0.9, mode="full", found=True),
    answer(index=0, depth=0.1, mode="recall", found=True, beyond_window=True, recalled=True),
    answer(index=1, depth=0.9, mode="recall", found=False, recalled=False),
    answer(index=2, depth=0.1, mode="recall", found=True, beyond_window=True, recalled=False),
    answer(index=0, depth=0.1, mode="recall", found=False, length=2048),
]


def test_shares_are_counted_by_cell_and_pooled() -> None:
    assert statistics.by_cell(ANSWERS) == {
        Cell("full", 1024, 0.1): Share(1, 2),
        Cell("full", 1024, 0.9): Share(2, 2),
        Cell("recall", 1024, 0.1): Share(2, 2),
        Cell("recall", 1024, 0.9): Share(0, 1),
        Cell("recall", 2048, 0.1): Share(0, 1),
    }
    assert statistics.by_row(ANSWERS)[Row("recall", 1024)] == Share(2, 3)
    assert statistics.beyond_window(ANSWERS) == {
        Row("full", 1024): Share(1, 2),
        Row("recall", 1024): Share(2, 2),
    }
    assert statistics.needle_recalled(ANSWERS) == {Row("recall", 1024): Share(1, 2)}
    assert statistics.mean_recalled_blocks(ANSWERS) == {Row("recall", 1024): 16.0}


def test_agreement_counts_what_both_were_asked_and_the_reference_answers() -> None:
    # Of 0, 1 and 3, which full answers, 3 was not asked of recall, and 1 it did not answer.
    assert statistics.agreement(ANSWERS, "recall", "full") == {1024: Share(1, 2)}
    assert statistics.agreement(ANSWERS, "dense", "full") == {}


def test_a_reading_that_several_modes_share_is_timed_once() -> None:
    shared = [
        answer(mode="window", fed_in="window", feed_s=2.0),
        answer(mode="recall", fed_in="window", feed_s=2.0),
        answer(mode="full", fed_in="window", feed_s=2.0),
        answer(index=1, mode="full", fed_in="window", feed_s=6.0),
    ]
    assert statistics.feed_rates(shared) == {Row("window", 1024): 2 * 1024 / 8}
    rates = statistics.answer_rates(shared)
    assert rates == {Row(mode, 1024): 16.0 for mode in ("window", "recall", "full")}
