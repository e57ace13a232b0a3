"""One question through a real engine: read, asked, answered."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from streamkv import Engine, EngineConfig, SamplingParams, Session
from streamkv.chat import Segment
from streamkv.recall_bench.asking import ANSWER_TOKENS, ask, has_number, turn_tokens
from streamkv.recall_bench.modes import Reading
from streamkv.recall_bench.question import ANSWER_START, ASKED, Question

LENGTH = 300
WINDOW = 128


@pytest.fixture(scope="module")
def engine(tiny_model_dir: Path) -> Iterator[Engine]:
    config = EngineConfig(window_size=WINDOW, max_sessions=2, compile="off")
    with Engine(str(tiny_model_dir), config) as opened:
        yield opened


@pytest.fixture
def question(engine: Engine) -> Question:
    ids = [(7 * place + 3) % engine.tokenizer.vocab_size for place in range(LENGTH)]
    return Question(LENGTH, 3, 0.1, "43432", "a.md", 0, ids, 30, 44)


def expected_text(engine: Engine, question: Question) -> str:
    """The greedy answer to the whole of it as one list of ids."""
    turn = [*engine.tokenizer.chat.render_turn("user", ASKED), Segment(ANSWER_START, False)]
    ids = [*question.token_ids, *engine.tokenizer.encode_segments(turn)]
    params = SamplingParams(temperature=0.0, max_tokens=ANSWER_TOKENS)
    with engine.session("expected") as session:
        session.feed([ids]).run()
        assert session.num_tokens == LENGTH + turn_tokens(engine.tokenizer) - ANSWER_TOKENS
        text = "".join(delta.text for delta in session.generate(params))
        session.delete()
    return text


def test_the_answer_is_the_greedy_one_to_stream_and_turn(
    engine: Engine, question: Question
) -> None:
    told: list[int] = []
    window = Reading("window", ("window",))
    [answer] = ask(engine, question, window, on_tokens=told.append)
    assert answer.text == expected_text(engine, question)
    assert (answer.length, answer.index, answer.mode, answer.number) == (300, 3, "window", "43432")
    assert (answer.feed_tokens, answer.fed_in, answer.found) == (LENGTH, "window", False)
    assert 1 <= answer.answer_tokens <= ANSWER_TOKENS
    assert answer.feed_s > 0 < answer.answer_s
    assert told == sorted(told)
    assert told[-1] == LENGTH - 1
    assert engine.session_names() == []


def test_a_number_is_found_where_the_model_says_it(engine: Engine, question: Question) -> None:
    text = expected_text(engine, question)
    said = replace(question, number=text[:3] if text[:3].isalnum() else text.split()[0])
    [answer] = ask(engine, said, Reading("window", ("window",)))
    assert answer.found is has_number(text, said.number)


def test_the_needle_is_beyond_the_window_from_its_last_token_on(
    engine: Engine, question: Question
) -> None:
    # The first token of the answer is chosen by the last token of the prompt, whose window this is.
    first_seen = LENGTH + turn_tokens(engine.tokenizer) - ANSWER_TOKENS - WINDOW
    for end, is_beyond in ((first_seen, True), (first_seen + 1, False), (LENGTH, False)):
        moved = replace(question, needle_start=end - 14, needle_end=end)
        [answer] = ask(engine, moved, Reading("window", ("window",)))
        assert answer.beyond_window is is_beyond, end


def test_modes_that_share_a_reading_answer_each_from_its_end(
    engine: Engine, question: Question, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fork reads it no more."""
    read: list[str] = []
    feed = Session.feed

    def counted(session: Session, items: object) -> object:
        read.append(session.name)
        return feed(session, items)  # type: ignore[arg-type]  # handed on as it is

    monkeypatch.setattr(Session, "feed", counted)
    first, second = ask(engine, question, Reading("window", ("window", "dense")))
    assert (first.mode, second.mode) == ("window", "dense")
    assert first.text == second.text
    # Besides the stream each answer's start is fed.
    assert len(read) - 2 == 1
    assert engine.session_names() == []


def test_a_reading_that_is_left_early_leaves_no_session(engine: Engine, question: Question) -> None:
    answers = ask(engine, question, Reading("window", ("window", "dense")))
    next(answers)
    answers.close()  # type: ignore[attr-defined]  # an iterator that is a generator
    assert engine.session_names() == []


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (" 43432.", True),
        ("43432", True),
        (" not 143432", False),
        (" 434321.", False),
        (" 4343", False),
        (": **43432**", True),
    ],
)
def test_a_number_counts_only_by_itself(text: str, found: bool) -> None:
    assert has_number(text, "43432") is found
