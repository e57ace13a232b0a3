"""Mode `full` with a store: after sleep and SIGKILL as if nothing had happened."""

import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import full_child
import pytest
from damaged import flip_block
from full_child import NUM_FED, WINDOW_SIZE, options, seeded, some_ids
from full_oracle import FULL, expected_scores

from streamkv import Engine, Session
from streamkv.errors import AbsentBlockError, JournalError, PoolFullError, SessionError
from streamkv.past_keys import chain_keys, replay_windows
from streamkv.tiers.faults import inject

MORE = some_ids(150, seed=11)
RECALLING = pytest.mark.parametrize("num_recalled", [0, 3])


def opened(model: Path, store: Path | str | None, **others: Any) -> Engine:
    return Engine(str(model), options(None if store is None else str(store), **others))


def tokens_of(session: Session, num_tokens: int) -> list[int | None]:
    return [delta.token_id for delta in session.generate(seeded(num_tokens))]


def scores_of(session: Session, ids: list[int]) -> list[float]:
    return [score.logprob for score in session.score([ids]) if score.logprob is not None]


def ids_of(session: Session) -> list[int]:
    return session._live.past.ids(0, session.num_tokens).tolist()


def killed(store: Path, name: str) -> Path:
    """What a kill at this moment would leave behind."""
    return Path(shutil.copytree(store, store.with_name(f"{store.name}-{name}")))


def kill_after(model: Path, store: Path, what: str, num_lines: int, num_recalled: int) -> list[int]:
    """Run the child until it has said `num_lines` lines, then SIGKILL it; returns all it said."""
    given = [str(model), str(store), what, str(num_recalled)]
    command = [sys.executable, full_child.__file__, *given]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        said = [int(child.stdout.readline()) for _ in range(num_lines)]
        child.kill()
        said += [int(line) for line in child.stdout.read().split("\n")[:-1]]
    return said


def check_names(session: Session) -> None:
    """Every block that is held has the name that the journal says."""
    live = session._live
    sequence, past = live.sequence, live.past
    windows = replay_windows(past, live.created_window)
    named = dict(enumerate(chain_keys(sequence, past, windows, sequence.num_computed)))
    for block in sequence.table:
        assert block.key in (None, named.get(block.block_index))
    if sequence.attends_to_all:
        assert sequence.keys is not None
        assert [sequence.keys.get(index) for index in named] == list(named.values())
        assert set(sequence.table.recalled) <= set(named)
    live.tiers.check_integrity()


@pytest.fixture(scope="module")
def dense(tiny_model_dir: Path) -> list[float]:
    """Scores of `MORE` behind a stream in which every token sees all before it."""
    ids = some_ids(NUM_FED) + MORE
    return expected_scores(tiny_model_dir, ids, [FULL] * len(ids))[-len(MORE) :]


@pytest.fixture(scope="module")
def switched(tiny_model_dir: Path) -> list[float]:
    """The same where `full` begins with the last token of what was read in `window`."""
    ids = some_ids(NUM_FED) + MORE
    windows = [WINDOW_SIZE] * (NUM_FED - 1) + [FULL] * (len(MORE) + 1)
    return expected_scores(tiny_model_dir, ids, windows)[-len(MORE) :]


@pytest.fixture(scope="module")
def answer(tiny_model_dir: Path) -> list[int | None]:
    """What an engine without a store answers."""
    with opened(tiny_model_dir, None, cpu_bytes="64MiB") as engine:
        session = engine.session("calm")
        session.feed([some_ids(NUM_FED)]).run()
        return tokens_of(session, 150)


@RECALLING
def test_killed_in_feeds_it_goes_on_as_if_it_had_not_been(
    tiny_model_dir: Path, tmp_path: Path, dense: list[float], num_recalled: int
) -> None:
    for num_lines in (17, 9)[: 1 + num_recalled]:
        said = kill_after(tiny_model_dir, tmp_path, "feed", num_lines, num_recalled)
    with opened(tiny_model_dir, tmp_path, recall_blocks=num_recalled) as engine:
        session = engine.session("victim")
        assert session.resumed and session.mode == "full"
        assert said[-1] > session.stats().num_computed > 0, "it starts from a checkpoint"
        session.feed([some_ids(NUM_FED)[session.num_tokens :]]).run()
        assert engine.counters()["ssd_reads"] > 0
        check_names(session)
        assert scores_of(session, MORE) == pytest.approx(dense, abs=1e-3)


