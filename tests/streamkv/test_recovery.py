"""Killed at any moment, a session goes on as if nothing had happened."""

import dataclasses
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import crash_child
import pytest
from crash_child import TEXT, config, greedy

from streamkv import Engine, EngineConfig, SamplingParams, Session

SYSTEM = "You keep a diary."


def kill_after(model: Path, store: Path, retain: str, what: str, num_lines: int) -> list[int]:
    """Run the child until it has said `num_lines` lines, then SIGKILL it; returns all it said."""
    command = [sys.executable, crash_child.__file__, str(model), str(store), retain, what]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        said = [int(child.stdout.readline()) for _ in range(num_lines)]
        child.kill()
        said += [int(line) for line in child.stdout.read().split("\n")[:-1]]
    return said


def ids_of(session: Session) -> list[int]:
    """The whole stream, from the journal."""
    journal = session._live.journal
    assert journal is not None
    return journal.ids(0, journal.state.num_tokens).tolist()


def undisturbed(model: Path, text: str, num_tokens: int) -> list[int]:
    """Tokens generated after a text by an engine that was never disturbed and has no store."""
    calm = EngineConfig(window_size=128, prefill_chunk=64, cpu_bytes=0)
    with Engine(str(model), calm) as engine:
        session = engine.session("calm", system=SYSTEM)
        session.feed(text).run()
        tokens = [delta.token_id for delta in session.generate(greedy(num_tokens))]
    return [token for token in tokens if token is not None]


@pytest.mark.parametrize("retain", ["all", "window", "none"])
def test_killed_in_a_feed_it_resumes_where_the_journal_ends(
    tiny_model_dir: Path, tmp_path: Path, retain: str
) -> None:
    said = kill_after(tiny_model_dir, tmp_path, retain, "feed", 25)
    with Engine(str(tiny_model_dir), config(str(tmp_path), retain)) as engine:
        session = engine.session("victim")
        assert session.resumed
        assert session.num_tokens > said[-1]
        computed = session.stats().num_computed
        if retain != "none":
            assert said[-1] - computed <= 3 * 192, "a resume starts from a checkpoint"
            assert engine.counters()["promotions"] >= 2
        done = session.text_chars
        session.feed(TEXT[done : done + 500]).run()
        found = [delta.token_id for delta in session.generate(greedy(40))]
    assert found == undisturbed(tiny_model_dir, TEXT[: done + 500], 40)


