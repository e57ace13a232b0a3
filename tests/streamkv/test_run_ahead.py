"""Real sessions over a device that runs ahead: whatever they do, every stream is that of its ids.

Model and device are `fake_model`'s and `fake_device`'s; engine, sessions, tiers, scheduling and the
engine's thread are real. Sessions feed, score, keep, generate, give up in the middle, are refused
tokens by a full disk, go to sleep and wake up, on threads and on event loops, in random order.
"""

import asyncio
import functools
import random
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from fake_device import WAIT_S, Device, DeviceTransfer
from fake_model import Oracle

import streamkv.engine
from streamkv import Engine, EngineConfig, SamplingParams
from streamkv.batch import Batch
from streamkv.errors import EngineClosedError, JournalError, SessionError
from streamkv.model import ModelAdapter
from streamkv.outputs import ChunkScores, Score
from streamkv.session import Session
from streamkv.tiers.gpu_pool import GpuPool

GREEDY = SamplingParams(temperature=0.0, seed=1, ignore_eos=True)
LIMITED = SamplingParams(temperature=0.0, seed=1, ignore_eos=True, max_tokens=7)
PARAMS = [
    GREEDY,
    GREEDY,
    SamplingParams(temperature=0.0, ignore_eos=True),
    SamplingParams(temperature=1.0, seed=7, ignore_eos=True),
    SamplingParams(temperature=0.0, logprobs=2, ignore_eos=True),
    SamplingParams(temperature=0.5, seed=9, repetition_penalty=1.1, ignore_eos=True),
]


def scores_of(chunk: ChunkScores) -> list[Score]:
    """The same, token by token, without their texts."""
    pairs = zip(chunk.token_ids.tolist(), chunk.logprobs.tolist(), strict=True)
    return [
        Score(token_id, "", index, logprob)
        for index, (token_id, logprob) in enumerate(pairs, chunk.token_index)
    ]


@dataclass
class Pace:
    """How long the device takes for a step.

    Attributes:
        held: steps wait until it is set.
    """

    rng: random.Random
    held: threading.Event = field(default_factory=threading.Event)

    def pause(self) -> None:
        """Wait as long as this step takes."""
        assert self.held.wait(WAIT_S)
        if self.rng.random() < 0.5:
            # Nothing relies on this: it only makes the threads meet in ever other places.
            time.sleep(self.rng.random() * 2e-3)


@dataclass
class Rig:
    """An engine over a fake device."""

    engine: Engine
    device: Device
    pace: Pace

    def settle(self) -> None:
        """Check what must hold once all sessions are closed."""
        self.engine._tiers.flush()
        assert self.engine.usage()["gpu"].num_blocks == 0
        self.engine._tiers.check_integrity()


@contextmanager
def rig(
    model: Path, store: Path | None, max_sequences: int, seed: int = 0, **options: Any
) -> Iterator[Rig]:
    """An engine whose steps are computed by a fake device, on a thread of its own."""
    made: list[Device] = []

    def make_transfer(pool: GpuPool) -> DeviceTransfer:
        made.append(Device(pool, max_sequences))
        return DeviceTransfer(pool, made[0])

    def make_runner(adapter: ModelAdapter, pool: GpuPool, config: EngineConfig) -> Device:
        return made[0]

    config = EngineConfig(
        window_size=64,
        prefill_chunk=64,
        cpu_bytes="2MiB",
        ssd_bytes="16MiB",
        store=str(store) if store else None,
        max_sessions=12,
        dtype="float32",
        **options,
    )
    pace = Pace(random.Random(seed))
    pace.held.set()
    with ExitStack() as stack:
        with (
            mock.patch.object(streamkv.engine, "make_transfer", make_transfer),
            mock.patch.object(streamkv.engine, "make_runner", make_runner),
        ):
            engine = Engine(str(model), config)
        stack.enter_context(made[0].running(pace.pause))
        stack.enter_context(engine)
        yield Rig(engine, made[0], pace)


