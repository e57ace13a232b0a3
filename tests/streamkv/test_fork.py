"""A fork has the past of its session, and nothing else in common with it."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from stream_oracle import (
    assert_goes_on_like,
    check_integrity,
    config,
    generated,
    ids_of,
)

from streamkv import Engine


@pytest.fixture
def engine(tiny_model_dir: Path, tmp_path: Path) -> Iterator[Engine]:
    with Engine(str(tiny_model_dir), config(tmp_path / "store")) as engine:
        yield engine
        check_integrity(engine)


@pytest.mark.parametrize("num_tokens", [1, 2, 63, 64, 65, 66, 127, 128, 129, 400, 449, 450])
@pytest.mark.parametrize("has_store", [True, False], ids=["store", "memory"])
def test_both_go_on_as_if_the_other_did_not_exist(
    tiny_model_dir: Path, tmp_path: Path, has_store: bool, num_tokens: int
) -> None:
    options = config(tmp_path / "store" if has_store else None)
    ids = [5 + 7 * index % 200 for index in range(num_tokens)]
    with Engine(str(tiny_model_dir), options) as engine:
        session = engine.session("first")
        session.feed([ids]).run()
        fork = session.fork("second")
        assert (fork.name, fork.num_tokens, fork.resumed) == ("second", num_tokens, False)
        fork.feed([[9, 8, 7]]).run()
        session.feed([[6] * 70]).run()
        check_integrity(engine)
        assert_goes_on_like(fork, engine, [*ids, 9, 8, 7])
        assert_goes_on_like(session, engine, [*ids, *[6] * 70])
        check_integrity(engine)


def test_full_blocks_are_shared_and_the_open_block_is_not(engine: Engine) -> None:
    session = engine.session("first")
    session.feed([[5] * 200]).run()
    before = engine.usage()["gpu"].num_blocks
    fork = session.fork("second")
    assert engine.usage()["gpu"].num_blocks == before + 1
    assert fork.stats().num_blocks == session.stats().num_blocks == before


def test_text_that_is_held_back_is_part_of_the_past(engine: Engine) -> None:
    session = engine.session("first")
    session.feed("the do").run()
    fork = session.fork("second")
    assert fork.text_chars == 6
    fork.feed("g sleeps").run()
    session.feed("or").run()
    for each in (fork, session):
        generated(each)
    whole = engine.tokenizer.encode("the dog sleeps")
    assert ids_of(fork)[: len(whole)] == whole
    whole = engine.tokenizer.encode("the door")
    assert ids_of(session)[: len(whole)] == whole


def test_a_fork_outlives_its_session(tiny_model_dir: Path, tmp_path: Path) -> None:
    for doomed, other in (("first", "second"), ("second", "first")):
        options = config(tmp_path / doomed)
        with Engine(str(tiny_model_dir), options) as engine:
            session = engine.session("first")
            session.feed([[5 + 7 * index % 200 for index in range(1000)]]).run()
            session.fork("second")
        with Engine(str(tiny_model_dir), options) as engine:
            engine.session(doomed).delete()
            assert engine.session_names() == [other]
        with Engine(str(tiny_model_dir), options) as engine:
            kept = engine.session(other)
            assert kept.num_tokens - kept.stats().num_computed <= 64
            assert engine.counters()["misses"] == 0
            assert_goes_on_like(kept, engine, ids_of(kept))
