"""Steps under way, launched, landed and claimed by hand, over real tiers and a slow device.

Every token is compared with what the stream's ids alone say, so that the row of another sequence,
of another token or over stale KV shows.
"""

import gc
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path

import pytest
from fake_device import Device
from fake_model import Oracle
from small_tiers import SmallTiers, small_tiers

from streamkv.batch import Batch, StepResult, Wanted
from streamkv.errors import PoolFullError, StoreError
from streamkv.executor import Executor
from streamkv.flights import Flights, Job, _Row
from streamkv.operations import Compute
from streamkv.sampling import SampledToken
from streamkv.sampling_params import SamplingParams
from streamkv.scheduler import Scheduler, Work
from streamkv.window import Window

WINDOW = Window(8, ((0, 2),))
GREEDY = SamplingParams(temperature=0.0)
SEEDED = SamplingParams(temperature=1.0, seed=5)


class Desk:
    """Stands between callers and `Flights`, as the engine's thread does.

    Attributes:
        flights: what is tested.
        device: carries steps out, one for each `run_next`.
        scheduler: what waits for a step.
    """

    def __init__(self, tiers: SmallTiers, max_sequences: int) -> None:
        self.device = Device(tiers.gpu_pool, max_sequences)
        self.executor = Executor(self.device, tiers.manager)
        self.scheduler = Scheduler(prefill_chunk=4)
        self.flights = Flights(self.executor, self._counted, self._deliver, self._fail)
        self._jobs: dict[Work, Job] = {}

    def ask(self, operation: Compute) -> Job:
        """Submit an operation: claim what is there, else wait in the queue."""
        sequence, num_tokens = operation.sequence, operation.num_tokens
        if sequence.head_is_written and num_tokens > 1:
            self.executor.advance(sequence, 1)
            num_tokens -= 1
        work = Work(sequence, num_tokens, operation.wanted, operation.params)
        job = Job(operation, work, Future())
        if not self.flights.claim(job):
            self._jobs[work] = job
            self.scheduler.add(work)
        return job

    def launch(self) -> None:
        """Start a step."""
        taken = self.scheduler.schedule(self.device.max_sequences)
        self.flights.launch([(self._jobs[work], step) for work, step in taken])

    def run(self) -> None:
        """Carry out and land the oldest step."""
        self.device.run_next()
        self.flights.land()

    def turn(self) -> None:
        """Launch what may be launched, then run the oldest step."""
        while self.flights.may_launch and (len(self.scheduler) or self.flights.can_go_on):
            self.launch()
        self.run()

    def _counted(self, job: Job, query_len: int) -> bool:
        return self.scheduler.postprocess(job.work, query_len)

    def _deliver(self, job: Job, result: StepResult, is_last: bool) -> None:
        if is_last and not job.future.done():
            job.future.set_result(result.token if result.token else result)

    def _fail(self, job: Job, error: BaseException) -> None:
        self.scheduler.remove(job.work)
        if not job.future.done():
            job.future.set_exception(error)


class Stream:
    """A sequence, what the model should say to it, and what it is to do next."""

    def __init__(self, desk: Desk, tiers: SmallTiers, seq_id: int, num_tokens: int = 3) -> None:
        self.desk = desk
        self.sequence = tiers.sequence(WINDOW, seq_id)
        self.oracle = Oracle(WINDOW)
        self.feed([100 * seq_id + i for i in range(num_tokens)])

    def feed(self, ids: list[int]) -> None:
        """Accept tokens; nothing is computed."""
        self.sequence.append(ids)
        self.oracle.extend(ids)

    def compute(self, after_step: Callable[[], None] | None = None) -> Job:
        """Ask for all pending tokens but the last."""
        num_tokens = self.sequence.num_pending - 1
        return self.desk.ask(Compute(self.sequence, num_tokens, after_step=after_step))

    def ask(
        self, params: SamplingParams = GREEDY, after_step: Callable[[], None] | None = None
    ) -> Job:
        """Ask for the next token."""
        num_tokens = self.sequence.num_pending
        return self.desk.ask(
            Compute(self.sequence, num_tokens, Wanted.LOGITS, lambda _: None, after_step, params)
        )

    def accept(self, job: Job, params: SamplingParams = GREEDY) -> int:
        """Take the token that was asked for into the stream."""
        token = job.future.result(0)
        assert isinstance(token, SampledToken)
        assert token.token_id == self.oracle.token(params)
        self.feed([token.token_id])
        return token.token_id


