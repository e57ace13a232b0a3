"""Recall with a store: a session that slept or was killed goes on as if nothing had happened."""

import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import recall_child
from damaged import flip_block
from recall_child import NUM_FED, STRIDE, options, seeded, some_ids

from streamkv import Engine, Session
from streamkv.errors import JournalError, SessionError
from streamkv.journal_records import Chosen
from streamkv.tiers.faults import inject

MORE = some_ids(150, seed=11)


def tokens_of(session: Session, num_tokens: int) -> list[int | None]:
    return [delta.token_id for delta in session.generate(seeded(num_tokens))]


def scores_of(session: Session, ids: list[int]) -> list[float]:
    return [score.logprob or 0.0 for score in session.score([ids])]


def ids_of(session: Session) -> list[int]:
    journal = session._live.journal
    assert journal is not None
    return journal.ids(0, journal.state.num_tokens).tolist()


def recall_of(session: Session) -> tuple[Any, ...]:
    """Mode, salt, what is recalled now and what is due."""
    recaller = session._live.executor.recaller
    assert recaller is not None
    stream = recaller._streams[session._live.sequence]
    recalled = tuple(session._live.sequence.table.recalled)
    due = [(choice.token_index, choice.choosing.blocks()) for choice in stream.schedule._choices]
    return stream.newest, list(stream.due), recalled, due


def choices_of(session: Session) -> list[Chosen]:
    """All choices that were made, also those that are behind."""
    return list(session._live.past.state.recall.choices(0))


@pytest.fixture(scope="module")
def calm(tiny_model_dir: Path) -> dict[str, Any]:
    """What an engine without a store does, with room for everything in memory."""
    with Engine(str(tiny_model_dir), options(None, cpu_bytes="64MiB")) as engine:
        session = engine.session("calm")
        session.feed([some_ids(NUM_FED)]).run()
        state, choices = recall_of(session)[2:], choices_of(session)
        with session.fork("scored") as fork:
            scores = scores_of(fork, MORE)
        tokens = tokens_of(session, 200)
        attended = [(each.start, each.end) for each in session.attended()]
    return {
        "tokens": tokens,
        "scores": scores,
        "attended": attended,
        "state": state,
        "choices": choices,
    }


def kill_after(model: Path, store: Path, what: str, num_lines: int) -> list[int]:
    """Run the child until it has said `num_lines` lines, then SIGKILL it; returns all it said."""
    command = [sys.executable, recall_child.__file__, str(model), str(store), what]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        said = [int(child.stdout.readline()) for _ in range(num_lines)]
        child.kill()
        said += [int(line) for line in child.stdout.read().split("\n")[:-1]]
    return said


def killed(store: Path, target: Path) -> str:
    """What a kill at this moment would leave behind."""
    shutil.copytree(store, target)
    return str(target)


def test_killed_in_feeds_it_goes_on_as_if_it_had_not_been(
    tiny_model_dir: Path, tmp_path: Path, calm: dict[str, Any]
) -> None:
    for num_lines in (25, 14):
        said = kill_after(tiny_model_dir, tmp_path, "feed", num_lines)
    with Engine(str(tiny_model_dir), options(str(tmp_path))) as engine:
        session = engine.session("victim")
        assert session.resumed and session.mode == "recall"
        assert said[-1] > session.stats().num_computed > 0, "it starts from a checkpoint"
        session.feed([some_ids(NUM_FED)[session.num_tokens :]]).run()
        assert recall_of(session)[2:] == calm["state"]
        assert choices_of(session) == calm["choices"], "none is made twice, none is left out"
        assert tokens_of(session, 60) == calm["tokens"][:60]
        assert engine.counters()["absent"] == 0


