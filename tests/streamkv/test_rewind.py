"""A session that is rewound goes on as one that never had the later tokens."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from stream_oracle import assert_goes_on_like, check_integrity, config, generated, ids_of

from streamkv import Engine


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
