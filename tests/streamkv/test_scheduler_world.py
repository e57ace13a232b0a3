"""Scheduler, admission and sleepers together, by random actions and by a state machine."""

import importlib.util
import random
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from streamkv.admission import Admission
from streamkv.scheduler import Scheduler
from streamkv.sleepers import Sleepers

BENCHMARKS = Path(__file__).parent.parent.parent / "benchmarks"


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        "scheduler_world", BENCHMARKS / "scheduler_world.py"
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Its dataclasses look for it there.
    sys.modules["scheduler_world"] = module
    spec.loader.exec_module(module)
    return module


world_module = load()


@pytest.mark.parametrize("seed", range(12))
def test_nothing_is_lost_by_random_actions(seed: int) -> None:
    world = world_module.random_actions(1500, seed)
    world.check_end()
    assert world.counts.done > 20 and world.sleepers.num_slept > 5


class Actions(RuleBasedStateMachine):
    """The same actions, chosen by hypothesis, so that what fails is short."""

    @initialize(seed=st.integers(0, 1000))
    def begin(self, seed: int) -> None:
        self.world = world_module.World(random.Random(seed).randrange)

    def player(self, index: int) -> Any:
        players = list(self.world.players.values())
        return players[index % len(players)]

    @rule(priority=st.integers(-1, 1))
    def open(self, priority: int) -> None:
        self.world.open(priority)

    @precondition(lambda self: self.world.players)
    @rule(index=st.integers(0, 20), num_tokens=st.sampled_from([1, 1, 5, 100]))
    def submit(self, index: int, num_tokens: int) -> None:
        self.world.submit(self.player(index), num_tokens)

    @precondition(lambda self: self.world.players)
    @rule(index=st.integers(0, 20), action=st.sampled_from(["close", "cancel", "hold", "release"]))
    def act(self, index: int, action: str) -> None:
        getattr(self.world, action)(self.player(index))

    @rule(seconds=st.sampled_from([0.001, 0.1, 6.0]))
    def tick(self, seconds: float) -> None:
        self.world.tick(seconds)

    @rule()
    def round(self) -> None:
        self.world.round()

    @rule()
    def step(self) -> None:
        self.world.step()

    @invariant()
    def all_is_well(self) -> None:
        if hasattr(self, "world"):
            self.world.check()

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.check_end()


TestActions = Actions.TestCase
TestActions.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)


@pytest.mark.parametrize(
    ("owner", "method", "broken"),
    [
        (Admission, "left", lambda self, owner: self._move(owner, *self_states())),
        (Sleepers, "_ask_again", lambda self, session: None),
        (Sleepers, "end_job", lambda self, sequence: None),
        (Scheduler, "take_back", lambda self, sequence: None),
    ],
)
def test_a_mistake_is_found(
    monkeypatch: pytest.MonkeyPatch, owner: type, method: str, broken: Any
) -> None:
    """Room is not given back, who was interrupted is forgotten, who is done stays busy, ..."""
    monkeypatch.setattr(owner, method, broken)
    with pytest.raises((AssertionError, KeyError)):
        for seed in range(30):
            world_module.random_actions(1500, seed).check_end()


def self_states() -> tuple[Any, Any]:
    states = sys.modules["streamkv.admission"].State
    return states.LEAVING, states.ASLEEP


def served(priorities: list[int], num_steps: int, max_sequences: int) -> dict[int, int]:
    """Tokens that sequences which decode all the time get, by priority."""
    world = world_module.World(random.Random(1).randrange)
    world.scheduler.mixed_chunk = 4
    players = []
    for priority in priorities:
        player = world_module.Player(world, len(players) + 1, 1)
        player.sequence.priority = priority
        players.append(player)
    counts = dict.fromkeys(priorities, 0)
    for player in players:
        player.sequence.append([0] * num_steps)
        world.scheduler.add(world_module.Work(player.sequence, 1))
    for _ in range(num_steps):
        for work, step in world.scheduler.schedule(max_sequences):
            work.sequence.advance(step.query_len)
            counts[work.sequence.priority] += step.query_len
            world.scheduler.add(world_module.Work(work.sequence, 1))
    return counts


def test_priorities_share_what_there_is() -> None:
    counts = served([0, 1, 2], 700, 1)
    assert sum(counts.values()) == 700
    assert counts[1] == pytest.approx(2 * counts[0], abs=2)
    assert counts[2] == pytest.approx(4 * counts[0], abs=4)


def test_who_had_nothing_to_do_has_nothing_saved_up() -> None:
    world = world_module.World(random.Random(1).randrange)
    first, late = (world_module.Player(world, number, 1) for number in (1, 2))
    scheduler = world.scheduler
    first.sequence.append([0] * 1000)
    late.sequence.append([0] * 1000)
    scheduler.add(world_module.Work(first.sequence, 1))
    taken = []
    for step_number in range(200):
        if step_number == 100:
            scheduler.add(world_module.Work(late.sequence, 1))
        for work, _ in scheduler.schedule(1):
            work.sequence.advance(1)
            taken.append(work.sequence)
            scheduler.add(world_module.Work(work.sequence, 1))
    assert taken[100:].count(late.sequence) == pytest.approx(50, abs=2)


def test_chunks_are_short_while_others_decode_and_some_steps_after() -> None:
    world = world_module.World(random.Random(1).randrange)
    reader, talker = (world_module.Player(world, number, 1) for number in (1, 2))
    scheduler = world.scheduler
    reader.sequence.append([0] * 1000)
    talker.sequence.append([0] * 10)
    scheduler.add(world_module.Work(reader.sequence, 1000))
    lengths = []
    for number in range(10):
        if number in (2, 3):
            scheduler.add(world_module.Work(talker.sequence, 1))
        for work, step in scheduler.schedule(8, others_decode=number == 4):
            work.sequence.advance(step.query_len)
            scheduler.postprocess(work, step.query_len)
            if work.sequence is reader.sequence:
                lengths.append(step.query_len)
    whole, short = world_module.CHUNK, world_module.MIXED_CHUNK
    assert lengths == [whole, whole, *[short] * 5, *[whole] * 3]


def test_chunks_and_decodes_take_turns_where_they_do_not_mix() -> None:
    scheduler = Scheduler(32, 8, mixes=False)
    world = world_module.World(random.Random(1).randrange)
    reader, *talkers = (world_module.Player(world, number, 1) for number in range(1, 4))
    reader.sequence.append([0] * 1000)
    scheduler.add(world_module.Work(reader.sequence, 1000))
    steps = []
    for _ in range(8):
        for talker in talkers:
            if talker.sequence not in scheduler._queued:
                talker.sequence.append([0])
                scheduler.add(world_module.Work(talker.sequence, 1))
        taken = scheduler.schedule(8)
        for work, step in taken:
            work.sequence.advance(step.query_len)
            scheduler.postprocess(work, step.query_len)
        steps.append([step.query_len for _, step in taken])
    assert steps == [[32], [1, 1]] * 4
