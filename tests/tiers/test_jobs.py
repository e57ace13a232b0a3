"""The ticket of a checkpoint: one outcome, for as many waiters as there are."""

import threading

import pytest

from streamkv.errors import StoreFullError
from streamkv.tiers.jobs import Checkpoint, CheckpointTicket
from streamkv.tiers.spec import BlockKey
from streamkv.tiers.transfer import Finished


def test_a_ticket_is_not_done_before_its_outcome_is_known() -> None:
    ticket = CheckpointTicket()
    assert not ticket.done()
    ticket.resolve(durable=True)
    assert ticket.done() and ticket.wait() is True and ticket.missing == 0


def test_a_ticket_tells_what_is_missing() -> None:
    ticket = CheckpointTicket()
    ticket.resolve(durable=False, missing=3)
    assert ticket.wait() is False and ticket.missing == 3


def test_every_waiter_gets_the_error() -> None:
    ticket = CheckpointTicket()
    errors: list[Exception] = []

    def wait() -> None:
        try:
            ticket.wait()
        except StoreFullError as error:
            errors.append(error)

    waiters = [threading.Thread(target=wait) for _ in range(3)]
    for waiter in waiters:
        waiter.start()
    full = StoreFullError("no room")
    ticket.fail(full)
    for waiter in waiters:
        waiter.join()
    assert errors == [full, full, full]
    with pytest.raises(StoreFullError, match="no room"):
        ticket.wait()


def test_a_checkpoint_holds_only_blocks_of_the_gpu_pool() -> None:
    a, b = BlockKey(b"a" * 16), BlockKey(b"b" * 16)
    job = Checkpoint("diary", [(a, 0), (b, None)], Finished())
    assert job.keys() == [a, b]
    assert job.held() == [0]
