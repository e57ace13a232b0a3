"""Counters exist from the start and lose nothing between threads."""

import threading

import pytest

from streamkv.tiers.usage import Counters


def test_counters_are_there_before_they_move() -> None:
    assert Counters(["writes", "misses"]).snapshot() == {"writes": 0, "misses": 0}


def test_a_snapshot_does_not_move_with_the_counters() -> None:
    counters = Counters(["writes"])
    before = counters.snapshot()
    counters.add("writes", 3)
    assert (before["writes"], counters.snapshot()["writes"]) == (0, 3)


def test_a_misspelt_counter_is_a_bug() -> None:
    with pytest.raises(AssertionError, match="no counter is called 'write'"):
        Counters(["writes"]).add("write")


def test_threads_do_not_lose_each_others_counts() -> None:
    counters = Counters(["writes"])

    def count() -> None:
        for _ in range(5000):
            counters.add("writes")

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counters.snapshot() == {"writes": 20000}
