"""A process that feeds, generates and is killed. Not a test: `test_recovery` runs it.

    crash_child.py MODEL STORE RETAIN feed|generate|rewind|fork

It says on standard output how far it has come, one line at a time.
"""

import itertools
import random
import sys
from collections.abc import Iterator

from streamkv import Engine, EngineConfig, SamplingParams

TEXT = "".join(
    f"Entry {number}: the {animal} sleeps in the sun, and nothing is forgotten.\n"
    for number, animal in zip(range(400), itertools.cycle(["dog", "fox", "café cat"]), strict=False)
)


def config(store: str, retain: str) -> EngineConfig:
    """The options that parent and child share."""
    return EngineConfig(
        window_size=128,
        prefill_chunk=64,
        cpu_bytes="256KiB",
        ssd_bytes="64MiB",
        store=store,
        retain=retain,  # type: ignore[arg-type]  # given by the test
        checkpoint_tokens=192,
    )


def rounds() -> Iterator[tuple[list[int], int]]:
    """What a session is fed in each round, and the token it is then taken back to."""
    chosen = random.Random(3)
    num_tokens = 30
    while True:
        fed = [chosen.randrange(5, 300) for _ in range(chosen.randrange(1, 400))]
        num_tokens = chosen.randrange(max(num_tokens // 2, 30), num_tokens + len(fed) + 1)
        yield fed, num_tokens


def greedy(num_tokens: int | None) -> SamplingParams:
    """Sampling with a seed: what was drawn must be drawn again."""
    return SamplingParams(temperature=0.8, seed=5, max_tokens=num_tokens, ignore_eos=True)


def main(model: str, store: str, retain: str, what: str) -> None:
    """Work until killed."""
    engine = Engine(model, config(store, retain))
    session = engine.session("victim", system="You keep a diary.")
    if what == "feed":
        pieces = (TEXT[start : start + 97] for start in range(session.text_chars, len(TEXT), 97))
        for progress in session.feed(pieces):
            print(progress.token_index, flush=True)
    elif what in ("rewind", "fork"):
        for round_number, (fed, token_index) in enumerate(rounds()):
            session.feed([fed]).run()
            print(session.num_tokens, flush=True)
            if what == "fork":
                session = session.fork(f"victim {round_number}")
            session.rewind(token_index)
            print(token_index, flush=True)
    else:
        if session.text_chars == 0:
            session.feed(TEXT[:6000]).run()
        for delta in session.generate(greedy(None)):
            print(delta.token_id, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
