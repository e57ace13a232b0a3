"""A session that is rewound goes on as one that never had the later tokens."""

import asyncio
import dataclasses
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import crash_child
import pytest
from crash_child import rounds
from stream_oracle import (
    SEEDED,
    Stream,
    assert_goes_on_like,
    check_integrity,
    config,
    generated,
    ids_of,
)
from test_recovery import kill_after

from streamkv import Engine, EngineConfig
from streamkv.errors import InputError, JournalError, SessionError
from streamkv.past import MAX_REMEMBERED
from streamkv.store import journal_path
from streamkv.tiers.faults import inject


@pytest.fixture
def engine(tiny_model_dir: Path, tmp_path: Path) -> Iterator[Engine]:
    with Engine(str(tiny_model_dir), config(tmp_path / "store")) as engine:
        yield engine
        check_integrity(engine)


PLACES = [1, 2, 4, 5, 63, 64, 65, 128, 129, 192, 300, 500, 511, 512, 513, 514, 570, 599, 600]


@pytest.mark.parametrize("token_index", PLACES)
@pytest.mark.parametrize("has_store", [True, False], ids=["store", "memory"])
def test_it_goes_on_from_any_place(
    tiny_model_dir: Path, tmp_path: Path, has_store: bool, token_index: int
) -> None:
    ids = [5 + 7 * index % 200 for index in range(600)]
    options = config(tmp_path / "store" if has_store else None)
    with Engine(str(tiny_model_dir), options) as engine:
        session = engine.session("diary")
        session.feed([ids]).run()
        session.rewind(token_index)
        assert session.num_tokens == token_index
        check_integrity(engine)
        assert_goes_on_like(session, engine, ids[:token_index])
        check_integrity(engine)


def test_a_seed_draws_the_same_tokens_again(engine: Engine) -> None:
    session = engine.session("diary")
    session.feed([[5, 6, 7] * 100]).run()
    first = generated(session)
    for back in (12, 5, 1):
        session.rewind(312 - back)
        assert generated(session)[:back] == first[-back:]
        session.rewind(312)
    assert ids_of(session)[-12:] == first


def some_ids(num_tokens: int) -> list[int]:
    return [5 + 7 * index % 200 for index in range(num_tokens)]


def test_what_stays_in_the_window_is_neither_copied_nor_read(engine: Engine) -> None:
    session = engine.session("diary")
    session.feed([some_ids(630)]).run()
    table = session._live.sequence.table
    before = {block.block_index: block.block_id for block in table}
    session.rewind(610)
    assert {block.block_index: block.block_id for block in table} == before
    assert session.stats().num_computed == 609
    counters = engine.counters()
    assert (counters["promotions"], counters["shared"], counters["misses"]) == (0, 0, 0)


def test_an_earlier_window_is_read_back_and_not_computed_anew(engine: Engine) -> None:
    session = engine.session("diary")
    session.feed([some_ids(1000)]).run()
    session.rewind(400)
    assert engine.counters()["misses"] == 0
    assert session.stats().num_computed == 384
    assert_goes_on_like(session, engine, some_ids(400))


@pytest.mark.parametrize("retain", ["window", "none"])
@pytest.mark.parametrize("token_index", [300, 640, 900])
def test_without_its_blocks_an_earlier_window_is_computed_anew(
    tiny_model_dir: Path, tmp_path: Path, retain: str, token_index: int
) -> None:
    with Engine(str(tiny_model_dir), config(tmp_path, retain=retain)) as engine:
        session = engine.session("diary")
        session.feed([some_ids(1000)]).run()
        session.rewind(token_index)
        if retain == "none":
            # What no layer of the window depends on is left out: two layers, two windows.
            assert session.stats().num_computed <= max(0, token_index - 256)
        assert_goes_on_like(session, engine, some_ids(token_index))
        check_integrity(engine)


