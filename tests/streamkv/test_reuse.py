"""Blocks that another session computed stand in for computing: the same answers, sooner."""

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from streamkv import Engine, EngineConfig, SamplingParams, Session
from streamkv.errors import InputError, PoolFullError, SessionError
from streamkv.journal import Journal
from streamkv.past_keys import chain_keys, replay_windows
from streamkv.reuse import Taking
from streamkv.store import journal_path
from streamkv.tiers.manager import TierManager
from streamkv.tiers.record import BadRecordError
from streamkv.tiers.spec import BlockKey

SMALL = EngineConfig(
    window_size=256, prefill_chunk=128, cpu_bytes="16MiB", ssd_bytes="64MiB", compile="off"
)
TEXT = "".join(
    f"Entry {number}: the {animal} sleeps in the sun, and nothing is forgotten.\n"
    for number, animal in zip(range(100), itertools.cycle(["dog", "fox", "cat"]), strict=False)
)
SYSTEM = "You keep a diary. " + "Write what you see, and nothing else. " * 20
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=0)
NUMBERS = itertools.count()


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("store")


@pytest.fixture(scope="module")
def engine(tiny_model_dir: Path, store: Path) -> Iterator[Engine]:
    with Engine(str(tiny_model_dir), dataclasses.replace(SMALL, store=str(store))) as engine:
        yield engine


@pytest.fixture(scope="module")
def ids(engine: Engine) -> list[int]:
    """The tokens of `TEXT`."""
    return engine.tokenizer.encode(TEXT)


@pytest.fixture
def name() -> str:
    """A name that no other test has, for a tenant or a session."""
    return f"test {next(NUMBERS)}"


def answer(session: Session) -> list[tuple[int, float]]:
    """What the model says next: tokens and log-probabilities."""
    deltas = [delta for delta in session.generate(GREEDY) if delta.token_id is not None]
    return [(d.logprob.token_id, d.logprob.logprob) for d in deltas if d.logprob is not None]


def assert_same(found: list[tuple[int, float]], expected: list[tuple[int, float]]) -> None:
    assert len(found) == GREEDY.max_tokens
    assert [token for token, _ in found] == [token for token, _ in expected]
    assert [lp for _, lp in found] == pytest.approx([lp for _, lp in expected], abs=1e-4)


def reused(session: Session) -> int:
    return session.stats().num_reused


def test_a_session_takes_what_another_of_its_tenant_has_computed(engine: Engine, name: str) -> None:
    with engine.session(f"{name} a", tenant=name) as first:
        first.feed(TEXT).run()
        before = engine.counters()["reused_tokens"]
        with engine.session(f"{name} b", tenant=name) as second:
            progress = second.feed(TEXT).run()
            num_tokens = second.num_tokens - 1
            assert progress[-1].num_reused == reused(second) == num_tokens // 64 * 64
            assert progress[-1].num_tokens == progress[-1].token_index == num_tokens
            assert engine.counters()["reused_tokens"] - before == reused(second)
            assert reused(first) == 0
            assert_same(answer(second), answer(first))


def test_it_takes_them_after_a_restart_too(tiny_model_dir: Path, tmp_path: Path) -> None:
    config = dataclasses.replace(SMALL, store=str(tmp_path))
    with Engine(str(tiny_model_dir), config) as engine:
        first = engine.session("a", tenant="acme")
        first.feed(TEXT).run()
        expected = answer(first)
    with Engine(str(tiny_model_dir), config) as engine:
        second = engine.session("b", tenant="acme")
        second.feed(TEXT).run()
        assert reused(second) == (second.num_tokens - 1) // 64 * 64
        assert engine.counters()["ssd_reads"] > 0
        assert_same(answer(second), expected)
    for path in tmp_path.rglob("*"):
        assert path.is_dir() or b"acme" not in path.read_bytes(), "a tenant's name is on disk"


@pytest.mark.parametrize("tenants", [("one", "two"), ("one", None), (None, "one"), (None, None)])
def test_nothing_is_shared_between_tenants_or_without_one(
    engine: Engine, name: str, tenants: tuple[str | None, str | None]
) -> None:
    one, two = (f"{name} {tenant}" if tenant else None for tenant in tenants)
    with (
        engine.session(f"{name} a", tenant=one, system=SYSTEM) as first,
        engine.session(f"{name} b", tenant=two, system=SYSTEM) as second,
    ):
        first.feed(TEXT).run()
        before = engine.counters()
        second.feed(TEXT).run()
        after = engine.counters()
        assert reused(second) == 0
        assert [after[kind] - before[kind] for kind in ("shared", "promotions")] == [0, 0]
        assert not keys_of(first) & keys_of(second)


