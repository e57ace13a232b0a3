"""Checkpoints that are made at leisure: memory has the blocks at once, the disk has time."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from streamkv.errors import EngineClosedError, StoreError
from streamkv.tiers.faults import inject

MakeRig = Callable[..., Any]


class SlowDisk:
    """A disk that finishes nothing until it is told to go on."""

    def __init__(self) -> None:
        self._goes_on = threading.Event()
        self.num_commits = 0

    def commit(self) -> None:
        """Called by the writing thread."""
        self.num_commits += 1
        self._goes_on.wait()

    def go_on(self) -> None:
        self._goes_on.set()


@contextmanager
def slow_disk() -> Iterator[SlowDisk]:
    disk = SlowDisk()
    with inject("ssd.commit", disk.commit):
        try:
            yield disk
        finally:
            disk.go_on()


def until(is_so: Callable[[], bool]) -> None:
    while not is_so():
        threading.Event().wait(0.001)


def lay_down(rig: Any, session: str, *numbers: int, partial: int | None = None) -> Any:
    """Have a session's blocks kept, and give them back as soon as they are."""
    blocks = [(rig.key_of(number), rig.seal(number)) for number in numbers]
    named = list(blocks)
    if partial is not None:
        named.append((rig.partial_key_of(partial), rig.fill(partial)))
    ticket = rig.manager.checkpoint(session, named, at_leisure=True)
    until(lambda: ticket.is_kept() or ticket.done())
    for _, block_id in blocks:
        rig.manager.drop(block_id)
    if partial is not None:
        rig.manager.free(named[-1][1])
    return ticket


@pytest.mark.parametrize("retain", ["all", "window"])
def test_gpu_blocks_are_free_while_the_disk_has_nothing_yet(make_rig: MakeRig, retain: str) -> None:
    rig = make_rig(cpu=8, retain=retain)
    with slow_disk() as disk:
        ticket = lay_down(rig, "diary", 0, 1, partial=2)
        assert ticket.is_kept() and not ticket.done()
        until(lambda: disk.num_commits > 0)
        # The worker stands still in the first checkpoint; its blocks are all the same there.
        assert rig.manager.usage()["gpu"].num_blocks == 0
        assert rig.held(0, 1) == [True, True]
        assert rig.restored(2, rig.partial_key_of(2))
        assert rig.ssd.manifest("diary") == []
    assert ticket.wait() is True
    rig.settle()
    assert rig.ssd.manifest("diary") == [rig.key_of(0), rig.key_of(1), rig.partial_key_of(2)]


def test_what_is_asked_for_now_is_done_before(make_rig: MakeRig) -> None:
    rig = make_rig(gpu=8, cpu=8)
    order: list[str] = []
    set_manifest = rig.ssd.set_manifest

    def noted(session: str, keys: Any) -> None:
        order.append(session)
        set_manifest(session, keys)

    rig.ssd.set_manifest = noted
    with slow_disk() as disk:
        first = lay_down(rig, "first", 0)
        until(lambda: disk.num_commits > 0)
        block_ids = [rig.seal(number) for number in (1, 2)]
        leisurely = rig.manager.checkpoint(
            "second", [(rig.key_of(1), block_ids[0])], at_leisure=True
        )
        now = rig.manager.checkpoint("third", [(rig.key_of(2), block_ids[1])])
    assert first.wait() and now.wait() and leisurely.wait()
    assert order == ["first", "third", "second"]
    for block_id in block_ids:
        rig.manager.drop(block_id)
    rig.settle()


def test_whoever_waits_for_one_has_it_made_before_others(make_rig: MakeRig) -> None:
    rig = make_rig(gpu=8, cpu=8)
    with slow_disk() as disk:
        lay_down(rig, "first", 0)
        until(lambda: disk.num_commits > 0)
        block_ids = [rig.seal(number) for number in (1, 2, 3)]
        others = [
            rig.manager.checkpoint(f"s{at}", [(rig.key_of(1 + at), block_ids[at])], at_leisure=True)
            for at in range(3)
        ]
        waits = threading.Thread(target=lambda: rig.manager.wait_for_checkpoint(others[2]))
        waits.start()
        until(lambda: others[2].is_awaited)
    waits.join()
    assert others[2].wait() is True
    assert all(ticket.wait() for ticket in others)
    for block_id in block_ids:
        rig.manager.drop(block_id)
    rig.settle()


