"""Checkpoints of one session: a real journal, a real store, a sequence that computes nothing."""

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
from small_tiers import SmallTiers, new_journal, small_tiers

from streamkv.checkpoint import Checkpointer
from streamkv.journal import Journal
from streamkv.recovery import open_block_key
from streamkv.sequence import Jump, Sequence
from streamkv.tiers.faults import inject
from streamkv.tiers.spec import BlockKey
from streamkv.window import Window
from streamkv.window_blocks import WindowBlocks

NEVER = 10**9
WINDOW = Window(8, ((0, 2),))


class Diary:
    """One session named `diary`, as far as checkpoints need it."""

    def __init__(self, tiers: SmallTiers, journal: Journal, window: Window = WINDOW) -> None:
        self.tiers = tiers
        self.journal = journal
        self.sequence: Sequence = tiers.sequence(window)

    def checkpointer(self, every: int = NEVER) -> Checkpointer:
        return Checkpointer("diary", self.sequence, self.journal, self.tiers.manager, every)

    def compute(self, num_tokens: int) -> None:
        self.sequence.append([5] * num_tokens)
        self.tiers.step(self.sequence, num_tokens)

    def journaled(self) -> WindowBlocks | None:
        """The newest checkpoint, as the file has it."""
        newest = self.journal.state.last_checkpoint
        return WindowBlocks.decode(newest.token_index, newest.digest) if newest else None

    def live(self) -> tuple[tuple[int, BlockKey], ...]:
        """(block_index, key) of the full blocks."""
        table = self.sequence.table
        return tuple((block.block_index, block.key) for block in table if block.key)


@pytest.fixture
def diary(tmp_path: Path) -> Iterator[Diary]:
    with (
        small_tiers(tmp_path / "blocks") as tiers,
        new_journal(tmp_path / "diary.journal") as journal,
    ):
        yield Diary(tiers, journal)


def test_a_checkpoint_names_the_full_blocks_of_sinks_and_window(diary: Diary) -> None:
    checkpointer = diary.checkpointer()
    diary.compute(22)
    checkpointer.begin()
    checkpointer.finish()
    expected = WindowBlocks(20, diary.sequence.chain_key, diary.live())
    assert [index for index, _ in expected.blocks] == [0, 3, 4]
    assert diary.journaled() == expected
    stored = diary.tiers.ssd.manifest("diary")
    assert stored == [key for _, key in expected.blocks]
    assert all(diary.tiers.ssd.contains(key) for key in stored)


def test_blocks_are_on_disk_before_the_journal_says_so(diary: Diary) -> None:
    checkpointer, log = diary.checkpointer(), list[str]()
    diary.compute(9)
    with (
        inject("ssd.fsync", lambda: log.append("blocks")),
        inject("journal.write", lambda: log.append("record")),
        inject("journal.fsync", lambda: log.append("journal synced")),
    ):
        checkpointer.begin()
        checkpointer.finish()
    assert log.index("blocks") < log.index("record") < log.index("journal synced")
    assert "blocks" not in log[log.index("record") :]


def test_one_is_begun_each_time_enough_tokens_were_computed(diary: Diary) -> None:
    checkpointer, begun = diary.checkpointer(every=10), []
    for _ in range(30):
        diary.compute(1)
        checkpointer.after_step()
        checkpointer.finish()
        newest = diary.journaled()
        begun.append(newest.token_index if newest else 0)
    # The first is due at 10 and holds what is full: 8. The next is due ten tokens after that.
    assert [begun.index(place) + 1 for place in sorted(set(begun) - {0})] == [10, 18, 26]
    assert sorted(set(begun)) == [0, 8, 16, 24]


