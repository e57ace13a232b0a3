"""Texts with one made-up fact in the middle and its question at the end, to measure heads with.

The texts are of Python's language reference, which every CPython carries; names and numbers are
drawn, always the same ones. Nothing here knows models.
"""

import pydoc_data.topics
import random
from collections.abc import Iterator
from typing import NamedTuple

from streamkv.tokenizer import Tokenizer

NUM_TEXTS = 12
TEXT_TOKENS = 448
"""Of the text around a fact."""

NUM_FIRST = 8
"""Tokens at the start that any head may look at for no reason of theirs: no fact is among them."""


class FactText(NamedTuple):
    """A text with a fact in it.

    Attributes:
        token_ids: text, fact, text, question, and the start of the answer.
        begin, end: where the fact lies.
        asked: where the question begins.
    """

    token_ids: list[int]
    begin: int
    end: int
    asked: int


def fact_texts(
    tokenizer: Tokenizer, num_texts: int = NUM_TEXTS, num_tokens: int = TEXT_TOKENS
) -> Iterator[FactText]:
    """Texts of Python's language reference, each with one made-up fact and its question."""
    rng = random.Random(2404_15574)
    topics = pydoc_data.topics.topics
    text = "\n".join(topics[name] for name in sorted(topics))
    for _ in range(num_texts):
        fact, question, start = _fact(rng)
        begin = rng.randrange(len(text) - 8 * num_tokens)
        filler = tokenizer.encode(text[begin : begin + 8 * num_tokens])[:num_tokens]
        told = tokenizer.encode(f"\n\n{fact}\n\n", at_start=False)
        asked = tokenizer.encode(f"\n\nQuestion: {question}\nAnswer: {start}", at_start=False)
        place = rng.randrange(NUM_FIRST, len(filler) * 2 // 3)
        ids = [*filler[:place], *told, *filler[place:], *asked]
        yield FactText(ids, place, place + len(told), len(ids) - len(asked))


def _fact(rng: random.Random) -> tuple[str, str, str]:
    """A fact, a question for it, and how the answer begins."""
    name, other, number = _name(rng), _name(rng), rng.randrange(10, 10_000)
    return rng.choice(
        [
            (f"The capital of {name} is {other}.", f"What is the capital of {name}?",
             f"The capital of {name} is"),
            (f"{name} lives in the town of {other}.", f"Where does {name} live?",
             f"{name} lives in the town of"),
            (f"The code of the door is {number}.", "What is the code of the door?",
             "The code of the door is"),
            (f"The captain's dog was called {other}.", "What was the captain's dog called?",
             "The captain's dog was called"),
            (f"The ship {name} left port with {number} barrels on board.",
             f"How many barrels were on board the ship {name}?", f"The ship {name} left port with"),
            (f"The meeting with {name} takes place in room {number}.",
             f"In which room does the meeting with {name} take place?",
             f"The meeting with {name} takes place in room"),
        ]
    )  # fmt: skip


def _name(rng: random.Random) -> str:
    """A name that no text has."""
    return "".join(rng.choice("bdfgklmnprstvz") + rng.choice("aeiou") for _ in range(3)).title()