def keys_of(session: Session) -> set[BlockKey]:
    """Keys of the live blocks."""
    return {block.key for block in session._live.sequence.table if block.key is not None}


@pytest.mark.parametrize("tenants", [("one", "two"), (None, "one"), (None, None)])
def test_a_prompt_marked_shared_is_computed_once_for_all(
    engine: Engine, name: str, tenants: tuple[str | None, str | None]
) -> None:
    one, two = (f"{name} {tenant}" if tenant else None for tenant in tenants)
    system = f"{name} {SYSTEM}"
    with (
        engine.session(f"{name} a", tenant=one, system=system, shared_prompt=True) as first,
        engine.session(f"{name} b", tenant=two, system=system, shared_prompt=True) as second,
        engine.session(f"{name} c", tenant=two, system=system) as third,
    ):
        num_prompt = first.num_tokens
        assert num_prompt > 2 * 64
        for session in (first, second, third):
            session.feed(TEXT).run()
        assert reused(first) == reused(third) == 0
        # The block in which the prompt ends holds what was fed, too, and is not shared.
        assert reused(second) == num_prompt // 64 * 64
        assert_same(answer(second), answer(first))


def test_sharers_are_kept_with_the_session(engine: Engine, name: str) -> None:
    engine.session(name, tenant=f"{name} one", system=SYSTEM, shared_prompt=True).close()
    for asked in ({}, {"tenant": f"{name} one"}, {"shared_prompt": True}):
        engine.session(name, **asked).close()  # type: ignore[arg-type]  # of either type
    with pytest.raises(SessionError, match="not created for tenant"):
        engine.session(name, tenant=f"{name} two")
    with pytest.raises(SessionError, match="another system prompt"):
        engine.session(name, tenant=f"{name} one", system="Another.", shared_prompt=True)
    engine.session(f"{name} own").close()
    with pytest.raises(SessionError, match="not created for tenant"):
        engine.session(f"{name} own", tenant=f"{name} one")
    with pytest.raises(SessionError, match="prompt of its own"):
        engine.session(f"{name} own", shared_prompt=True)


def test_a_resumed_session_has_the_keys_it_had(engine: Engine, name: str) -> None:
    with engine.session(f"{name} a", tenant=name, system=SYSTEM, shared_prompt=True) as first:
        first.feed(TEXT[:2500]).run()
    with engine.session(f"{name} a") as first:
        first.feed(TEXT[2500:]).run()
        with engine.session(f"{name} b", tenant=name, system=SYSTEM, shared_prompt=True) as second:
            second.feed([TEXT[:2500], TEXT[2500:]]).run()
            assert reused(second) == (second.num_tokens - 1) // 64 * 64
            assert keys_of(second) == keys_of(first)


@pytest.mark.parametrize(
    ("asked", "problem"),
    [
        ({"tenant": ""}, "an empty name"),
        ({"tenant": 7}, "not text"),
        ({"tenant": "\ud800"}, "surrogate"),
        ({"shared_prompt": True}, "no system prompt to share"),
        ({"shared_prompt": True, "system": ""}, "no system prompt to share"),
    ],
)
def test_sharers_that_are_none_are_refused(
    engine: Engine, name: str, asked: dict[str, object], problem: str
) -> None:
    with pytest.raises(InputError, match=problem):
        engine.session(name, **asked)  # type: ignore[arg-type]  # of either type
    assert name not in engine.session_names()


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.data())
def test_any_common_prefix_gives_the_answer_of_computing_everything(
    engine: Engine, ids: list[int], data: st.DataObject
) -> None:
    """Prefixes of any length modulo the block, fed in any pieces, before or after other text."""
    number = next(NUMBERS)
    num_common = data.draw(st.integers(0, 700))
    num_other = data.draw(st.integers(1, 150))
    cuts = sorted(data.draw(st.lists(st.integers(1, num_common + num_other), max_size=3)))
    other = [(token + 1) % engine.model.vocab_size for token in ids[num_common:]][:num_other]
    stream = ids[:num_common] + other
    pieces = [stream[a:b] for a, b in itertools.pairwise([0, *cuts, len(stream)]) if a < b]
    with (
        engine.session(f"common {number}", tenant=f"common {number}") as first,
        engine.session(f"reuse {number}", tenant=f"common {number}") as second,
        engine.session(f"compute {number}") as alone,
    ):
        first.feed(ids[:800]).run()
        for session in (second, alone):
            for piece in pieces:
                session.feed(piece).run()
        if len(pieces) == 1:
            assert reused(second) == min(num_common, len(stream) - 1) // 64 * 64
        assert second.num_tokens == alone.num_tokens
        assert_same(answer(second), answer(alone))


