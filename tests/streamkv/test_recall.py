"""Recall in live sessions: against attention to everything, and however the input is cut."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from late_copies import Exhausted, LateCopies

from streamkv import Engine, EngineConfig, SamplingParams, Session, device, digest_pages
from streamkv.digest_memory import DigestMemory
from streamkv.errors import ConfigError, StoreError

WINDOW_SIZE, STRIDE = 192, 64
NUM_TOKENS = 900
GREEDY = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)


def options(**others: Any) -> EngineConfig:
    given: dict[str, Any] = {
        "window_size": WINDOW_SIZE,
        "recall_blocks": 3,
        "recall_stride": STRIDE,
        "attention": "recall",
        "prefill_chunk": 128,
        "cpu_bytes": "64MiB",
        "max_sessions": 3,
        "compile": "off",
    }
    return EngineConfig(**(given | others))


def some_ids(count: int = NUM_TOKENS, seed: int = 3) -> list[int]:
    return [5 + (seed * index * index + 7 * index) % 290 for index in range(count)]


def scores(session: Session, ids: list[int], cut: int) -> list[float]:
    pieces = [ids[low : low + cut] for low in range(0, len(ids), cut)]
    return [score.logprob or 0.0 for score in session.score(pieces)]


@pytest.fixture(scope="module")
def dense(tiny_model_dir: Path) -> list[float]:
    """Every token attends to all before it."""
    with Engine(str(tiny_model_dir), EngineConfig(window_size=1000, compile="off")) as engine:
        return scores(engine.session("dense"), some_ids(), NUM_TOKENS)


@pytest.mark.parametrize("num_sinks", [0, 4, 70])
def test_recalling_everything_at_its_true_distance_is_attending_to_everything(
    tiny_model_dir: Path, dense: list[float], num_sinks: int
) -> None:
    everything = options(recall_blocks=20, position_policy="absolute", num_sink_tokens=num_sinks)
    with Engine(str(tiny_model_dir), everything) as engine:
        found = scores(engine.session("all"), some_ids(), NUM_TOKENS)
    assert found == pytest.approx(dense, abs=1e-4)


def test_a_window_alone_is_not(tiny_model_dir: Path, dense: list[float]) -> None:
    with Engine(str(tiny_model_dir), options(attention="window")) as engine:
        found = scores(engine.session("window"), some_ids(), NUM_TOKENS)
    assert found[:WINDOW_SIZE] == pytest.approx(dense[:WINDOW_SIZE], abs=1e-4)
    assert found != pytest.approx(dense, abs=1e-2)


@pytest.mark.parametrize("policy", ["far", "cache", "absolute"])
def test_results_do_not_depend_on_how_the_input_is_cut(tiny_model_dir: Path, policy: str) -> None:
    found, attended = [], []
    for cut in (NUM_TOKENS, 64, 7, 1):
        with Engine(str(tiny_model_dir), options(position_policy=policy)) as engine:
            session = engine.session("one")
            found.append(scores(session, some_ids(), cut))
            session.generate(GREEDY).run()
            attended.append([(each.start, each.end) for each in session.attended()])
    for others in found[1:]:
        assert others == pytest.approx(found[0], abs=2e-4)
    assert attended[0] and all(others == attended[0] for others in attended)


def test_the_native_decode_step_shows_its_queries_too(tiny_model_dir: Path) -> None:
    told = []
    for compile_ in ("off", "auto"):
        with Engine(str(tiny_model_dir), options(compile=compile_)) as engine:
            if compile_ == "auto" and not engine.wait_until_fast():
                pytest.skip("no native decode step on this machine")
            session = engine.session("one")
            session.feed([some_ids(700)]).run()
            params = SamplingParams(temperature=0.0, max_tokens=150, ignore_eos=True)
            tokens = [delta.token_id for delta in session.generate(params)]
            told.append((tokens, [each.start for each in session.attended()]))
    assert told[0] == told[1]


def test_an_answer_attends_to_what_the_question_chose(tiny_model_dir: Path) -> None:
    with Engine(str(tiny_model_dir), options(attention="window")) as engine:
        session = engine.session("one")
        assert session.mode == "window"
        session.feed([some_ids()]).run()
        assert session.attended() == []
        session.set_mode("recall", 2)
        assert session.mode == "recall"
        session.generate(GREEDY).run()
        told = session.attended()
        assert len(told) == 2
        ids = some_ids()
        for each in told:
            assert each.end - each.start == 64
            assert each.weight is not None and 0 < each.weight < 1
            # A token of it leaves the window of a query that the choice is for.
            assert each.start <= NUM_TOKENS + 2 * STRIDE - WINDOW_SIZE
            before = ids[max(0, each.start - 8) : each.start]
            decoder = engine.tokenizer.decoder(previous=before)
            assert each.text == "".join(map(decoder.push, ids[each.start : each.end]))
        session.set_mode("window")
        assert session.mode == "window"
        assert len(session._live.sequence.table.recalled) == 0


@pytest.mark.parametrize("has_store", [False, True])
@pytest.mark.parametrize("budget", [0, 40_000, 1 << 24])
def test_results_do_not_depend_on_where_digests_lie(
    tiny_model_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    budget: int,
    has_store: bool,
) -> None:
    """On a device, which writes and reads the host's memory late, in part of it, and on a CPU."""
    monkeypatch.setattr(digest_pages, "FIRST_BLOCKS", 2)
    copies = LateCopies()
    memories = [DigestMemory("cpu"), DigestMemory("cpu", budget, copies)]
    told = []
    for number, memory in enumerate(memories):
        monkeypatch.setattr(device, "DigestMemory", lambda *_, memory=memory: memory)
        store = str(tmp_path / str(number)) if has_store else None
        with Engine(str(tiny_model_dir), options(store=store, max_sessions=4)) as engine:
            session, other = engine.session("one"), engine.session("other")
            other.feed([some_ids(500, seed=5)]).run()
            found: list[object] = [scores(session, some_ids(), 7)]
            if has_store:
                session.close()
                session = engine.session("one")
            fork = session.fork("fork")
            for each in (session, fork, other):
                each.feed([some_ids(300, seed=11)]).run()
                found.append([delta.token_id for delta in each.generate(GREEDY)])
                found.append(each.attended())
            session.rewind(400)
            session.feed([some_ids(300, seed=7)]).run()
            found += [[delta.token_id for delta in session.generate(GREEDY)], session.attended()]
            usage = engine.digest_usage()
            assert usage == session.stats().digests and usage.num_lost == 0
            assert (usage.gpu_bytes > 0) == (number == 1 and budget > 0)
            assert (usage.cpu_bytes > 0) == (number == 0 or budget < 1 << 24)
            for each in (session, fork, other):
                each.close()
            memory.check_integrity()
            usage = engine.digest_usage()
            assert usage.gpu_bytes == usage.cpu_bytes == 0
            told.append(found)
    assert told[0] == told[1]
    assert told[0][2] and (copies.num_asked > 0) == (budget < 1 << 24)