def test_killed_in_a_generation_no_token_that_was_handed_out_is_lost(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    expected = undisturbed(tiny_model_dir, TEXT[:6000], 160)
    tokens: list[int] = []
    for num_lines in (50, 30):
        said = kill_after(tiny_model_dir, tmp_path, "all", "generate", num_lines)
        tokens += said
        with Engine(str(tiny_model_dir), config(str(tmp_path), "all")) as engine:
            stream = ids_of(engine.session("victim"))
        num_fed = len(stream) - len(tokens)
        # A token may have been journaled and not yet been said.
        handed_out = stream[: num_fed + len(tokens)][-len(tokens) :]
        if handed_out != tokens:
            handed_out = stream[-len(tokens) - 1 : -1]
        assert handed_out == tokens
        tokens = tokens if stream[-1] == tokens[-1] else [*tokens, stream[-1]]
    with Engine(str(tiny_model_dir), config(str(tmp_path), "all")) as engine:
        rest = [d.token_id for d in engine.session("victim").generate(greedy(20))]
    assert [*tokens, *rest][:160] == expected[: len(tokens) + 20]


def damaged(name: str) -> Callable[[Path], None]:
    """What can happen to a store between two processes."""

    def remove_blocks(store: Path) -> None:
        shutil.rmtree(store / "blocks")

    def flip_bytes(store: Path) -> None:
        path = store / "blocks" / "data.mdb"
        data = bytearray(path.read_bytes())
        for place in range(len(data) // 2, len(data), 4096):
            data[place + 100] ^= 0xFF
        path.write_bytes(data)

    return {"blocks removed": remove_blocks, "bytes flipped": flip_bytes}[name]


@pytest.mark.parametrize("what", ["blocks removed", "bytes flipped"])
def test_without_its_blocks_a_session_computes_its_window_anew(
    tiny_model_dir: Path, tmp_path: Path, what: str
) -> None:
    with Engine(str(tiny_model_dir), config(str(tmp_path), "all")) as engine:
        engine.session("victim", system=SYSTEM).feed(TEXT[:9000]).run()
    damaged(what)(tmp_path)
    with Engine(str(tiny_model_dir), config(str(tmp_path), "all")) as engine:
        session = engine.session("victim")
        num_computed = session.stats().num_computed
        found = [delta.token_id for delta in session.generate(greedy(30))]
        assert num_computed == 0
        assert engine.counters()["misses"] > 0
    assert found == undisturbed(tiny_model_dir, TEXT[:9000], 30)


def test_a_clean_close_resumes_without_computing_anything(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    with Engine(str(tiny_model_dir), config(str(tmp_path), "all")) as engine:
        session = engine.session("victim", system=SYSTEM)
        session.feed(TEXT[:5000]).run()
        before = session.stats()
    with Engine(str(tiny_model_dir), config(str(tmp_path), "all")) as engine:
        session = engine.session("victim")
        after = session.stats()
        assert (after.num_tokens, after.num_computed) == (before.num_tokens, before.num_computed)
        assert after.text_chars == before.text_chars
        found = [delta.token_id for delta in session.generate(greedy(30))]
    assert found == undisturbed(tiny_model_dir, TEXT[:5000], 30)


def test_a_session_closed_after_an_answer_computes_nothing_of_it_anew(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    """A decode step and a chunk round otherwise: what one made the other must not replace."""
    for num_tokens in (1, 2, 63, 64, 65):
        store = config(str(tmp_path / str(num_tokens)), "all")
        with Engine(str(tiny_model_dir), store) as engine, engine.session("one") as session:
            session.feed(TEXT[:300]).run()
            session.generate(greedy(num_tokens)).run()
            assert session.stats().num_computed == session.num_tokens - 2
            written = session.num_tokens - 1
        with Engine(str(tiny_model_dir), store) as engine, engine.session("one") as session:
            assert session.stats().num_computed == written


def test_kept_text_survives_a_restart(tiny_model_dir: Path, tmp_path: Path) -> None:
    found = []
    for cut in (False, True):
        store = tmp_path / str(cut)
        engine = Engine(str(tiny_model_dir), config(str(store), "all"))
        session = engine.session("victim", system=SYSTEM)
        session.feed(TEXT[:2000]).run()
        session.keep("The number is seven. ")
        session.feed(TEXT[2000:4000]).run()
        if cut:
            engine.close()
            shutil.rmtree(store / "blocks")
            engine = Engine(str(tiny_model_dir), config(str(store), "all"))
            session = engine.session("victim")
        session.feed(TEXT[4000:8000]).run()
        found.append([delta.token_id for delta in session.generate(greedy(30))])
        engine.close()
    assert found[0] == found[1]


def test_delete_leaves_nothing_of_the_session(tiny_model_dir: Path, tmp_path: Path) -> None:
    with Engine(str(tiny_model_dir), config(str(tmp_path), "all")) as engine:
        other = engine.session("other")
        other.feed(TEXT[:3000]).run()
        session = engine.session("victim")
        session.feed(TEXT[:8000]).run()
        other.close()
        kept = engine.usage()["ssd"].num_blocks
        session.delete()
        assert engine.session_names() == ["other"]
        assert engine.usage()["ssd"].num_blocks <= kept
        assert engine.usage()["gpu"].num_blocks == 0
        again = engine.session("victim")
        assert (again.num_tokens, again.resumed) == (0, False)
    with Engine(str(tiny_model_dir), config(str(tmp_path), "all")) as engine:
        assert engine.session("other").stats().num_computed > 0


def test_a_window_computed_anew_makes_checkpoints_again(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    model, options = str(tiny_model_dir), config(str(tmp_path), "all")
    with Engine(model, options) as engine:
        engine.session("victim", system=SYSTEM).feed(TEXT[:9000]).run()
    shutil.rmtree(tmp_path / "blocks")
    with Engine(model, options) as engine:
        engine.session("victim").feed(TEXT[9000:20000]).run()
    with Engine(model, options) as engine:
        session = engine.session("victim")
        assert session.stats().num_computed == session.num_tokens - 1
        found = [delta.token_id for delta in session.generate(greedy(10))]
    assert found == undisturbed(tiny_model_dir, TEXT[:20000], 10)


def test_a_window_without_sink_tokens_is_computed_anew(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    options = dataclasses.replace(config(str(tmp_path), "all"), num_sink_tokens=0)
    with Engine(str(tiny_model_dir), options) as engine:
        engine.session("victim").feed(TEXT[:9000]).run()
    shutil.rmtree(tmp_path / "blocks")
    found = []
    for directory in (str(tmp_path), None):
        here = dataclasses.replace(options, store=directory)
        with Engine(str(tiny_model_dir), here) as engine:
            session = engine.session("victim")
            if directory is None:
                session.feed(TEXT[:9000]).run()
            found.append([delta.token_id for delta in session.generate(greedy(10))])
    assert found[0] == found[1]


def test_a_generation_that_ends_with_a_full_block_is_resumed_without_computing(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    options = config(str(tmp_path), "all")
    with Engine(str(tiny_model_dir), options) as engine:
        session = engine.session("victim", system=SYSTEM)
        session.feed(TEXT[:1000]).run()
        answer = session.generate(SamplingParams(temperature=0.0, ignore_eos=True))
        while session._live.sequence.num_computed % 64:
            next(answer)
        answer.close()
    with Engine(str(tiny_model_dir), options) as engine:
        stats = engine.session("victim").stats()
        assert stats.num_computed >= stats.num_tokens - 2


@pytest.mark.parametrize(("before", "after"), [(50, 0), (300, 0), (300, 10), (1000, 1), (255, 70)])
def test_text_kept_in_the_open_block_is_resumed(
    tiny_model_dir: Path, tmp_path: Path, before: int, after: int
) -> None:
    """The window changes within the block that a clean close stores."""
    ids = [5 + 7 * index % 200 for index in range(before + after)]
    found = []
    for closes in (False, True):
        options = config(str(tmp_path / str(closes)), "all")
        with Engine(str(tiny_model_dir), options) as engine:
            session = engine.session("victim")
            session.feed([ids[:before]]).run()
            session.keep("K")
            if after:
                session.feed([ids[before:]]).run()
            if closes:
                session.close()
                session = engine.session("victim")
                assert session.num_tokens - session.stats().num_computed <= 64
            found.append([delta.token_id for delta in session.generate(greedy(8))])
    assert found[0] == found[1]
