"""What records say about recall, against lists that are searched from end to end."""

import random
from dataclasses import replace

import pytest

from streamkv.journal_records import Chosen, ModeSet
from streamkv.recall_history import RecallHistory


def mode(token_index: int, name: str = "recall", salt: bytes = b"s" * 16) -> ModeSet:
    return ModeSet(token_index, name, 3, 64, "far", salt)


class Oracle:
    """The same by its rules, one event at a time."""

    def __init__(self) -> None:
        self.modes: list[ModeSet] = []
        self.choices: list[Chosen] = []

    def set_mode(self, new: ModeSet) -> None:
        self.modes = [m for m in self.modes if m.token_index < new.token_index] + [new]
        self.choices = [c for c in self.choices if c.token_index < new.token_index]

    def choose(self, new: Chosen) -> None:
        if self.modes and new.token_index < self.modes[-1].token_index <= new.made_at:
            moved = replace(self.modes[-1], token_index=new.token_index)
            self.modes = [m for m in self.modes if m.token_index < new.token_index] + [moved]
        self.choices = [c for c in self.choices if c.token_index < new.token_index] + [new]

    def rewind(self, end: int) -> int | None:
        self.modes = [m for m in self.modes if m.token_index < end]
        lost = [c for c in self.choices if c.made_at >= end]
        self.choices = [c for c in self.choices if c.made_at < end]
        return min((c.token_index for c in lost if c.token_index < end), default=None)

    def mode_at(self, token_index: int) -> ModeSet | None:
        found = [m for m in self.modes if m.token_index <= token_index]
        return found[-1] if found else None

    def salt_of(self, end: int) -> bytes:
        return next((m.salt for m in reversed(self.modes) if m.token_index < end), b"")

    def choice_at(self, token_index: int) -> Chosen | None:
        since = self.mode_at(token_index)
        first = since.token_index if since is not None else 0
        found = [c for c in self.choices if first <= c.token_index <= token_index]
        return found[-1] if found else None


@pytest.mark.parametrize("seed", range(30))
def test_it_is_what_a_search_from_end_to_end_finds(seed: int) -> None:
    chosen = random.Random(seed)
    history, oracle = RecallHistory(), Oracle()
    num_computed = 0
    for _ in range(60):
        num_computed += chosen.randrange(200)
        match chosen.choice(["mode", "ahead", "now", "back", "rewind"]):
            case "mode":
                name, salt = chosen.choice([("recall", bytes(16)), ("window", b""), ("full", b"")])
                new = mode(num_computed, name, chosen.randbytes(16) if salt else salt)
                history.set_mode(new)
                oracle.set_mode(new)
            case "rewind":
                num_computed = chosen.randrange(num_computed + 1)
                assert history.rewind(num_computed + 1) == oracle.rewind(num_computed + 1)
            case what:
                lag = {"ahead": 64, "now": 0, "back": -chosen.randrange(64)}[what]
                blocks = tuple(sorted(chosen.sample(range(100), chosen.randrange(4))))
                choice = Chosen(max(0, num_computed + lag), num_computed, blocks)
                history.choose(choice)
                oracle.choose(choice)
        copied = history.copy()
        for each in (history, copied):
            assert list(each.modes(0)) == oracle.modes
            assert list(each.choices(0)) == oracle.choices
            assert each.newest == (oracle.modes[-1] if oracle.modes else None)
            assert each.last_made_at == max((c.made_at for c in oracle.choices), default=-1)
            assert each.has_salt == any(m.salt for m in oracle.modes)
        for _ in range(5):
            at = chosen.randrange(num_computed + 100)
            assert history.mode_at(at) == oracle.mode_at(at)
            assert history.salt_of(at) == oracle.salt_of(at)
            assert history.choice_at(at) == oracle.choice_at(at)
            assert list(history.modes(at)) == [m for m in oracle.modes if m.token_index >= at]
            some = [c for c in oracle.choices if at <= c.token_index < at + 300]
            assert list(history.choices(at, at + 300)) == some


def test_a_block_that_ends_where_a_mode_begins_is_named_by_the_one_before() -> None:
    history = RecallHistory()
    history.set_mode(mode(0, salt=b"a" * 16))
    history.set_mode(mode(128, salt=b"b" * 16))
    assert history.salt_of(128) == b"a" * 16 and history.salt_of(129) == b"b" * 16


def test_a_copy_goes_its_own_way() -> None:
    history = RecallHistory()
    history.set_mode(mode(0))
    history.choose(Chosen(64, 0, (1, 2)))
    copied = history.copy()
    copied.choose(Chosen(64, 64, (3,)))
    assert list(history.choices(0)) == [Chosen(64, 0, (1, 2))]
    assert list(copied.choices(0)) == [Chosen(64, 64, (3,))]
