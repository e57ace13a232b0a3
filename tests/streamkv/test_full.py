"""Mode `full` in live sessions: against transformers' own attention, from every tier."""

from pathlib import Path
from typing import Any

import pytest
from full_oracle import FULL, expected_scores
from tiered import bring_back, open_over

from streamkv import Engine, EngineConfig, SamplingParams, Session
from streamkv.errors import AbsentBlockError, ConfigError, PoolFullError, StoreError

WINDOW_SIZE = 192
NUM_TOKENS = 900
GREEDY = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True, logprobs=0)


def options(**others: Any) -> dict[str, Any]:
    given: dict[str, Any] = {
        "window_size": WINDOW_SIZE,
        "num_sink_tokens": 0,
        "attention": "full",
        "prefill_chunk": 128,
        "cpu_bytes": "64MiB",
        "max_sessions": 6,
        "compile": "off",
    }
    return given | others


def opened(model_dir: Path, **others: Any) -> Engine:
    return Engine(str(model_dir), EngineConfig(**options(**others)))


def some_ids(count: int = NUM_TOKENS, seed: int = 3) -> list[int]:
    return [5 + (seed * index * index + 7 * index) % 290 for index in range(count)]


def scores(session: Session, ids: list[int], cut: int = NUM_TOKENS) -> list[float]:
    """Log-probabilities of all tokens but a stream's first."""
    pieces = [ids[low : low + cut] for low in range(0, len(ids), cut)]
    return [each.logprob for each in session.score(pieces) if each.logprob is not None]


def num_used(engine: Engine) -> int:
    return engine._tiers.usage()["gpu"].num_blocks


@pytest.fixture(scope="module")
def dense(tiny_model_dir: Path) -> list[float]:
    """Scores of a stream in which every token sees all before it."""
    return expected_scores(tiny_model_dir, some_ids(), [FULL] * NUM_TOKENS)


@pytest.mark.parametrize("num_sinks", [0, 4, 70])
def test_full_is_dense_attention_without_any_other_tier(
    tiny_model_dir: Path, dense: list[float], num_sinks: int
) -> None:
    bare = {"num_sink_tokens": num_sinks, "cpu_bytes": 0, "retain": "none"}
    with opened(tiny_model_dir, **bare) as engine:
        session = engine.session("one")
        assert session.mode == "full"
        assert scores(session, some_ids()) == pytest.approx(dense, abs=1e-3)
        engine._tiers.check_integrity()
        session.delete()
        assert num_used(engine) == 0 and engine._opener._entrance._room.owners == set()


@pytest.mark.parametrize("window_size", [64, 65, 127, 320])
def test_full_is_dense_attention_for_every_window(
    tiny_model_dir: Path, dense: list[float], window_size: int
) -> None:
    """Also where a chunk is longer than the window, so that tokens leave it in its own step."""
    with opened(tiny_model_dir, window_size=window_size, prefill_chunk=512) as engine:
        assert scores(engine.session("one"), some_ids()) == pytest.approx(dense, abs=1e-3)


def test_a_window_alone_is_not(tiny_model_dir: Path, dense: list[float]) -> None:
    with opened(tiny_model_dir, attention="window") as engine:
        found = scores(engine.session("one"), some_ids())
    assert found != pytest.approx(dense, abs=1e-2)


@pytest.mark.parametrize("tier", ["gpu", "cpu", "ssd"])
def test_what_comes_back_from_a_tier_is_attended_like_what_never_left(
    tiny_model_dir: Path, tmp_path: Path, dense: list[float], tier: str
) -> None:
    found, num_read = [], 0
    with open_over(tier, tiny_model_dir, tmp_path, **options()) as engine:
        session = engine.session("one")
        for low in range(0, NUM_TOKENS, 150):
            found += scores(session, some_ids()[low : low + 150])
            num_read += bring_back(session, engine, tier)
            engine._tiers.check_integrity()
    assert found == pytest.approx(dense, abs=1e-3)
    # Blocks that had left the window by then, each time anew.
    assert num_read > 20


