"""Read an input that never ends, at constant memory, and ask about it now and then.

python examples/infinite_iterator.py
"""

import itertools
from collections.abc import Iterator

from streamkv import Engine, EngineConfig, SamplingParams

MODEL = "smollm2-135m"


def readings() -> Iterator[str]:
    """A sensor that reports for ever."""
    for minute in itertools.count():
        yield f"Minute {minute}: the tank holds {100 - minute % 60} litres.\n"


def main(num_questions: int = 3) -> None:
    """Read a while, ask, read on: the iterator is consumed lazily, where it was left."""
    source = readings()
    with Engine(MODEL, EngineConfig(window_size=512), on_progress=print) as engine:
        session = engine.session("tank")
        for _ in range(num_questions):
            for progress in session.feed(source):
                if progress.num_tokens >= 1024:
                    break
            session.say("How much does the tank hold now?")
            answer = session.generate(SamplingParams(temperature=0.0, max_tokens=30))
            text = "".join(delta.text for delta in answer)
            print(f"after {session.num_tokens} tokens: {text}")


if __name__ == "__main__":
    main()
