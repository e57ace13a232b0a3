"""Killed and resumed: how long until the next token, and is it the right one.

    python benchmarks/resume.py [--tokens N] [--quick]

A process feeds a session of 50,000 tokens and generates; this one kills it with SIGKILL at several
distances from its last checkpoint. The next process opens an engine (timed after imports), opens
the session and generates: timed from `engine.session(name)` until it returns and until the first
token is out. Files are in the page cache, as after a crash of a process. Every token that any life
says is compared with those of a process that was never disturbed and keeps nothing.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from common import (
    MODEL,
    NEAR_TIE,
    agreement,
    arguments,
    every,
    finish,
    greedy,
    pieces,
    require,
    say,
    topics_ids,
)
from report import Report, median

from streamkv import Engine, EngineConfig, Session

NUM_TOKENS = 50_000
SESSION = "victim"
LIVES = (40, 170, 300, 430, 500, 20)
"""Tokens that each life says before it is killed: so it dies at many distances from a checkpoint.
The last says the 20 that are asked for."""
QUICK_LIVES = (6, 9, 5)


def config(store: str | None) -> EngineConfig:
    """Default options, in float32, where equal tokens are promised."""
    return EngineConfig(dtype="float32", store=store, ssd_bytes="2GiB", max_sessions=1)


def tell(**fields: Any) -> None:
    """One JSON line for the parent."""
    print(json.dumps(fields), flush=True)


def feed(session: Session, ids: list[int]) -> None:
    """Feed what the session does not have yet."""
    show = every(5_000)
    for progress in session.feed(pieces(ids[session.num_tokens :], 512)):
        show(progress.token_index, progress.tokens_per_s)


def live(store: str | None, num_tokens: int, num_generated: int | None) -> None:
    """One life of the process: open, resume or feed, generate; says what it does and when."""
    started = time.perf_counter()
    with Engine(MODEL, config(store)) as engine:
        opened = time.perf_counter()
        session = engine.session(SESSION)
        resumed = time.perf_counter()
        computed = session.stats().num_computed
        if session.num_tokens < num_tokens:
            feed(session, topics_ids(engine.tokenizer, num_tokens))
        for place, delta in enumerate(session.generate(greedy(num_generated))):
            if place == 0:
                first = time.perf_counter() - opened
                times = {"engine_s": opened - started, "open_s": resumed - opened}
                tell(**times, first_token_s=first, recomputed=delta.token_index - computed)
            tell(index=delta.token_index, token=delta.token_id, margin=delta.margin)


def lines_of(child: "subprocess.Popen[str]") -> Iterator[dict[str, Any]]:
    """What a child says, line by line; a line cut by its death is left out."""
    assert child.stdout is not None
    for line in child.stdout:
        if line.endswith("\n"):
            yield json.loads(line)


def start(store: str | None, num_tokens: int, num_generated: int | None) -> Any:
    """Start a life in a process of its own."""
    command = [sys.executable, __file__, "--child", json.dumps([store, num_tokens, num_generated])]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def undisturbed(num_tokens: int, num_generated: int) -> dict[int, tuple[int, float]]:
    """Token and margin by token index, of a process that keeps nothing and is left alone."""
    with start(None, num_tokens, num_generated) as child:
        said = list(lines_of(child))
    require(child.returncode == 0, "the undisturbed process failed")
    return {line["index"]: (line["token"], line["margin"]) for line in said if "index" in line}


def kill_after(store: str, num_tokens: int, num_said: int) -> tuple[dict[str, Any], dict[int, int]]:
    """One life, killed once it has said `num_said` tokens: its times, and tokens by index."""
    tokens: dict[int, int] = {}
    with start(store, num_tokens, None) as child:
        lines = lines_of(child)
        times = next(lines, None)
        require(times is not None, "the process ended before its first token")
        for line in lines:
            tokens[line["index"]] = line["token"]
            if len(tokens) == num_said:
                child.kill()
    assert times is not None
    require(len(tokens) >= num_said, f"the process ended after {len(tokens)} tokens")
    return times, tokens


def check(
    report: Report, said: dict[int, int], calm: dict[int, tuple[int, float]], num_resumes: int
) -> None:
    """Every token that any life said is the undisturbed one, near ties apart."""
    indices = sorted(said)
    require(indices[-1] - indices[0] < len(calm), "the undisturbed process said too little")
    agreed = agreement(
        [said[index] for index in indices],
        [calm[index][0] for index in indices],
        [calm[index][1] for index in indices],
        NEAR_TIE["float32"],
    )
    where = indices[min(agreed.num_equal, len(indices) - 1)]
    require(agreed.ok, f"the token at index {where} is not the undisturbed one")
    report.add(
        "same_tokens",
        agreed.num_equal,
        f"of {len(indices)} tokens over {num_resumes} resumes",
        better="higher",
        near_ties=agreed.near_ties,
    )


def measure(report: Report, store: str, options: argparse.Namespace) -> None:
    """All lives, then the comparison, then the figures."""
    num_tokens, lives = (1024, QUICK_LIVES) if options.quick else (options.tokens, LIVES)
    all_times, said = [], dict[int, int]()
    for number, num_said in enumerate(lives):
        say(f"life {number}, to be killed after {num_said} tokens")
        times, tokens = kill_after(store, num_tokens, num_said)
        say(f"  {times}")
        changed = [index for index in said.keys() & tokens.keys() if said[index] != tokens[index]]
        require(not changed, f"tokens at {changed} were said before, and others")
        said |= tokens
        all_times.append(times)
    say("the undisturbed process")
    calm = undisturbed(num_tokens, max(said) - min(said) + 1)
    check(report, said, calm, len(lives) - 1)
    resumed = all_times[1:]
    for name, bound in (("first_token_s", 1.0), ("open_s", 1.0), ("engine_s", 2.0)):
        values = [times[name] for times in resumed]
        report.add(
            f"worst_{name}", max(values), "s", bound=bound, median=median(values), all=values
        )
    recomputed = [times["recomputed"] for times in resumed]
    report.add("worst_recomputed", max(recomputed), "tokens", all=recomputed)


def main() -> int:
    """Measure; 0 if every bound is kept."""
    parser = arguments(__doc__)
    parser.add_argument("--tokens", type=int, default=NUM_TOKENS, help="age of the session")
    parser.add_argument("--child", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child is not None:
        live(*options.child)
        return 0
    report = Report("resume")
    with tempfile.TemporaryDirectory() as directory:
        measure(report, str(Path(directory) / "store"), options)
    return finish(report, quick=options.quick)


if __name__ == "__main__":
    sys.exit(main())
