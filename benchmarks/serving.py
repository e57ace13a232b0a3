"""Many users on one engine: Poisson arrivals of conversations of several turns.

    python benchmarks/serving.py [--data DIR] [--sessions N] [--rate R] [--device cuda] [--quick]

Each user says something, reads the answer as it comes, thinks, and goes on. Times as users see
them: to the first token of an answer (ttft), between two tokens, per turn; then tokens per second
and memory. The same load three times: with tiers (sessions sleep in the cpu pool and the store when
others need their room), with the same and no store, and without tiers: there a session is closed
after each turn, because its room is wanted, and all that was said is computed again at the next.

Checked: every turn is answered, with as many tokens as it may have. Without --data texts are made
up; with it what users say comes from `bench/` and `chat/`.
"""

import asyncio
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import MODEL, arguments, finish, require, say
from memory import resident_bytes
from report import Report
from serving_load import Conversation, conversations, made_up_texts, texts_of

from streamkv import Engine, EngineConfig, SamplingParams, Session
from streamkv.errors import PoolFullError

SETTINGS = ("tiers", "cpu_only", "without")
SHARES = (0.5, 0.9, 0.99)


@dataclass(slots=True)
class Seen:
    """What users saw.

    Attributes:
        ttft_s, between_s, turn_s: seconds to first tokens, between tokens, of turns.
        num_tokens: answered.
        num_turns: answered.
        peak_bytes: memory of the process.
    """

    ttft_s: list[float] = field(default_factory=list)
    between_s: list[float] = field(default_factory=list)
    turn_s: list[float] = field(default_factory=list)
    num_tokens: int = 0
    num_turns: int = 0
    peak_bytes: int = 0


async def answer(session: Session, max_tokens: int, began_s: float, seen: Seen) -> str:
    """Read an answer as it comes; its text."""
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    before_s, parts = began_s, []
    async for delta in session.agenerate(params):
        now_s = time.perf_counter()
        if not parts:
            seen.ttft_s.append(now_s - began_s)
        else:
            seen.between_s.append(now_s - before_s)
        before_s = now_s
        parts.append(delta.text)
    require(len(parts) >= max_tokens, f"{len(parts)} of {max_tokens} tokens were answered")
    seen.num_tokens += max_tokens
    seen.num_turns += 1
    seen.turn_s.append(before_s - began_s)
    return "".join(parts)


async def user(engine: Engine, name: str, talk: Conversation, keeps: bool, seen: Seen) -> None:
    """One conversation, from its arrival to its end.

    Args:
        engine: answers.
        name: of the session.
        talk: what is said.
        keeps: the session stays open between turns.
        seen: gets what the user saw.
    """
    await asyncio.sleep(talk.arrives_s)
    session: Session | None = None
    said: list[tuple[str, str]] = []
    for number, turn in enumerate(talk.turns):
        if number:
            await asyncio.sleep(turn.think_s)
        began_s = time.perf_counter()
        if session is None:
            session = await opened(engine, name)
            for text, answered in said:
                await session.asay(text)
                async for _ in session.afeed(answered or " "):
                    pass
        await session.asay(turn.text)
        said.append((turn.text, await answer(session, turn.max_tokens, began_s, seen)))
        if not keeps:
            await session.adelete()
            session = None
    if session is not None:
        await session.aclose()


async def opened(engine: Engine, name: str) -> Session:
    """A session; waits for room where nobody sleeps."""
    while True:
        try:
            return await asyncio.to_thread(engine.session, name)
        except PoolFullError:
            await asyncio.sleep(0.02)


async def watch(seen: Seen) -> None:
    """Note the largest memory, until cancelled."""
    while True:
        seen.peak_bytes = max(seen.peak_bytes, resident_bytes())
        await asyncio.sleep(0.5)


async def play(engine: Engine, load: Sequence[Conversation], keeps: bool) -> Seen:
    """All users."""
    seen = Seen()
    watching = asyncio.ensure_future(watch(seen))
    await asyncio.gather(
        *(user(engine, f"user {number}", talk, keeps, seen) for number, talk in enumerate(load))
    )
    watching.cancel()
    return seen


def config(setting: str, options: Any, store: str) -> EngineConfig:
    """Options of an engine by what lies below its gpu pool."""
    has_tiers = setting != "without"
    return EngineConfig(
        device=options.device,
        window_size=options.window,
        max_sessions=options.room,
        cpu_bytes=options.cpu_bytes if has_tiers else 0,
        store=store if setting == "tiers" else None,
        retain="window" if has_tiers else "none",
    )