def test_results_do_not_depend_on_how_the_input_is_cut(
    tiny_model_dir: Path, dense: list[float]
) -> None:
    for cut in (64, 7, 1):
        with opened(tiny_model_dir) as engine:
            session = engine.session("one")
            assert scores(session, some_ids(), cut) == pytest.approx(dense, abs=2e-4)


def test_the_native_kernels_see_the_same(tiny_model_dir: Path) -> None:
    told = []
    for compile_ in ("off", "auto"):
        with opened(tiny_model_dir, compile=compile_) as engine:
            if compile_ == "auto" and not engine.wait_until_fast():
                pytest.skip("no native kernels on this machine")
            session = engine.session("one")
            found = scores(session, some_ids(500))
            params = SamplingParams(temperature=0.0, max_tokens=150, ignore_eos=True, logprobs=0)
            deltas = list(session.generate(params))
            found += [each.logprob.logprob for each in deltas if each.logprob is not None]
            told.append((found, [each.token_id for each in deltas]))
    assert told[0][1] == told[1][1]
    assert told[0][0] == pytest.approx(told[1][0], abs=1e-3)


def test_generated_tokens_see_everything(tiny_model_dir: Path) -> None:
    with opened(tiny_model_dir, attention="window") as engine:
        session = engine.session("one")
        session.feed([some_ids(500)]).run()
        at = session.stats().num_computed
        session.set_mode("full")
        deltas = list(session.generate(GREEDY))
    ids = some_ids(500) + [each.token_id for each in deltas if each.token_id is not None]
    windows = [WINDOW_SIZE] * at + [FULL] * (len(ids) - at)
    expected = expected_scores(tiny_model_dir, ids, windows)[-20:]
    found = [each.logprob.logprob for each in deltas if each.logprob is not None]
    assert found == pytest.approx(expected, abs=1e-3)