def test_a_later_checkpoint_takes_the_place_of_one_that_waits(make_rig: MakeRig) -> None:
    """Else the older one, made when there is leisure, would be what the session resumes from."""
    rig = make_rig(gpu=8, cpu=8, retain="window")
    with slow_disk() as disk:
        lay_down(rig, "other", 9)
        until(lambda: disk.num_commits > 0)
        block_ids = [rig.seal(number) for number in (0, 1)]
        named = [(rig.key_of(at), block_id) for at, block_id in enumerate(block_ids)]
        waits = rig.manager.checkpoint("diary", named[:1], at_leisure=True)
        newest = rig.manager.checkpoint("diary", named[1:])
        assert waits.done() and not waits.wait()
    assert newest.wait() is True
    rig.manager.flush()
    assert rig.ssd.manifest("diary") == [rig.key_of(1)]
    for block_id in block_ids:
        rig.manager.drop(block_id)
    rig.settle()
    assert rig.held(0, 1) == [False, True]


def test_one_asked_for_while_blocks_are_taken_into_memory_comes_last(make_rig: MakeRig) -> None:
    """The manifest is the newest one whatever the worker is about when it is asked for."""
    rig = make_rig(gpu=8, cpu=8)
    block_ids = [rig.seal(number) for number in (0, 1)]
    named = [(rig.key_of(at), block_id) for at, block_id in enumerate(block_ids)]
    rig.manager.flush()
    keep, newest = rig.manager._lower.keep, []

    def keep_and_ask(session: str, wanted: Any) -> int:
        if not newest:
            newest.append(rig.manager.checkpoint("diary", named[1:]))
        return int(keep(session, wanted))

    rig.manager._lower.keep = keep_and_ask
    older = rig.manager.checkpoint("diary", named[:1], at_leisure=True)
    assert older.wait() is True
    assert newest[0].wait() is True
    rig.manager.flush()
    assert rig.ssd.manifest("diary") == [rig.key_of(1)]
    for block_id in block_ids:
        rig.manager.drop(block_id)
    rig.settle()


def test_one_that_waits_can_be_given_up_and_one_that_is_being_made_cannot(
    make_rig: MakeRig,
) -> None:
    rig = make_rig(gpu=8, cpu=8, retain="window")
    with slow_disk() as disk:
        made = lay_down(rig, "first", 0)
        until(lambda: disk.num_commits > 0)
        block_id = rig.seal(1)
        waits = rig.manager.checkpoint("second", [(rig.key_of(1), block_id)], at_leisure=True)
        assert rig.manager.give_up_checkpoint(waits) is True
        assert waits.done() and not waits.wait()
        assert rig.manager.give_up_checkpoint(made) is False
        rig.manager.drop(block_id)
    assert made.wait() is True
    rig.settle()
    assert rig.ssd.manifest("second") == []
    assert rig.held(1) == [False], "nobody needs it"


def test_who_is_forgotten_is_not_stored_when_there_is_leisure(make_rig: MakeRig) -> None:
    rig = make_rig(gpu=8, cpu=8)
    with slow_disk() as disk:
        lay_down(rig, "other", 9)
        until(lambda: disk.num_commits > 0)
        block_id = rig.seal(0)
        rig.manager.checkpoint("diary", [(rig.key_of(0), block_id)], at_leisure=True)
        forgotten = rig.manager.forget("diary", [rig.key_of(0)])
        rig.manager.drop(block_id)
    assert forgotten.wait() is True
    rig.settle()
    assert rig.ssd.manifest("diary") == []
    assert rig.held(0) == [False]


