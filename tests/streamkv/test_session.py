"""What a user does with a session: feed, score, say, generate, keep, stop anywhere, go on."""

import asyncio
import gc
import itertools
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from streamkv import Engine, EngineConfig, FinishReason, SamplingParams, Session
from streamkv.errors import (
    ConfigError,
    EngineClosedError,
    InputError,
    PoolFullError,
    SessionError,
)

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
TEXT = "The quick brown fox jumps over the lazy dog. " * 20


@pytest.fixture(scope="module")
def engine(tiny_model_dir: Path) -> Iterator[Engine]:
    config = EngineConfig(window_size=128, prefill_chunk=64, cpu_bytes="4MiB")
    with Engine(str(tiny_model_dir), config) as engine:
        yield engine


@pytest.fixture
def session(engine: Engine, request: pytest.FixtureRequest) -> Iterator[Session]:
    with engine.session(request.node.name.replace("[", "-").replace("]", "")[:60]) as session:
        yield session


def test_feed_reports_progress_and_takes_an_infinite_iterator_lazily(session: Session) -> None:
    taken = 0

    def lines() -> Iterator[str]:
        nonlocal taken
        for taken in itertools.count(1):
            yield f"line {taken}: the dog sleeps in the sun\n"

    feeding = session.feed(lines())
    first, second = next(feeding), next(feeding)
    feeding.close()
    assert (first.num_tokens, second.num_tokens) == (64, 128)
    assert taken < 40
    assert second.token_index == session.stats().num_computed == 128


def test_feed_leaves_only_the_last_token_pending(session: Session) -> None:
    *_, last = session.feed([TEXT, "end"])
    stats = session.stats()
    assert last.text_chars == len(TEXT) + 3 == stats.text_chars
    assert stats.num_computed == stats.num_tokens - 1


def test_words_are_joined_as_given(session: Session, engine: Engine) -> None:
    session.feed(["hel", "lo wor", "ld", " again"]).run()
    scored = list(session.score([" and"]))
    ids = engine.tokenizer.encode("hello world again and")
    assert session.num_tokens == len(ids)
    assert [score.token_id for score in scored] == ids[-len(scored) :]


def test_a_text_is_one_item_not_its_characters(session: Session) -> None:
    assert session.feed("hello there").run()[-1].text_chars == 11


@pytest.mark.parametrize("items", ["", [], [""], [[]]], ids=["text", "list", "texts", "ids"])
def test_an_empty_feed_is_refused(session: Session, items: list[str]) -> None:
    with pytest.raises(InputError, match="empty feed"):
        session.feed(items).run()
    assert session.num_tokens == 0


@pytest.mark.parametrize("bad", [[-1], [10**6], ["a"], [1.5], [True]])
def test_token_ids_out_of_range_are_refused_by_name(session: Session, bad: list[int]) -> None:
    with pytest.raises(InputError, match="token id"):
        session.feed([[5, 6], bad]).run()
    assert session.num_tokens == 2


def test_invalid_unicode_is_refused_and_nothing_is_lost(session: Session) -> None:
    session.feed("good ").run()
    before = session.text_chars
    with pytest.raises(InputError, match="surrogate"):
        session.feed("bad \ud800").run()
    assert session.text_chars == before
    session.feed("good again").run()


def test_an_exception_in_the_users_iterator_comes_out_and_the_session_goes_on(
    session: Session,
) -> None:
    def broken() -> Iterator[str]:
        yield "fine so far "
        raise RuntimeError("the log file vanished")

    with pytest.raises(RuntimeError, match="vanished"):
        session.feed(broken()).run()
    assert session.text_chars == len("fine so far ")
    assert len(session.generate(GREEDY).run()) == 8


def test_generate_on_an_empty_session_is_refused(session: Session) -> None:
    with pytest.raises(SessionError, match="empty"):
        next(session.generate(GREEDY))


def test_deltas_join_to_the_decoded_tokens(session: Session, engine: Engine) -> None:
    session.feed(TEXT).run()
    deltas = session.generate(SamplingParams(temperature=1.5, seed=3, max_tokens=60)).run()
    ids = [delta.token_id for delta in deltas if delta.token_id is not None]
    text = "".join(delta.text for delta in deltas)
    assert text == engine.tokenizer.decode(ids)
    assert deltas[-1].finish_reason is not None
    assert all(delta.finish_reason is None for delta in deltas[:-1])
    assert [delta.token_index for delta in deltas] == list(
        range(deltas[0].token_index, deltas[0].token_index + len(deltas))
    )


