"""Questions to the model: in the session that reads the transcript, or apart from it.

A question apart runs in a session of its own that is deleted afterwards, so that what is asked
twice is never read twice by the session that holds the transcript. This module does not judge the
answers.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, Self

from streamkv.config import EngineConfig
from streamkv.outputs import Delta, FinishReason, Progress, SessionStats
from streamkv.sampling_params import SamplingParams
from streamkv.summarize.prompts import SYSTEM

RETRY_SEED = 1


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
    def generate(self, params: SamplingParams) -> Iterator[Delta]: ...
    def delete(self) -> None: ...
    def stats(self) -> SessionStats: ...


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
        retry: whether it is asked again: then with some noise, because greedy would err alike.
    """

    prompt: str
    opening: str
    max_tokens: int
    retry: bool = False

    @property
    def params(self) -> SamplingParams:
        """Greedy, ending at a blank line; reproducible noise on a retry."""
        return SamplingParams(
            temperature=0.5 if self.retry else 0.0,
            seed=RETRY_SEED,
            repetition_penalty=1.1,
            stop=("\n\n",),
            max_tokens=self.max_tokens,
        )


@dataclass(frozen=True, slots=True)
class RawAnswer:
    """What the model wrote; `ended`: by itself, rather than at the limit of tokens."""

    text: str
    ended: bool


def ask(session: SessionLike, question: Question) -> RawAnswer:
    """Say the prompt to `session` and take down the answer, which becomes part of its stream."""
    session.say(question.prompt)
    if question.opening:
        for _ in session.feed(question.opening):
            pass
    text, ended = question.opening, False
    for delta in session.generate(question.params):
        text += delta.text
        ended = delta.finish_reason is FinishReason.STOP
    return RawAnswer(text, ended)


def ask_apart(engine: EngineLike, name: str, question: Question) -> RawAnswer:
    """Ask in a session called `name` that exists only for this question."""
    with fresh_session(engine, name) as session:
        try:
            return ask(session, question)
        finally:
            session.delete()


@contextmanager
def fresh_session(engine: EngineLike, name: str) -> Iterator[SessionLike]:
    """A session that has read nothing but the system prompt; one of that name is deleted first."""
    if name in engine.session_names():
        with engine.session(name, system=SYSTEM) as old:
            old.delete()
    with engine.session(name, system=SYSTEM) as session:
        yield session
