import pytest

from streamkv.tiers.faults import FAULT_POINTS, fault_point, inject


def test_a_fault_point_does_nothing_by_itself() -> None:
    for name in FAULT_POINTS:
        fault_point(name)


def test_an_injected_action_runs_at_its_point_and_at_no_other() -> None:
    calls: list[str] = []
    with inject("ssd.put", lambda: calls.append("put")):
        fault_point("ssd.put")
        fault_point("ssd.get")
        fault_point("ssd.put")
    fault_point("ssd.put")
    assert calls == ["put", "put"]


def test_what_the_action_raises_reaches_the_caller_and_the_injection_ends() -> None:
    def fail() -> None:
        raise OSError("no disk")

    with pytest.raises(OSError, match="no disk"), inject("worker", fail):
        fault_point("worker")
    fault_point("worker")


def test_an_inner_injection_hides_the_outer_one_until_it_ends() -> None:
    calls: list[str] = []
    with inject("worker", lambda: calls.append("outer")):
        with inject("worker", lambda: calls.append("inner")):
            fault_point("worker")
        fault_point("worker")
    assert calls == ["inner", "outer"]


def test_a_name_that_no_code_calls_is_refused() -> None:
    with pytest.raises(AssertionError, match=r"ssd\.putt"), inject("ssd.putt", lambda: None):
        pass
