"""Conversations that arrive at random. Pure, but for reading the texts; belongs to `serving.py`.

What a user says comes from question sets (`bench/`) and from channels in which many talk (`chat/`);
when, how long the answer may be, and how long the user thinks, are drawn once from a seed, so that
every engine is given the same load.
"""

import json
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

LINES_OF_CHAT = 6
_SAID = re.compile(r"USER:\s*(.*?)(?=\s*ASSISTANT:|$)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Turn:
    """One thing said, and how much may be answered.

    Attributes:
        text: of the user.
        max_tokens: of the answer.
        think_s: seconds between the answer before and this.
    """

    text: str
    max_tokens: int
    think_s: float


@dataclass(frozen=True, slots=True)
class Conversation:
    """One session.

    Attributes:
        arrives_s: when its first turn comes.
        turns: at least one.
    """

    arrives_s: float
    turns: tuple[Turn, ...]


def texts_of(data: Path) -> list[list[str]]:
    """What users say, by conversation.

    Args:
        data: a folder with `bench/` or `chat/`.
    """
    found = [*_questions(data / "bench"), *_topics(data / "bench"), *_channels(data / "chat")]
    if not found:
        raise SystemExit(f"{data}: no bench/*.jsonl and no chat/*.txt in it")
    return found


def made_up_texts() -> list[list[str]]:
    """The same without any data: about things that there are many of."""
    things = ["a garden", "an old clock", "the sea", "a train", "bread", "a library", "snow", "tea"]
    asked = "Tell me about {}.", "What is it good for?", "Who would want {} and why?", "And then?"
    return [[each.format(thing) for each in asked] for thing in things]


def conversations(
    texts: list[list[str]],
    number: int,
    rate: float,
    mean_answer: int,
    mean_think_s: float,
    seed: int = 0,
) -> list[Conversation]:
    """A load: Poisson arrivals, exponential answers and pauses.

    Args:
        texts: of `texts_of`.
        number: of conversations.
        rate: of their arrivals, a second.
        mean_answer: tokens.
        mean_think_s: seconds.
        seed: of all that is drawn.
    """
    rng, now_s, found = random.Random(seed), 0.0, []
    for _ in range(number):
        now_s += rng.expovariate(rate)
        turns = tuple(
            Turn(
                text,
                min(4 * mean_answer, 1 + int(rng.expovariate(1 / mean_answer))),
                rng.expovariate(1 / mean_think_s),
            )
            for text in rng.choice(texts)
        )
        found.append(Conversation(now_s, turns))
    return found


def _questions(directory: Path) -> Iterator[list[str]]:
    path = directory / "mt_bench_question.jsonl"
    if path.exists():
        for line in path.read_text(encoding="utf-8").splitlines():
            yield [str(turn) for turn in json.loads(line)["turns"]]


def _topics(directory: Path) -> Iterator[list[str]]:
    path = directory / "longeval_topics_conversations.jsonl"
    if path.exists():
        for line in path.read_text(encoding="utf-8").splitlines():
            said = [text.strip() for text in _SAID.findall(json.loads(line)["conversation"])]
            yield [text for text in said if text]


def _channels(directory: Path) -> Iterator[list[str]]:
    for path in sorted(directory.glob("*.raw.txt")):
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
        said = [line for line in lines if not line.startswith("===")]
        parts = [
            "\n".join(said[first : first + LINES_OF_CHAT])
            for first in range(0, len(said) - LINES_OF_CHAT, LINES_OF_CHAT)
        ]
        for first in range(0, len(parts) - 4, 4):
            yield parts[first : first + 4]