@pytest.fixture
def tiers(tmp_path: Path) -> Iterator[SmallTiers]:
    with small_tiers(tmp_path / "blocks", num_blocks=40, retain="none") as tiers:
        yield tiers


@pytest.fixture
def desk(tiers: SmallTiers) -> Desk:
    return Desk(tiers, max_sequences=4)


@pytest.fixture
def one(desk: Desk, tiers: SmallTiers) -> Stream:
    return Stream(desk, tiers, 1)


@pytest.fixture
def two(desk: Desk, tiers: SmallTiers) -> Stream:
    return Stream(desk, tiers, 2, num_tokens=1)


def first_token(desk: Desk, stream: Stream, params: SamplingParams = GREEDY) -> None:
    """Give a stream its first token, and launch the step after it ahead."""
    job = stream.ask(params)
    desk.launch()
    desk.launch()
    desk.run()
    stream.accept(job, params)


def steps_of(desk: Desk, seq_id: int) -> list[int]:
    """Start of each step that was launched for a sequence."""
    return [start for step in desk.device.launched for i, start, _ in step if i == seq_id]


def test_the_step_after_the_newest_is_launched_before_anybody_asks(desk: Desk, one: Stream) -> None:
    assert desk.flights.may_launch and not desk.flights.can_go_on
    job = one.ask()
    desk.launch()
    assert desk.flights.may_launch and desk.flights.can_go_on and not job.future.done()
    desk.launch()
    assert desk.flights.is_full and not desk.flights.may_launch and not desk.flights.can_go_on
    assert (len(desk.flights), desk.flights.num_awaited) == (2, 1)
    assert steps_of(desk, 1) == [0, 3]
    desk.run()
    one.accept(job)
    assert not desk.flights.may_launch, "waits for the caller of the row, or for its end"
    second = one.ask()
    assert desk.flights.num_awaited == 0 and desk.flights.may_launch
    desk.launch()
    desk.run()
    one.accept(second)
    assert steps_of(desk, 1) == [0, 3, 4]


def test_a_stream_over_many_blocks_is_that_of_its_ids_and_every_row_is_claimed(
    desk: Desk, one: Stream, tiers: SmallTiers
) -> None:
    first_token(desk, one)
    for _ in range(40):
        job = one.ask()
        desk.launch()
        desk.run()
        one.accept(job)
    assert steps_of(desk, 1) == [0, *range(3, 44)]
    assert one.sequence.num_computed == 42 and one.sequence.head_is_written
    # Sinks, the window as a resume at the last full block needs it, the open block, and one ahead.
    assert len(one.sequence.table) <= 5
    desk.flights.drain()
    desk.executor.release(one.sequence)
    assert tiers.num_used() == 0


def test_a_row_that_has_landed_before_it_is_asked_for_is_handed_out_at_once(
    desk: Desk, one: Stream
) -> None:
    first_token(desk, one)
    desk.run()
    assert not desk.flights and desk.flights.num_awaited == 0
    one.accept(one.ask())
    assert len(desk.scheduler) == 0
    job = one.ask()
    assert len(desk.scheduler) == 1, "nothing was launched from a row that had landed"
    desk.launch()
    desk.run()
    one.accept(job)


def refuse_token(stream: Stream) -> None:
    """The first token was chosen but not taken: a full disk, a cancelled task."""
    stream.sequence.pending.pop()
    stream.sequence.num_tokens -= 1
    stream.oracle.give_up()


def take_another(stream: Stream) -> None:
    refuse_token(stream)
    stream.feed([7])


def feed_more(stream: Stream) -> None:
    stream.feed([7])


def keep(stream: Stream) -> None:
    """Change the window from the next token on."""
    start = stream.sequence.num_tokens
    stream.sequence.append([7, 8])
    stream.oracle.keep([7, 8])
    window = stream.sequence.final_window.with_sinks(start, start + 2)
    stream.sequence.change_window(start, window)