@pytest.mark.parametrize("cut", [NUM_TOKENS, 50])
def test_a_stream_may_be_read_in_all_modes_in_turn(tiny_model_dir: Path, cut: int) -> None:
    """Window, full, recall of everything, full, window: a mask row of its own for each token."""
    ids, stride = some_ids(1100), 64
    both = options(
        attention="window", recall_blocks=20, recall_stride=stride, position_policy="absolute"
    )
    windows: list[int] = []
    found: list[float] = []
    plan = [("window", 401), ("full", 130), ("recall", 300), ("full", 99), ("window", 170)]
    with Engine(str(tiny_model_dir), EngineConfig(**both)) as engine:
        session = engine.session("one")
        for mode, count in plan:
            session.set_mode(mode)  # type: ignore[arg-type]
            assert session.mode == mode
            begin = session.stats().num_computed
            low = session.num_tokens
            found += scores(session, ids[low : low + count], cut)
            seen = FULL if mode != "window" else WINDOW_SIZE
            rows = [seen] * (session.stats().num_computed - begin)
            if mode == "recall":
                # The first choice is made at the next boundary, and attended a stride later.
                lag = (begin // stride + 2) * stride - begin
                rows[:lag] = [WINDOW_SIZE] * lag
            windows += rows
            engine._tiers.check_integrity()
    windows.append(WINDOW_SIZE)
    assert found == pytest.approx(expected_scores(tiny_model_dir, ids, windows), abs=1e-3)


def test_recalling_everything_is_full(tiny_model_dir: Path) -> None:
    found = []
    for mode in ("recall", "full"):
        everything = options(
            attention=mode, recall_blocks=20, recall_stride=64, position_policy="absolute"
        )
        with Engine(str(tiny_model_dir), EngineConfig(**everything)) as engine:
            found.append(scores(engine.session("one"), some_ids()))
    assert found[0] == pytest.approx(found[1], abs=2e-4)


def test_kept_text_counts_once(tiny_model_dir: Path) -> None:
    """Sink tokens in mid-stream, of which some share blocks with others, are seen once by all."""
    with opened(tiny_model_dir) as engine:
        session = engine.session("one")
        session.feed([some_ids(300)]).run()
        session.keep("The fox sleeps in the sun, and the café forgets nothing. " * 4)
        found = scores(session, some_ids(400, seed=11))
        past = session._live.past
        ids = past.ids(0, session.num_tokens).tolist()
    expected = expected_scores(tiny_model_dir, ids, [FULL] * len(ids))[-400:]
    assert found == pytest.approx(expected, abs=1e-3)


def test_a_fork_goes_on_as_its_origin_does_and_shares_its_blocks(tiny_model_dir: Path) -> None:
    more = some_ids(300, seed=11)
    expected = expected_scores(tiny_model_dir, some_ids() + more, [FULL] * (NUM_TOKENS + 300))
    with opened(tiny_model_dir, cpu_bytes=0) as engine:
        session = engine.session("one")
        session.feed([some_ids()]).run()
        before = num_used(engine)
        fork = session.fork("two")
        assert fork.mode == "full"
        assert num_used(engine) - before <= 1, "only the open block is copied"
        assert scores(fork, more) == pytest.approx(expected[-300:], abs=1e-3)
        session.delete()
        assert scores(fork, more)
        fork.delete()
        engine._tiers.flush()
        engine._tiers.check_integrity()
        assert num_used(engine) == 0 and engine._opener._entrance._room.owners == set()


@pytest.mark.parametrize(
    "token_index", [1, 2, 63, 64, 65, 128, 300, 448, 449, 700, 705, 832, 833, 896, 899, 900]
)
@pytest.mark.parametrize("num_sinks", [0, 70])
def test_a_rewound_session_goes_on_from_any_place(
    tiny_model_dir: Path, token_index: int, num_sinks: int
) -> None:
    more = some_ids(280, seed=11)
    ids = some_ids()[:token_index] + more
    expected = expected_scores(tiny_model_dir, ids, [FULL] * len(ids))[-280:]
    with opened(tiny_model_dir, cpu_bytes=0, num_sink_tokens=num_sinks) as engine:
        session = engine.session("one")
        session.feed([some_ids()]).run()
        session.rewind(token_index)
        assert session.mode == "full" and session.num_tokens == token_index
        engine._tiers.flush()
        engine._tiers.check_integrity()
        assert num_used(engine) <= token_index // 64 + 1
        assert scores(session, more) == pytest.approx(expected, abs=1e-3)
        session.delete()
        engine._tiers.flush()
        assert num_used(engine) == 0


def test_a_rewind_keeps_what_was_computed_in_another_mode(tiny_model_dir: Path) -> None:
    """The block that the stream ends in was computed in `window`; it stays as it is."""
    more = some_ids(100, seed=11)
    with opened(tiny_model_dir, attention="window") as engine:
        session = engine.session("one")
        session.feed([some_ids(701)]).run()
        session.set_mode("full")
        session.feed([some_ids(900)[701:]]).run()
        session.rewind(601)
        found = scores(session, more)
    ids = some_ids(601) + more
    windows = [WINDOW_SIZE] * 600 + [FULL] * 101
    expected = expected_scores(tiny_model_dir, ids, windows)
    assert found == pytest.approx(expected[-100:], abs=1e-3)


def test_a_fork_of_a_rewound_session_is_its_own(tiny_model_dir: Path) -> None:
    with opened(tiny_model_dir, cpu_bytes=0) as engine:
        session = engine.session("one")
        session.feed([some_ids()]).run()
        fork = session.fork("two")
        session.rewind(450)
        one, two = some_ids(200, seed=11), some_ids(200, seed=17)
        found = scores(session, one), scores(fork, two)
    ids = some_ids(450) + one
    expected = expected_scores(tiny_model_dir, ids, [FULL] * len(ids))[-200:]
    assert found[0] == pytest.approx(expected, abs=1e-3)
    ids = some_ids() + two
    expected = expected_scores(tiny_model_dir, ids, [FULL] * len(ids))[-200:]
    assert found[1] == pytest.approx(expected, abs=1e-3)


def test_forks_and_rewinds_of_an_engine_that_recalls_lose_nothing(tiny_model_dir: Path) -> None:
    """Its cpu pool has room for two blocks only: what is given back is gone."""
    recalling = options(recall_blocks=3, recall_stride=64, cpu_bytes="64KiB")
    more = some_ids(200, seed=11)
    ids = some_ids(650) + more
    expected = expected_scores(tiny_model_dir, ids, [FULL] * len(ids))[-200:]
    with Engine(str(tiny_model_dir), EngineConfig(**recalling)) as engine:
        session = engine.session("one")
        session.feed([some_ids()]).run()
        before = num_used(engine)
        fork = session.fork("two")
        assert num_used(engine) - before <= 1, "only the open block is copied"
        for each in (session, fork):
            each.rewind(650)
            assert scores(each, more) == pytest.approx(expected, abs=1e-3)
        # Leaving the mode gives all of it back, and recall goes on with what is left.
        fork.set_mode("recall")
        assert len(list(fork.generate(GREEDY))) == 20
        engine._tiers.flush()
        engine._tiers.check_integrity()


def test_sessions_beside_it_are_not_disturbed(tiny_model_dir: Path, dense: list[float]) -> None:
    with opened(tiny_model_dir) as engine:
        one, other = engine.session("one"), engine.session("other")
        other.set_mode("window")
        found: dict[str, list[float]] = {"one": [], "other": []}
        for low in range(0, NUM_TOKENS, 45):
            for session in (one, other):
                found[session.name] += scores(session, some_ids()[low : low + 45])
    assert found["one"] == pytest.approx(dense, abs=1e-3)
    windows = [WINDOW_SIZE] * NUM_TOKENS
    expected = expected_scores(tiny_model_dir, some_ids(), windows)
    assert found["other"] == pytest.approx(expected, abs=1e-3)


@pytest.mark.parametrize("former", ["window", "recall"])
def test_a_pool_without_room_is_refused_before_anything_is_lost(
    tiny_model_dir: Path, former: str
) -> None:
    small = options(attention=former, max_sessions=1, recall_blocks=2, recall_stride=64)
    with Engine(str(tiny_model_dir), EngineConfig(**small)) as engine:
        session = engine.session("one")
        session.feed([some_ids(2000)]).run()
        session.generate(GREEDY).run()
        attended = session.attended()
        held = num_used(engine)
        with pytest.raises(PoolFullError, match=r"needs room for 29 old blocks .* gpu_bytes of"):
            session.set_mode("full")
        assert session.mode == former
        engine._tiers.check_integrity()
        assert num_used(engine) == held and session.attended() == attended
        assert len(list(session.generate(GREEDY))) == 20


def test_a_stream_that_outgrows_the_pool_goes_on_in_another_mode(tiny_model_dir: Path) -> None:
    with opened(tiny_model_dir, max_sessions=1) as engine:
        session = engine.session("one")
        with pytest.raises(PoolFullError, match="gpu_bytes"):
            session.feed([some_ids(4000)]).run()
        engine._tiers.check_integrity()
        assert session.mode == "full" and session.num_tokens == 4000
        reached = session.stats().num_computed
        # The pool has 15 blocks, of which 7 are a window's.
        assert reached == 640
        session.set_mode("window")
        assert scores(session, some_ids(10))
        assert session.stats().num_computed > reached


def test_what_is_said_to_be_enough_is(tiny_model_dir: Path) -> None:
    """The size that the message names has room for the stream."""
    block_bytes = 0
    with opened(tiny_model_dir, attention="window", max_sessions=1) as engine:
        block_bytes = engine.model.spec.block_bytes
        session = engine.session("one")
        session.feed([some_ids(2000)]).run()
        with pytest.raises(PoolFullError) as caught:
            session.set_mode("full")
    named = str(caught.value).split("at least ")[1].split(",")[0]
    with opened(
        tiny_model_dir, attention="window", max_sessions=1, gpu_bytes=named.replace(" ", "")
    ) as engine:
        assert engine.usage()["gpu"].limit_bytes // block_bytes > 17
        session = engine.session("one")
        session.feed([some_ids(2000)]).run()
        session.set_mode("full")
        assert session.mode == "full"


def test_a_block_that_no_tier_has_is_an_error_that_names_its_tokens(tiny_model_dir: Path) -> None:
    with opened(tiny_model_dir, attention="window", retain="none", cpu_bytes=0) as engine:
        session = engine.session("one")
        session.feed([some_ids(500)]).run()
        engine._tiers.flush()
        held = num_used(engine)
        with pytest.raises(AbsentBlockError, match=r"tokens 0 to 63 .* no tier has it") as caught:
            session.set_mode("full")
        assert (caught.value.start, caught.value.end) == (0, 64)
        assert session.mode == "window" and num_used(engine) == held
        engine._tiers.check_integrity()
        assert len(list(session.generate(GREEDY))) == 20


def test_a_damaged_frame_is_an_error_in_full_and_absent_to_recall(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    both = options(
        recall_blocks=20, recall_stride=64, cpu_bytes="64KiB", codec="raw", store=str(tmp_path)
    )
    with Engine(str(tiny_model_dir), EngineConfig(**both)) as engine:
        session = engine.session("one")
        session.feed([some_ids()]).run()
        block_id = session._live.sequence.table.recalled[3]
        content = engine._gpu_pool.block_bytes(block_id).tobytes()
        session.set_mode("window")
        engine._tiers.flush()
        flip_in(tmp_path / "blocks" / "data.mdb", content[300:340])
        with pytest.raises(AbsentBlockError, match=r"tokens 192 to 255 .* damaged"):
            session.set_mode("full")
        engine._tiers.check_integrity()
        session.set_mode("recall")
        assert len(list(session.generate(GREEDY))) == 20
        assert engine.counters()["absent"] == 1


def flip_in(path: Path, pattern: bytes) -> None:
    """Flip a bit of every copy of some bytes in a file that is open."""
    content = path.read_bytes()
    at = content.index(pattern)
    with open(path, "r+b") as file:
        while at >= 0:
            file.seek(at)
            file.write(bytes([content[at] ^ 1]))
            at = content.find(pattern, at + 1)


def test_a_read_that_fails_leaves_the_session_as_it_was(
    tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(tiny_model_dir, attention="window") as engine:
        session = engine.session("one")
        session.feed([some_ids()]).run()
        engine._tiers.flush()
        held, reads = num_used(engine), []
        real = engine._tiers._transfer.promote

        def fails(*given: Any) -> Any:
            reads.append(given)
            if len(reads) == 4:
                raise StoreError("the disk is gone")
            return real(*given)

        with monkeypatch.context() as patch:
            patch.setattr(engine._tiers._transfer, "promote", fails)
            with pytest.raises(StoreError, match="the disk is gone"):
                session.set_mode("full")
        assert session.mode == "window" and num_used(engine) == held
        engine._tiers.check_integrity()
        session.set_mode("full")
        assert session.mode == "full"


def test_full_takes_no_number_of_blocks(tiny_model_dir: Path) -> None:
    with opened(tiny_model_dir, attention="window") as engine:
        session = engine.session("one")
        with pytest.raises(ConfigError, match="recall_blocks=3: mode 'full' attends to every"):
            session.set_mode("full", 3)
        assert session.mode == "window"