def test_killed_in_an_answer_it_goes_on_with_the_same_blocks(
    tiny_model_dir: Path, tmp_path: Path, calm: dict[str, Any]
) -> None:
    for num_lines in (40, 30):
        kill_after(tiny_model_dir, tmp_path, "answer", num_lines)
    with Engine(str(tiny_model_dir), options(str(tmp_path))) as engine:
        session = engine.session("victim")
        num_left = 130 - (session.num_tokens - NUM_FED)
        assert num_left > 0
        tokens_of(session, num_left)
        assert ids_of(session)[NUM_FED:] == calm["tokens"][:130]
        assert engine.counters()["absent"] == 0


def test_asleep_it_forgets_nothing(
    tiny_model_dir: Path, tmp_path: Path, calm: dict[str, Any]
) -> None:
    with Engine(str(tiny_model_dir), options(str(tmp_path))) as engine:
        session = engine.session("one")
        session.feed([some_ids(NUM_FED)]).run()
        before = recall_of(session)
        assert before[2:] == calm["state"]
    with Engine(str(tiny_model_dir), options(str(tmp_path))) as engine:
        session = engine.session("one")
        assert recall_of(session)[0] == before[0]
        told = session.attended()
        assert told and engine.counters()["ssd_reads"] > 0
        assert all(each.weight is None for each in told), "weights are not written down"
        assert scores_of(session, MORE) == pytest.approx(calm["scores"], abs=2e-4)
    with Engine(str(tiny_model_dir), options(str(tmp_path))) as engine:
        session = engine.session("one")
        session.rewind(NUM_FED)
        assert tokens_of(session, 60) == calm["tokens"][:60]
        told = [(each.start, each.end) for each in session.attended()]
        assert told and set(told) <= set(calm["attended"])
        engine._tiers.check_integrity()


@pytest.mark.parametrize("num_more", [0, 1, 30, 64, 100])
def test_woken_right_before_an_answer_its_last_queries_choose(
    tiny_model_dir: Path, tmp_path: Path, num_more: int
) -> None:
    fed = some_ids(960 + num_more)
    with Engine(str(tiny_model_dir), options(None, cpu_bytes="64MiB")) as engine:
        session = engine.session("calm")
        session.feed([fed]).run()
        expected = tokens_of(session, 30)
    with Engine(str(tiny_model_dir), options(str(tmp_path))) as engine:
        engine.session("one").feed([fed]).run()
        engine._tiers.flush()
        copied = killed(tmp_path, tmp_path.with_name(tmp_path.name + "-killed"))
    for store in (str(tmp_path), copied):
        with Engine(str(tiny_model_dir), options(store)) as engine:
            assert tokens_of(engine.session("one"), 30) == expected


def test_the_mode_lasts_and_begins_at_its_token(tiny_model_dir: Path, tmp_path: Path) -> None:
    def read_then_ask(session: Session) -> None:
        session.feed([some_ids(700)]).run()
        session.set_mode("recall", 2)
        session.feed([MORE]).run()
        session.set_mode("window")
        session.feed([some_ids(100, seed=7)]).run()
        session.set_mode("recall", 3)

    with Engine(str(tiny_model_dir), options(None, attention="window", cpu_bytes="64MiB")) as calm:
        session = calm.session("calm")
        read_then_ask(session)
        expected = tokens_of(session, 50)
    window = options(str(tmp_path), attention="window", cpu_bytes="64MiB")
    with Engine(str(tiny_model_dir), window) as engine:
        session = engine.session("one")
        read_then_ask(session)
        before = recall_of(session)
        checkpointer = session._live.checkpointer
        assert checkpointer is not None
        checkpointer.write_now()
        copied = killed(tmp_path, tmp_path.with_name(tmp_path.name + "-killed"))
    for store in (str(tmp_path), copied):
        with Engine(str(tiny_model_dir), options(store, attention="window")) as engine:
            session = engine.session("one")
            assert session.mode == "recall" and recall_of(session)[0] == before[0]
            assert tokens_of(session, 50) == expected