def test_by_the_clock_too_a_block_has_to_be_full(
    diary: Diary, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("streamkv.checkpoint.HALF_SECOND", 0.0)
    checkpointer = Checkpointer("diary", diary.sequence, diary.journal, diary.tiers.manager)
    diary.compute(3)
    checkpointer.after_step()
    checkpointer.finish()
    assert diary.journaled() is None
    diary.compute(1)
    checkpointer.after_step()
    checkpointer.finish()
    assert diary.journaled() == WindowBlocks(4, diary.sequence.chain_key, diary.live())


def test_a_resumed_session_counts_from_its_checkpoint(diary: Diary) -> None:
    diary.compute(12)
    checkpointer = diary.checkpointer(every=8)
    checkpointer.resumed_from(WindowBlocks(8, BlockKey(b"k" * 16), ()))
    checkpointer.after_step()
    checkpointer.finish()
    assert diary.journaled() is None
    diary.compute(4)
    checkpointer.after_step()
    checkpointer.finish()
    newest = diary.journaled()
    assert newest is not None and newest.token_index == 16


def fail_on_disk() -> None:
    raise OSError(5, "Input/output error")


def test_a_checkpoint_that_fails_is_said_aloud_and_the_one_before_stays(
    diary: Diary, caplog: pytest.LogCaptureFixture
) -> None:
    checkpointer = diary.checkpointer(every=4)
    diary.compute(8)
    checkpointer.after_step()
    checkpointer.finish()
    before = diary.journaled()
    diary.compute(8)
    with inject("journal.write", fail_on_disk), caplog.at_level(logging.WARNING):
        checkpointer.after_step()
        diary.tiers.manager.flush()
        checkpointer.after_step()
    assert "session 'diary': no checkpoint at token 16" in caplog.text
    assert diary.journaled() == before is not None
    assert all(diary.tiers.restored(key) for _, key in before.blocks)
    checkpointer.finish()
    diary.compute(4)
    checkpointer.after_step()
    checkpointer.finish()
    newest = diary.journaled()
    assert newest is not None and newest.token_index == 20


def test_what_is_not_durable_is_not_journaled(tmp_path: Path) -> None:
    with (
        small_tiers(tmp_path / "blocks", retain="none") as tiers,
        new_journal(tmp_path / "diary.journal") as journal,
    ):
        diary = Diary(tiers, journal)
        checkpointer = diary.checkpointer()
        diary.compute(9)
        checkpointer.begin()
        checkpointer.finish()
        assert checkpointer.finish_with_open_block(BlockKey(b"o" * 16)) is None
        assert diary.journaled() is None


def test_blocks_that_are_not_exact_make_no_checkpoint(diary: Diary) -> None:
    """On the way to an exact window, blocks have no key and a resume could not use them."""
    sequence = diary.sequence = diary.tiers.sequence(Window(8))
    # Token 20 follows the four first ones at once, as when a lost window is computed anew.
    sequence.restart_at(0, sequence.root_key, [], Jump(4, 20, BlockKey(b"j" * 16)))
    sequence.exact_from = 28
    diary.compute(4)
    checkpointer, journaled = diary.checkpointer(every=4), []
    for _ in range(5):
        diary.compute(4)
        checkpointer.after_step()
        checkpointer.finish()
        newest = diary.journaled()
        journaled.append((sequence.num_computed, newest.token_index if newest else None))
    # Blocks 7 and 8 are exact; all of the window at token 36 is in them.
    assert journaled == [(24, None), (28, None), (32, None), (36, 36), (40, 40)]


@pytest.mark.parametrize("num_tokens", [3, 8, 14])
def test_the_open_block_is_stored_with_the_last_checkpoint(diary: Diary, num_tokens: int) -> None:
    checkpointer = diary.checkpointer()
    diary.compute(num_tokens)
    key = open_block_key("diary", diary.sequence)
    start, has_open = num_tokens - num_tokens % 4, num_tokens % 4 > 0
    assert checkpointer.finish_with_open_block(key) == (key if has_open else None)
    assert diary.journaled() == WindowBlocks(start, diary.sequence.chain_key, diary.live())
    named = [key for _, key in diary.live()] + [key] * has_open
    assert diary.tiers.ssd.manifest("diary") == named
    if has_open:
        tokens = diary.tiers.restored(key)
        assert tokens is not None
        assert tokens[: num_tokens - start] == [float(t) for t in range(start, num_tokens)]


def test_an_open_block_that_could_not_be_stored_is_not_promised(
    diary: Diary, caplog: pytest.LogCaptureFixture
) -> None:
    checkpointer = diary.checkpointer()
    diary.compute(6)
    with inject("ssd.fsync", fail_on_disk), caplog.at_level(logging.WARNING):
        assert checkpointer.finish_with_open_block(open_block_key("diary", diary.sequence)) is None
    assert diary.journaled() is None
