"""Scoring by chunks gives the values of scoring by tokens, however the input is cut or ends."""

import asyncio
import random
from collections.abc import AsyncIterator, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from stream_oracle import TEXT, assert_goes_on_like, config, generated, ids_of
from test_run_ahead import User, rig, scores_of

from streamkv import ChunkScores, Engine, Session
from streamkv.batch import Batch
from streamkv.errors import InputError, SessionError
from streamkv.intake import PIECE_IDS

IDS = random.Random(8).choices(range(3, 300), k=700)
CHUNK = 64


@pytest.fixture(scope="module")
def engine(tiny_model_dir: Path) -> Iterator[Engine]:
    with Engine(str(tiny_model_dir), config()) as engine:
        yield engine


@pytest.fixture
def session(engine: Engine) -> Iterator[Session]:
    with engine.session("scored") as session:
        yield session
        session.delete()


def flat(chunks: Iterable[ChunkScores]) -> list[tuple[int, int, float]]:
    """(token_index, token_id, logprob) of each token; chunks must lie end to end."""
    found = []
    for chunk in chunks:
        assert chunk.token_ids.dtype == np.int64 and chunk.logprobs.dtype == np.float32
        found += [(score.token_index, score.token_id, score.logprob) for score in scores_of(chunk)]
    indices = [index for index, _, _ in found]
    assert indices == list(range(indices[0], indices[0] + len(found)))
    return found


def by_token(session: Session, items: Any) -> list[tuple[int, int, float]]:
    """The same by `score`."""
    return [
        (score.token_index, score.token_id, np.nan if score.logprob is None else score.logprob)
        for score in session.score(items)
    ]


def assert_alike(
    found: list[tuple[int, int, float]], expected: list[tuple[int, int, float]]
) -> None:
    """Equal but for what chunks of other sizes round differently."""
    assert [row[:2] for row in found] == [row[:2] for row in expected]
    values, wanted = ([row[2] for row in rows] for rows in (found, expected))
    np.testing.assert_allclose(values, wanted, rtol=0, atol=2e-4)


def cut(whole: Any, size: int) -> list[Any]:
    return [whole[start : start + size] for start in range(0, len(whole), size)]


@pytest.mark.parametrize("whole", [IDS, TEXT[:2500]], ids=["ids", "text"])
def test_chunks_are_those_of_score_bit_by_bit_the_same_for_every_cut(
    engine: Engine, whole: Any
) -> None:
    with engine.session("by token") as session:
        expected = by_token(session, [whole])
        session.delete()
    runs = []
    for size in (1, 7, 63, 64, 65, 129, 1000, len(whole)):
        with engine.session(f"cut at {size}") as session:
            chunks = session.score_chunks(cut(whole, size)).run()
            session.delete()
        assert [chunk.token_index for chunk in chunks[1:]] == [
            CHUNK * number + 1 for number in range(1, len(chunks))
        ]
        found = flat(chunks)
        assert_alike(found, expected)
        runs.append(np.array(found))
    assert all(np.array_equal(runs[0], run, equal_nan=True) for run in runs)
    assert np.isnan(runs[0][0, 2]) and not np.isnan(runs[0][1:, 2]).any()


def test_a_stream_that_exists_has_no_first_token(session: Session, engine: Engine) -> None:
    with engine.session("by token") as other:
        for each in (session, other):
            each.feed([IDS[:100]]).run()
            generated(each)
            each.keep("the key is under the mat. ")
        found = flat(session.score_chunks([IDS[:200], "The fox ", "sleeps."]))
        assert_alike(found, by_token(other, [IDS[:200], "The fox ", "sleeps."]))
        assert ids_of(session) == ids_of(other)
        other.delete()


def test_a_session_that_resumes_scores_on(tiny_model_dir: Path, tmp_path: Path) -> None:
    """In the middle of a chunk, with what was given to be scored and nothing else."""
    with Engine(str(tiny_model_dir), config(tmp_path)) as engine:
        with engine.session("whole") as whole:
            expected = by_token(whole, [IDS])
        with engine.session("twice") as session:
            found = flat(session.score_chunks([IDS[:330]]))
        with engine.session("twice") as session:
            assert session.resumed
            found += flat(session.score_chunks([IDS[330:]]))
    assert_alike(found, expected)


def test_one_token_is_a_chunk(session: Session) -> None:
    [chunk] = session.score_chunks([[5]])
    assert (chunk.token_index, chunk.token_ids.tolist()) == (0, [5])
    assert np.isnan(chunk.logprobs).tolist() == [True]
    [chunk] = session.score_chunks([[6]])
    assert chunk.token_index == 1 and chunk.logprobs[0] < 0


@pytest.mark.parametrize("items", ["", [], [""], [[]]])
def test_nothing_to_score_is_refused(session: Session, items: Any) -> None:
    with pytest.raises(InputError, match="nothing to score"):
        session.score_chunks(items).run()
    assert session.num_tokens == 0


def handed_out_before(chunks: Iterator[ChunkScores], error: type[Exception]) -> list[ChunkScores]:
    """What comes before the iterator raises."""
    handed: list[ChunkScores] = []

    def take() -> None:
        for chunk in chunks:
            handed.append(chunk)

    with pytest.raises(error):
        take()
    return handed


