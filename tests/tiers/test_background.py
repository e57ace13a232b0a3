"""The worker's jobs: claims begin with the call, and deletions look twice."""

from collections.abc import Callable
from typing import Any

import pytest

from streamkv.errors import InputError
from streamkv.tiers.faults import inject

MakeRig = Callable[..., Any]


def test_a_block_dropped_before_its_checkpoint_is_done_is_kept(make_rig: MakeRig) -> None:
    rig = make_rig(retain="window")
    block_id = rig.seal(0)
    ticket = rig.manager.checkpoint("diary", [(rig.key_of(0), block_id)])
    rig.manager.drop(block_id)
    assert ticket.wait() is True
    rig.settle()
    assert rig.held(0) == [True]


def test_a_block_sealed_again_before_its_deletion_is_kept(make_rig: MakeRig) -> None:
    rig = make_rig(retain="window", gpu=4)
    block_id = rig.seal(0)
    rig.manager.flush()
    held: list[int] = []

    def seal_again() -> None:
        if not held:
            held.append(rig.seal(0))

    with inject("worker", seal_again):
        rig.manager.drop(block_id)
        rig.manager.flush()
    rig.settle()
    assert rig.manager.usage()["cpu"].num_blocks == 1
    rig.manager.drop(held[0])
    rig.settle()
    assert rig.manager.usage()["cpu"].num_blocks == 0


def test_checkpoints_of_a_session_are_done_in_order(make_rig: MakeRig) -> None:
    rig = make_rig(gpu=8)
    blocks = [(rig.key_of(number), rig.seal(number)) for number in range(4)]
    tickets = [rig.manager.checkpoint("diary", blocks[first:]) for first in range(4)]
    assert tickets[-1].wait() is True
    assert all(ticket.done() for ticket in tickets)
    assert rig.ssd.manifest("diary") == [rig.key_of(3)]


def test_a_session_name_that_the_store_refuses_fails_only_its_own_ticket(
    make_rig: MakeRig,
) -> None:
    rig = make_rig()
    block_id = rig.seal(0)
    named = [(rig.key_of(0), block_id)]
    with pytest.raises(InputError, match="session"):
        rig.manager.checkpoint("x" * 1000, named).wait()
    assert rig.manager.forget("x" * 1000).wait() is True
    assert rig.manager.checkpoint("diary", named).wait() is True
    assert rig.count("ssd_disabled") == 0
    rig.manager.drop(block_id)
    rig.settle()


def test_a_checkpoint_of_nothing_forgets_what_was_needed(make_rig: MakeRig) -> None:
    rig = make_rig(retain="window", cpu=None)
    block_id = rig.seal(0)
    assert rig.manager.checkpoint("diary", [(rig.key_of(0), block_id)]).wait() is True
    rig.manager.drop(block_id)
    for _ in range(2):
        assert rig.manager.checkpoint("diary", []).wait() is True
    rig.settle()
    assert rig.ssd.manifest("diary") == []
    assert rig.held(0) == [False]