@pytest.mark.parametrize("num_before", [0, 10, 64, 100, 128, 300])
def test_mid_stream_it_goes_on_where_the_other_is_ahead(
    engine: Engine, ids: list[int], name: str, num_before: int
) -> None:
    with (
        engine.session(f"{name} a", tenant=name) as first,
        engine.session(f"{name} b", tenant=name) as second,
    ):
        if num_before:
            second.feed(ids[:num_before]).run()
        first.feed(ids[:900]).run()
        second.feed(ids[num_before:900]).run()
        assert reused(second) >= 899 // 64 * 64 - max(0, num_before - 1)
        assert_same(answer(second), answer(first))


def test_a_head_whose_logits_were_made_is_no_obstacle(
    engine: Engine, ids: list[int], name: str
) -> None:
    """The last pending token lies in a block already when it is the first of one."""
    one = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    with (
        engine.session(f"{name} a", tenant=name) as first,
        engine.session(f"{name} b", tenant=name) as second,
    ):
        second.feed(ids[:64]).run()
        [delta] = second.generate(one).run()
        assert delta.token_id is not None and second._live.sequence.num_computed == 63
        stream = [*ids[:64], delta.token_id, *ids[64:500]]
        first.feed(stream).run()
        second.feed(ids[64:500]).run()
        assert reused(second) >= 6 * 64
        assert_same(answer(second), answer(first))


def test_say_and_generate_reuse_too(engine: Engine, name: str) -> None:
    with (
        engine.session(f"{name} a", tenant=name, system=SYSTEM) as first,
        engine.session(f"{name} b", tenant=name, system=SYSTEM) as second,
        engine.session(f"{name} c", tenant=name, system=SYSTEM) as third,
    ):
        first.say(TEXT[:900])
        second.say(TEXT[:900])
        assert reused(second) == (second.num_tokens - 1) // 64 * 64
        expected = answer(first)
        assert_same(answer(second), expected)
        # The prompt alone is pending when it is asked to go on.
        num_tokens = third.num_tokens
        answer(third)
        assert reused(third) == (num_tokens - 1) // 64 * 64


def test_scores_are_computed_whatever_is_stored(engine: Engine, ids: list[int], name: str) -> None:
    with (
        engine.session(f"{name} a", tenant=name) as first,
        engine.session(f"{name} b", tenant=name) as second,
    ):
        expected = first.score([ids[:300]]).run()
        found = second.score([ids[:300]]).run()
        assert reused(second) == 0
        assert [score.token_index for score in found] == [*range(300)]
        assert [s.logprob for s in found[1:]] == pytest.approx([s.logprob for s in expected[1:]])


@pytest.mark.parametrize("num_before", [100, 128])
def test_kept_text_is_named_apart_and_shared_with_who_keeps_it_too(
    engine: Engine, ids: list[int], name: str, num_before: int
) -> None:
    """With a window of 256 the block after 300 tokens more sees the sinks at their caps."""

    def grow(session: Session) -> None:
        session.feed(ids[:num_before]).run()
        session.keep(" Never forget the sun.")
        session.feed(ids[num_before:800]).run()

    with (
        engine.session(f"{name} a", tenant=name) as first,
        engine.session(f"{name} b", tenant=name) as second,
        engine.session(f"{name} c", tenant=name) as third,
    ):
        grow(first)
        grow(second)
        assert reused(second) >= 600
        assert_same(answer(second), answer(first))
        third.feed(ids[:num_before]).run()
        third.feed(" Never forget the sun.").run()
        third.feed(ids[num_before:800]).run()
        # Until the window is full, all tokens see their whole past: the same blocks.
        assert 0 < reused(third) <= 320


