"""The cost gate on literal speeds."""

import threading

import pytest

from streamkv.cost_gate import ASSUMED_BYTES_PER_S, REFUSALS_BEFORE_RETRY, CostGate, Speed

MIB = 1 << 20


def gate_at(tokens_per_s: float, ssd_bytes_per_s: float) -> CostGate:
    """A gate that has measured both for a minute."""
    gate = CostGate()
    gate.note_computed(round(60 * tokens_per_s), 60)
    gate.note_read("ssd", round(60 * ssd_bytes_per_s), 60)
    return gate


def test_reading_is_chosen_as_long_as_nothing_was_computed() -> None:
    gate = CostGate()
    assert gate.compute_s(1000) is None
    assert gate.chooses_reading(64, {"ssd": 1 << 40})
    assert gate.counters() == {"gate_reads": 1, "gate_computes": 0}


@pytest.mark.parametrize(
    ("num_tokens", "num_bytes", "reads"),
    [
        (1000, {"ssd": 499_000_000}, True),  # 0.499 s against 0.5 s
        (1000, {"ssd": 501_000_000}, False),
        (64, {"ssd": 31_000_000}, True),
        (64, {"ssd": 33_000_000}, False),
        (64, {}, True),
    ],
)
def test_the_faster_way_is_chosen(num_tokens: int, num_bytes: dict[str, int], reads: bool) -> None:
    gate = gate_at(tokens_per_s=2000, ssd_bytes_per_s=1e9)
    assert gate.chooses_reading(num_tokens, num_bytes) is reads  # type: ignore[arg-type]  # names of tiers
    assert gate.counters() == {"gate_reads": int(reads), "gate_computes": int(not reads)}


def test_what_lies_in_several_tiers_takes_the_time_of_all() -> None:
    gate = gate_at(tokens_per_s=1000, ssd_bytes_per_s=1e9)
    gate.note_read("cpu", 600_000_000_000, 60)
    assert gate.read_s({"cpu": 5_000_000_000, "ssd": 500_000_000}) == pytest.approx(1.0, rel=1e-3)
    assert gate.compute_s(1000) == pytest.approx(1.0)


def test_speeds_are_assumed_until_something_was_read() -> None:
    for place, speed in ASSUMED_BYTES_PER_S.items():
        assert CostGate().read_s({place: round(speed)}) == pytest.approx(1.0)
    gate = CostGate()
    gate.note_read("ssd", 100_000_000, 1.0)
    assert gate.read_s({"ssd": 100_000_000}) == pytest.approx(1.0, rel=0.1)


def test_an_assumption_does_not_hide_that_few_bytes_took_long() -> None:
    gate = CostGate()
    gate.note_read("ssd", 100_000, 1.0)
    assert gate.read_s({"ssd": 100_000}) == pytest.approx(1.0, rel=1e-3)


def test_a_moment_does_not_count_more_than_what_is_assumed() -> None:
    gate = CostGate()
    gate.note_read("ssd", 1000, 0.001)
    assert gate.read_s({"ssd": 1_000_000_000}) == pytest.approx(1.0, rel=0.2)


def test_what_was_measured_last_counts_most() -> None:
    speed = Speed()
    speed.add(1000, 2.0)
    assert speed.per_s == pytest.approx(500)
    for _ in range(10):
        speed.add(100, 2.0)
    assert speed.per_s == pytest.approx(50, rel=0.02)


@pytest.mark.parametrize(("amount", "seconds"), [(0, 1.0), (100, 0.0), (100, -1.0), (-1, 1.0)])
def test_work_that_tells_nothing_is_not_counted(amount: float, seconds: float) -> None:
    speed = Speed()
    speed.add(amount, seconds)
    assert speed.per_s is None
    speed.add(10, 1.0)
    speed.add(amount, seconds)
    assert speed.per_s == pytest.approx(10)


def test_a_tier_that_was_slow_once_is_read_again_some_time() -> None:
    gate = gate_at(tokens_per_s=1000, ssd_bytes_per_s=1e3)
    chosen = [gate.chooses_reading(64, {"ssd": MIB}) for _ in range(2 * REFUSALS_BEFORE_RETRY + 2)]
    refused = [False] * REFUSALS_BEFORE_RETRY
    assert chosen == [*refused, True, *refused, True]
    gate.note_read("ssd", 10**12, 60)
    assert gate.chooses_reading(64, {"ssd": MIB})


def test_it_counts_rightly_from_several_threads() -> None:
    gate = gate_at(tokens_per_s=1000, ssd_bytes_per_s=1e9)

    def choose() -> None:
        for _ in range(200):
            gate.chooses_reading(64, {"ssd": MIB})
            gate.note_read("ssd", MIB, 0.001)

    threads = [threading.Thread(target=choose) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(gate.counters().values()) == 800
