"""The self-check passes on real tiers, and fails when one of them brings back something else."""

import dataclasses
import math
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from streamkv import Engine
from streamkv.self_check import (
    CONFIG,
    FULL_TIERS,
    GROUPS,
    Case,
    Group,
    Outcome,
    _compare,
    self_check,
)
from streamkv.self_check_play import (
    GENERATED_A_PART,
    NUM_PARTS,
    Follower,
    Plain,
    Sleeper,
    play,
    texts,
)
from streamkv.tiers.lower import LowerTiers
from streamkv.tiers.restoring import Restore

QUIET = dataclasses.replace(CONFIG, compile="off")


def check(model: Path, *tiers: str, mode: str = "window") -> dict[str, Outcome]:
    """Outcomes of some tiers, by tier."""
    [group] = [group for group in GROUPS if group.mode == mode]
    cases = [case for case in group.cases if case.tier in tiers]
    chosen = dataclasses.replace(group, cases=cases)
    return {outcome.tier: outcome for outcome in self_check(str(model), QUIET, [chosen])}


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where temporary directories are made."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_every_tier_brings_back_what_was_computed(tiny_model_dir: Path, temporary: Path) -> None:
    said: list[str] = []
    outcomes = list(self_check(str(tiny_model_dir), QUIET, on_progress=said.append))
    told = [(outcome.mode, outcome.tier) for outcome in outcomes]
    assert told == [(mode, tier) for mode in ("window", "full") for tier in ("gpu", "cpu", "ssd")]
    assert [outcome.problem for outcome in outcomes] == [""] * 6
    gpu, cpu, ssd = outcomes[:3]
    assert gpu.num_tokens == NUM_PARTS * GENERATED_A_PART
    assert cpu.num_tokens == ssd.num_tokens > 8 * QUIET.window_size
    # Resumed at block boundaries, the steps are the same: so are the results, bit for bit.
    assert cpu.largest_difference == ssd.largest_difference == 0.0
    assert min(outcome.num_blocks for outcome in outcomes) >= NUM_PARTS
    # The same steps again: what came back is bit for bit what left.
    assert {outcome.num_tokens for outcome in outcomes[3:]} == {cpu.num_tokens}
    assert {outcome.largest_difference for outcome in outcomes[3:]} == {0.0}
    # All that has left the window comes back twelve times.
    assert min(outcome.num_blocks for outcome in outcomes[3:]) > 12 * NUM_PARTS
    assert len(said) == 8
    assert list(temporary.iterdir()) == [], "a temporary store was left behind"


def test_the_stream_is_the_same_always() -> None:
    assert texts() == texts()
    assert len(texts()) == NUM_PARTS
    assert texts()[0].startswith("uied ie atna")


def flipping(real: Callable[[Restore], list[bool]]) -> Callable[[Restore], list[bool]]:
    """`Restore.wait`, after which some numbers of each block have another sign."""

    def wait(self: Restore) -> list[bool]:
        found = real(self)
        for target, is_there in zip(self.targets, found, strict=True):
            if is_there:
                bytes_ = self._restoring._transfer._gpu_pool.block_bytes(target.block_id)
                bytes_[3:4096:4] ^= 0x80
        return found

    return wait


@pytest.mark.parametrize("mode", ["window", "full"])
@pytest.mark.parametrize("tier", ["gpu", "cpu", "ssd"])
def test_bytes_that_change_on_the_way_are_found(
    tiny_model_dir: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch, tier: str, mode: str
) -> None:
    monkeypatch.setattr(Restore, "wait", flipping(Restore.wait))
    outcome = check(tiny_model_dir, tier, mode=mode)[tier]
    assert outcome.num_blocks > 0
    assert outcome.num_different > 0
    assert outcome.largest_difference > 1e-3
    assert "tokens differ" in outcome.problem
    assert list(temporary.iterdir()) == []


def test_a_near_tie_makes_no_other_stream_of_a_follower(tiny_model_dir: Path) -> None:
    with Engine(str(tiny_model_dir), QUIET) as engine:
        reference = play(Plain(engine))
    with Engine(str(tiny_model_dir), QUIET) as engine:
        at = sorted(_first_answer(engine))[3]
    # As if the reference had chosen another one there.
    token_id, logprob = reference[at]
    tied = {**reference, at: ((token_id + 1) % 200, logprob)}
    with Engine(str(tiny_model_dir), QUIET) as engine:
        player = Follower(engine, tied)
        said = play(player)
        # The stream has the reference's token, and goes on from it in another way.
        assert said[at] == (token_id, pytest.approx(logprob, abs=1e-4))
        assert said.keys() <= reference.keys()
        assert said[at + 1][1] != pytest.approx(reference[at + 1][1], abs=1e-4)


def _first_answer(engine: Engine) -> dict[int, tuple[int, float]]:
    """What a follower says after the first part."""
    player = Follower(engine)
    player.read(texts()[0])
    return player.go_on()


def test_two_tokens_of_one_probability_are_a_tie() -> None:
    reference = {7: (50, -1.0), 8: (51, -2.0)}
    tie = _compare("window", "gpu", 1, {7: (49, -1.1), 8: (51, -2.0)}, reference, 0.25)
    assert (tie.num_different, tie.num_tokens) == (0, 2)
    assert tie.largest_difference == pytest.approx(0.1)
    other = _compare("window", "gpu", 1, {7: (49, -1.3), 9: (51, -2.0)}, reference, 0.25)
    assert other.num_different == 2
    assert other.largest_difference == math.inf


def test_only_other_cuts_in_16_bits_may_differ_by_more() -> None:
    follower, sleeper = Case("gpu", "shared", {}, Follower), Case("cpu", "cpu_reads", {}, Sleeper)
    assert follower.tolerance("float32") == sleeper.tolerance("float32") < 1e-3
    assert follower.tolerance("bfloat16") > sleeper.tolerance("bfloat16") < 0.05


def test_a_tier_that_brings_nothing_back_was_not_checked(
    tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LowerTiers, "lock_many", lambda self, keys: [None] * len(keys))
    monkeypatch.setattr(LowerTiers, "read_into", lambda self, key, out: False)
    outcome = check(tiny_model_dir, "ssd")["ssd"]
    assert outcome.num_different == 0, "computing all of it anew is right, too"
    assert outcome.num_blocks == 0
    assert "not exercised" in outcome.problem


def test_a_mode_that_an_engine_does_not_have_is_said_and_left_out(tiny_model_dir: Path) -> None:
    said: list[str] = []
    refused = Group("recall", {"attention": "recall"}, FULL_TIERS)
    assert list(self_check(str(tiny_model_dir), QUIET, [refused], said.append)) == []
    assert said[-1].startswith("recall: not checked: with recall_blocks=0")


@pytest.mark.parametrize(
    ("outcome", "problem"),
    [
        (Outcome("window", "cpu", 3, 100, 0, 1e-6), ""),
        (Outcome("window", "cpu", 3, 100, 2, math.inf), "2 of 100 tokens differ"),
        (Outcome("window", "cpu", 0, 100, 0, 0.0), "not exercised"),
        (Outcome("window", "cpu", 3, 0, 0, 0.0), "nothing was compared"),
    ],
)
def test_what_is_wrong_is_said(outcome: Outcome, problem: str) -> None:
    assert outcome.problem.startswith(problem) if problem else outcome.problem == ""