@pytest.mark.parametrize("retain", ["all", "window"])
def test_where_memory_is_short_those_who_wait_are_stored_first(
    make_rig: MakeRig, retain: str
) -> None:
    """Ten sessions of two blocks, and room for three blocks in memory: none of them is lost."""
    rig = make_rig(gpu=4, cpu=3, retain=retain)
    tickets = [lay_down(rig, f"s{at}", 2 * at, 2 * at + 1) for at in range(10)]
    assert all(ticket.wait() for ticket in tickets)
    rig.settle()
    assert rig.held(*range(20)) == [True] * 20
    assert [rig.ssd.manifest(f"s{at}") for at in range(10)] == [
        [rig.key_of(2 * at), rig.key_of(2 * at + 1)] for at in range(10)
    ]


def test_more_than_memory_can_hold_goes_to_the_disk_at_once(make_rig: MakeRig) -> None:
    rig = make_rig(gpu=4, cpu=1)
    ticket = lay_down(rig, "diary", 0, 1, 2)
    assert ticket.done() and ticket.wait() is True
    rig.settle()
    assert rig.held(0, 1, 2) == [True] * 3


@pytest.mark.parametrize(("cpu", "ssd"), [(None, True), (8, False)])
def test_with_one_tier_only_it_is_as_any_other(
    make_rig: MakeRig, cpu: int | None, ssd: bool
) -> None:
    rig = make_rig(cpu=cpu, ssd=ssd)
    ticket = lay_down(rig, "diary", 0, 1)
    assert ticket.wait() is ssd
    assert ticket.missing == 0
    rig.settle()
    assert rig.held(0, 1) == [True, True]


def test_a_disk_that_fails_meanwhile_loses_nothing_that_memory_keeps(make_rig: MakeRig) -> None:
    rig = make_rig(gpu=8, cpu=8, retain="window")

    def fail() -> None:
        raise OSError(5, "Input/output error")

    with slow_disk() as disk:
        failed = lay_down(rig, "other", 9)
        until(lambda: disk.num_commits > 0)
        block_id = rig.seal(0)
        waits = rig.manager.checkpoint("diary", [(rig.key_of(0), block_id)], at_leisure=True)
        rig.manager.drop(block_id)
        with inject("ssd.commit", fail):
            disk.go_on()
            with pytest.raises(StoreError):
                failed.wait()
            assert waits.wait() is False
            assert waits.missing == 0
    assert rig.count("ssd_disabled") == 1
    rig.settle()
    assert rig.held(0, 9) == [True, True]


@pytest.mark.parametrize("drain", [True, False])
def test_a_manager_that_is_closed_makes_those_that_wait_or_says_that_it_does_not(
    make_rig: MakeRig, drain: bool
) -> None:
    rig = make_rig(gpu=8, cpu=8)
    with slow_disk() as disk:
        made = lay_down(rig, "first", 0)
        until(lambda: disk.num_commits > 0)
        block_id = rig.seal(1)
        waits = rig.manager.checkpoint("second", [(rig.key_of(1), block_id)], at_leisure=True)
        rig.manager.drop(block_id)
        closes = threading.Thread(target=lambda: rig.manager.close(drain=drain))
        closes.start()
        until(lambda: not rig.manager._writer.is_running())
    closes.join()
    assert made.wait() is True
    if drain:
        assert waits.wait() is True
        assert rig.ssd.manifest("second") == [rig.key_of(1)]
    else:
        with pytest.raises(EngineClosedError):
            waits.wait()


def test_a_worker_that_stops_tells_who_waits_for_leisure(make_rig: MakeRig) -> None:
    rig = make_rig(gpu=8, cpu=8)

    def stop() -> None:
        raise RuntimeError("a bug")

    with slow_disk() as disk:
        lay_down(rig, "first", 0)
        until(lambda: disk.num_commits > 0)
        block_id = rig.seal(1)
        waits = rig.manager.checkpoint("second", [(rig.key_of(1), block_id)], at_leisure=True)
        with inject("worker", stop):
            disk.go_on()
            with pytest.raises(RuntimeError, match="a bug"):
                waits.wait()
