"""What belongs to an open session, and how it goes to sleep when its disk fails."""

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from streamkv import Engine, EngineConfig, SamplingParams
from streamkv.errors import EngineClosedError
from streamkv.journal import Journal
from streamkv.journal_records import Closed, Turn
from streamkv.live import LiveStream
from streamkv.outputs import FinishReason
from streamkv.store import journal_path
from streamkv.tiers.faults import inject

TEXT = "The quick brown fox jumps over the lazy dog. " * 20


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("store")


@pytest.fixture(scope="module")
def engine(tiny_model_dir: Path, store: Path) -> Iterator[Engine]:
    config = EngineConfig(
        window_size=128,
        prefill_chunk=64,
        cpu_bytes="4MiB",
        ssd_bytes="64MiB",
        store=str(store),
        compile="off",
    )
    with Engine(str(tiny_model_dir), config) as engine:
        yield engine


def fail_on_disk() -> None:
    raise OSError(28, "No space left on device")


def live_of(engine: Engine, name: str, text: str = TEXT) -> LiveStream:
    session = engine.session(name)
    if text:
        session.feed(text).run()
    return session._live


def closed_at(store: Path, name: str) -> Closed | None:
    """The last record of a session's way to sleep, from its file."""
    with Journal.open(journal_path(store, name)) as journal:
        return journal.state.last_closed


def test_chunks_end_at_multiples_of_the_prefill_chunk(engine: Engine) -> None:
    live = live_of(engine, "chunks", "")
    found = []
    for num_computed in (0, 1, 63, 64, 100):
        live.sequence.num_computed = num_computed
        found.append(live.next_chunk())
    live.sequence.num_computed = 0
    assert found == [64, 63, 1, 64, 28]


def test_stats_never_count_more_tokens_than_there_are(engine: Engine) -> None:
    live = live_of(engine, "counted", "")
    stats = live.stats({}, "awake", None)
    assert (stats.num_tokens, stats.num_sink_tokens, stats.num_window_tokens) == (0, 0, 0)
    live.intake.accept([5, 6, 7])
    stats = live.stats({}, "awake", None)
    assert (stats.num_sink_tokens, stats.num_window_tokens, stats.num_computed) == (3, 3, 0)
    live.intake.accept([5] * 500)
    stats = live.stats({}, "awake", None)
    assert (stats.num_sink_tokens, stats.num_window_tokens) == (4, 128)
    assert stats.num_blocks == 0 and set(stats.tiers) == {"gpu", "cpu", "ssd"}


def test_text_goes_on_in_the_middle_of_a_character(engine: Engine) -> None:
    """A generation whose first token completes the last character of the stream."""
    live = live_of(engine, "half", "")
    first, second = "é".encode()
    ids = {data: i for i in range(400) if len(data := engine.tokenizer.token_bytes(i)) == 1}
    live.intake.accept([ids[bytes([first])]])
    assert live.decoder().push(ids[bytes([second])]) == "é"


def test_a_generation_that_was_left_is_journaled_as_abandoned(engine: Engine) -> None:
    live = live_of(engine, "turns", "")
    params = SamplingParams(seed=9)
    assert live.journal is not None
    live.end_turn(params, FinishReason.LENGTH)
    assert live.journal.state.last_turn == Turn({"reason": "length", "seed": 9})
    live.end_turn(params, None)
    assert live.journal.state.last_turn == Turn({"reason": "abandoned", "seed": 9})


def test_asleep_it_holds_no_gpu_block_and_names_its_open_block(engine: Engine, store: Path) -> None:
    before = engine.usage()["gpu"].num_blocks
    session = engine.session("asleep")
    session.feed(TEXT).run()
    num_computed = session.stats().num_computed
    assert num_computed % 64 and engine.usage()["gpu"].num_blocks > before
    session.close()
    assert engine.usage()["gpu"].num_blocks == before
    closed = closed_at(store, "asleep")
    assert closed is not None and closed.token_index == num_computed
    assert len(closed.partial_key) == 16
    with pytest.raises(EngineClosedError):
        session._live.intake.accept("too late")


@pytest.mark.parametrize("fault", ["journal.write", "journal.fsync"])
def test_a_disk_that_fails_at_the_end_costs_time_not_tokens(
    engine: Engine, store: Path, caplog: pytest.LogCaptureFixture, fault: str
) -> None:
    before = engine.usage()["gpu"].num_blocks
    name = f"fails at {fault}"
    session = engine.session(name)
    session.feed(TEXT).run()
    num_tokens = session.num_tokens
    with inject(fault, fail_on_disk), caplog.at_level(logging.WARNING):
        session.close()
    assert f"session {name!r}: went to sleep without its last record" in caplog.text
    assert engine.usage()["gpu"].num_blocks == before
    with engine.session(name) as again:
        assert (again.num_tokens, again.text_chars) == (num_tokens, len(TEXT))
        assert len(again.generate(SamplingParams(max_tokens=2, ignore_eos=True)).run()) == 2


def test_a_session_that_is_not_whole_yet_can_be_deleted(engine: Engine, store: Path) -> None:
    before = engine.usage()["gpu"].num_blocks
    for text in ("", "dog", TEXT):
        live_of(engine, "gone", text)
        engine._sessions["gone"].delete()
        assert not journal_path(store, "gone").exists()
    assert engine.usage()["gpu"].num_blocks == before