def test_rewound_again_while_its_window_is_computed_anew(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    with Engine(str(tiny_model_dir), config(tmp_path, retain="none")) as engine:
        session = engine.session("diary")
        session.feed([some_ids(1000)]).run()
        session.rewind(900)
        session.feed([[9] * 5]).run()
        session.rewind(890)
        session.rewind(800)
        session.feed([[9] * 5]).run()
        assert_goes_on_like(session, engine, [*some_ids(800), *[9] * 5])


def test_rewound_with_tokens_that_are_not_computed_yet(engine: Engine) -> None:
    session = engine.session("diary")
    session.feed([some_ids(200)]).run()
    feeding = session.feed([some_ids(1000)])
    next(feeding)
    assert session.stats().num_computed < 400 < session.num_tokens
    session.rewind(400)
    with pytest.raises(SessionError, match="stale"):
        next(feeding)
    assert_goes_on_like(session, engine, [*some_ids(200), *some_ids(200)])


def test_a_generation_left_in_the_middle_ends_first(engine: Engine) -> None:
    session = engine.session("diary")
    session.feed([some_ids(130)]).run()
    answer = session.generate(SEEDED)
    first = [next(answer).token_id for _ in range(3)]
    session.rewind(131)
    with pytest.raises(SessionError, match="stale"):
        next(answer)
    again = generated(session)
    assert again[:2] == first[1:]
    assert_goes_on_like(session, engine, [*some_ids(130), first[0], *again])  # type: ignore[list-item]  # ids


@pytest.mark.parametrize(
    "token_index", [0, -1, 601, 10**30, 1.0, "5", None, True], ids=lambda value: repr(value)[:9]
)
def test_what_is_no_token_of_the_stream_is_refused(engine: Engine, token_index: Any) -> None:
    session = engine.session("diary")
    session.feed([some_ids(600)]).run()
    with pytest.raises(InputError, match=r"token_index=.*whole number from 1 to 600"):
        session.rewind(token_index)
    assert_goes_on_like(session, engine, some_ids(600))


def test_an_empty_session_has_no_earlier_token(engine: Engine) -> None:
    with pytest.raises(InputError, match="nothing to go back to"):
        engine.session("diary").rewind(1)


def test_text_is_joined_as_if_it_came_for_the_first_time(engine: Engine) -> None:
    session = engine.session("diary")
    session.feed("the fox sleeps ").run()
    num_tokens, num_chars = session.num_tokens, session.text_chars
    session.feed("and the do").run()
    session.rewind(num_tokens)
    assert (session.num_tokens, session.text_chars) == (num_tokens, num_chars - 1)
    text = "the fox sleeps"
    assert engine.tokenizer.decode(ids_of(session)) == text[: session.text_chars]
    session.feed(" or runs\n\n").run()
    generated(session)
    whole = engine.tokenizer.encode(text + " or runs\n\n")
    assert ids_of(session)[: len(whole)] == whole


@pytest.mark.parametrize("has_store", [True, False], ids=["store", "memory"])
def test_text_chars_are_those_before_the_token(
    tiny_model_dir: Path, tmp_path: Path, has_store: bool
) -> None:
    text = "The fox sleeps. Grüße aus Köln, naïve café 🙂! " * 12
    options = config(tmp_path / "store" if has_store else None)
    with Engine(str(tiny_model_dir), options) as engine:
        session = engine.session("diary")
        session.feed(text[start : start + 100] for start in range(0, len(text), 100)).run()
        num_tokens = session.num_tokens
        answer = generated(session)
        session.feed(" And again.").run()
        flushed = session.num_tokens - len(answer)
        for token_index in range(num_tokens + 12, 0, -3):
            session.rewind(token_index)
            fed = engine.tokenizer.decode(ids_of(session)[: min(token_index, num_tokens)])
            assert session.text_chars <= len(text)
            if token_index <= num_tokens:
                whole = fed.rstrip("\ufffd")
                assert text.startswith(whole)
                assert session.text_chars == len(whole)
        assert flushed > 0


def test_turns_that_were_given_up_are_forgotten(engine: Engine) -> None:
    session = engine.session("diary")
    session.feed([some_ids(20)]).run()
    session.say("How are you?")
    generated(session)
    session.rewind(20)
    once = engine.session("other")
    once.feed([some_ids(20)]).run()
    for each in (session, once):
        each.say("And now?")
    assert ids_of(session) == ids_of(once)
    session.rewind(session.num_tokens - 1)
    assert session._live.intake._has_turns


def test_text_kept_later_is_no_longer_kept(engine: Engine) -> None:
    session, stream = engine.session("diary"), Stream(some_ids(300))
    session.feed([stream.ids]).run()
    session.keep("The number is seven. ")
    session.feed([[9] * 300]).run()
    session.rewind(300)
    assert session.stats().num_sink_tokens == 4
    assert_goes_on_like(session, engine, stream)


def test_text_kept_before_is_kept_also_if_only_a_part_is_left(engine: Engine) -> None:
    session = engine.session("diary")
    session.feed([some_ids(300)]).run()
    session.keep("The number is seven. ")
    stream = Stream(ids_of(session), [(300, session.num_tokens - 300)])
    session.feed([[9] * 300]).run()
    for token_index in (450, 303):
        session.rewind(token_index)
        stream.ids = [*stream.ids, *[9] * 300][:token_index]
        assert session.stats().num_sink_tokens == 4 + stream.kept[0][1]
        assert_goes_on_like(session, engine, stream)
        stream.ids = ids_of(session)


def test_a_longer_text_kept_in_place_of_a_shorter_one_has_its_own_blocks(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    """Far from the start, how far away sink tokens seem depends on how many there are."""
    text = "Nothing is forgotten. "
    with Engine(str(tiny_model_dir), config(tmp_path)) as engine:
        session = engine.session("diary")
        session.feed([some_ids(600)]).run()
        session.keep(text * 14)
        assert session.num_tokens > 704, "a whole block is kept"
        session.feed([[9] * 300]).run()
        session.rewind(600)
        session.keep(text * 40)
        stream = Stream(ids_of(session), [(600, session.num_tokens - 600)])
    with Engine(str(tiny_model_dir), config(tmp_path)) as engine:
        assert_goes_on_like(engine.session("diary"), engine, stream, tolerance=2e-5)


def test_it_survives_a_restart(tiny_model_dir: Path, tmp_path: Path) -> None:
    for token_index in (1, 64, 130, 700, 960, 1000):
        options = config(tmp_path / str(token_index))
        with Engine(str(tiny_model_dir), options) as engine:
            session = engine.session("diary")
            session.feed([some_ids(1000)]).run()
            session.rewind(token_index)
        with Engine(str(tiny_model_dir), options) as engine:
            session = engine.session("diary")
            assert session.num_tokens - session.stats().num_computed <= 64
            assert engine.counters()["misses"] == 0
            assert_goes_on_like(session, engine, some_ids(token_index))


def test_a_record_of_a_rewind_that_is_torn_does_not_count(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    options = config(tmp_path / "store")
    path = journal_path(tmp_path / "store", "diary")
    with Engine(str(tiny_model_dir), options) as engine:
        session = engine.session("diary")
        session.feed([some_ids(1000)]).run()
        before = path.stat().st_size
        session.rewind(500)
        after = path.stat().st_size
        content = path.read_bytes()
    for cut in (before, before + 1, before + 20, after - 1, after):
        store = tmp_path / f"cut at {cut}"
        shutil.copytree(tmp_path / "store", store)
        journal_path(store, "diary").write_bytes(content[:cut])
        with Engine(str(tiny_model_dir), dataclasses.replace(options, store=str(store))) as engine:
            num_tokens = 500 if cut == after else 1000
            assert_goes_on_like(engine.session("diary"), engine, some_ids(num_tokens))


@pytest.mark.parametrize("num_lines", [1, 2, 7, 16])
@pytest.mark.parametrize("retain", ["all", "window"])
def test_killed_at_any_moment_the_stream_is_whole(
    tiny_model_dir: Path, tmp_path: Path, retain: str, num_lines: int
) -> None:
    said = kill_after(tiny_model_dir, tmp_path, retain, "rewind", num_lines)
    options = dataclasses.replace(crash_child.config(str(tmp_path), retain), compile="off")
    with Engine(str(tiny_model_dir), options) as engine:
        session = engine.session("victim")
        stream = ids_of(session)
        calm = EngineConfig(window_size=128, prefill_chunk=64, cpu_bytes=0, compile="off")
        with Engine(str(tiny_model_dir), calm) as undisturbed:
            other = undisturbed.session("calm", system="You keep a diary.")
            assert stream in possible_streams(ids_of(other), len(said))
            other.feed([stream[other.num_tokens :]]).run()
            assert ids_of(other) == stream
            assert generated(session) == generated(other)


def possible_streams(system: list[int], num_said: int) -> list[list[int]]:
    """What the child's session may hold when it has said so many lines, or one or two more."""
    found, current, num_lines = [], system, 0
    for fed, token_index in rounds():
        found += [[*current, *fed[:count]] for count in range(len(fed) + 1)]
        current = [*current, *fed][:token_index]
        found.append(current)
        num_lines += 2
        if num_lines < num_said - 1:
            found.clear()
        if num_lines > num_said:
            return found
    raise AssertionError


def test_nothing_changes_when_it_cannot_be_journaled(engine: Engine) -> None:
    session = engine.session("diary")
    session.feed([some_ids(600)]).run()

    def full() -> None:
        raise OSError(28, "No space left on device")

    with inject("journal.write", full), pytest.raises(JournalError, match="No space"):
        session.rewind(300)
    assert_goes_on_like(session, engine, some_ids(600))


def test_rewound_in_an_event_loop(engine: Engine) -> None:
    async def play() -> None:
        session = engine.session("diary")
        await session.afeed([some_ids(300)]).run()
        answer = session.agenerate(SEEDED)
        await anext(answer)
        await session.arewind(200)
        with pytest.raises(SessionError, match="stale"):
            await anext(answer)
        fork = await session.afork("other")
        assert (session.num_tokens, fork.num_tokens) == (200, 200)

    asyncio.run(play())
    assert_goes_on_like(engine._sessions["other"], engine, some_ids(200))


def test_without_a_store_a_stream_beyond_what_is_remembered_is_not_rewound(
    tiny_model_dir: Path,
) -> None:
    with Engine(str(tiny_model_dir), config()) as engine:
        session = engine.session("diary")
        session.feed([some_ids(100)]).run()
        session._live.memory._add((5,) * MAX_REMEMBERED)
        with pytest.raises(SessionError, match="Open the engine with a store"):
            session.rewind(50)
        assert session.num_tokens == 100
