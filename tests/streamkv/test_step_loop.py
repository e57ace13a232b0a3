"""The engine's thread, with an executor that computes nothing and notes what it was asked."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from typing import Any

import pytest
import torch

from streamkv.batch import Batch, Landed, StepResult, Wanted
from streamkv.errors import EngineClosedError
from streamkv.sequence import Sequence
from streamkv.step_loop import Call, Compute, StepLoop
from streamkv.tiers.spec import BlockKey
from streamkv.window import Window

WAIT_S = 30


class NotingExecutor:
    """Counts tokens as computed. The score of a token is its id, the logits are its id twice.

    Attributes:
        log: (seq_id, ids, what was wanted) of each step, and whatever a test notes.
        before_step: called with a sequence's id before each of its steps.
    """

    def __init__(self) -> None:
        self.log: list[Any] = []
        self.before_step: Callable[[int], None] = lambda seq_id: None

    max_sequences = 1

    def between_steps(self, idle: bool) -> bool:
        return False

    def launch(self, batch: Batch) -> Landed:
        return Landed(self.run(batch))

    def prepare(self, batch: Batch) -> None:
        [step] = batch.steps
        self.before_step(step.sequence.seq_id)

    def run(self, batch: Batch) -> list[StepResult]:
        [step] = batch.steps
        ids = step.sequence.next_ids(step.query_len)
        self.log.append((step.sequence.seq_id, ids, step.wanted))
        row = torch.tensor(ids, dtype=torch.float32)
        match step.wanted:
            case Wanted.SCORES:
                return [StepResult(scores=row)]
            case Wanted.LOGITS:
                return [StepResult(logits=row[-1:].repeat(2))]
            case Wanted.NOTHING:
                return [StepResult()]

    def postprocess(self, batch: Batch) -> None:
        [step] = batch.steps
        self.advance(step.sequence, step.query_len)

    def advance(self, sequence: Sequence, num_tokens: int) -> None:
        sequence.advance(num_tokens)


@pytest.fixture
def executor() -> NotingExecutor:
    return NotingExecutor()


@pytest.fixture
def loop(executor: NotingExecutor) -> Iterator[StepLoop]:
    loop = StepLoop(executor, prefill_chunk=4)
    yield loop
    loop.close()


def sequence(seq_id: int, num_tokens: int) -> Sequence:
    """A sequence whose token at index `i` has the id `10 * seq_id + i`."""
    made = Sequence(seq_id, Window(64), 64, BlockKey(b"r" * 16))
    made.append(range(10 * seq_id, 10 * seq_id + num_tokens))
    return made


class Gate:
    """Holds the engine's thread in a step of one sequence until it is opened."""

    def __init__(self, executor: NotingExecutor, seq_id: int) -> None:
        self._seq_id = seq_id
        self._reached, self._opened = threading.Event(), threading.Event()
        executor.before_step = self._hold

    def _hold(self, seq_id: int) -> None:
        if seq_id == self._seq_id:
            self._reached.set()
            assert self._opened.wait(WAIT_S)

    def wait(self) -> None:
        assert self._reached.wait(WAIT_S)

    def open(self) -> None:
        self._opened.set()


def test_each_operation_gets_what_it_wanted(loop: StepLoop, executor: NotingExecutor) -> None:
    scores = loop.submit(Compute(sequence(1, 6), 6, Wanted.SCORES)).result(WAIT_S)
    assert scores.tolist() == [10, 11, 12, 13, 14, 15]
    logits = Compute(sequence(2, 6), 6, Wanted.LOGITS, lambda logits: logits.tolist())
    assert loop.submit(logits).result(WAIT_S) == [25, 25]
    assert loop.submit(Compute(sequence(3, 2), 2)).result(WAIT_S) is None
    assert executor.log == [
        (1, [10, 11, 12, 13], Wanted.SCORES),
        (1, [14, 15], Wanted.SCORES),
        (2, [20, 21, 22, 23], Wanted.NOTHING),
        (2, [24, 25], Wanted.LOGITS),
        (3, [30, 31], Wanted.NOTHING),
    ]


def test_whatever_touches_a_step_runs_on_the_one_thread(loop: StepLoop) -> None:
    idents = set[int]()

    def note(*_: object) -> None:
        idents.add(threading.get_ident())

    loop.submit(Compute(sequence(1, 9), 9, Wanted.LOGITS, note, note)).result(WAIT_S)
    loop.submit(Call(note)).result(WAIT_S)
    assert len(idents) == 1 and threading.get_ident() not in idents


def test_after_step_sees_the_tokens_of_each_step_counted(loop: StepLoop) -> None:
    one, seen = sequence(1, 10), list[int]()
    loop.submit(Compute(one, 10, after_step=lambda: seen.append(one.num_computed))).result(WAIT_S)
    assert seen == [4, 8, 10]


def test_a_call_goes_between_two_steps_of_a_long_feed(
    loop: StepLoop, executor: NotingExecutor
) -> None:
    gate = Gate(executor, seq_id=1)
    feed = loop.submit(Compute(sequence(1, 8), 8))
    gate.wait()
    call = loop.submit(Call(lambda: executor.log.append("call")))
    gate.open()
    feed.result(WAIT_S)
    call.result(WAIT_S)
    first, second = (1, [10, 11, 12, 13], Wanted.NOTHING), (1, [14, 15, 16, 17], Wanted.NOTHING)
    assert executor.log == [first, "call", second]