class User:
    """One session and what the model should say to it.

    Attributes:
        session: open, or closed between two uses.
    """

    def __init__(self, rig: Rig, name: str, seed: int) -> None:
        self.rig = rig
        self.name = name
        self.rng = random.Random(seed)
        self.session: Session = rig.engine.session(name)
        self.oracle = Oracle(self.session._live.created_window)
        self.oracle.extend(list(rig.engine.tokenizer.prefix_ids))
        self.feed(self.ids(1, 90))

    def ids(self, least: int, most: int) -> list[int]:
        """Random ids."""
        return [self.rng.randrange(3, 300) for _ in range(self.rng.randint(least, most))]

    def check(self) -> None:
        """The stream is what the oracle has, as far as the session remembers it."""
        recent = list(self.session._live.sequence.recent_ids)
        assert self.session.num_tokens == len(self.oracle.ids)
        assert recent == self.oracle.ids[-len(recent) :]

    def feed(self, ids: list[int]) -> None:
        """Feed ids; they are accepted before any step of them can fail."""
        with suppress(MemoryError):
            self.session.feed([ids]).run()
        self.oracle.extend(ids)

    def score(self, ids: list[int]) -> None:
        """Score ids: these, and nothing that was pending before."""
        scores, first = list[Score](), len(self.oracle.ids)
        expected = list(enumerate(ids, first))
        try:
            if self.rng.random() < 0.5:
                scores.extend(self.session.score([ids]))
            else:
                for chunk in self.session.score_chunks([ids]):
                    scores.extend(scores_of(chunk))
        except MemoryError:
            expected = expected[: len(scores)]
        if self.session.num_tokens > first:
            self.oracle.extend(ids)
        assert [(score.token_index, score.token_id) for score in scores] == expected
        for score in scores:
            assert score.logprob == pytest.approx(self.oracle.logprob(score.token_index))

    def keep(self, text: str) -> None:
        """Keep a text."""
        with suppress(MemoryError):
            self.session.keep(text)
        self.oracle.keep(self.rig.engine.tokenizer.encode(text))

    def expect(self, params: SamplingParams, token_id: int | None) -> None:
        """A token was handed out."""
        assert token_id == self.oracle.token(params), self.name
        assert token_id is not None
        self.oracle.extend([token_id])

    def expect_unseen(self, params: SamplingParams) -> None:
        """A token may have been accepted that nobody saw, when its caller gave up."""
        if self.session.num_tokens > len(self.oracle.ids):
            self.oracle.extend([self.oracle.token(params)])
        self.check()

    def act(self) -> None:
        """Do one thing, to the end or until a step of it fails."""
        with suppress(MemoryError):
            self._act()
        self.check()

    def _act(self) -> None:
        params = self.rng.choice(PARAMS)
        match self.rng.randrange(12):
            case 0:
                self.feed(self.ids(1, 200))
            case 1:
                self.score(self.ids(1, 150))
            case 2 if self.session.stats().num_sink_tokens < 60:
                self.keep(self.rng.choice(["the key ", "a ", "under the mat and the dog"]))
            case 3:
                self.session.close()
                self.session = self.rig.engine.session(self.name)
                assert self.session.resumed
            case 4:
                self.be_refused(params)
            case 5:
                # Given up in the middle, and gone on with as if nothing had been.
                generation = self.session.generate(params)
                for _ in range(self.rng.randrange(1, 6)):
                    self.expect(params, next(generation).token_id)
                if self.rng.random() < 0.5:
                    generation.close()
            case _:
                self.generate(params, self.rng.randrange(1, 40))

    def generate(self, params: SamplingParams, num_tokens: int) -> None:
        """Generate, and give up after so many tokens, or reach the end there."""
        if self.rng.random() < 0.3:
            limited = SamplingParams(**{**_fields(params), "max_tokens": num_tokens})
            for delta in self.session.generate(limited):
                self.expect(params, delta.token_id)
            return
        generation = self.session.generate(params)
        for _ in range(num_tokens):
            self.expect(params, next(generation).token_id)

    def be_refused(self, params: SamplingParams) -> None:
        """A token that cannot be journaled is not handed out, and not accepted.

        What was launched after it is no answer to whatever comes instead.
        """
        generation = self.session.generate(params)
        self.expect(params, next(generation).token_id)
        refused = JournalError("no space left")
        with (
            mock.patch.object(self.session._live.intake, "_write", side_effect=refused),
            pytest.raises(JournalError),
        ):
            next(generation)
        match self.rng.randrange(4):
            case 0:
                self.feed([self.oracle.token(params), *self.ids(0, 1)])
            case 1:
                self.feed(self.ids(1, 1))
            case 2:
                self.keep("a")
        self.generate(params, 4)

    def act_plainly(self) -> None:
        """Generate, or feed a token at a time."""
        if self.rng.random() < 0.7:
            for delta in self.session.generate(LIMITED):
                self.expect(GREEDY, delta.token_id)
        else:
            [token_id] = self.ids(1, 1)
            before = self.session.num_tokens
            try:
                self.session.feed([[token_id]]).run()
            finally:
                self.oracle.extend([token_id] * (self.session.num_tokens - before))

    async def act_async(self) -> None:
        """Do one thing on an event loop."""
        params = self.rng.choice(PARAMS)
        match self.rng.randrange(8):
            case 0:
                ids = self.ids(1, 150)
                await self.session.afeed([ids]).run()
                self.oracle.extend(ids)
            case 1:
                await self.session.aclose()
                self.session = await asyncio.to_thread(self.rig.engine.session, self.name)
            case 2 | 3:
                await self.be_cancelled(params)
            case _:
                generation = self.session.agenerate(params)
                for _ in range(self.rng.randrange(1, 40)):
                    self.expect(params, (await anext(generation)).token_id)
        self.check()

    async def be_cancelled(self, params: SamplingParams) -> None:
        """Give up somewhere in a step, once or again and again."""
        got: list[int | None] = []

        async def talk() -> None:
            async for delta in self.session.agenerate(params):
                got.append(delta.token_id)

        task = asyncio.create_task(talk())
        for _ in range(self.rng.randrange(40)):
            await asyncio.sleep(0)
        while not task.done():
            task.cancel()
            for _ in range(self.rng.randrange(1, 4)):
                await asyncio.sleep(0)
        assert task.cancelled()
        for token_id in got:
            self.expect(params, token_id)
        self.expect_unseen(params)


