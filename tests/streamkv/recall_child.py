"""A process that recalls from a store and is killed. Not a test: `test_recall_store` runs it.

    recall_child.py MODEL STORE feed|answer

It says on standard output how far it has come, one line at a time.
"""

import sys
from typing import Any

from streamkv import Engine, EngineConfig, SamplingParams

WINDOW_SIZE, STRIDE = 192, 64
NUM_FED = 1500


def options(store: str | None, **others: Any) -> EngineConfig:
    """The options that parent and child share; a cpu pool of eight blocks, the rest on the ssd."""
    given: dict[str, Any] = {
        "window_size": WINDOW_SIZE,
        "recall_blocks": 3,
        "recall_stride": STRIDE,
        "attention": "recall",
        "prefill_chunk": 64,
        "cpu_bytes": "256KiB",
        "ssd_bytes": "64MiB",
        "store": store,
        "checkpoint_tokens": 192,
        "compile": "off",
        "max_sessions": 3,
    }
    return EngineConfig(**(given | others))


def some_ids(count: int, seed: int = 3) -> list[int]:
    """A stream that does not repeat itself."""
    return [5 + (seed * index * index + 7 * index) % 290 for index in range(count)]


def seeded(num_tokens: int | None) -> SamplingParams:
    """Sampling with a seed: what was drawn must be drawn again."""
    return SamplingParams(temperature=0.8, seed=5, max_tokens=num_tokens, ignore_eos=True)


def main(model: str, store: str, what: str) -> None:
    """Work until killed."""
    session = Engine(model, options(store)).session("victim")
    if what == "feed":
        rest = some_ids(NUM_FED)[session.num_tokens :]
        for start in range(0, len(rest), 29):
            session.feed([rest[start : start + 29]]).run()
            print(session.num_tokens, flush=True)
    else:
        if session.num_tokens == 0:
            session.feed([some_ids(NUM_FED)]).run()
        for delta in session.generate(seeded(None)):
            print(delta.token_id, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
