"""One question, read once and answered in some modes.

Feeds the stream, says the question by the model's chat template, gives the start of the answer and
generates greedily. Knows sessions, not where questions come from nor what becomes of answers.
"""

import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from streamkv.chat import Segment
from streamkv.engine import Engine
from streamkv.recall_bench import modes
from streamkv.recall_bench.answers import Answer
from streamkv.recall_bench.modes import Reading
from streamkv.recall_bench.question import ANSWER_START, ASKED, Question
from streamkv.sampling_params import SamplingParams
from streamkv.session import Session
from streamkv.tiers.spec import BLOCK_SIZE
from streamkv.tokenizer import Tokenizer

ANSWER_TOKENS = 12
"""Five digits take at most six tokens, and a model may begin with a few of its own."""

NAME = "recall question"
OnTokens = Callable[[int], None]
"""Called with tokens read in this question so far."""


@dataclass(frozen=True, slots=True)
class _Read:
    """A stream that has been read."""

    fed_in: str
    seconds: float
    num_tokens: int


def turn_tokens(tokenizer: Tokenizer) -> int:
    """Tokens that come after the stream: the question's turn, the answer's start, the answer."""
    turn = [*tokenizer.chat.render_turn("user", ASKED), Segment(ANSWER_START, False)]
    return len(tokenizer.encode_segments(turn)) + ANSWER_TOKENS


def has_number(text: str, number: str) -> bool:
    """Whether the number stands in a text, and not as part of a longer one."""
    return re.search(rf"(?<!\d){number}(?!\d)", text) is not None


def ask(
    engine: Engine,
    question: Question,
    reading: Reading,
    recall_blocks: int = 0,
    on_tokens: OnTokens = lambda num_tokens: None,
) -> Iterator[Answer]:
    """Read the stream of a question once and answer it in each mode of `reading`."""
    with _read(engine, question, reading.fed_in, recall_blocks, on_tokens) as (session, read):
        *others, last = reading.modes
        for mode in others:
            copy = session.fork(NAME + " copy")
            try:
                yield _answer(copy, question, mode, read, recall_blocks)
            finally:
                copy.delete()
        yield _answer(session, question, last, read, recall_blocks)


@contextmanager
def _read(
    engine: Engine, question: Question, fed_in: str, recall_blocks: int, on_tokens: OnTokens
) -> Iterator[tuple[Session, _Read]]:
    session = engine.session(NAME)
    try:
        modes.switch(session, fed_in, recall_blocks)
        started = time.perf_counter()
        for progress in session.feed([question.token_ids]):
            on_tokens(progress.num_tokens)
        _wait_for_device()
        seconds = time.perf_counter() - started
        assert session.num_tokens == question.length
        yield session, _Read(fed_in, seconds, len(question.token_ids))
    finally:
        session.delete()


def _answer(
    session: Session, question: Question, mode: str, read: _Read, recall_blocks: int
) -> Answer:
    modes.switch(session, mode, recall_blocks)
    session.say(ASKED)
    session.feed(ANSWER_START).run()
    _wait_for_device()
    params = SamplingParams(temperature=0.0, max_tokens=ANSWER_TOKENS)
    started = time.perf_counter()
    deltas = list(session.generate(params))
    seconds = time.perf_counter() - started
    text = "".join(delta.text for delta in deltas)
    recalled = _recalled_blocks(session)
    return Answer(
        length=question.length,
        index=question.index,
        depth=question.depth,
        number=question.number,
        source=question.source,
        source_token=question.source_token,
        needle_start=question.needle_start,
        needle_end=question.needle_end,
        mode=mode,
        fed_in=read.fed_in,
        text=text,
        found=has_number(text, question.number),
        beyond_window=_has_left_window(session, question, deltas[0].token_index),
        feed_s=read.seconds,
        feed_tokens=read.num_tokens,
        answer_s=seconds,
        answer_tokens=sum(delta.token_id is not None for delta in deltas),
        recalled_blocks=None if recalled is None else len(recalled),
        needle_recalled=None
        if recalled is None
        else not recalled.isdisjoint(question.needle_blocks),
    )


def _has_left_window(session: Session, question: Question, first_index: int) -> bool:
    """Whether no token of the needle was in the window when the first token was chosen."""
    stats = session.stats()
    return question.needle_end <= first_index - stats.num_window_tokens


def _recalled_blocks(session: Session) -> set[int] | None:
    if session.mode != "recall":
        return None
    return {recalled.start // BLOCK_SIZE for recalled in session.attended()}


def _wait_for_device() -> None:
    """Let a GPU finish what it was given, so that its time counts where it belongs."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()