def keep_the_same(stream: Stream) -> None:
    """The token that was refused comes again, but as one that is kept."""
    chosen, start = stream.oracle.ids[-1], stream.sequence.num_tokens - 1
    refuse_token(stream)
    window = stream.sequence.final_window.with_sinks(start, start + 1)
    stream.sequence.append([chosen])
    stream.oracle.keep([chosen])
    stream.sequence.change_window(start, window)


@pytest.mark.parametrize("act", [refuse_token, take_another, feed_more, keep, keep_the_same])
@pytest.mark.parametrize("landed", [False, True])
def test_what_was_launched_for_another_course_of_things_is_not_handed_out(
    desk: Desk, one: Stream, act: Callable[[Stream], None], landed: bool
) -> None:
    for _ in range(3):
        first_token(desk, one)
        if landed:
            desk.run()
        act(one)
        for _ in range(4):
            job = one.ask()
            while not job.future.done():
                desk.turn()
            one.accept(job)


def test_the_same_token_fed_by_a_caller_may_go_on_from_what_was_launched(
    desk: Desk, one: Stream
) -> None:
    first_token(desk, one)
    chosen = one.oracle.ids[-1]
    refuse_token(one)
    one.feed([chosen])
    job = one.ask()
    desk.run()
    one.accept(job)


def test_a_token_that_repeats_itself_does_not_make_the_step_after_it_an_answer(
    desk: Desk, tiers: SmallTiers
) -> None:
    """The last token comes again, is refused, and is then asked for once more."""
    for seq_id in range(1, 100):
        for last in range(1, 40):
            oracle = Oracle(WINDOW)
            oracle.extend([*range(100 * seq_id, 100 * seq_id + 3), 7 * last])
            if oracle.token(GREEDY) == 7 * last:
                one = Stream(desk, tiers, seq_id)
                one.feed([7 * last])
                first_token(desk, one)
                refuse_token(one)
                job = one.ask()
                desk.device.run_next()
                desk.launch()
                desk.flights.drain()
                one.accept(job)
                return
    raise AssertionError("no token repeats itself")


def test_other_params_are_no_answer(desk: Desk, one: Stream) -> None:
    first_token(desk, one)
    job = one.ask(SEEDED)
    assert len(desk.scheduler) == 1
    desk.device.run_next()
    desk.launch()
    desk.flights.drain()
    one.accept(job, SEEDED)


def test_a_feed_is_no_caller_of_a_row(desk: Desk, one: Stream) -> None:
    first_token(desk, one)
    refuse_token(one)
    one.feed([one.oracle.token(GREEDY), 7])
    job = one.compute()
    desk.device.run_next()
    desk.launch()
    assert job.future.result(0) == StepResult(), "there is nothing to wait for"
    token = one.ask()
    desk.launch()
    desk.flights.drain()
    one.accept(token)


@pytest.mark.parametrize("offset", [0, 1, 2])
def test_no_step_ahead_crosses_a_change_of_the_window(desk: Desk, one: Stream, offset: int) -> None:
    first_token(desk, one)
    boundary = one.sequence.num_tokens + offset
    window = WINDOW.with_sinks(2, 4)
    one.sequence.change_window(boundary, window)
    one.oracle.change_window(boundary, window)
    for _ in range(5):
        job = one.ask()
        while not job.future.done():
            desk.launch()
            assert not desk.flights.can_go_on or one.sequence.num_tokens != boundary
            desk.launch()
            desk.run()
        one.accept(job)
        if one.sequence.num_tokens == boundary + 1:
            assert steps_of(desk, 1)[-1] < boundary, "nothing was launched over the change"
    assert one.sequence.window == window