def test_killed_in_an_answer_it_goes_on_with_it(
    tiny_model_dir: Path, tmp_path: Path, answer: list[int | None]
) -> None:
    kill_after(tiny_model_dir, tmp_path, "answer", 40, 0)
    with opened(tiny_model_dir, tmp_path) as engine:
        session = engine.session("victim")
        num_left = 110 - (session.num_tokens - NUM_FED)
        assert num_left > 0
        tokens_of(session, num_left)
        assert ids_of(session)[NUM_FED:] == answer[:110]
        check_names(session)


@RECALLING
def test_killed_right_after_the_change_of_mode_every_block_is_there(
    tiny_model_dir: Path, tmp_path: Path, switched: list[float], num_recalled: int
) -> None:
    """Also those that were in the cpu pool only until then."""
    kill_after(tiny_model_dir, tmp_path, "switch", 1, num_recalled)
    with opened(tiny_model_dir, tmp_path, recall_blocks=num_recalled) as engine:
        session = engine.session("victim")
        assert session.mode == "full"
        assert 0 < session.stats().num_computed < NUM_FED - 1, "the rest was read in `window`"
        assert scores_of(session, MORE) == pytest.approx(switched, abs=1e-3)
        check_names(session)


@RECALLING
def test_asleep_it_forgets_nothing(
    tiny_model_dir: Path, tmp_path: Path, dense: list[float], num_recalled: int
) -> None:
    found: list[float] = []
    with opened(tiny_model_dir, tmp_path, recall_blocks=num_recalled) as engine:
        engine.session("one").feed([some_ids(NUM_FED)]).run()
    for low in range(0, len(MORE), 50):
        with opened(tiny_model_dir, tmp_path, recall_blocks=num_recalled) as engine:
            session = engine.session("one")
            assert session.mode == "full"
            found += scores_of(session, MORE[low : low + 50])
            check_names(session)
    assert found == pytest.approx(dense, abs=1e-3)


PLAN: list[tuple[str, int]] = [
    ("window", 401),
    ("full", 130),
    ("recall", 300),
    ("full", 99),
    ("window", 120),
]


def in_turn(session: Session, place: int) -> list[Any]:
    """Read and answer in the mode of that place of the plan."""
    mode, count = PLAN[place]
    session.set_mode(mode)  # type: ignore[arg-type]
    assert session.mode == mode
    low = sum(count for _, count in PLAN[:place])
    found: list[Any] = [tokens_of(session, 12)] if place else []
    return [*found, scores_of(session, some_ids(1100)[low : low + count])]


@pytest.mark.parametrize("way", ["sleep", "kill"])
def test_modes_follow_each_other_with_restarts_in_between(
    tiny_model_dir: Path, tmp_path: Path, way: str
) -> None:
    others = {"attention": "window", "recall_blocks": 3, "num_sink_tokens": 4}
    with opened(tiny_model_dir, None, **others, **{"cpu_bytes": "64MiB"}) as engine:
        session = engine.session("calm")
        expected = [in_turn(session, place) for place in range(len(PLAN))]
        expected_tokens = tokens_of(session, 30)
    store = tmp_path / "store"
    for place in range(len(PLAN)):
        with opened(tiny_model_dir, store, **others) as engine:
            session = engine.session("one")
            assert session.mode == PLAN[max(0, place - 1)][0]
            [*tokens, scores] = in_turn(session, place)
            check_names(session)
            if way == "kill":
                engine._tiers.flush()
                store = killed(store, str(place))
        assert tokens == expected[place][:-1]
        assert scores == pytest.approx(expected[place][-1], abs=2e-4)
    with opened(tiny_model_dir, store, **others) as engine:
        session = engine.session("one")
        assert session.mode == "window"
        assert tokens_of(session, 30) == expected_tokens
        check_names(session)