def test_checkpoints_and_journal_are_those_of_computed_tokens(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    config = dataclasses.replace(SMALL, store=str(tmp_path), checkpoint_tokens=128)
    with Engine(str(tiny_model_dir), config) as engine:
        engine.session("a", tenant="t").feed(TEXT).run()
        second = engine.session("b", tenant="t")
        second.feed(TEXT).run()
        assert reused(second) > 0
        num_tokens = second.num_tokens
        expected = answer(second)
        second.close()
        with Journal.read_beside(journal_path(tmp_path, "b")) as journal:
            checkpoint = journal.state.last_checkpoint
            assert checkpoint is not None
            assert checkpoint.token_index == journal.state.num_tokens // 64 * 64
        with (
            Journal.read_beside(journal_path(tmp_path, "a")) as one,
            Journal.read_beside(journal_path(tmp_path, "b")) as other,
        ):
            fed = num_tokens - 1
            assert one.ids(0, fed).tolist() == other.ids(0, fed).tolist()
    with Engine(str(tiny_model_dir), config) as engine:
        again = engine.session("b")
        assert again.stats().num_computed >= num_tokens
        rest = engine.session("c", tenant="t")
        rest.feed(TEXT).run()
        assert_same(answer(rest), expected)


def damage(engine: Engine, doomed: Callable[[int], bool], session: Session) -> int:
    """Make the ssd's record of some blocks of a stream unreadable; returns how many."""
    keys = stored_keys(engine, session)
    bad = {key for index, key in enumerate(keys) if doomed(index)}
    assert engine._store is not None
    reader = engine._store.blocks._reader
    real = reader._fetch

    def fetch(key: BlockKey, *more: object) -> object:
        if key in bad:
            raise BadRecordError("damaged by a test")
        return real(key, *more)  # type: ignore[arg-type]  # handed on

    reader._fetch = fetch  # type: ignore[method-assign, assignment]  # for some blocks
    return len(bad)


@pytest.mark.parametrize(
    ("damaged", "num_stored", "num_reused"),
    [
        # A window of 256 tokens: a query at the end of block 6 sees block 2, and none later does.
        ((2,), 6, 4),  # up to it, and again behind the chunk of two blocks that is computed
        ((2,), 7, 7),
        ((0,), 12, 10),  # sink tokens are seen for ever
        ((2, 11), 12, 11),
        ((7, 8), 12, 9),  # chunks end at even blocks: 7 is computed, then 8 and 9
        ((9,), 12, 11),
    ],
)
def test_a_damaged_block_shortens_the_run_and_not_the_answer(
    tiny_model_dir: Path,
    tmp_path: Path,
    ids: list[int],
    damaged: tuple[int, ...],
    num_stored: int,
    num_reused: int,
) -> None:
    config = dataclasses.replace(SMALL, store=str(tmp_path), cpu_bytes=0)
    num_tokens = num_stored * 64 + 10
    with Engine(str(tiny_model_dir), config) as engine:
        first = engine.session("a", tenant="t")
        first.feed(ids[:num_tokens]).run()
        expected = answer(first)
        # What it has generated lies behind, and is not asked for.
        first.close()
    with Engine(str(tiny_model_dir), config) as engine:
        first = engine.session("a")
        assert damage(engine, lambda index: index in damaged, first) == len(damaged)
        first.close()
        second = engine.session("b", tenant="t")
        second.feed(ids[:num_tokens]).run()
        found = answer(second)
        assert reused(second) == num_reused * 64
    assert_same(found, expected)


def test_a_resume_whose_window_is_damaged_starts_at_the_block_before(
    tiny_model_dir: Path, tmp_path: Path, ids: list[int]
) -> None:
    config = dataclasses.replace(SMALL, store=str(tmp_path), cpu_bytes=0)
    with Engine(str(tiny_model_dir), SMALL) as engine, engine.session("calm") as session:
        session.feed(ids[: 20 * 64 + 11]).run()
        expected = answer(session)
    with Engine(str(tiny_model_dir), config) as engine, engine.session("a") as session:
        session.feed(ids[: 20 * 64 + 10]).run()
    with Engine(str(tiny_model_dir), config) as engine:
        session = engine.session("a")
        num_tokens = session.num_tokens
        damage(engine, lambda index: index == 18, session)
        session.close()
        session = engine.session("a")
        assert session.stats().num_computed == 0
        session.feed(ids[20 * 64 + 10 : 20 * 64 + 11]).run()
        assert reused(session) >= 3 * 64
        assert session.stats().num_computed == num_tokens
        assert_same(answer(session), expected)
        # From the whole window on, blocks are exact and are kept.
        assert all(block.key for block in list(session._live.sequence.table)[:-1])


def test_blocks_that_were_read_for_nothing_are_given_back(
    engine: Engine, ids: list[int], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Abandoned in the middle of reading; a pool without room."""
    monkeypatch.setattr("streamkv.reuse.READ_AT_ONCE", 1)
    first = engine.session(f"{name} a", tenant=name)
    first.feed(ids[:900]).run()
    # What left the window is in the gpu pool until it was copied.
    engine._tiers.flush()
    used = engine.usage()["gpu"].num_blocks
    steps: list[int | None] = []
    real = Taking.step

    def step(self: Taking) -> int | None:
        if len(steps) == 2:
            raise KeyboardInterrupt
        steps.append(real(self))
        return steps[-1]

    monkeypatch.setattr(Taking, "step", step)
    second = engine.session(f"{name} b", tenant=name)
    with pytest.raises(KeyboardInterrupt):
        second.feed(ids[:900]).run()
    assert steps == [None, None]
    assert engine.usage()["gpu"].num_blocks == used
    assert second.stats().num_computed == 0
    monkeypatch.setattr(Taking, "step", real)

    def is_full(self: TierManager) -> int:
        raise PoolFullError("full")

    with monkeypatch.context() as patch:
        patch.setattr(TierManager, "allocate", is_full)
        with pytest.raises(PoolFullError):
            second.feed(ids[900:901]).run()
    assert engine.usage()["gpu"].num_blocks == used
    second.feed(ids[901:902]).run()
    assert reused(second) > 0
    first.close()
    second.close()


def test_a_gate_that_finds_reading_too_slow_has_it_computed(
    engine: Engine, ids: list[int], name: str
) -> None:
    gate = engine._sharing.gate
    with (
        engine.session(f"{name} a", tenant=name) as first,
        engine.session(f"{name} b", tenant=name) as second,
    ):
        first.feed(ids[:300]).run()
        gate.note_computed(10**12, 60.0)
        before = engine.counters()
        second.feed(ids[:300]).run()
        after = engine.counters()
        assert reused(second) == 0
        assert after["gate_computes"] > before["gate_computes"]
        gate.note_computed(600, 600.0)
        assert_same(answer(second), answer(first))


def test_a_resume_asks_the_gate_too(engine: Engine, ids: list[int], name: str) -> None:
    gate = engine._sharing.gate
    with engine.session(name) as session:
        session.feed(ids[:600]).run()
    gate.note_computed(10**12, 60.0)
    with engine.session(name) as session:
        assert session.stats().num_computed == 0, "all of it is computed anew"
    gate.note_computed(600, 600.0)
    with engine.session(name) as session:
        assert session.stats().num_computed == 576, "the checkpoint was not superseded"


def stored_keys(engine: Engine, session: Session) -> list[BlockKey]:
    """Keys of a stream's full blocks."""
    live = session._live
    assert live.journal is not None
    windows = replay_windows(live.journal, live.created_window)
    return list(chain_keys(live.sequence, live.journal, windows, live.sequence.num_computed))


@pytest.mark.parametrize("num_common", [0, 200, 256, 900])
def test_deleting_a_session_leaves_what_others_of_its_tenant_stand_on(
    engine: Engine, ids: list[int], name: str, num_common: int
) -> None:
    first = engine.session(f"{name} a", tenant=name)
    first.feed(ids[:900]).run()
    second = engine.session(f"{name} b", tenant=name)
    second.feed([*ids[:num_common], *ids[1000:1400]]).run()
    keys, others = stored_keys(engine, first), stored_keys(engine, second)
    second.close()
    first.delete()
    where = engine._tiers.where
    shared = num_common // 64
    assert keys[:shared] == others[:shared]
    assert all(where(key) for key in others)
    assert not any(where(key) for key in keys[shared:])
    engine.session(f"{name} b").delete()
    assert not any(where(key) for key in others)


def test_deleting_a_session_leaves_its_shared_prompt(engine: Engine, name: str) -> None:
    system = f"{name} {SYSTEM}"
    first = engine.session(name, system=system, shared_prompt=True)
    num_prompt = first.num_tokens // 64
    first.feed(TEXT).run()
    keys = stored_keys(engine, first)
    first.delete()
    where = [engine._tiers.where(key) is not None for key in keys]
    assert where == [index < num_prompt for index in range(len(keys))]


def test_a_damaged_journal_of_another_session_does_not_keep_one_from_being_deleted(
    engine: Engine, ids: list[int], store: Path, name: str
) -> None:
    with engine.session(f"{name} b", tenant=name) as second:
        second.feed(ids[:900]).run()
    path = journal_path(store, f"{name} b")
    path.write_bytes(b"no journal at all")
    first = engine.session(f"{name} a", tenant=name)
    first.feed(ids[:900]).run()
    keys = stored_keys(engine, first)
    first.delete()
    where = [engine._tiers.where(key) is not None for key in keys]
    # What its manifest names, sinks and window, stays.
    assert where == [index == 0 or index >= 10 for index in range(14)]
    path.unlink()
