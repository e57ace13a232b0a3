"""The sessions of a summary: one reads the transcript, others are asked about pieces of it.

A question is asked in a session of its own, which holds nothing else and is deleted afterwards.
Asked in the session that reads the transcript, a small model repeats its earlier answers from there
on: with SmolLM2-135M, six of seven segments got the answer of an earlier one. So the answer to a
question depends on the question alone, and not on what was asked before or where a run was cut off.
"""

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, Self

from streamkv.config import EngineConfig
from streamkv.outputs import Delta, FinishReason, Progress
from streamkv.sampling_params import SamplingParams
from streamkv.summarize.prompts import SYSTEM

RETRY_TEMPERATURE = 0.5
RETRY_SEED = 1


class Deltas(Iterator[Delta], Protocol):
    """What is used of a generation: it can be left before its end."""

    def close(self) -> None: ...


class SessionLike(Protocol):
    """What is used of a `Session`."""

    def __enter__(self) -> Self: ...
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
        /,
    ) -> None: ...
    def feed(self, items: str) -> Iterator[Progress]: ...
    def say(self, text: str) -> None: ...
    def generate(self, params: SamplingParams) -> Deltas: ...
    def delete(self) -> None: ...
    @property
    def text_chars(self) -> int: ...


class EngineLike(Protocol):
    """What is used of an `Engine`."""

    @property
    def config(self) -> EngineConfig: ...
    @property
    def model_name(self) -> str: ...
    def session(self, name: str, *, system: str | None = None) -> SessionLike: ...
    def session_names(self) -> list[str]: ...
    def count_tokens(self, text: str) -> int: ...


@dataclass(frozen=True, slots=True)
class Question:
    """What is asked.

    Attributes:
        prompt: the user's turn.
        opening: how the answer is made to begin; part of it.
        max_tokens: most tokens of the answer.
        max_lines: lines of the answer after which it has said enough.
        retry: whether it is asked again: then with some noise, because greedy would err alike.
    """

    prompt: str
    opening: str
    max_tokens: int
    max_lines: int
    retry: bool = False

    @property
    def params(self) -> SamplingParams:
        """Greedy, ending at a blank line; reproducible noise on a retry.

        No repetition penalty: it would count against the names and numbers of the transcript itself
        and make the model change them.
        """
        return SamplingParams(
            temperature=RETRY_TEMPERATURE if self.retry else 0.0,
            seed=RETRY_SEED,
            stop=("\n\n",),
            max_tokens=self.max_tokens,
        )


@dataclass(frozen=True, slots=True)
class RawAnswer:
    """What the model wrote; `ended`: by itself, rather than at the limit of tokens."""

    text: str
    ended: bool


def ask(engine: EngineLike, name: str, question: Question) -> RawAnswer:
    """Ask in a session called `name` that exists only for this question."""
    if name in engine.session_names():
        engine.session(name).delete()
    with engine.session(name, system=SYSTEM) as session:
        try:
            return _take_down(session, question)
        finally:
            session.delete()


def read_on(session: SessionLike, text: str, start: int) -> int:
    """Feed `text`, which begins at character `start` of the transcript, where it was not fed yet.

    Returns:
        Tokens that were read.
    """
    num_tokens = 0
    if rest := text[max(0, session.text_chars - start) :]:
        for progress in session.feed(rest):
            num_tokens = progress.num_tokens
    return num_tokens


def _take_down(session: SessionLike, question: Question) -> RawAnswer:
    session.say(question.prompt)
    for _ in session.feed(question.opening):
        pass
    text, ended = question.opening, False
    with closing(session.generate(question.params)) as deltas:
        for delta in deltas:
            text += delta.text
            enough = text.count("\n") >= question.max_lines
            ended = enough or delta.finish_reason is FinishReason.STOP
            if enough:
                break
    return RawAnswer(text, ended)
