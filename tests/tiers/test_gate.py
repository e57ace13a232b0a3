from concurrent.futures import ThreadPoolExecutor
from threading import Event

import pytest

from streamkv.errors import StoreError
from streamkv.tiers.gate import Gate


def test_many_threads_are_inside_at_once() -> None:
    gate, both = Gate("a thing"), [Event(), Event()]

    def visit(me: int) -> bool:
        with gate.enter():
            both[me].set()
            return both[1 - me].wait(10)

    with ThreadPoolExecutor(2) as threads:
        assert list(threads.map(visit, [0, 1])) == [True, True]


def test_exclusive_waits_for_those_inside_and_keeps_others_out() -> None:
    gate, order = Gate("a thing"), []
    inside, leave, alone = Event(), Event(), Event()

    def visit() -> None:
        with gate.enter():
            inside.set()
            assert leave.wait(10)
            order.append("visitor leaves")

    def replace() -> None:
        with gate.exclusive():
            order.append("replaced")
            alone.set()

    def visit_later() -> None:
        assert alone.wait(10)
        with gate.enter():
            order.append("later visitor")

    with ThreadPoolExecutor(3) as threads:
        done = [threads.submit(visit)]
        assert inside.wait(10)
        done += [threads.submit(replace), threads.submit(visit_later)]
        leave.set()
        for future in done:
            future.result(10)
    assert order == ["visitor leaves", "replaced", "later visitor"]


def test_a_closed_gate_lets_nobody_in() -> None:
    gate = Gate("The store x")
    gate.check_open()
    gate.close()
    assert gate.closed
    with pytest.raises(StoreError, match="The store x is closed"), gate.enter():
        pass
    with pytest.raises(StoreError):
        gate.check_open()


def test_an_error_inside_leaves_the_gate_passable() -> None:
    gate = Gate("a thing")
    with pytest.raises(KeyError), gate.enter():
        raise KeyError
    with pytest.raises(KeyError), gate.exclusive():
        raise KeyError
    with gate.exclusive():
        pass
    with gate.enter():
        pass