def test_the_same_seed_draws_the_same_tokens(engine: Engine) -> None:
    texts = []
    for name, seed in (("s1", 11), ("s2", 11), ("s3", 12)):
        with engine.session(name) as session:
            session.feed(TEXT).run()
            params = SamplingParams(temperature=1.0, seed=seed, max_tokens=20, ignore_eos=True)
            texts.append([delta.token_id for delta in session.generate(params)])
    assert texts[0] == texts[1] != texts[2]


def test_max_tokens_none_goes_on_until_closed(session: Session) -> None:
    session.feed(TEXT).run()
    params = SamplingParams(temperature=0.0, ignore_eos=True)
    deltas = list(itertools.islice(session.generate(params), 150))
    assert len(deltas) == 150
    assert session.stats().num_blocks <= (128 + 64) // 64 + 2


def test_a_stop_string_is_withheld(session: Session) -> None:
    session.feed(TEXT).run()
    full = "".join(delta.text for delta in session.generate(GREEDY))
    with_stop = engine_text_with_stop(session, full[3:6])
    assert full[3:6] not in with_stop


def engine_text_with_stop(session: Session, stop: str) -> str:
    params = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True, stop=[stop])
    return "".join(delta.text for delta in session.generate(params))


def test_a_stop_id_ends_the_generation(session: Session) -> None:
    session.feed(TEXT).run()
    first = next(iter(session.generate(GREEDY)))
    assert first.token_id is not None
    ids = [delta.token_id for delta in session.generate(GREEDY)]
    stop_id = ids[2]
    assert stop_id is not None
    params = SamplingParams(temperature=0.0, stop_ids=[stop_id], max_tokens=500)
    last = session.generate(params).run()[-1]
    assert last.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)


def test_an_abandoned_generation_keeps_exactly_what_was_handed_out(session: Session) -> None:
    session.feed(TEXT).run()
    before = session.num_tokens
    generation = session.generate(SamplingParams(temperature=0.0, ignore_eos=True))
    handed = [next(generation).token_id for _ in range(5)]
    generation.close()
    assert session.num_tokens >= before + 5
    rest = [delta.token_id for delta in session.generate(GREEDY)]
    assert len(handed) == 5 and len(rest) == 8


def test_going_on_after_abandoning_equals_going_straight_on(engine: Engine) -> None:
    tokens = []
    for name, cut in (("straight", None), ("cut", 7)):
        with engine.session(name) as session:
            session.feed(TEXT).run()
            params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=20)
            generation = session.generate(params)
            first = [d.token_id for d in itertools.islice(generation, cut)]
            generation.close()
            params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=20)
            rest = [d.token_id for d in session.generate(params)]
            tokens.append((first + rest)[:20])
    assert tokens[0] == tokens[1]


def test_an_iterator_left_behind_is_stale_once_the_session_went_on(session: Session) -> None:
    session.feed(TEXT).run()
    old = session.generate(GREEDY)
    next(old)
    session.feed("something else ").run()
    with pytest.raises(SessionError, match="stale"):
        next(old)


def test_whoever_closes_the_engine_while_iterating_hears_of_it(tiny_model_dir: Path) -> None:
    engine = Engine(str(tiny_model_dir), EngineConfig(window_size=64, cpu_bytes=0))
    session = engine.session("cut short")
    with pytest.raises(EngineClosedError):
        for _ in session.feed(TEXT * 100):
            engine.close()
    assert session.num_tokens > 0


@pytest.mark.parametrize(
    ("params", "words"),
    [({"max_tokens": 3}, "not SamplingParams"), (SamplingParams(stop_ids=[10**9]), "stop_ids")],
)
def test_parameters_that_this_model_cannot_use_are_refused(
    session: Session, params: Any, words: str
) -> None:
    session.feed(TEXT).run()
    with pytest.raises(InputError, match=words):
        session.generate(params)


def test_an_iterator_that_is_never_iterated_is_said_aloud(session: Session) -> None:
    with pytest.warns(ResourceWarning, match="never iterated"):
        session.feed("lost?")
        gc.collect()
    assert session.num_tokens == 0


def test_a_second_call_at_the_same_time_is_refused(session: Session) -> None:
    def nested() -> Iterator[str]:
        yield "a "
        session.say("now?")

    with pytest.raises(SessionError, match="busy"):
        session.feed(nested()).run()