def test_without_memory_for_digests_a_stream_goes_on_and_recalls_nothing(
    tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "DigestMemory", lambda *_: Exhausted("cpu"))
    with Engine(str(tiny_model_dir), options()) as engine:
        session = engine.session("one")
        session.feed([some_ids()]).run()
        assert len(list(session.generate(GREEDY))) == 20
        assert session.attended() == []
        assert engine.counters()["digests_lost"] >= NUM_TOKENS // 64
        assert engine.digest_usage().cpu_bytes == 0
        engine._tiers.check_integrity()


def num_used(engine: Engine) -> int:
    return engine._tiers.usage()["gpu"].num_blocks


def test_every_block_is_given_back(tiny_model_dir: Path) -> None:
    with Engine(str(tiny_model_dir), options()) as engine:
        for _ in range(3):
            session = engine.session("one")
            session.feed([some_ids()]).run()
            session.generate(GREEDY).run()
            fork = session.fork("two")
            fork.generate(GREEDY).run()
            engine._tiers.check_integrity()
            session.delete()
            fork.generate(GREEDY).run()
            fork.delete()
            engine._tiers.flush()
            engine._tiers.check_integrity()
            assert num_used(engine) == 0


def test_a_fork_goes_on_as_its_origin_does(tiny_model_dir: Path) -> None:
    with Engine(str(tiny_model_dir), options()) as engine:
        session = engine.session("one")
        session.feed([some_ids()]).run()
        session.generate(GREEDY).run()
        fork = session.fork("two")
        more = some_ids(300, seed=11)
        for each in (session, fork):
            each.feed([more]).run()
        ours = [delta.token_id for delta in session.generate(GREEDY)]
        theirs = [delta.token_id for delta in fork.generate(GREEDY)]
        assert ours == theirs
        told, forked = session.attended(), fork.attended()
        assert [each[:3] for each in told] == [each[:3] for each in forked]
        # The two are computed side by side, not in one row.
        weights = [[each.weight for each in of] for of in (told, forked)]
        assert weights[0] == pytest.approx(weights[1], rel=1e-5)


def test_a_fork_in_another_mode_shares_no_block_that_differs(tiny_model_dir: Path) -> None:
    """What the two compute from the same tokens differs; names tell it apart."""
    with Engine(str(tiny_model_dir), options()) as engine:
        session = engine.session("one")
        session.feed([some_ids()]).run()
        fork = session.fork("two")
        fork.set_mode("window")
        before = session._live.sequence.chain_key
        assert before == fork._live.sequence.chain_key
        for each in (session, fork):
            each.feed([some_ids(128, seed=11)]).run()
        assert session._live.sequence.chain_key != fork._live.sequence.chain_key


