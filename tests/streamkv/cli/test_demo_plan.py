"""How much the demo reads on fast and slow machines, and where it copies and kills."""

import pytest

from streamkv.cli.demo_plan import Pace, end_within, make_plan

CHARS = 400_000


def pace(tokens_per_s: float, token_index: int = 4_000, elapsed_s: float = 10.0) -> Pace:
    return Pace(elapsed_s, 6.0, token_index, 4 * token_index, tokens_per_s)


def test_a_fast_machine_reads_all_of_the_text() -> None:
    plan = make_plan(pace(1_000.0), CHARS, 508, limit_s=240.0)
    assert plan.end_chars == CHARS
    assert (plan.copy_at, plan.lead) == (64_000, 6_000)


def test_a_slow_machine_reads_what_fits() -> None:
    # 240 - 10 elapsed - 2 * 6 starting - 300 * 20 / 200 writing - 6 the lead = 182 s
    assert end_within(pace(200.0), CHARS, 508, limit_s=240.0) == 4 * (4_000 + 182 * 200)
    plan = make_plan(pace(200.0), CHARS, 508, limit_s=240.0)
    assert plan.copy_at + plan.lead == int(0.7 * 40_400)
    assert plan.lead == 1_200


def test_a_very_slow_machine_still_reads_eight_windows() -> None:
    plan = make_plan(pace(1.0, token_index=512), CHARS, 508, limit_s=240.0)
    assert plan.end_chars == 4 * 8 * 508
    assert plan.copy_at + plan.lead == int(0.7 * 8 * 508)
    assert plan.lead == 2 * 508


def test_when_time_is_up_nothing_more_is_read() -> None:
    late = pace(1_000.0, token_index=50_000, elapsed_s=500.0)
    assert end_within(late, CHARS, 508, limit_s=240.0) == 4 * 50_000


@pytest.mark.parametrize("tokens_per_s", [1.0, 90.0, 1_000.0, 50_000.0, 1e7])
@pytest.mark.parametrize("window_size", [64, 508, 4_000])
def test_the_copy_is_taken_before_the_kill_and_at_most_8192_tokens_before(
    tokens_per_s: float, window_size: int
) -> None:
    plan = make_plan(pace(tokens_per_s), CHARS, window_size, limit_s=240.0)
    assert plan.copy_at > 0
    assert 0 < plan.lead <= 6_144
    assert plan.end_chars <= CHARS


def test_a_later_pace_keeps_the_rate() -> None:
    later = pace(500.0).later(60.0, 30_000, 120_000)
    assert later == Pace(60.0, 6.0, 30_000, 120_000, 500.0)
