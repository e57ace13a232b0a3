"""Which lines of a live log are unusual? Surprisal of each line, given all the lines before it.

tail -f /var/log/syslog | python examples/surprising_lines.py
"""

import sys
from collections.abc import Iterable

from streamkv import Engine, EngineConfig

MODEL = "smollm2-135m"


def main(lines: Iterable[str] = sys.stdin, top: float = 1.5) -> None:
    """Print lines whose tokens are much less expected than those of the lines so far."""
    mean, num_lines = 0.0, 0
    with Engine(MODEL, EngineConfig(window_size=1020)) as engine:
        session = engine.session("log")
        for line in lines:
            scores = session.score(line)
            losses = [-score.logprob for score in scores if score.logprob is not None]
            if not losses:
                continue
            surprisal = sum(losses) / len(losses)
            if num_lines > 5 and surprisal > top * mean:
                print(f"{surprisal:.1f} nats a token (usually {mean:.1f}): {line}", end="")
            num_lines += 1
            mean += (surprisal - mean) / num_lines


if __name__ == "__main__":
    main()