def _fields(params: SamplingParams) -> dict[str, Any]:
    return {name: getattr(params, name) for name in params.__dataclass_fields__}


def run_threads(*functions: Any) -> None:
    """Run functions at the same time; the first error of any is raised."""
    errors: list[BaseException] = []

    def guarded(function: Any) -> None:
        try:
            function()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(function,)) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(4 * WAIT_S)
        assert not thread.is_alive(), "somebody waits for ever"
    if errors:
        raise errors[0]


@pytest.mark.parametrize(
    ("seed", "max_sequences", "retain"),
    [(1, 1, "all"), (2, 2, "window"), (3, 3, "none"), (4, 8, "all"), (5, 5, "none")],
)
def test_random_histories_are_those_of_their_ids(
    tiny_model_dir: Path, tmp_path: Path, seed: int, max_sequences: int, retain: Any
) -> None:
    with rig(tiny_model_dir, tmp_path / "store", max_sequences, seed, retain=retain) as made:

        def on_thread(number: int) -> None:
            user = User(made, f"thread {number}", 100 * seed + number)
            for _ in range(25):
                user.act()
            user.session.close()

        def on_loop(number: int) -> None:
            async def talk(user: User) -> None:
                for _ in range(20):
                    await user.act_async()
                await user.session.aclose()

            async def main() -> None:
                await asyncio.gather(*(talk(user) for user in users))

            users = [User(made, f"loop {number} {i}", 100 * seed + 10 * number + i) for i in (5, 6)]
            asyncio.run(main())

        run_threads(
            *(functools.partial(on_thread, number) for number in range(3)),
            *(functools.partial(on_loop, number) for number in (1, 2)),
        )
        made.settle()


@pytest.mark.parametrize(("seed", "max_sequences"), [(1, 2), (2, 6)])
def test_steps_that_fail_to_start_or_on_the_device_change_nothing_but_for_their_callers(
    tiny_model_dir: Path, tmp_path: Path, seed: int, max_sequences: int
) -> None:
    rng = random.Random(seed)

    def fail_now_and_then(batch: Batch) -> None:
        if rng.random() < 0.04:
            raise MemoryError("no room for this step")

    with rig(tiny_model_dir, tmp_path / "store", max_sequences, seed, retain="window") as made:
        made.device.before_launch = made.device.before_results = fail_now_and_then

        def use(number: int) -> None:
            user = User(made, f"unlucky {number}", 100 * seed + number)
            for _ in range(25):
                user.act()
            user.session.close()

        run_threads(*(functools.partial(use, number) for number in range(5)))
        made.settle()


@pytest.mark.parametrize("num_acts", [3, 12])
def test_an_engine_closed_in_the_middle_loses_nothing_that_was_handed_out(
    tiny_model_dir: Path, tmp_path: Path, num_acts: int
) -> None:
    users: list[User] = []
    busy = threading.Barrier(6)

    def use(user: User) -> None:
        for _ in range(num_acts):
            user.act_plainly()
        busy.wait(WAIT_S)
        with pytest.raises((EngineClosedError, SessionError), match="closed"):
            while True:
                user.act_plainly()

    with rig(tiny_model_dir, tmp_path / "store", 3, retain="window") as made:
        users = [User(made, f"cut off {number}", number) for number in range(5)]

        def close() -> None:
            busy.wait(WAIT_S)
            made.engine.close()

        run_threads(close, *(functools.partial(use, user) for user in users))
    with rig(tiny_model_dir, tmp_path / "store", 3, retain="window") as made:
        for user in users:
            user.session = made.engine.session(user.name)
            user.expect_unseen(GREEDY)
            user.generate(GREEDY, 30)
            user.check()
            user.session.close()
        made.settle()
