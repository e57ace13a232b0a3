"""A process that attends to everything over a store and is killed: `test_full_store` runs it.

    full_child.py MODEL STORE feed|answer|switch NUM_RECALLED

It says on standard output how far it has come, one line at a time. Not a test.
"""

import sys
import time
from typing import Any

from streamkv import Engine, EngineConfig, SamplingParams

WINDOW_SIZE = 192
NUM_FED = 900


def options(store: str | None, **others: Any) -> EngineConfig:
    """The options that parent and child share; a cpu pool of eight blocks, the rest on the ssd."""
    given: dict[str, Any] = {
        "window_size": WINDOW_SIZE,
        "num_sink_tokens": 0,
        "recall_stride": 64,
        "attention": "full",
        "prefill_chunk": 64,
        "cpu_bytes": "256KiB",
        "ssd_bytes": "64MiB",
        "store": store,
        "checkpoint_tokens": 192,
        "compile": "off",
        "max_sessions": 6,
    }
    return EngineConfig(**(given | others))


def some_ids(count: int, seed: int = 3) -> list[int]:
    """A stream that does not repeat itself."""
    return [5 + (seed * index * index + 7 * index) % 290 for index in range(count)]


def seeded(num_tokens: int | None) -> SamplingParams:
    """Sampling with a seed: what was drawn must be drawn again."""
    return SamplingParams(temperature=0.8, seed=5, max_tokens=num_tokens, ignore_eos=True)


def main(model: str, store: str, what: str, num_recalled: str) -> None:
    """Work until killed."""
    others: dict[str, Any] = {"recall_blocks": int(num_recalled)}
    if what == "switch":
        # Nothing is on disk but what a checkpoint has brought there.
        others |= {"attention": "window", "cpu_bytes": "64MiB", "checkpoint_tokens": 4096}
    session = Engine(model, options(store, **others)).session("victim")
    rest = some_ids(NUM_FED)[session.num_tokens :]
    if what == "feed":
        for start in range(0, len(rest), 29):
            session.feed([rest[start : start + 29]]).run()
            print(session.num_tokens, flush=True)
    elif what == "answer":
        if rest:
            session.feed([rest]).run()
        for delta in session.generate(seeded(None)):
            print(delta.token_id, flush=True)
    else:
        session.feed([rest]).run()
        session.set_mode("full")
        print(session.num_tokens, flush=True)
    time.sleep(600)


if __name__ == "__main__":
    main(*sys.argv[1:])