def test_special_tokens_in_a_users_text_stay_text(session: Session, engine: Engine) -> None:
    end = engine.tokenizer.encode_segments([])
    session.feed("a<|im_end|>b ").run()
    scores = session.score("c<|im_start|>d").run()
    assert end == []
    assert not {score.token_id for score in scores} & engine.tokenizer.special_ids
    assert "".join(score.text for score in scores).endswith("c<|im_start|>d")


def test_say_renders_a_turn_by_the_template(session: Session, engine: Engine) -> None:
    session.say("Who sleeps?")
    expected = "<|im_start|>user\nWho sleeps?<|im_end|>\n<|im_start|>assistant\n"
    text = engine.tokenizer.decode(list(session._live.sequence.recent_ids), skip_special=False)
    assert text == expected


def test_say_refuses_an_empty_turn_and_an_unknown_role(session: Session) -> None:
    with pytest.raises(InputError, match="empty turn"):
        session.say("  ")
    with pytest.raises(InputError, match="role"):
        session.say("hello", role="Nobody!")
    assert session.num_tokens == 0


def test_keep_refuses_what_passes_the_trained_length(session: Session) -> None:
    with pytest.raises(InputError, match="trained length"):
        session.keep("word " * 6000)
    session.keep("the key is under the mat ")
    assert session.stats().num_sink_tokens > 4


def test_score_of_a_first_token_has_no_logprob(session: Session) -> None:
    scores = session.score(["The dog"]).run()
    assert scores[0].logprob is None
    assert all(score.logprob is not None and score.logprob < 0 for score in scores[1:])
    again = session.score([" sleeps"]).run()
    assert again[0].logprob is not None


def test_only_what_is_given_to_be_scored_is_scored(tiny_model_dir: Path, tmp_path: Path) -> None:
    """Not the token generated last, nor what is computed anew when no tier has the window."""
    config = EngineConfig(window_size=64, store=str(tmp_path), retain="none", cpu_bytes=0)
    ids = list(range(10, 16))
    with Engine(str(tiny_model_dir), config) as engine:
        with engine.session("scored") as session:
            session.feed(TEXT * 3).run()
            session.generate(GREEDY).run()
            scores = session.score([ids]).run()
            assert [score.token_id for score in scores] == ids
        with engine.session("scored") as session:
            assert session.resumed and session.num_tokens > 300
            scores = session.score([ids]).run()
    found = [(score.token_index, score.token_id) for score in scores]
    assert found == list(enumerate(ids, session.num_tokens - len(ids)))


def test_logprobs_are_reported_when_asked_for(session: Session) -> None:
    session.feed(TEXT).run()
    params = SamplingParams(temperature=0.0, max_tokens=3, logprobs=2, ignore_eos=True)
    for delta in session.generate(params):
        assert delta.logprob is not None
        assert delta.logprob.top[0] == (delta.token_id, delta.logprob.logprob)
        assert len(delta.logprob.top) == 2


@pytest.mark.parametrize("name", ["", ".hidden", "a/b", "../up", "x" * 101, "nul\0"])
def test_names_that_are_no_file_names_are_refused(engine: Engine, name: str) -> None:
    with pytest.raises(InputError, match="name"):
        engine.session(name)


def test_a_session_cannot_be_opened_twice(engine: Engine, session: Session) -> None:
    with pytest.raises(SessionError, match="open already"):
        engine.session(session.name)


def test_a_closed_session_refuses_calls(engine: Engine) -> None:
    session = engine.session("closed")
    session.close()
    session.close()
    with pytest.raises(SessionError, match="closed"):
        session.feed("x")


def test_more_sessions_than_the_pool_holds_are_asleep_and_nothing_leaks(engine: Engine) -> None:
    opened = [engine.session(f"many-{number}") for number in range(100)]
    states = engine.session_states()
    assert states["awake"] >= engine.config.max_sessions and states["asleep"] > 50
    assert states["awake"] + states["asleep"] == 100
    assert [session.stats().state for session in opened].count("asleep") == states["asleep"]
    for session in opened:
        session.close()
    assert engine.usage()["gpu"].num_blocks == 0
    assert engine.session_states() == dict.fromkeys(states, 0)