@pytest.mark.parametrize("error", [PoolFullError("full"), StoreError("the writer stopped")])
def test_without_a_block_nothing_is_launched_ahead_and_nobody_is_hurt(
    desk: Desk, one: Stream, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(batch: Batch) -> None:
        raise error

    one.feed([5])
    job = one.ask()
    desk.launch()
    with monkeypatch.context() as patch:
        patch.setattr(desk.executor, "prepare", refuse)
        desk.launch()
    assert steps_of(desk, 1) == [0] and not desk.flights.can_go_on
    desk.run()
    one.accept(job)
    job = one.ask()
    desk.launch()
    desk.run()
    one.accept(job)


def test_sequences_of_one_step_get_their_own_tokens(desk: Desk, tiers: SmallTiers) -> None:
    streams = [Stream(desk, tiers, seq_id, num_tokens=1) for seq_id in range(1, 5)]
    for turn in range(25):
        # Asked for in another order each time, one with other params now and then.
        order = sorted(range(4), key=lambda i, turn=turn: (i * 7 + turn * 3) % 5)
        params = [SEEDED if (turn + 3 * i) % 7 == 0 else GREEDY for i in range(4)]
        jobs = {i: streams[i].ask(params[i]) for i in order}
        while not all(job.future.done() for job in jobs.values()):
            desk.turn()
        for i, job in jobs.items():
            streams[i].accept(job, params[i])
    assert len(desk.device.launched) < 60


def test_a_longer_part_lies_behind_the_rows_of_one_token(
    desk: Desk, one: Stream, two: Stream
) -> None:
    first_token(desk, one)
    job = one.ask()
    two.feed(list(range(20)))
    fed = two.compute()
    desk.launch()
    assert desk.device.launched[-1] == [(1, 4, 1), (2, 0, 4)]
    desk.run()
    one.accept(job)
    while not fed.future.done():
        desk.launch()
        desk.run()
    token = two.ask()
    desk.launch()
    desk.flights.drain()
    two.accept(token)


def test_more_sequences_than_a_step_has_room_for_get_the_same_share(
    tiers: SmallTiers,
) -> None:
    """Those who wait come first, and of those who could go on ahead it is not always the same."""
    desk = Desk(tiers, max_sequences=2)
    streams = [Stream(desk, tiers, seq_id, num_tokens=1) for seq_id in (1, 2, 3)]
    jobs = [stream.ask() for stream in streams]
    for _ in range(30):
        desk.turn()
        for i, stream in enumerate(streams):
            if jobs[i].future.done():
                stream.accept(jobs[i])
                jobs[i] = stream.ask()
    shares = [stream.sequence.num_tokens for stream in streams]
    assert sum(shares) > 55 and max(shares) - min(shares) <= 2


def refuse_two(batch: Batch) -> None:
    if any(step.sequence.seq_id == 2 for step in batch.steps):
        raise MemoryError("no room for two")


def test_a_launch_that_fails_fails_the_one_whose_part_is_to_blame(
    desk: Desk, one: Stream, two: Stream, tiers: SmallTiers
) -> None:
    three = Stream(desk, tiers, 3)
    first_token(desk, one)
    jobs = [one.ask(), two.ask(), three.ask()]
    desk.device.before_launch = refuse_two
    desk.launch()
    desk.flights.drain()
    with pytest.raises(MemoryError, match="no room for two"):
        jobs[1].future.result(0)
    one.accept(jobs[0])
    three.accept(jobs[2])
    desk.device.before_launch = lambda batch: None
    for _ in range(6):
        asked = [(stream, stream.ask()) for stream in (one, two, three)]
        while not all(job.future.done() for _, job in asked):
            desk.launch()
            desk.flights.drain()
        for stream, job in asked:
            stream.accept(job)


def test_a_feed_that_failed_meanwhile_is_not_launched_by_itself(
    desk: Desk, one: Stream, two: Stream
) -> None:
    one.feed(list(range(9)))
    fed = one.compute()
    desk.launch()
    token = two.ask()
    desk.device.before_launch = refuse_together
    desk.device.before_results = refuse_one
    desk.launch()
    desk.device.before_results = lambda batch: None
    with pytest.raises(MemoryError, match="no room for one"):
        fed.future.result(0)
    assert len(desk.scheduler) == 0 and steps_of(desk, 1) == [0]
    desk.flights.drain()
    two.accept(token)


def refuse_together(batch: Batch) -> None:
    if len(batch.steps) > 1:
        raise MemoryError("no room for two")


def refuse_one(batch: Batch) -> None:
    if any(step.sequence.seq_id == 1 for step in batch.steps):
        raise MemoryError("no room for one")


def test_nothing_goes_on_from_tokens_that_a_failed_launch_has_damaged(
    tiers: SmallTiers,
) -> None:
    desk = Desk(tiers, max_sequences=2)
    streams = [Stream(desk, tiers, seq_id, num_tokens=1) for seq_id in (1, 2, 3)]
    jobs = [stream.ask() for stream in streams]
    desk.launch()

    def refuse(batch: Batch) -> None:
        raise MemoryError("no room")

    desk.device.before_launch = refuse
    desk.launch()
    desk.device.before_launch = lambda batch: None
    with pytest.raises(MemoryError):
        jobs[2].future.result(0)
    jobs[2] = streams[2].ask()
    for _ in range(12):
        desk.turn()
        for i, stream in enumerate(streams):
            if jobs[i].future.done():
                stream.accept(jobs[i])
                jobs[i] = stream.ask()


def test_a_step_that_fails_on_the_device_fails_its_callers_and_no_later_one(
    desk: Desk, one: Stream, two: Stream
) -> None:
    jobs = [one.ask(), two.ask()]
    desk.launch()
    desk.launch()

    def damage(batch: Batch) -> None:
        raise RuntimeError("the device is gone")

    desk.device.before_results = damage
    desk.run()
    desk.device.before_results = lambda batch: None
    for job in jobs:
        with pytest.raises(RuntimeError, match="the device is gone"):
            job.future.result(0)
    for _ in range(5):
        jobs = [one.ask(), two.ask()]
        while not all(job.future.done() for job in jobs):
            desk.launch()
            desk.flights.drain()
        one.accept(jobs[0])
        two.accept(jobs[1])


def test_a_device_that_cannot_say_whether_it_is_done_is_asked_for_the_results(
    desk: Desk, one: Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU an error of a kernel comes back from whatever is asked of the device next."""

    def gone(*_: object) -> None:
        raise RuntimeError("the device is gone")

    job = one.ask()
    desk.launch()
    desk.launch()
    desk.device.before_results = gone
    monkeypatch.setattr("fake_device.FakeFlight.done", gone)
    assert desk.flights.has_landed and not desk.flights.may_launch
    desk.flights.land()
    with pytest.raises(RuntimeError, match="the device is gone"):
        job.future.result(0)


@pytest.mark.parametrize("when", ["launched", "claimed"])
def test_an_error_after_a_step_is_that_callers_alone(
    desk: Desk, one: Stream, two: Stream, when: str
) -> None:
    def broken() -> None:
        raise ZeroDivisionError

    first_token(desk, one)
    other = two.ask()
    if when == "launched":
        refuse_token(one)
        job = one.ask(after_step=broken)
        desk.device.run_next()
        desk.launch()
        with pytest.raises(ZeroDivisionError):
            job.future.result(0)
    else:
        with pytest.raises(ZeroDivisionError):
            one.ask(after_step=broken)
        desk.launch()
    launched = steps_of(desk, 1)
    desk.launch()
    assert steps_of(desk, 1) == launched, "its caller may be doing anything by now"
    desk.flights.drain()
    two.accept(other)
    for _ in range(4):
        job = one.ask()
        desk.launch()
        desk.flights.drain()
        one.accept(job)


def num_rows() -> int:
    gc.collect()
    return sum(type(found) is _Row for found in gc.get_objects())


def test_memory_does_not_grow_with_the_tokens_of_a_stream(desk: Desk, one: Stream) -> None:
    first_token(desk, one)
    counts = []
    for _ in range(6):
        job = one.ask()
        desk.launch()
        desk.run()
        one.accept(job)
        counts.append(num_rows())
    assert len(set(counts)) == 1


def test_nothing_is_remembered_of_a_sequence_that_is_forgotten(
    desk: Desk, tiers: SmallTiers
) -> None:
    before = num_rows()
    for seq_id in range(1, 6):
        stream = Stream(desk, tiers, seq_id)
        first_token(desk, stream)
        desk.flights.drain()
        desk.flights.forget(stream.sequence)
        desk.flights.forget(stream.sequence)
    assert num_rows() == before
