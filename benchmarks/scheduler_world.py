"""Scheduler, admission and sleepers with a model that computes nothing, a pool of numbers, and a
clock that is moved by hand. Belongs to `scheduler_actions.py` and to the tests.

`World` does what the engine's thread does, one action at a time: sessions open and close, ask for
tokens, give up, are held; steps are scheduled and land; time goes by; blocks take some rounds to
leave and to come, and sometimes cannot. `check` asserts after any of them that every block has one
owner, that room is promised to whoever has blocks, and that every job is where it belongs.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from streamkv.admission import Admission, State
from streamkv.batch import Wanted
from streamkv.errors import PoolFullError, StoreError
from streamkv.pool_room import PoolRoom
from streamkv.scheduler import Scheduler, Work
from streamkv.sequence import Sequence
from streamkv.sleepers import Sleepers
from streamkv.tiers.free_list import FreeList
from streamkv.tiers.spec import BlockKey
from streamkv.window import Window

NUM_BLOCKS = 24
CHUNK, MIXED_CHUNK = 32, 8
MAX_SEQUENCES = 4
TURN_TOKENS = 40


@dataclass(slots=True, eq=False)
class Job:
    """Tokens that a session was asked for.

    Attributes:
        work: what is left of them.
        state: `waiting`, `queued`, `done`, `failed` or `cancelled`.
    """

    work: Work
    state: str = "waiting"


class Player:
    """A session: blocks of the pool while it is awake, and nothing else.

    It has the methods of `Sleeper`, and takes some rounds for each.
    """

    def __init__(self, world: "World", number: int, num_blocks: int) -> None:
        self.name = f"session {number}"
        self.sequence = Sequence(number, Window(1 << 20), 64, BlockKey(b"r" * 16))
        self.num_blocks = num_blocks
        self.held: list[int] = []
        self.asleep: object | None = None
        self.jobs: list[Job] = []
        self.num_holds = 0
        self._world = world
        self._rounds = 0

    def begin_asleep(self) -> None:
        self.asleep = ()

    def begin_leaving(self) -> bool:
        assert self.asleep is None
        self._rounds = self._world.draw(4)
        return self._world.draw(10) > 0

    def is_settled(self) -> bool:
        self._rounds -= 1
        return self._rounds <= 0

    def leave(self) -> bool:
        if self._world.draw(10) == 0:
            return False
        self.release()
        self.asleep = ()
        return True

    def journal_if_stored(self) -> bool:
        assert self.asleep is not None and self.num_holds == 0
        return self._world.draw(4) > 0

    def stay(self) -> None:
        assert self.asleep is None

    def begin_waking(self) -> None:
        assert self.asleep is not None and not self.held
        if self._world.draw(20) == 0:
            raise StoreError("the disk is gone")
        self.allocate(1 + self._world.draw(self.num_blocks))
        self._rounds = self._world.draw(4)

    def is_there(self) -> bool:
        self._rounds -= 1
        return self._rounds <= 0

    def wake(self) -> None:
        self.asleep = None
        if self._world.draw(20) == 0:
            raise PoolFullError("no room for old blocks")

    def give_up_waking(self) -> None:
        self.release()

    def allocate(self, num_blocks: int) -> None:
        """Have so many blocks, as far as they are promised."""
        while len(self.held) < min(num_blocks, self.num_blocks):
            self.held.append(self._world.free_list.allocate())

    def release(self) -> None:
        """Give all back."""
        while self.held:
            self._world.free_list.release(self.held.pop())


@dataclass(slots=True, eq=False)
class Counts:
    """What has happened: how often jobs ended in each way, and tokens by priority."""

    done: int = 0
    failed: int = 0
    cancelled: int = 0
    tokens: dict[int, int] = field(default_factory=dict)


class World:
    """Everything, and the actions.

    Args:
        draw: a number below the one given; decides what is left open.
    """

    def __init__(self, draw: Callable[[int], int]) -> None:
        self.draw = draw
        self.now_s = 0.0
        self.free_list = FreeList(NUM_BLOCKS)
        self.room = PoolRoom(NUM_BLOCKS)
        self.admission = Admission(self.room, TURN_TOKENS)
        self.sleepers = Sleepers(self.admission, 5.0, clock=lambda: self.now_s)
        self.scheduler = Scheduler(CHUNK, MIXED_CHUNK)
        self.players: dict[Sequence, Player] = {}
        self.jobs: dict[Work, Job] = {}
        self.counts = Counts()
        self._flying: list[Job] = []
        self._num_opened = 0

    def open(self, priority: int = 0) -> Player | None:
        """A new session; `None` if it has to wait for room and gives up."""
        self._num_opened += 1
        player = Player(self, self._num_opened, 1 + self.draw(8))
        has_blocks = self.draw(3) == 0
        entered = self.sleepers.enter(
            player.name, player.num_blocks, priority, has_blocks=has_blocks
        )
        if not entered.done():
            self.sleepers.remove(player.name)
            return None
        player.sequence.priority = priority
        if self.admission.state(player.name) is State.AWAKE and has_blocks:
            player.allocate(1)
        self.sleepers.add(player.name, player.sequence, player)  # type: ignore[arg-type]
        self.players[player.sequence] = player
        return player

    def close(self, player: Player) -> None:
        """A session ends, as soon as nothing of it is on its way."""
        for job in player.jobs:
            if job.state in ("waiting", "queued") and not self.is_flying(player):
                self._cancel(player, job)
        if any(job.state in ("waiting", "queued") for job in player.jobs) or player.num_holds:
            return
        settled = []
        self.sleepers.when_settled(player.sequence, lambda: settled.append(True))
        if not settled:
            return
        self.sleepers.remove(player.name)
        player.release()
        del self.players[player.sequence]

    def submit(self, player: Player, num_tokens: int) -> Job | None:
        """Ask for tokens; `None` if the session is at work already."""
        if any(job.state in ("waiting", "queued") for job in player.jobs):
            return None
        player.jobs.clear()
        player.sequence.append([0] * num_tokens)
        wanted = Wanted.LOGITS if num_tokens == 1 else Wanted.NOTHING
        job = Job(Work(player.sequence, num_tokens, wanted))
        player.jobs.append(job)
        self.sleepers.when_awake(
            player.sequence,
            lambda: self._queue(player, job),
            lambda error: self._fail(job),
            lambda: job.state == "waiting",
        )
        return job

    def cancel(self, player: Player) -> None:
        """Whoever asked gives up, as far as nothing is under way."""
        for job in player.jobs:
            if not self.is_flying(player):
                self._cancel(player, job)

    def hold(self, player: Player) -> None:
        """Keep a session as it is."""
        if self.admission.state(player.name) in (State.AWAKE, State.LEAVING):
            self.sleepers.hold(player.sequence)
            player.num_holds += 1

    def release(self, player: Player) -> None:
        """Undo that."""
        if player.num_holds:
            player.num_holds -= 1
            self.sleepers.release(player.sequence)

    def round(self) -> bool:
        """What the engine's thread does between steps."""
        return self.sleepers.advance(
            lambda sequence: not self.is_flying(self.players[sequence]), self._interrupt
        )

    def step(self) -> None:
        """One step is landed, the next is launched."""
        for job in self._flying:
            self._landed(job)
        self._flying = []
        for work, step in self.scheduler.schedule(MAX_SEQUENCES):
            player, job = self.players[work.sequence], self.jobs[work]
            assert self.sleepers.is_awake(work.sequence), f"{player.name} computes and is not awake"
            player.allocate(len(player.held) + self.draw(2))
            work.sequence.advance(step.query_len)
            self.sleepers.computed(work.sequence, step.query_len)
            priority = work.sequence.priority
            self.counts.tokens[priority] = self.counts.tokens.get(priority, 0) + step.query_len
            self.scheduler.postprocess(work, step.query_len)
            self._flying.append(job)

    def tick(self, seconds: float) -> None:
        """Time goes by."""
        self.now_s += seconds

    def is_flying(self, player: Player) -> bool:
        """Whether a step of a session is under way."""
        return any(job.work.sequence is player.sequence for job in self._flying)

    def drain(self) -> None:
        """Go on until every job has ended; asserts that it does."""
        for player in self.players.values():
            while player.num_holds:
                self.release(player)
        for _ in range(100_000):
            self.tick(0.1)
            self.round()
            self.step()
            if all(job.state not in ("waiting", "queued") for job in self.all_jobs()):
                break
        else:
            raise AssertionError("a job never ends")
        self.step()

    def all_jobs(self) -> list[Job]:
        """Of all sessions."""
        return [job for player in self.players.values() for job in player.jobs]

    def check(self) -> None:
        """Assert what must hold after every action."""
        self.admission.check_integrity()
        self.free_list.check_integrity()
        held = [block for player in self.players.values() for block in player.held]
        assert len(held) == len(set(held)) == self.free_list.num_used
        for player in self.players.values():
            state = self.admission.state(player.name)
            if state in (State.ASLEEP, State.WAITING):
                assert not player.held and player.asleep is not None
            assert len(player.held) <= self.room.promised(player.name)
            queued = [job for job in player.jobs if job.work in self.jobs]
            assert not queued or state is State.AWAKE, f"{player.name} is {state}"
            for job in player.jobs:
                if job.state == "waiting":
                    assert state not in (State.ASLEEP, State.AWAKE), f"{player.name} is forgotten"
                assert (job.state == "queued") == (job.work in self.jobs)
        assert len(self.scheduler) + len(self._flying) >= len(self.jobs)

    def check_end(self) -> None:
        """Close all, and assert that nothing is left."""
        self.drain()
        while self.players:
            self.tick(0.1)
            self.round()
            for player in list(self.players.values()):
                self.close(player)
        self.check()
        assert self.free_list.num_used == 0 and self.room.num_free == NUM_BLOCKS
        assert len(self.admission) == 0 and not self.jobs and len(self.scheduler) == 0
        assert not self.sleepers.has_business

    def _queue(self, player: Player, job: Job) -> None:
        if job.state != "waiting":
            return
        job.state = "queued"
        self.jobs[job.work] = job
        self.sleepers.begin_job(player.sequence)
        self.scheduler.add(job.work)

    def _interrupt(self, sequence: Sequence) -> None:
        work = self.scheduler.take_back(sequence)
        if work is None:
            return
        player, job = self.players[sequence], self.jobs.pop(work)
        job.state = "waiting"
        self.sleepers.end_job(sequence)
        self.sleepers.wait_for_turn(
            sequence, lambda: self._queue(player, job), lambda error: self._fail(job)
        )

    def _landed(self, job: Job) -> None:
        if job.work.num_tokens == 0 and job.state == "queued":
            self._end(job, "done")
            self.counts.done += 1

    def _cancel(self, player: Player, job: Job) -> None:
        if job.state == "queued":
            self.scheduler.remove(job.work)
            self._end(job, "cancelled")
        elif job.state == "waiting":
            job.state = "cancelled"
        else:
            return
        self.counts.cancelled += 1

    def _fail(self, job: Job) -> None:
        if job.state == "waiting":
            job.state = "failed"
            self.counts.failed += 1

    def _end(self, job: Job, state: str) -> None:
        job.state = state
        if self.jobs.pop(job.work, None) is not None:
            self.sleepers.end_job(job.work.sequence)


def random_actions(num_actions: int, seed: int, world: World | None = None) -> World:
    """Carry out actions at random, and check after each."""
    rng = random.Random(seed)
    world = world or World(rng.randrange)
    for _ in range(num_actions):
        players = list(world.players.values())
        action = rng.randrange(12)
        if (action == 0 and len(players) < 30) or not players:
            world.open(rng.choice([-1, 0, 0, 0, 1]))
        elif action == 1:
            world.close(rng.choice(players))
        elif action <= 4:
            world.submit(rng.choice(players), rng.choice([1, 1, 1, 5, 100]))
        elif action == 5:
            world.cancel(rng.choice(players))
        elif action == 6:
            world.hold(rng.choice(players))
        elif action == 7:
            player = rng.choice(players)
            while player.num_holds:
                world.release(player)
        elif action == 8:
            world.tick(rng.choice([0.001, 0.1, 6.0]))
        elif action <= 10:
            world.round()
        else:
            world.step()
        world.check()
    return world