def broken(items: list[Any], error: Exception) -> Iterator[Any]:
    yield from items
    raise error


MANY = [5 + 7 * index % 290 for index in range(PIECE_IDS)]


@pytest.mark.parametrize(
    ("items", "error", "num_accepted"),
    [
        ([IDS[:150], [5, -1]], InputError, 150),
        ([[*MANY, *IDS[:300], 10**6]], InputError, PIECE_IDS),
        ([IDS[:200], "bad \ud800"], InputError, 200),
        ([IDS[:200], 7], InputError, 200),
        (broken([IDS[:200], IDS[200:333]], OSError("gone")), OSError, 333),
    ],
    ids=["second-item", "second-piece", "unicode", "no-item", "iterator"],
)
def test_what_was_full_is_handed_out_before_an_error_and_the_session_goes_on(
    session: Session, engine: Engine, items: Any, error: type[Exception], num_accepted: int
) -> None:
    handed = handed_out_before(session.score_chunks(iter(items)), error)
    assert session.num_tokens == num_accepted
    assert len(flat(handed)) == (num_accepted - 1) // CHUNK * CHUNK + 1
    assert_goes_on_like(session, engine, ids_of(session))


@pytest.mark.parametrize("end", ["close", "leave", "rewind", "sleep"])
def test_who_stops_early_leaves_what_was_accepted(
    tiny_model_dir: Path, tmp_path: Path, end: str
) -> None:
    """The pieces that one more chunk needed; that chunk is computed, and counts as computed."""
    long = MANY * 3
    with Engine(str(tiny_model_dir), config(tmp_path)) as engine:
        session = engine.session("left early")
        chunks = session.score_chunks([long])
        handed = [next(chunks) for _ in range(PIECE_IDS // CHUNK - 1)]
        # The next chunk lacks the token after it, which is in the next piece.
        assert len(flat(handed)) == PIECE_IDS - CHUNK + 1
        assert session.num_tokens == 2 * PIECE_IDS
        assert session.stats().num_computed == PIECE_IDS
        expected = long[: 2 * PIECE_IDS]
        match end:
            case "close":
                chunks.close()
            case "rewind":
                session.rewind(PIECE_IDS - 30)
                expected = long[: PIECE_IDS - 30]
            case "sleep":
                session.close()
                session = engine.session("left early")
        assert ids_of(session) == expected
        assert_goes_on_like(session, engine, expected)
        if end != "close":
            with pytest.raises(SessionError):
                next(chunks)


def test_no_item_is_asked_for_while_scores_are_owed(session: Session) -> None:
    taken = 0

    def items() -> Iterator[list[int]]:
        nonlocal taken
        for start in range(0, 640, 70):
            taken += 1
            yield IDS[start : start + 70]

    chunks = session.score_chunks(items())
    assert taken == 0
    next(chunks)
    assert taken == 1 and session.num_tokens == 70
    next(chunks)
    assert taken == 2 and session.num_tokens == 140


def test_the_next_chunk_is_launched_before_the_one_before_is_handed_out(
    narrow_model_dir: Path,
) -> None:
    with rig(narrow_model_dir, None, max_sequences=2) as found:
        user = User(found, "pipeline", seed=1)
        ids, first = user.ids(300, 300), user.session.num_tokens
        user.oracle.extend(ids)
        before, num_scored, num_launched = len(found.device.launched), 0, list[int]()
        for chunk in user.session.score_chunks([ids]):
            num_launched.append(len(found.device.launched) - before)
            for score in scores_of(chunk):
                assert score.token_index == first + num_scored
                assert score.logprob == pytest.approx(user.oracle.logprob(score.token_index))
                num_scored += 1
        # The last one is short: it is asked for when there are no more items.
        assert (num_scored, num_launched) == (300, [2, 3, 4, 4, 5])
        user.session.close()
        found.settle()


def test_an_error_of_the_second_chunk_comes_after_the_scores_of_the_first(
    narrow_model_dir: Path,
) -> None:
    """And one of the first is not followed by scores of the second."""
    with rig(narrow_model_dir, None, max_sequences=2) as found:
        for failing, hook in (
            (128, "before_launch"),
            (128, "before_results"),
            (64, "before_results"),
        ):
            session = found.engine.session(f"{hook} {failing}")

            def fail(batch: Batch, at: int = failing) -> None:
                if any(step.start == at for step in batch.steps):
                    raise MemoryError("no room")

            setattr(found.device, hook, fail)
            handed = handed_out_before(session.score_chunks([IDS]), MemoryError)
            setattr(found.device, hook, lambda batch: None)
            assert len(flat(handed)) == failing + 1
            session.close()
        found.settle()


def test_the_async_twin_does_the_same(engine: Engine, session: Session) -> None:
    expected = flat(session.score_chunks([IDS]))

    async def items() -> AsyncIterator[list[int]]:
        for piece in cut(IDS, 150):
            await asyncio.sleep(0)
            yield piece

    async def main() -> list[ChunkScores]:
        async with engine.session("async") as twin:
            chunks = [chunk async for chunk in twin.ascore_chunks(items())]
            left = twin.ascore_chunks([IDS])
            await anext(left)
            await left.aclose()
            await twin.adelete()
            return chunks

    assert np.array_equal(np.array(flat(asyncio.run(main()))), np.array(expected), equal_nan=True)