def test_a_step_that_fails_fails_its_own_caller_and_nobody_else(
    loop: StepLoop, executor: NotingExecutor
) -> None:
    gate = Gate(executor, seq_id=3)
    loop.submit(Compute(sequence(3, 1), 1))
    gate.wait()
    bad, good = sequence(1, 8), sequence(2, 8)
    failing, working = loop.submit(Compute(bad, 8)), loop.submit(Compute(good, 8))

    def full(seq_id: int) -> None:
        if seq_id == 1:
            raise MemoryError("the pool is full")

    executor.before_step = full
    gate.open()
    with pytest.raises(MemoryError, match="pool is full"):
        failing.result(WAIT_S)
    assert working.result(WAIT_S) is None
    assert (bad.num_computed, good.num_computed) == (0, 8)
    executor.before_step = lambda seq_id: None
    loop.submit(Compute(bad, 8)).result(WAIT_S)
    assert bad.num_computed == 8


@pytest.mark.parametrize("where", ["on_logits", "after_step", "call"])
def test_an_error_in_a_callers_function_comes_back_to_the_caller(
    loop: StepLoop, where: str
) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError(where)

    one = sequence(1, 6)
    operation = {
        "on_logits": Compute(one, 6, Wanted.LOGITS, broken),
        "after_step": Compute(one, 6, after_step=broken),
        "call": Call(broken),
    }[where]
    with pytest.raises(ZeroDivisionError, match=where):
        loop.submit(operation).result(WAIT_S)
    rest = one.num_pending
    one.append([7])
    assert loop.submit(Compute(one, rest + 1)).result(WAIT_S) is None
    assert one.num_pending == 0


@pytest.mark.parametrize(
    ("wanted", "num_tokens", "computed"),
    [
        (Wanted.NOTHING, 1, []),
        (Wanted.NOTHING, 3, [[11, 12]]),
        (Wanted.LOGITS, 3, [[11, 12]]),
        (Wanted.LOGITS, 1, [[10]]),
        (Wanted.SCORES, 3, [[10, 11, 12]]),
    ],
)
def test_a_head_whose_kv_exists_is_computed_anew_only_for_its_logits(
    loop: StepLoop,
    executor: NotingExecutor,
    wanted: Wanted,
    num_tokens: int,
    computed: list[list[int]],
) -> None:
    one = sequence(1, 3)
    one.head_is_written = True
    loop.submit(Compute(one, num_tokens, wanted, lambda logits: logits)).result(WAIT_S)
    assert [ids for _, ids, _ in executor.log] == computed
    assert one.num_computed == num_tokens


def test_what_was_cancelled_while_it_waited_is_not_done(
    loop: StepLoop, executor: NotingExecutor
) -> None:
    gate = Gate(executor, seq_id=1)
    held = loop.submit(Compute(sequence(1, 1), 1))
    gate.wait()
    two = sequence(2, 4)
    cancelled = loop.submit(Compute(two, 4))
    cancelled_call = loop.submit(Call(lambda: executor.log.append("call")))
    last = loop.submit(Compute(sequence(3, 1), 1))
    assert cancelled.cancel() and cancelled_call.cancel()
    gate.open()
    held.result(WAIT_S)
    last.result(WAIT_S)
    with pytest.raises(CancelledError):
        cancelled.result(WAIT_S)
    assert [entry[0] for entry in executor.log] == [1, 3]
    assert two.num_computed == 0


def test_close_finishes_the_step_in_hand_and_fails_what_waits(executor: NotingExecutor) -> None:
    loop, gate = StepLoop(executor, prefill_chunk=4), Gate(executor, seq_id=1)
    in_hand = loop.submit(Compute(sequence(1, 4), 4))
    gate.wait()
    one_of_many = loop.submit(Compute(sequence(2, 4), 4))
    call = loop.submit(Call(lambda: executor.log.append("call")))
    closing = threading.Thread(target=loop.close)
    closing.start()
    while True:
        # Refused from the moment that the loop counts as closed, though a step is in hand.
        try:
            late = loop.submit(Compute(sequence(4, 1), 1))
        except EngineClosedError:
            break
        late.cancel()
    gate.open()
    closing.join(WAIT_S)
    assert not closing.is_alive()
    assert in_hand.result(WAIT_S) is None
    for waiting in (one_of_many, call):
        with pytest.raises(EngineClosedError, match="before this was done"):
            waiting.result(WAIT_S)
    assert executor.log == [(1, [10, 11, 12, 13], Wanted.NOTHING)]


def test_close_cuts_a_long_feed_at_its_next_step(executor: NotingExecutor) -> None:
    loop, gate, one = StepLoop(executor, prefill_chunk=4), Gate(executor, seq_id=1), sequence(1, 40)
    feed = loop.submit(Compute(one, 40))
    gate.wait()
    closed = loop.submit(Call(loop.close))
    gate.open()
    closed.result(WAIT_S)
    with pytest.raises(EngineClosedError):
        feed.result(WAIT_S)
    loop.close()
    assert one.num_computed in (4, 8)


def test_a_call_given_up_while_the_engine_closes_holds_nobody_up(executor: NotingExecutor) -> None:
    loop, gate = StepLoop(executor, prefill_chunk=4), Gate(executor, seq_id=1)
    loop.submit(Compute(sequence(1, 4), 4))
    gate.wait()
    given_up, waiting = loop.submit(Call(lambda: None)), loop.submit(Call(lambda: None))
    assert given_up.cancel()
    closing = threading.Thread(target=loop.close)
    closing.start()
    while True:
        try:
            loop.submit(Call(lambda: None))
        except EngineClosedError:
            break
    gate.open()
    closing.join(WAIT_S)
    with pytest.raises(EngineClosedError):
        waiting.result(WAIT_S)
