"""The engine's thread, with an executor that computes nothing and notes what it was asked."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_device import Device
from fake_model import Oracle
from small_tiers import SmallTiers, small_tiers

from streamkv.batch import Batch, Landed, SequenceStep, StepResult, Wanted
from streamkv.errors import EngineClosedError
from streamkv.executor import Executor
from streamkv.sampling import SampledToken
from streamkv.sampling_params import SamplingParams
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

    def prepare(self, step: SequenceStep) -> None:
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

    def postprocess(self, step: SequenceStep) -> None:
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


def test_an_operation_that_resolves_at_launch_hands_back_a_future_of_its_scores(
    loop: StepLoop,
) -> None:
    one = sequence(1, 12)
    first = Compute(one, 6, Wanted.SCORES, resolves_at_launch=True)
    scores = loop.submit(first).result(WAIT_S)
    assert one.num_computed == 6
    following = loop.submit(Compute(one, 5, Wanted.SCORES)).result(WAIT_S)
    assert scores.result(WAIT_S).tolist() == [10, 11, 12, 13, 14, 15]
    assert following.tolist() == [16, 17, 18, 19, 20]


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


@pytest.mark.parametrize("where", ["_admit", "_take_step"])
def test_a_mistake_of_the_engines_own_reaches_everybody_who_waits(
    executor: NotingExecutor, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    loop = StepLoop(executor, prefill_chunk=4)
    held, reached = threading.Event(), threading.Event()

    def hold() -> None:
        reached.set()
        assert held.wait(WAIT_S)

    async def wait_for_one() -> None:
        await loop.waiter(waiting[0])

    def mistake(*_: object) -> None:
        raise AssertionError("a mistake of our own")

    first = loop.submit(Call(hold))
    assert reached.wait(WAIT_S)
    monkeypatch.setattr(loop, where, mistake)
    waiting = [loop.submit(Compute(sequence(seq_id, 4), 4)) for seq_id in (1, 2, 3)]
    call = loop.submit(Call(lambda: "called"))
    held.set()
    first.result(WAIT_S)
    for future in waiting:
        with pytest.raises(AssertionError, match="a mistake of our own"):
            future.result(WAIT_S)
    # On an event loop too, also from now on.
    with pytest.raises(AssertionError, match="a mistake of our own"):
        asyncio.run(wait_for_one())
    assert call.result(WAIT_S) == "called" if where == "_admit" else call.done()
    with pytest.raises(EngineClosedError):
        loop.submit(Call(hold))
    loop.settle(sequence(1, 1))
    loop.close()


def test_calls_that_a_mistake_kept_from_being_carried_out_hear_of_it(
    executor: NotingExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop, gate = StepLoop(executor, prefill_chunk=4), Gate(executor, seq_id=1)
    loop.submit(Compute(sequence(1, 4), 4))
    gate.wait()

    def mistake() -> None:
        raise AssertionError("a mistake of our own")

    monkeypatch.setattr(loop._flights, "drain", mistake)
    calls = [loop.submit(Call(lambda: None)) for _ in range(3)]
    late = loop.submit(Compute(sequence(2, 4), 4))
    gate.open()
    for future in (*calls, late):
        with pytest.raises(AssertionError, match="a mistake of our own"):
            future.result(WAIT_S)
    loop.close()


def test_an_event_loop_hears_of_a_call_before_the_next_step_is_carried_out(
    loop: StepLoop, executor: NotingExecutor
) -> None:
    """On a CPU a step is over when it was launched, and that takes its time."""
    queued, heard = threading.Event(), threading.Event()
    heard_in_time: list[bool] = []
    executor.before_step = lambda seq_id: heard_in_time.append(heard.wait(WAIT_S))

    async def main() -> None:
        loop.submit(Call(lambda: queued.wait(WAIT_S)))
        waiter = loop.waiter(loop.submit(Call(lambda: None)))
        step = loop.waiter(loop.submit(Compute(sequence(1, 4), 4)))
        queued.set()
        done, _ = await asyncio.wait([waiter], timeout=WAIT_S / 3)
        heard.set()
        assert waiter in done
        await step

    asyncio.run(main())
    assert heard_in_time == [True]


def test_event_loops_that_are_closed_are_let_go(loop: StepLoop) -> None:
    async def main() -> object:
        return await loop.waiter(loop.submit(Call(lambda: 5)))

    for _ in range(4):
        assert asyncio.run(main()) == 5
    assert len(loop._mailboxes) == 1


def test_two_event_loops_and_threads_get_their_own_results(loop: StepLoop) -> None:
    def ask(seq_id: int) -> "Future[Any]":
        logits = Compute(sequence(seq_id, 3), 3, Wanted.LOGITS, lambda logits: logits.tolist())
        return loop.submit(logits)

    def on_thread(first: int) -> bool:
        found = [ask(first + i).result(WAIT_S) for i in range(20)]
        return found == [[10 * (first + i) + 2] * 2 for i in range(20)]

    async def main(first: int) -> bool:
        found = await asyncio.gather(*(loop.waiter(ask(first + i)) for i in range(20)))
        return found == [[10 * (first + i) + 2] * 2 for i in range(20)]

    with ThreadPoolExecutor(4) as pool:
        answers = [
            *(pool.submit(on_thread, first) for first in (100, 200)),
            *(pool.submit(asyncio.run, main(first)) for first in (300, 400)),
        ]
        assert all(answer.result(WAIT_S) for answer in answers)


class Held:
    """An engine's thread over a device that carries nothing out until it may.

    Attributes:
        loop: of the engine.
        device: whose steps are held.
        is_ahead: set once a step was launched ahead.
        may_run: lets the device go on.
    """

    def __init__(self, tiers: SmallTiers, max_sequences: int = 2) -> None:
        self.tiers = tiers
        self.device = Device(tiers.gpu_pool, max_sequences)
        self.device.before_launch = self._note
        self.loop = StepLoop(Executor(self.device, tiers.manager), prefill_chunk=4)
        self.is_ahead, self.may_run = threading.Event(), threading.Event()

    def _note(self, batch: Batch) -> None:
        if any(step.source is not None for step in batch.steps):
            self.is_ahead.set()

    def pause(self) -> None:
        """Before each step of the device."""
        assert self.may_run.wait(WAIT_S)

    def stream(self, seq_id: int) -> Sequence:
        """A stream with one token."""
        made = self.tiers.sequence(Window(8, ((0, 2),)), seq_id)
        made.append([10 * seq_id])
        return made

    def ask(self, made: Sequence) -> "Future[Any]":
        """Ask for the next token."""
        params = SamplingParams(temperature=0.0)
        num_tokens = made.num_pending
        return self.loop.submit(Compute(made, num_tokens, Wanted.LOGITS, params=params))


@pytest.fixture
def held(tmp_path: Path) -> Iterator[Held]:
    with small_tiers(tmp_path / "blocks", num_blocks=40, retain="none") as tiers:
        made = Held(tiers)
        with made.device.running(made.pause):
            yield made
            made.may_run.set()
            made.loop.close()


def test_a_call_runs_once_everything_has_landed(held: Held) -> None:
    token = held.ask(held.stream(1))
    assert held.is_ahead.wait(WAIT_S)
    call = held.loop.submit(Call(lambda: (token.done(), held.device.last)))
    assert not token.done() and not call.done()
    held.may_run.set()
    assert call.result(WAIT_S) == (True, None)


def test_settling_waits_for_what_nobody_asked_for(held: Held) -> None:
    one = held.stream(1)
    token = held.ask(one)
    assert held.is_ahead.wait(WAIT_S)
    held.may_run.set()
    token.result(WAIT_S)
    held.loop.settle(one)
    assert held.device.last is None and not held.loop._flights._ahead


def test_close_hands_out_what_is_under_way(held: Held) -> None:
    token = held.ask(held.stream(1))
    assert held.is_ahead.wait(WAIT_S)
    waiting = held.loop.submit(Compute(held.stream(2), 1))
    closing = threading.Thread(target=held.loop.close)
    closing.start()
    while True:
        try:
            held.loop.submit(Call(lambda: None)).cancel()
        except EngineClosedError:
            break
    held.may_run.set()
    closing.join(WAIT_S)
    assert not closing.is_alive()
    assert isinstance(token.result(WAIT_S), SampledToken)
    assert waiting.done()


@pytest.mark.parametrize("closes", [False, True])
def test_more_can_be_asked_for_before_what_was_launched_has_landed(
    held: Held, closes: bool
) -> None:
    """And it lands, though the engine is closed meanwhile."""
    one, oracle = held.stream(1), Oracle(Window(8, ((0, 2),)))
    one.append(range(11, 19))
    oracle.extend(list(range(10, 19)))
    coming = []
    for _ in range(2):
        part = Compute(one, 4, Wanted.SCORES, resolves_at_launch=True)
        coming.append(held.loop.submit(part).result(WAIT_S))
    assert held.device.launched == [[(1, 0, 4)], [(1, 4, 4)]]
    assert one.num_computed == 8 and not any(scores.done() for scores in coming)
    held.may_run.set()
    if closes:
        held.loop.close()
    found = [score for scores in coming for score in scores.result(WAIT_S).tolist()]
    assert found == pytest.approx([oracle.logprob(index) for index in range(1, 9)])


def test_a_mistake_while_steps_are_under_way_leaves_nobody_waiting(
    held: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    def mistake(*_: object) -> None:
        raise AssertionError("a mistake of our own")

    tokens = [held.ask(held.stream(seq_id)) for seq_id in (1, 2, 3)]
    assert held.is_ahead.wait(WAIT_S)
    monkeypatch.setattr(held.loop, "_deliver", mistake)
    monkeypatch.setattr(held.loop._flights, "_deliver", mistake)
    held.may_run.set()
    for token in tokens:
        with pytest.raises(AssertionError, match="a mistake of our own"):
            token.result(WAIT_S)


def test_more_streams_than_a_step_has_room_for_all_go_on(held: Held) -> None:
    """Each caller asks again at once; none is left behind by more than its turn."""
    held.may_run.set()
    streams = [held.stream(seq_id) for seq_id in range(1, 6)]
    counts = dict.fromkeys(range(5), 0)
    done = threading.Event()

    def talk(number: int) -> None:
        made = streams[number]
        while not done.is_set():
            made.append([held.ask(made).result(WAIT_S).token_id])
            counts[number] += 1
            if min(counts.values()) >= 20:
                done.set()

    with ThreadPoolExecutor(5) as pool:
        for answer in [pool.submit(talk, number) for number in range(5)]:
            answer.result(WAIT_S)
    assert min(counts.values()) >= 20


def test_a_step_waits_for_those_who_were_just_served(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two callers who come back one after the other share a step, if not on the first time."""
    monkeypatch.setattr("streamkv.step_loop.PATIENCE_S", 30.0)
    sizes: list[int] = []

    class Wide(NotingExecutor):
        max_sequences = 8

        def prepare(self, step: SequenceStep) -> None:
            pass

        def run(self, batch: Batch) -> list[StepResult]:
            sizes.append(len(batch.steps))
            return [StepResult(logits=torch.zeros(2)) for _ in batch.steps]

        def postprocess(self, step: SequenceStep) -> None:
            step.sequence.advance(step.query_len)

    wide = StepLoop(Wide(), 64)
    sequences = [sequence(number, 60) for number in (1, 2)]
    try:
        for _ in range(50):
            futures = [
                wide.submit(Compute(each, 1, Wanted.LOGITS, lambda logits: None))
                for each in sequences
            ]
            for future in futures:
                future.result(WAIT_S)
    finally:
        wide.close()
    # Whoever is first has a step of his own only before anybody was served.
    assert sum(sizes) == 100 and sizes.count(2) >= 49