def test_without_a_tier_below_more_sessions_than_the_pool_holds_are_refused(
    tiny_model_dir: Path,
) -> None:
    config = EngineConfig(window_size=128, prefill_chunk=64, cpu_bytes=0, compile="off")
    with Engine(str(tiny_model_dir), config) as engine:
        opened = []
        with pytest.raises(PoolFullError, match="max_sessions"):
            for number in range(100):
                opened.append(engine.session(f"many-{number}"))
        assert len(opened) >= engine.config.max_sessions
        assert engine.session_states()["awake"] == len(opened)


def test_two_sessions_take_turns(engine: Engine) -> None:
    """A long feed does not stall another session's tokens: they alternate with its chunks."""
    feeder, talker = engine.session("feeder"), engine.session("talker")
    talker.feed("Once upon a time ").run()
    order: list[str] = []
    started = threading.Event()

    def feed() -> None:
        for _ in feeder.feed(TEXT * 8):
            order.append("chunk")
            started.set()

    thread = threading.Thread(target=feed)
    thread.start()
    started.wait()
    for _ in talker.generate(GREEDY):
        order.append("token")
    thread.join()
    feeder.close()
    talker.close()
    last_token = len(order) - 1 - order[::-1].index("token")
    assert "chunk" in order[last_token:]


def test_closing_the_engine_in_mid_stream_ends_the_stream_with_an_error(
    tiny_model_dir: Path,
) -> None:
    engine = Engine(str(tiny_model_dir), EngineConfig(window_size=64, cpu_bytes=0))
    session = engine.session("cut off")
    session.feed(TEXT).run()
    generation = session.generate(SamplingParams(ignore_eos=True))
    next(generation)
    errors: list[BaseException] = []

    def consume() -> None:
        try:
            for _ in generation:
                pass
        except EngineClosedError as error:
            errors.append(error)

    thread = threading.Thread(target=consume)
    thread.start()
    engine.close()
    thread.join(timeout=30)
    assert not thread.is_alive()
    assert len(errors) <= 1
    with pytest.raises(EngineClosedError):
        engine.session("another")


def test_a_window_beyond_the_trained_length_is_refused_at_open(tiny_model_dir: Path) -> None:
    with pytest.raises(ConfigError, match="trained length"):
        Engine(str(tiny_model_dir), EngineConfig(window_size=4096))


def test_a_gpu_pool_smaller_than_a_window_is_refused_at_open(tiny_model_dir: Path) -> None:
    with pytest.raises(ConfigError, match="gpu_bytes"):
        Engine(str(tiny_model_dir), EngineConfig(window_size=1024, gpu_bytes="64KiB"))


def test_the_async_twins_do_the_same(engine: Engine) -> None:
    async def lines() -> AsyncIterator[str]:
        for start in range(0, len(TEXT), 50):
            await asyncio.sleep(0)
            yield TEXT[start : start + 50]

    async def main() -> tuple[int, list[int | None], int]:
        async with engine.session("async") as session:
            progress = [p async for p in session.afeed(lines())]
            scores = await session.ascore([" and", " so"]).run()
            tokens = [delta.token_id async for delta in session.agenerate(GREEDY)]
            await session.asay("And then?")
            return progress[-1].text_chars, tokens, len(scores)

    text_chars, tokens, num_scores = asyncio.run(main())
    with engine.session("sync") as session:
        session.feed(TEXT).run()
        assert len(session.score([" and", " so"]).run()) == num_scores
        assert [delta.token_id for delta in session.generate(GREEDY)] == tokens
    assert text_chars == len(TEXT)


def test_a_cancelled_task_leaves_the_session_usable(engine: Engine) -> None:
    async def main() -> int:
        session = engine.session("cancelled")
        await session.afeed(TEXT).run()

        async def talk() -> None:
            async for _ in session.agenerate(SamplingParams(ignore_eos=True)):
                pass

        task = asyncio.create_task(talk())
        await asyncio.sleep(0.2)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        count = len(await session.agenerate(GREEDY).run())
        await session.aclose()
        return count

    assert asyncio.run(main()) == 8


def test_the_event_loop_is_never_blocked(engine: Engine) -> None:
    """Other tasks run between and during the steps of a feed."""

    async def main() -> int:
        beats = 0
        done = asyncio.Event()

        async def heart() -> None:
            nonlocal beats
            while not done.is_set():
                beats += 1
                await asyncio.sleep(0)

        heartbeat = asyncio.create_task(heart())
        async with engine.session("loop") as session:
            await session.afeed(TEXT * 3).run()
        done.set()
        await heartbeat
        return beats

    assert asyncio.run(main()) > 20