def test_a_kill_leaves_every_block_before_a_checkpoint_to_recall(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    """Also those that came and went between two checkpoints, and fit into the cpu pool."""
    rare = {"cpu_bytes": "64MiB", "checkpoint_tokens": 4096}
    with Engine(str(tiny_model_dir), options(str(tmp_path), **rare)) as engine:
        session = engine.session("one")
        session.feed([some_ids(1300)]).run()
        checkpointer = session._live.checkpointer
        assert checkpointer is not None
        checkpointer.write_now()
        copied = killed(tmp_path, tmp_path.with_name(tmp_path.name + "-killed"))
    with Engine(str(tiny_model_dir), options(copied)) as engine:
        sequence = engine.session("one")._live.sequence
        recaller = engine._executor.recaller
        assert recaller is not None
        keys = recaller.keys(sequence, 0, 20)
        assert len(keys) == 20
        assert [index for index, key in enumerate(keys) if not engine._tiers.where(key)] == []


@pytest.mark.parametrize("offset", [-1, 0, 1])
def test_killed_around_every_boundary(tiny_model_dir: Path, tmp_path: Path, offset: int) -> None:
    """Fed so that a step ends there; the process is killed at each."""
    ends = [boundary + offset + 1 for boundary in range(512, 512 + 5 * STRIDE, STRIDE)]
    with Engine(str(tiny_model_dir), options(None, cpu_bytes="64MiB")) as engine:
        session = engine.session("calm")
        expected = []
        for end in ends:
            session.feed([some_ids(end)[session.num_tokens :]]).run()
            expected.append(recall_of(session)[2:])
        expected_tokens = tokens_of(session, 20)
    store = tmp_path / "0"
    for place, end in enumerate(ends, 1):
        with Engine(str(tiny_model_dir), options(str(store), checkpoint_tokens=64)) as engine:
            session = engine.session("one")
            session.feed([some_ids(end)[session.num_tokens :]]).run()
            assert session.stats().num_computed == end - 1
            assert recall_of(session)[2:] == expected[place - 1]
            engine._tiers.flush()
            killed(store, tmp_path / str(place))
        store = tmp_path / str(place)
    with Engine(str(tiny_model_dir), options(str(store))) as engine:
        assert tokens_of(engine.session("one"), 20) == expected_tokens


def test_a_choice_for_tokens_already_computed_voids_them(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    """As an answer's choice for the end of its question: killed right after it was written."""
    with Engine(str(tiny_model_dir), options(str(tmp_path), checkpoint_tokens=64)) as engine:
        session = engine.session("one")
        session.feed([some_ids(1000)]).run()
        engine._tiers.flush()
        live = session._live
        assert live.checkpointer is not None and live.journal is not None
        live.checkpointer.write_now()
        stored = live.journal.state.last_checkpoint
        assert stored is not None and stored.token_index == 960
        recaller = live.executor.recaller
        assert recaller is not None
        log = recaller._streams[live.sequence].log
        log.write(Chosen(token_index=940, made_at=999, blocks=(1, 5)))
        assert live.journal.state.last_checkpoint is None
        copied = killed(tmp_path, tmp_path.with_name(tmp_path.name + "-killed"))
    with Engine(str(tiny_model_dir), options(copied)) as engine:
        session = engine.session("one")
        assert 0 < session.stats().num_computed <= 940
        session.feed([MORE[:1]]).run()
        assert recall_of(session)[2] == (1, 5)
        assert len(tokens_of(session, 10)) == 10


def test_a_choice_that_cannot_be_written_is_not_used(tiny_model_dir: Path, tmp_path: Path) -> None:
    def full() -> None:
        raise OSError(28, "No space left on device")

    with Engine(str(tiny_model_dir), options(str(tmp_path))) as engine:
        session = engine.session("one")
        session.feed([some_ids(1000)]).run()
        before = recall_of(session)[2]
        params = seeded(30)
        with inject("journal.write", full), pytest.raises(JournalError, match="No space left"):
            session.generate(params).run()
        assert recall_of(session)[2] == before
        assert len(tokens_of(session, 30)) == 30
        assert recall_of(session)[2] != before
        engine._tiers.check_integrity()


def test_a_damaged_block_is_absent_and_counted_and_the_answer_goes_on(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    raw = options(str(tmp_path), codec="raw")
    with Engine(str(tiny_model_dir), raw) as engine:
        session = engine.session("one")
        session.feed([some_ids(1000)]).run()
        told = [each.start // 64 for each in session.attended()]
        recalled = session._live.sequence.table.recalled
        # A resume begins a little earlier, with the choice before.
        before = next(made for made in choices_of(session) if made.token_index == 1000 - 64 - 40)
        victim = next(index for index in recalled if index in before.blocks)
        block = engine._gpu_pool.data[recalled[victim]]
        content = block[0, 0, 0, :4].contiguous().numpy().tobytes()
        assert victim in told
    assert flip_block(tmp_path, content) >= 1
    with Engine(str(tiny_model_dir), raw) as engine:
        session = engine.session("one")
        assert victim not in recall_of(session)[2] and len(recall_of(session)[2]) == 2
        assert len(tokens_of(session, 20)) == 20
        counted = session.stats().counters
        assert counted["absent"] >= 1 and counted["misses"] >= 1
        assert engine.counters()["ssd_corrupt"] >= 1
        engine._tiers.check_integrity()


def test_a_damaged_digest_is_a_block_that_is_not_chosen(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    with Engine(str(tiny_model_dir), options(str(tmp_path))) as engine:
        session = engine.session("one")
        session.feed([some_ids(1000)]).run()
        tokens_of(session, 5)
        victim = session.attended()[0].start // 64
    path = tmp_path / "sessions" / "one.digests"
    data = bytearray(path.read_bytes())
    row = (len(data) - 24) // 15
    data[24 + victim * row + row // 2] ^= 1
    path.write_bytes(data)
    with Engine(str(tiny_model_dir), options(str(tmp_path))) as engine:
        session = engine.session("one")
        session.rewind(1000)
        tokens_of(session, 5)
        told = [each.start // 64 for each in session.attended()]
        assert told and victim not in told


def test_with_its_store_removed_an_open_session_goes_on_and_says_what_it_cannot_write(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    store = tmp_path / "store"
    with Engine(str(tiny_model_dir), options(str(store), checkpoint_tokens=64)) as engine:
        session = engine.session("one")
        session.feed([some_ids(1000)]).run()
        shutil.rmtree(store)
        session.feed([MORE]).run()
        said = []
        with pytest.raises(JournalError, match="was deleted"):
            for delta in session.generate(seeded(30)):
                said.append(delta)
        assert len(said) == 29
        with pytest.raises(JournalError, match="cannot be created"):
            engine.session("two")
        with pytest.raises(JournalError):
            session.fork("three")
        engine._tiers.check_integrity()


def test_a_slow_disk_gives_the_same_tokens(
    tiny_model_dir: Path, tmp_path: Path, calm: dict[str, Any]
) -> None:
    """Every read of a stored block waits until the test lets it go on."""
    may_read, waiting = threading.Semaphore(0), threading.Semaphore(0)
    ended = threading.Event()

    def wait() -> None:
        waiting.release()
        while not may_read.acquire(timeout=0.05):
            if ended.is_set():
                return

    found: list[int | None] = []

    def answer() -> None:
        with Engine(str(tiny_model_dir), options(str(tmp_path))) as engine:
            session = engine.session("one")
            session.feed([some_ids(NUM_FED)]).run()
            found.extend(tokens_of(session, 60))

    with inject("ssd.get", wait):
        thread = threading.Thread(target=answer)
        thread.start()
        num_reads = 0
        while thread.is_alive():
            if waiting.acquire(timeout=0.05):
                num_reads += 1
                may_read.release()
        ended.set()
        thread.join()
    assert num_reads > 5
    assert found == calm["tokens"][:60]


def test_what_is_chosen_is_read_ahead_while_its_stride_goes_by(
    tiny_model_dir: Path, tmp_path: Path, calm: dict[str, Any]
) -> None:
    """With blocks on the ssd and room in the cpu pool: none is read when it is due."""
    with Engine(str(tiny_model_dir), options(str(tmp_path))) as engine:
        engine.session("one").feed([some_ids(NUM_FED)]).run()
    # Started again, nothing is in memory but the window.
    with Engine(str(tiny_model_dir), options(str(tmp_path), cpu_bytes="64MiB")) as engine:
        session = engine.session("one")
        answer = session.generate(seeded(200))
        tokens, ssd_reads = list[int | None](), None
        while len(tokens) < 200:
            tokens.append(next(answer).token_id)
            while engine._tiers._prefetching._reads:
                time.sleep(0.001)
            if ssd_reads is None:
                ssd_reads = engine.counters()["ssd_reads"]
        counted = engine.counters()
    assert tokens == calm["tokens"]
    assert counted["ssd_reads"] == ssd_reads
    assert counted["prefetched"] > 0 and counted["cpu_reads"] > 0


def test_blocks_recalled_while_they_are_written_down_are_the_same(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    """The writer holds every copy back until its queue is full: blocks leave the window before."""

    def tokens(store: Path, holds_back: bool) -> list[int | None]:
        changed = {"cpu_bytes": "64MiB", "recall_blocks": 16, "prefill_chunk": 512}
        everything = options(str(store), attention="window", **changed)
        with Engine(str(tiny_model_dir), everything) as engine:
            go_on, writer = threading.Event(), engine._tiers._writer

            def hold_back() -> None:
                while holds_back and writer.has_room() and not go_on.wait(0.002):
                    pass

            with inject("worker", hold_back):
                session = engine.session("one")
                session.feed([some_ids(1100)]).run()
                session.set_mode("recall")
                found = tokens_of(session, 60)
                go_on.set()
                engine._tiers.flush()
            # Held back, blocks were recalled that only the gpu pool had.
            assert engine.counters()["shared"] > 0 or not holds_back
            assert engine.counters()["absent"] == 0
            engine._tiers.check_integrity()
        return found

    assert tokens(tmp_path / "held", True) == tokens(tmp_path / "free", False)


def test_an_engine_without_room_refuses_a_session_that_recalls(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    with Engine(str(tiny_model_dir), options(str(tmp_path))) as engine:
        engine.session("one").feed([some_ids(300)]).run()
    for few in ({"recall_blocks": 2}, {"recall_blocks": 0, "attention": "window"}):
        with Engine(str(tiny_model_dir), options(str(tmp_path), **few)) as engine:
            with pytest.raises(SessionError, match="recall_blocks=3"):
                engine.session("one")
            assert engine.usage()["gpu"].num_blocks == 0
            assert not engine.session(f"with {few['recall_blocks']}").resumed


def test_a_session_takes_its_digests_with_it(tiny_model_dir: Path, tmp_path: Path) -> None:
    with Engine(str(tiny_model_dir), options(str(tmp_path))) as engine:
        session = engine.session("one")
        session.feed([some_ids(640)]).run()
        digests = tmp_path / "sessions" / "one.digests"
        # As a checkpoint does.
        engine._executor.before_checkpoint(session._live.sequence)
        recaller = engine._executor.recaller
        assert recaller is not None and recaller.digester.digest_bytes % (2 * 64 * 16) == 0
        row = 24 + recaller.digester.digest_bytes
        assert digests.stat().st_size == 24 + 9 * row
        fork = session.fork("two")
        fork.rewind(200)
        assert (tmp_path / "sessions" / "two.digests").stat().st_size == 24 + 3 * row
        assert digests.stat().st_size == 24 + 9 * row
        fork.feed([MORE]).run()
        session.delete()
        fork.generate(seeded(5)).run()
        fork.delete()
        engine._tiers.flush()
        assert list((tmp_path / "sessions").iterdir()) == []
        assert engine.usage()["gpu"].num_blocks == 0
        assert engine.usage()["ssd"].num_blocks == 0