def measure(report: Report, setting: str, options: Any, load: Sequence[Conversation]) -> None:
    """One setting."""
    with (
        tempfile.TemporaryDirectory() as store,
        Engine(options.model, config(setting, options, store), on_progress=say) as engine,
    ):
        engine.wait_until_fast()
        warm = engine.session("warm")
        warm.say("Hello.")
        warm.generate(SamplingParams(max_tokens=8, ignore_eos=True)).run()
        warm.delete()
        began = time.perf_counter()
        seen = asyncio.run(play(engine, load, keeps=setting != "without"))
        seconds = time.perf_counter() - began
        counted, usage = engine.counters(), engine.usage()
    num_turns = sum(len(talk.turns) for talk in load)
    require(seen.num_turns == num_turns, f"{seen.num_turns} of {num_turns} turns were answered")
    for name, spans in (
        ("ttft", seen.ttft_s), ("between_tokens", seen.between_s), ("turn", seen.turn_s),
    ):  # fmt: skip
        for share in SHARES:
            ms = 1000 * float(np.quantile(spans, share)) if spans else 0.0
            report.add(f"{setting}_{name}_p{round(100 * share)}_ms", ms, "ms")
    rate = seen.num_tokens / seconds
    report.add(f"{setting}_tokens_per_s", rate, "tokens/s", better="higher", seconds=seconds)
    report.add(f"{setting}_peak_mib", seen.peak_bytes / 2**20, "MiB")
    for name in ("sessions_slept", "sessions_woken"):
        report.add(f"{setting}_{name}", counted[name], "times", better="higher")
    p50, p99 = (1000 * float(np.quantile(seen.ttft_s, share)) for share in (0.5, 0.99))
    say(
        f"  {setting}: {seen.num_turns} turns, {seen.num_tokens:,} tokens in {seconds:.1f} s, "
        f"{rate:.1f} tokens/s; ttft p50 {p50:.0f}, p99 {p99:.0f} ms; "
        f"slept {counted['sessions_slept']}; gpu {usage['gpu'].num_bytes >> 20} MiB at the end"
    )


def main() -> int:
    """Measure; 0 if every turn was answered."""
    parser = arguments(__doc__)
    parser.add_argument("--data", type=Path, help="folder with bench/ and chat/")
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    parser.add_argument("--settings", nargs="+", choices=SETTINGS, default=SETTINGS)
    parser.add_argument("--sessions", type=int, help="conversations (24; 512 on a GPU)")
    parser.add_argument("--rate", type=float, help="arrivals a second (0.2; 10 on a GPU)")
    parser.add_argument("--answer", type=int, help="mean tokens of an answer (24; 128 on a GPU)")
    parser.add_argument("--think", type=float, help="mean seconds between turns (4; 4)")
    parser.add_argument("--room", type=int, help="sessions that the gpu pool has room for (4; 64)")
    parser.add_argument("--window", type=int, default=1024)
    parser.add_argument("--cpu-bytes", help="of the cpu pool (2GiB; 24GiB on a GPU)")
    options = parser.parse_args()
    is_gpu = options.device == "cuda"
    # About half of what two cores, or an H200, can do.
    preset = {"sessions": 24, "rate": 0.2, "answer": 24, "think": 4.0, "room": 4}
    preset |= {"cpu_bytes": "2GiB"}
    if is_gpu:
        require(torch.cuda.is_available(), "there is no GPU")
        preset = {"sessions": 512, "rate": 10.0, "answer": 128, "think": 4.0, "room": 64}
        # Room for all: `cpu_only` has nowhere else to put them.
        preset |= {"cpu_bytes": "24GiB"}
    if options.quick:
        preset |= {"sessions": 6, "rate": 3.0, "answer": 6, "think": 0.2, "room": 2}
    for name, value in preset.items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    texts = texts_of(options.data) if options.data is not None else made_up_texts()
    load = conversations(texts, options.sessions, options.rate, options.answer, options.think)
    report = Report("serving_gpu" if is_gpu else "serving")
    report.notes.append(
        f"{options.model} on {options.device}: {options.sessions} conversations of "
        f"{sum(len(talk.turns) for talk in load)} turns, {options.rate} arrivals a second, answers "
        f"of {options.answer} tokens in the mean, {options.think} s between turns; window "
        f"{options.window}, room for {options.room} sessions; "
        f"{'real texts' if options.data else 'made-up texts'}"
    )
    for setting in options.settings:
        say(f"== {setting}")
        measure(report, setting, options, load)
    return finish(report, quick=options.quick)


if __name__ == "__main__":
    sys.exit(main())