def test_a_question_read_in_another_mode_is_computed_again_once(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    """Killed right after it was written that it will be, and in the answer."""
    others = {"attention": "window", "recall_blocks": 3, "checkpoint_tokens": 64}
    with opened(tiny_model_dir, None, **others, **{"cpu_bytes": "64MiB"}) as engine:
        session = engine.session("calm")
        session.feed([some_ids(NUM_FED)]).run()
        session.set_mode("full")
        expected = tokens_of(session, 100)
    store = tmp_path / "store"
    with opened(tiny_model_dir, store, **others) as engine:
        session = engine.session("one")
        session.feed([some_ids(NUM_FED)]).run()
        session.set_mode("full")
        live = session._live
        assert live.checkpointer is not None and live.journal is not None
        live.checkpointer.write_now()
        stored = live.journal.state.last_checkpoint
        assert stored is not None and stored.token_index == 896
        live.executor.choose_blocks(live.sequence)
        assert live.sequence.num_computed == 832 and live.journal.state.last_checkpoint is None
        store = killed(store, "voided")
    with opened(tiny_model_dir, store, **others) as engine:
        session = engine.session("one")
        assert 0 < session.stats().num_computed <= 832
        assert tokens_of(session, 10) == expected[:10]
        engine._tiers.flush()
        store = killed(store, "answering")
    with opened(tiny_model_dir, store, **others) as engine:
        session = engine.session("one")
        assert tokens_of(session, 90) == expected[10:]
        check_names(session)


def test_a_checkpoint_of_what_is_computed_again_is_void(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    """It was under way when the question was given up: its record must not come after that."""
    others = {"attention": "window", "recall_blocks": 3, "checkpoint_tokens": 4096}
    with opened(tiny_model_dir, tmp_path, **others) as engine:
        session = engine.session("one")
        session.feed([some_ids(NUM_FED)]).run()
        session.set_mode("full")
        live, may_write = session._live, threading.Event()
        assert live.checkpointer is not None and live.journal is not None
        with inject("worker", lambda: may_write.wait(60)):
            live.checkpointer.begin()
            live.executor.choose_blocks(live.sequence)
            assert live.sequence.num_computed == 832
            may_write.set()
            engine._tiers.flush()
        live.checkpointer.after_step()
        assert live.journal.state.last_checkpoint is None


@RECALLING
def test_forks_and_rewinds_last(tiny_model_dir: Path, tmp_path: Path, num_recalled: int) -> None:
    store = tmp_path / "store"
    with opened(tiny_model_dir, store, recall_blocks=num_recalled) as engine:
        session = engine.session("one")
        session.feed([some_ids(NUM_FED)]).run()
        fork = session.fork("two")
        session.rewind(450)
        fork.feed([some_ids(100, seed=17)]).run()
        check_names(session)
        check_names(fork)
        engine._tiers.flush()
        copied = killed(store, "killed")
    expected = {}
    for name, ids in {
        "one": some_ids(450),
        "two": some_ids(NUM_FED) + some_ids(100, seed=17),
    }.items():
        every = ids + MORE
        dense = expected_scores(tiny_model_dir, every, [FULL] * len(every))
        expected[name] = dense[-len(MORE) :]
    for path in (store, copied):
        with opened(tiny_model_dir, path, recall_blocks=num_recalled) as engine:
            for name, scores in expected.items():
                session = engine.session(name)
                assert session.mode == "full"
                assert scores_of(session, MORE) == pytest.approx(scores, abs=1e-3)
                check_names(session)
            # A resumed session that has computed nothing yet goes back, too.
        with opened(tiny_model_dir, path, recall_blocks=num_recalled) as engine:
            session = engine.session("one")
            session.rewind(451)
            assert session.mode == "full"
            ids = [*some_ids(450), MORE[0], *MORE]
            dense = expected_scores(tiny_model_dir, ids, [FULL] * len(ids))[-len(MORE) :]
            assert scores_of(session, MORE) == pytest.approx(dense, abs=1e-3)
            check_names(session)


def test_a_rewind_to_before_the_mode_goes_on_in_it(tiny_model_dir: Path, tmp_path: Path) -> None:
    store = tmp_path / "store"
    with opened(tiny_model_dir, store, attention="window") as engine:
        session = engine.session("one")
        session.feed([some_ids(701)]).run()
        session.set_mode("full")
        session.feed([some_ids(NUM_FED)[701:]]).run()
        session.rewind(601)
        engine._tiers.flush()
        copied = killed(store, "killed")
        assert session.mode == "full"
    ids = some_ids(601) + MORE
    windows = [WINDOW_SIZE] * 600 + [FULL] * (len(MORE) + 1)
    expected = expected_scores(tiny_model_dir, ids, windows)[-len(MORE) :]
    for path in (store, copied):
        with opened(tiny_model_dir, path, attention="window") as engine:
            session = engine.session("one")
            assert session.mode == "full"
            assert scores_of(session, MORE) == pytest.approx(expected, abs=1e-3)
            check_names(session)


def test_with_a_damaged_block_it_opens_and_goes_on_in_another_mode(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    with opened(tiny_model_dir, tmp_path, codec="raw") as engine:
        session = engine.session("one")
        session.feed([some_ids(NUM_FED)]).run()
        held = session._live.sequence.table.recalled[3]
        content = engine._gpu_pool.data[held][0, 0, 0, :4].contiguous().numpy().tobytes()
    assert flip_block(tmp_path, content) >= 1
    for _ in range(2):
        # Asleep in between it is still in `full`, and still opens.
        with opened(tiny_model_dir, tmp_path, codec="raw") as engine:
            session = engine.session("one")
            assert session.mode == "full" and session.num_tokens == NUM_FED
            with pytest.raises(AbsentBlockError, match=r"tokens 192 to 255 .* in mode 'window'"):
                session.generate(seeded(5)).run()
            engine._tiers.check_integrity()
            assert session.mode == "full" and session.num_tokens == NUM_FED
    with opened(tiny_model_dir, tmp_path, codec="raw") as engine:
        session = engine.session("one")
        session.set_mode("window")
        assert len(tokens_of(session, 20)) == 20
        check_names(session)
    with opened(tiny_model_dir, tmp_path, codec="raw") as engine:
        session = engine.session("one")
        assert session.mode == "window" and session.num_tokens == NUM_FED + 20
        assert len(tokens_of(session, 5)) == 5
        with pytest.raises(AbsentBlockError, match="tokens 192 to 255"):
            session.set_mode("full")
        assert session.mode == "window" and len(tokens_of(session, 5)) == 5


def test_a_pool_that_is_too_small_says_how_much_it_needs(
    tiny_model_dir: Path, tmp_path: Path, dense: list[float]
) -> None:
    store = tmp_path / "store"
    with opened(tiny_model_dir, store) as engine:
        engine.session("one").feed([some_ids(NUM_FED)]).run()
    small = {"max_sessions": 1, "gpu_bytes": "320KiB"}
    with opened(tiny_model_dir, store, **small) as engine:
        session = engine.session("one")
        with pytest.raises(PoolFullError, match=r"gpu_bytes of at least ") as caught:
            session.feed([MORE]).run()
        named = str(caught.value).split("at least ")[1].split(",")[0]
    copied = killed(store, "killed")
    with opened(tiny_model_dir, copied, **small) as engine:
        session = engine.session("one")
        session.set_mode("window")
        assert len(tokens_of(session, 5)) == 5
    with opened(tiny_model_dir, store, max_sessions=1, gpu_bytes=named) as engine:
        session = engine.session("one")
        assert session.mode == "full" and session.num_tokens == NUM_FED + len(MORE)
        session.rewind(NUM_FED)
        assert scores_of(session, MORE) == pytest.approx(dense, abs=1e-3)


@pytest.mark.parametrize("retain", ["window", "none"])
def test_with_any_retain_what_was_read_in_full_is_there_after_a_restart(
    tiny_model_dir: Path, tmp_path: Path, dense: list[float], retain: str
) -> None:
    """`window` keeps what a resume needs, which is everything; `none` computes all of it anew."""
    store = tmp_path / "store"
    with opened(tiny_model_dir, store, retain=retain) as engine:
        engine.session("one").feed([some_ids(NUM_FED)]).run()
        engine._tiers.flush()
        copied = killed(store, "killed")
    for path in (copied, store):
        with opened(tiny_model_dir, path, retain=retain) as engine:
            session = engine.session("one")
            assert (session.stats().num_computed == 0) == (retain == "none")
            assert scores_of(session, MORE) == pytest.approx(dense, abs=1e-3)
            check_names(session)
            session.set_mode("window")
            for seed in (13, 17, 19):
                session.feed([some_ids(300, seed)]).run()
            engine._tiers.flush()
            # No longer needed by anyone.
            assert engine.usage()["ssd"].num_blocks <= 3 * (WINDOW_SIZE // 64 + 2)


def test_a_checkpoint_has_what_a_lagging_writer_gave_up(
    tiny_model_dir: Path, tmp_path: Path, dense: list[float]
) -> None:
    store = tmp_path / "store"
    drops = {"on_pressure": "drop", "cpu_bytes": 0, "checkpoint_tokens": 4096}
    with opened(tiny_model_dir, store, **drops) as engine:
        session, is_read = engine.session("one"), threading.Event()
        with inject("worker", is_read.wait):
            session.feed([some_ids(NUM_FED)]).run()
            is_read.set()
        assert engine.counters()["dropped"] > 0
        assert session._live.checkpointer is not None
        session._live.checkpointer.write_now()
        store = killed(store, "killed")
    with opened(tiny_model_dir, store, **drops) as engine:
        session = engine.session("one")
        assert session.stats().num_computed == 896
        assert scores_of(session, MORE) == pytest.approx(dense, abs=1e-3)


def test_engines_with_and_without_recall_open_each_others_sessions(
    tiny_model_dir: Path, tmp_path: Path, dense: list[float]
) -> None:
    with opened(tiny_model_dir, tmp_path, recall_blocks=3) as engine:
        session = engine.session("one")
        session.feed([some_ids(NUM_FED)]).run()
        session.fork("left").set_mode("window")
    with opened(tiny_model_dir, tmp_path, attention="window") as engine:
        session, left = engine.session("one"), engine.session("left")
        assert (session.mode, left.mode) == ("full", "window")
        assert scores_of(session, MORE) == pytest.approx(dense, abs=1e-3)
        assert len(tokens_of(left, 70)) == 70
        check_names(left)
    with opened(tiny_model_dir, tmp_path, attention="window", recall_blocks=3) as engine:
        session, left = engine.session("one"), engine.session("left")
        assert (session.mode, left.mode) == ("full", "window")
        assert len(tokens_of(session, 5)) == 5
        left.set_mode("recall")
        assert len(tokens_of(left, 5)) == 5
        assert engine.counters()["absent"] == 0
        check_names(session)
    with (
        opened(tiny_model_dir, tmp_path, attention="window") as engine,
        pytest.raises(SessionError, match="recall_blocks=3"),
    ):
        engine.session("left")


def test_a_mode_that_cannot_be_written_does_not_begin(tiny_model_dir: Path, tmp_path: Path) -> None:
    def full() -> None:
        raise OSError(28, "No space left on device")

    with opened(tiny_model_dir, tmp_path, attention="window", recall_blocks=3) as engine:
        session = engine.session("one")
        session.feed([some_ids(NUM_FED)]).run()
        engine._tiers.flush()
        for before, after in (("window", "full"), ("full", "recall")):
            session.set_mode(before)  # type: ignore[arg-type]
            held = engine.usage()["gpu"].num_blocks
            with inject("journal.write", full), pytest.raises(JournalError, match="No space left"):
                session.set_mode(after)  # type: ignore[arg-type]
            assert session.mode == before
            engine._tiers.flush()
            assert engine.usage()["gpu"].num_blocks == held
            engine._tiers.check_integrity()
            assert len(tokens_of(session, 5)) == 5


def test_attention_is_for_sessions_that_never_had_a_mode(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    with opened(tiny_model_dir, tmp_path, attention="window") as engine:
        engine.session("plain").feed([some_ids(NUM_FED)]).run()
        other = engine.session("set")
        other.feed([some_ids(300)]).run()
        other.set_mode("full")
        other.set_mode("window")
    with opened(tiny_model_dir, tmp_path) as engine:
        assert engine.session("set").mode == "window"
        session = engine.session("plain")
        assert session.mode == "full"
        found = scores_of(session, MORE)
        check_names(session)
    ids = some_ids(NUM_FED) + MORE
    windows = [WINDOW_SIZE] * (NUM_FED - 1) + [FULL] * (len(MORE) + 1)
    expected = expected_scores(tiny_model_dir, ids, windows)[-len(MORE) :]
    assert found == pytest.approx(expected, abs=1e-3)


def test_nothing_is_left_of_a_session_that_is_deleted(tiny_model_dir: Path, tmp_path: Path) -> None:
    with opened(tiny_model_dir, tmp_path) as engine:
        session = engine.session("one")
        session.feed([some_ids(NUM_FED)]).run()
        session.rewind(500)
    with opened(tiny_model_dir, tmp_path) as engine:
        session = engine.session("one")
        session.feed([MORE]).run()
        session.delete()
        engine._tiers.flush()
        assert list((tmp_path / "sessions").iterdir()) == []
        assert engine.usage()["gpu"].num_blocks == engine.usage()["ssd"].num_blocks == 0
        assert engine._opener._entrance._room.owners == set()
