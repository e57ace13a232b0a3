"""A scripted engine: what a run does is tested with answers that no small model gives on demand."""

from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

import pytest

from streamkv.config import EngineConfig
from streamkv.outputs import Delta, FinishReason, Progress
from streamkv.sampling_params import SamplingParams

# A prompt to an answer, with its opening left out; ends with CUT_OFF if it reached max_tokens.
Script = Callable[[str], str]
CUT_OFF = "<cut off>"


def four_chars_a_token(text: str) -> int:
    """A tokenizer's length, near enough: four characters a token."""
    return (len(text) + 3) // 4


@dataclass
class ScriptedSession:
    """Remembers what it was given, across reopening."""

    name: str
    engine: "ScriptedEngine"
    fed: str = ""
    said: list[str] = field(default_factory=list)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
        /,
    ) -> None: ...

    @property
    def text_chars(self) -> int:
        return len(self.fed)

    def feed(self, items: str) -> Iterator[Progress]:
        self.fed += items
        yield Progress(four_chars_a_token(items), 1, self.text_chars, 1.0)

    def say(self, text: str) -> None:
        self.said.append(text)

    def generate(self, params: SamplingParams) -> Generator[Delta]:
        answer = self.engine.script(self.said[-1])
        reason = FinishReason.LENGTH if answer.endswith(CUT_OFF) else FinishReason.STOP
        for word in answer.removesuffix(CUT_OFF).split(" "):
            yield Delta(" " + word, 5, 9)
        yield Delta("", 6, 10, reason)

    def delete(self) -> None:
        self.engine.sessions.pop(self.name, None)


@dataclass
class ScriptedEngine:
    """An engine whose model answers by a script."""

    script: Script
    config: EngineConfig = field(default_factory=lambda: EngineConfig(window_size=1024))
    model_name: str = "scripted"
    sessions: dict[str, ScriptedSession] = field(default_factory=dict)

    def session(self, name: str, *, system: str | None = None) -> ScriptedSession:
        return self.sessions.setdefault(name, ScriptedSession(name, self))

    def session_names(self) -> list[str]:
        return list(self.sessions)

    def count_tokens(self, text: str) -> int:
        return four_chars_a_token(text)


@pytest.fixture
def scripted() -> Callable[[Script], ScriptedEngine]:
    """Makes an engine that answers by a script."""
    return ScriptedEngine


@pytest.fixture
def meeting(tmp_path: Path) -> Path:
    """Three hundred captions by two speakers, no two alike."""
    cues = []
    for number in range(300):
        speaker = "Ada" if number % 2 else "Grace"
        start = f"{number // 60:02d}:{number % 60:02d}"
        text = f"{speaker}: item {number} costs {number * 7} pounds in town {number * 13}"
        cues.append(f"{number + 1}\n00:{start},000 --> 00:{start},900\n{text}\n")
    path = tmp_path / "meeting.srt"
    path.write_text("\n".join(cues))
    return path