def test_a_rewound_session_recalls_only_what_is_left(tiny_model_dir: Path) -> None:
    with Engine(str(tiny_model_dir), options()) as engine:
        session = engine.session("one")
        session.feed([some_ids()]).run()
        session.generate(GREEDY).run()
        session.rewind(500)
        session.feed([some_ids(100, seed=11)]).run()
        session.generate(GREEDY).run()
        told = session.attended()
        # What leaves the window of a query that the choice was made for: two strides of them.
        assert told and all(each.end <= 600 - WINDOW_SIZE + 2 * STRIDE for each in told)
        engine._tiers.check_integrity()


def test_a_rewind_leaves_nothing_recalled_of_what_it_gave_up(tiny_model_dir: Path) -> None:
    """The blocks of those token indices are others from now on."""
    with Engine(str(tiny_model_dir), options()) as engine:
        session = engine.session("one")
        session.feed([some_ids()]).run()
        session.generate(GREEDY).run()
        recalled = session._live.sequence.table.recalled
        assert max(recalled) * 64 >= 200
        session.rewind(200)
        assert session.attended() == []
        assert all((index + 1) * 64 <= 200 for index in recalled), "what the tokens before it chose"
        assert session.mode == "recall"
        fresh = engine.session("fresh")
        fresh.feed([some_ids(200)]).run()
        more = some_ids(500, seed=11)
        assert scores(session, more, 64) == pytest.approx(scores(fresh, more, 64), abs=1e-4)


def test_a_read_that_fails_leaves_no_block_without_an_owner(
    tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Engine(str(tiny_model_dir), options()) as engine:
        session = engine.session("one")
        session.feed([some_ids()]).run()
        session.set_mode("window")
        engine._tiers.flush()
        held = num_used(engine)

        def fails(*_: object) -> bool:
            raise StoreError("the disk is gone")

        with monkeypatch.context() as patch:
            patch.setattr(engine._tiers._transfer, "promote", fails)
            session.set_mode("recall")
            with pytest.raises(StoreError, match="the disk is gone"):
                session.generate(GREEDY).run()
        # The question's blocks are given up to be computed again; each other one has its owner.
        left = len(session._live.sequence.table)
        assert num_used(engine) == left < held
        assert len(list(session.generate(GREEDY))) == 20
        engine._tiers.check_integrity()


def test_blocks_that_no_tier_has_are_absent_and_the_answer_goes_on(tiny_model_dir: Path) -> None:
    """A cpu pool with room for a few blocks and no store: most of the past is gone."""
    with Engine(str(tiny_model_dir), options(cpu_bytes="64KiB")) as engine:
        session = engine.session("one")
        session.feed([some_ids()]).run()
        tokens = list(session.generate(GREEDY))
        assert len(tokens) == 20
        assert engine.counters()["absent"] > 0
        assert session.stats().counters["absent"] == engine.counters()["absent"]
        engine._tiers.check_integrity()


@pytest.fixture
def engine(tiny_model_dir: Path) -> Iterator[Engine]:
    with Engine(str(tiny_model_dir), options()) as opened:
        yield opened


def test_a_mode_that_is_none_is_refused(engine: Engine, tiny_model_dir: Path) -> None:
    session = engine.session("one")
    with pytest.raises(ConfigError, match="mode='telepathy'"):
        session.set_mode("telepathy")  # type: ignore[arg-type]  # what is tested
    with pytest.raises(ConfigError, match="recall_blocks=4"):
        session.set_mode("recall", 4)
    with Engine(str(tiny_model_dir), EngineConfig(window_size=128)) as plain:
        other = plain.session("one")
        other.set_mode("window")
        with pytest.raises(ConfigError, match="no room for recalled blocks"):
            other.set_mode("recall")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"recall_blocks": 0}, "attention='recall'"),
        ({"recall_blocks": -1}, "recall_blocks=-1"),
        ({"recall_stride": 65}, "recall_stride=65: not a multiple of 64. Use 64 or 128."),
        ({"window_size": 128}, "window_size=192, or recall_blocks=0"),
        ({"recall_stride": 128}, "window_size=320"),
        ({"position_policy": "near"}, "position_policy='near'"),
        ({"retain": "window"}, "nothing is kept"),
        ({"cpu_bytes": 0}, "nothing is kept"),
    ],
)
def test_options_that_cannot_be_are_refused(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        options(**changed)


def test_a_policy_that_passes_the_trained_length_is_refused_with_the_numbers(
    tiny_model_dir: Path,
) -> None:
    too_many = options(recall_blocks=5000, position_policy="cache")
    with pytest.raises(ConfigError, match="trained length"):
        Engine(str(tiny_model_dir), too_many)


def test_the_stride_fits_the_window_unless_it_is_given() -> None:
    assert EngineConfig(recall_blocks=1).stride == 256
    assert options(recall_stride=None).stride == 64
    assert options(recall_stride=None, window_size=400).stride == 128
