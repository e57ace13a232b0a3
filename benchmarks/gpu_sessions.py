"""Many sessions on one engine: decoding together, beside a long feed, asleep, and of one prompt.

    python benchmarks/gpu_sessions.py [--parts decode feed sleep_8b sleep_smollm2 prompt]
                                      [--tokenizer DIR] [--store DIR] [--seconds N] [--quick]

decode: 64 sessions of the shape of Llama-3.1-8B, random weights, bf16, context of 4,096 tokens:
tokens per second as their callers get them, what lies between two captured steps on the device, and
how long the engine's thread is at work for each, waiting left out. feed: p99 between two tokens of
32 such sessions while another one reads 100,000 tokens, over the p50 before. sleep: 1,000 sessions
of the demo model with 2,048 tokens (150 of the 8B shape with 4,096), for 64 (16) of which the gpu
pool has room, 24 GiB of page-locked memory and a store for the others; then the time until one of
them is awake, with room and without, over the time in which as many bytes are copied. prompt: 1,000
sessions of one tenant with the same system prompt of 2,000 tokens.

Checked: what a session that slept says of its last tokens is what it said before, and every token
that was fed is computed once. `--quick` runs a tiny model, also on a CPU.
"""

import asyncio
import itertools
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import MODEL, arguments, greedy, pieces, require, say
from open_models import Model, opened, random_model, real_model
from parts import Parts, synchronize
from random_model import LLAMA_8B, TINY, engine_config, ids
from report import Report, median
from step_times import StepTimes

from streamkv import Engine, EngineConfig, Session
from streamkv.admission import State
from streamkv.decode_graphs import _Step
from streamkv.device_copies import Arrival
from streamkv.sizing import blocks_of_session
from streamkv.step_loop import Call

PARTS = ("decode", "feed", "sleep_8b", "sleep_smollm2", "prompt")
TOKENS_PER_S = 4800.0
GAP_MS = 0.1
HOST_MS = 2.0
FEED_P99 = 2.0
FEED_TOKENS_PER_S = 10_000.0
WAKE_RATIO = 1.3
SKIPPED = 24
"""First tokens of each session, in which they find together."""


@dataclass(frozen=True)
class Case:
    """How large everything is.

    Attributes:
        window: of the sessions that decode.
        decoders, beside: sessions that decode together, and beside a feed.
        fed: tokens of the feed.
        sleeping: sessions, tokens of each, sessions that the pool has room for, by model.
        pinned: bytes of page-locked memory below them.
        prompted, prompt: sessions of one prompt, and its tokens.
        steps: that are timed.
        device: of the model.
    """

    window: int = 4096
    decoders: int = 64
    beside: int = 32
    fed: int = 100_000
    sleeping: Any = None
    pinned: str = "24GiB"
    prompted: int = 1000
    prompt: int = 2000
    steps: int = 200
    device: str = "cuda"


FULL = Case(sleeping={"smollm2": (1000, 2048, 64), "8b": (150, 4096, 16)})
QUICK = Case(
    window=256,
    decoders=4,
    beside=3,
    fed=2000,
    sleeping={"smollm2": (12, 256, 3), "8b": (6, 256, 2)},
    pinned="4MiB",
    prompted=6,
    prompt=200,
    steps=20,
)


def on_thread(engine: Engine, function: Callable[[], Any]) -> Any:
    """What a function returns on the engine's thread."""
    return engine._loop.submit(Call(function, is_aside=True)).result()


async def stamps_of(session: Session, num_tokens: int | None, until: asyncio.Event) -> list[float]:
    """When each token came."""
    found = []
    async for _ in session.agenerate(greedy(num_tokens)):
        found.append(time.perf_counter())
        if until.is_set():
            break
    return found


async def decode(sessions: Sequence[Session], num_tokens: int) -> list[list[float]]:
    """Stamps of sessions that generate at the same time."""
    never = asyncio.Event()
    return await asyncio.gather(*(stamps_of(each, num_tokens, never) for each in sessions))


def spans_ms(stamps: Sequence[Sequence[float]], begin: float = 0.0, end: float = np.inf) -> Any:
    """Milliseconds between two tokens of a session, of all sessions, within a time."""
    found = [
        1000 * (after - before)
        for each in stamps
        for before, after in zip(each[SKIPPED:], each[SKIPPED + 1 :], strict=False)
        if before >= begin and after <= end
    ]
    return np.array(found)


class WaitingAwake:
    """Processor time that the engine's thread spends on looking whether the device is done.

    A driver's wait for an event keeps a processor busy; it is no work.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._wait = Arrival.wait

    def __enter__(self) -> "WaitingAwake":
        wait = self._wait

        def timed(arrival: Arrival) -> None:
            began_s = time.thread_time()
            wait(arrival)
            self.seconds += time.thread_time() - began_s

        Arrival.wait = timed  # type: ignore[method-assign]  # measured, and put back
        return self

    def __exit__(self, *_: object) -> None:
        Arrival.wait = self._wait  # type: ignore[method-assign]  # as it was


class Gaps:
    """What lies between captured steps on the device.

    Args:
        engine: whose.
        rows: sessions of a step.
    """

    def __init__(self, engine: Engine, rows: int) -> None:
        self._steps = engine._runner._graphs._steps  # type: ignore[attr-defined]  # on a GPU
        self._rows = rows
        self._marks: list[tuple[Any, Any]] = []

    def replay(self) -> None:
        """A step, with a mark before it and behind it."""
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        self._old.graph.replay()
        end.record()
        self._marks.append((begin, end))

    def __enter__(self) -> "Gaps":
        self._old = self._steps[self._rows]
        old = self._old
        self._steps[self._rows] = _Step(old.table, self, old.logits, old.kept)
        return self

    def __exit__(self, *_: object) -> None:
        self._steps[self._rows] = self._old

    def ms(self) -> Any:
        """Milliseconds from the end of a step to the begin of the next."""
        synchronize()
        marks = self._marks[SKIPPED:]
        pairs = itertools.pairwise(marks)
        return np.array([first[1].elapsed_time(second[0]) for first, second in pairs])


def measure_decode(parts: Parts, case: Case, engine: Engine, sessions: list[Session]) -> None:
    """All sessions at the same time."""
    report, rates = parts.report, []
    for _ in range(3):
        stamps = asyncio.run(decode(sessions, case.steps + SKIPPED))
        spans = [each[-1] - each[SKIPPED - 1] for each in stamps]
        rates.append(len(sessions) * case.steps / (sum(spans) / len(spans)))
    name = f"{len(sessions)}_sessions"
    report.add(
        f"{name}_tokens_per_s", median(rates), "tokens/s", better="higher", bound=TOKENS_PER_S,
        rounds=[round(rate) for rate in rates], peers={"vllm_0.24.0_other_run": 4568},
    )  # fmt: skip
    say(f"  {name}: {[round(rate) for rate in rates]} tokens/s")
    before_s = on_thread(engine, time.thread_time)
    with WaitingAwake() as waiting:
        asyncio.run(decode(sessions, case.steps))
    spent_ms = 1000 * (on_thread(engine, time.thread_time) - before_s) / case.steps
    awake_ms = 1000 * waiting.seconds / case.steps
    report.add(
        f"{name}_host_ms", spent_ms - awake_ms, "ms of the engine's thread a step", bound=HOST_MS,
        waiting_awake_ms=awake_ms,
    )  # fmt: skip
    say(f"  the engine's thread works {spent_ms - awake_ms:.3f} ms a step, waits {awake_ms:.3f}")
    if case.device == "cuda":
        with Gaps(engine, len(sessions)) as gaps:
            asyncio.run(decode(sessions, case.steps + SKIPPED))
        found = gaps.ms()
        p50, p99 = (float(np.quantile(found, share)) for share in (0.5, 0.99))
        report.add(f"{name}_gap_p50_ms", p50, "ms between two graphs", bound=GAP_MS, p99=p99)
        say(f"  between two graphs: p50 {p50:.4f}, p99 {p99:.4f} ms")


def measure_feed(parts: Parts, case: Case, engine: Engine, sessions: list[Session]) -> None:
    """Sessions that decode while another one reads."""
    report = parts.report
    before = spans_ms(asyncio.run(decode(sessions, case.steps + SKIPPED)))
    p50 = float(np.median(before))
    token_ids = ids(77, case.fed)

    async def play() -> tuple[list[list[float]], float, float]:
        done = asyncio.Event()
        tasks = [asyncio.ensure_future(stamps_of(each, None, done)) for each in sessions]
        await asyncio.sleep(1.0 if case.device == "cuda" else 0.2)
        begin = time.perf_counter()
        with engine.session("reader") as reader:
            async for _ in reader.afeed(pieces(token_ids, 8192)):
                pass
            await asyncio.to_thread(engine._loop.settle, reader._live.sequence)
            end = time.perf_counter()
            done.set()
            found = await asyncio.gather(*tasks)
            require(reader._live.sequence.num_computed == case.fed - 1, "not all was read")
            await asyncio.to_thread(reader.delete)
        return found, begin, end

    ratios, rates, times = [], [], None
    for _ in range(3):
        stamps, begin, end = asyncio.run(play())
        beside = spans_ms([[0.0] * SKIPPED + each for each in stamps], begin, end)
        times = StepTimes.of(beside.tolist())
        ratios.append(times.p99 / p50)
        rates.append(case.fed / (end - begin))
        say(f"  beside a feed: {times}, p50 alone {p50:.3f} ms; {rates[-1]:,.0f} tokens/s read")
    assert times is not None
    name = f"{len(sessions)}_beside_a_feed"
    report.add(
        f"{name}_p99_over_p50", median(ratios), "x of the p50 alone", bound=FEED_P99,
        rounds=ratios, p50_alone_ms=p50, **times._asdict(),
    )  # fmt: skip
    report.add(
        f"{name}_read_tokens_per_s", median(rates), "tokens/s", better="higher",
        bound=FEED_TOKENS_PER_S, rounds=rates,
    )  # fmt: skip


def decoders(stack: ExitStack, case: Case, model: Model) -> tuple[Engine, list[Session]]:
    """An engine without tiers below, and sessions with full windows."""
    config = engine_config(
        case.window, case.decoders + 2, device=case.device, prefill_chunk=min(4096, case.window)
    )
    engine = opened(stack, model, config)
    sessions = []
    for number in range(case.decoders):
        session = engine.session(f"decoder {number}")
        # Blocks of different sessions are full at different steps.
        session.feed(pieces(ids(number, case.window + 64 + number), config.prefill_chunk)).run()
        sessions.append(session)
    return engine, sessions


def put_to_sleep(engine: Engine, session: Session) -> None:
    """As if others needed the room; waits for it."""
    sleepers, sequence = engine._loop._sleepers, session._live.sequence
    assert sleepers is not None

    def begin() -> None:
        known = sleepers._sessions[sequence]
        if sleepers._admission.state(known.name) is State.AWAKE:
            engine._loop._may_leave(sequence)
            sleepers._begin_leaving(known, lambda sequence: None)

    while session.stats().state != "asleep":
        on_thread(engine, begin)
        time.sleep(0.001)


def wake_ms(engine: Engine, session: Session) -> float:
    """Milliseconds until a session that sleeps is awake."""
    synchronize()
    began = time.perf_counter()
    engine._loop.submit(Call(lambda: None, session._live.sequence, is_aside=True)).result()
    seconds = time.perf_counter() - began
    require(session.stats().state == "awake", "a session did not wake")
    return 1000 * seconds


def copy_ms(engine: Engine, num_blocks: int) -> float:
    """Milliseconds in which so many blocks are copied from page-locked memory."""
    tiers = engine._tiers
    blocks = list(engine._cpu_pool._index.values())[:num_blocks]
    require(len(blocks) == num_blocks, "the cpu pool has too few blocks")
    data = [engine._cpu_pool.data(block) for block in blocks]

    def copied() -> float:
        targets = [tiers.allocate() for _ in data]
        synchronize()
        began = time.perf_counter()
        tiers._transfer.promote_many(list(zip(data, targets, strict=True))).wait()
        seconds = time.perf_counter() - began
        for block_id in targets:
            tiers.free(block_id)
        return seconds

    return 1000 * median([on_thread(engine, copied) for _ in range(9)])


def place_of(engine: Engine, session: Session) -> str:
    """Where all of a sleeping session is: `cpu`, `ssd`, or `both`."""
    sleeper = session._live.sleeper
    assert sleeper is not None and sleeper.asleep is not None
    places = {engine._tiers.where(key) for _, key in sleeper.asleep.all_blocks}
    return str(places.pop()) if len(places) == 1 else "both"


def logprobs(session: Session, token_ids: list[int]) -> list[float]:
    """Of some tokens that follow."""
    return [score.logprob or 0.0 for score in session.score([token_ids])]


def measure_sleep(parts: Parts, case: Case, name: str, model: Model, store: Path | None) -> None:
    """Far more sessions than there is room for."""
    num_sessions, num_tokens, num_awake = case.sleeping[name]
    report = parts.report
    with ExitStack() as stack:
        directory = stack.enter_context(tempfile.TemporaryDirectory(dir=store))
        config = engine_config(
            num_tokens, num_awake, device=case.device, retain="window", cpu_bytes=case.pinned,
            store=directory, codec="raw", ssd_bytes="110GiB" if case.device == "cuda" else "1GiB",
            prefill_chunk=min(2048, num_tokens),
        )  # fmt: skip
        config = replace(config, gpu_bytes=room_for(config, model, num_awake))
        engine = opened(stack, model, config)
        sessions = [engine.session(f"session {number}") for number in range(num_sessions)]
        began = time.perf_counter()
        asyncio.run(feed_all(sessions, num_tokens))
        seconds = time.perf_counter() - began
        counted = engine.counters()
        states = engine.session_states()
        say(f"  {num_sessions} sessions fed in {seconds:.1f} s: {states}, {counted}")
        total = num_sessions * num_tokens
        report.add(f"{name}_fed_tokens_per_s", total / seconds, "tokens/s", better="higher")
        awake = [each for each in sessions if each.stats().state == "awake"][:num_awake]
        report.add(f"{name}_asleep", num_sessions - len(awake), "sessions", better="higher")
        require(len(awake) >= num_awake - 1, f"only {len(awake)} sessions are awake")
        stamps = asyncio.run(decode(awake, case.steps + SKIPPED))
        times = StepTimes.of(spans_ms(stamps).tolist())
        report.add(f"{name}_{len(awake)}_awake_ms", times.mean, "ms a token", p99=times.p99)
        wakes(parts, name, engine, sessions)


def wakes(parts: Parts, name: str, engine: Engine, sessions: list[Session]) -> None:
    """How long it takes until a session is awake."""
    report = parts.report
    awake = [each for each in sessions if each.stats().state == "awake"]
    for session in awake[-4:]:
        put_to_sleep(engine, session)
    asleep = [each for each in sessions if each.stats().state == "asleep"]
    by_place: dict[str, list[Session]] = {"cpu": [], "ssd": [], "both": []}
    for session in asleep:
        by_place[place_of(engine, session)].append(session)
    say(f"  asleep: { ({place: len(found) for place, found in by_place.items()}) }")
    num_blocks = len(by_place["cpu"][0]._live.sleeper.asleep.all_blocks)  # type: ignore[union-attr]
    copying = copy_ms(engine, num_blocks)
    report.add(f"{name}_copy_ms", copying, "ms", blocks=num_blocks)
    for place in ("cpu", "ssd"):
        found = []
        for session in by_place[place][-24:]:
            found.append(wake_ms(engine, session))
            put_to_sleep(engine, session)
        if not found:
            report.notes.append(f"{name}: no session is asleep on {place}")
            continue
        ms = median(found)
        say(f"  awake from {place} in {ms:.3f} ms ({min(found):.3f} to {max(found):.3f}), "
            f"copying takes {copying:.3f}")  # fmt: skip
        report.add(f"{name}_wake_from_{place}_ms", ms, "ms", rounds=found)
        if place == "cpu":
            ratio = ms / copying
            report.add(f"{name}_wake_over_copy", ratio, "x of copying", bound=WAKE_RATIO)
    crowded(parts, name, engine, [*by_place["cpu"], *by_place["both"], *by_place["ssd"]])


def crowded(parts: Parts, name: str, engine: Engine, asleep: list[Session]) -> None:
    """Sessions that wake while others have to make room; what they say is checked."""
    found = []
    for session in asleep[:24]:
        expected = logprobs(session, [7, 8, 9])
        session.rewind(session.num_tokens - 3)
        put_to_sleep(engine, session)
        for other in asleep[24:40]:
            other.feed([[11]]).run()
        began = time.perf_counter()
        again = logprobs(session, [7, 8, 9])
        found.append(1000 * (time.perf_counter() - began))
        worst = max(abs(a - b) for a, b in zip(expected, again, strict=True))
        require(worst < 0.2, f"a session that slept differs by {worst:g}")
    parts.report.add(f"{name}_crowded_turn_ms", median(found), "ms", longest=max(found))


def room_for(config: EngineConfig, model: Model, num_sessions: int) -> int:
    """Bytes of a gpu pool for so many sessions, and a block or two."""
    spec = model.spec
    blocks = blocks_of_session(config, spec, config.num_sink_tokens, config.window_size)
    return (num_sessions * blocks + 2) * model.block_bytes


async def feed_all(sessions: Sequence[Session], num_tokens: int) -> None:
    """Every session reads, some at a time."""
    gate = asyncio.Semaphore(32)

    async def one(number: int, session: Session) -> None:
        async with gate:
            async for _ in session.afeed([ids(number, num_tokens)]):
                pass

    await asyncio.gather(*(one(number, each) for number, each in enumerate(sessions)))


def measure_prompt(parts: Parts, case: Case, model: Model) -> None:
    """Sessions of one tenant that begin alike."""
    report, size = parts.report, 64
    with ExitStack() as stack:
        config = engine_config(
            case.prompt + size, 8, device=case.device, retain="window", cpu_bytes=case.pinned,
            num_sink_tokens=0, prefill_chunk=case.prompt + size,
        )  # fmt: skip
        engine = opened(stack, model, config)
        prompt = ids(5, case.prompt)
        began = time.perf_counter()
        for number in range(case.prompted):
            session = engine.session(f"session {number}", tenant="one")
            session.feed([[*prompt, 100 + number]]).run()
        seconds = time.perf_counter() - began
        engine._tiers.flush()
        whole = case.prompt // size
        reused = engine.counters()["reused_tokens"]
        num_computed = case.prompted * case.prompt - reused
        least = case.prompt + (case.prompted - 1) * (case.prompt - whole * size)
        report.add("prompt_tokens_computed", num_computed, "tokens", bound=least)
        stored = engine.usage()["cpu"].num_blocks
        # Beside them are open blocks of sessions that sleep.
        open_blocks = engine.session_states()["asleep"]
        report.add("prompt_blocks_stored", stored - open_blocks, "blocks", bound=whole)
        report.add("prompt_session_ms", 1000 * seconds / case.prompted, "ms a session")
        say(f"  {case.prompted} sessions: {num_computed:,} tokens computed, {stored} blocks stored")
        say(f"  of these {open_blocks} are open ones of sessions that sleep")


def main() -> int:
    """Measure; 0 if every bound is kept."""
    parser = arguments(__doc__)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--tokenizer", type=Path, help="directory of one, for random weights")
    parser.add_argument("--store", type=Path, help="directory for stores of up to 90 GB")
    parser.add_argument("--seconds", type=float, default=500.0, help="time to end in (500)")
    parser.add_argument("--name", default="gpu_sessions", help="of the result")
    options = parser.parse_args()
    has_gpu = torch.cuda.is_available()
    if not has_gpu and not options.quick:
        print("this benchmark needs a GPU", file=sys.stderr)
        return 2
    case = replace(QUICK if options.quick else FULL, device="cuda" if has_gpu else "cpu")
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    # Each open session has its journal open.
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    report = Report(options.name)
    parts = Parts(report, quick=options.quick, seconds=options.seconds)
    large = partial(
        random_model, TINY if options.quick else LLAMA_8B, options.tokenizer, case.device
    )
    small = large if options.quick else partial(real_model, MODEL)
    wanted = [part for part in PARTS if part in options.parts]
    if {"decode", "feed"} & set(wanted):
        with ExitStack() as stack:
            engine, sessions = decoders(stack, case, large())
            if "decode" in wanted:
                parts.run("decode", lambda: measure_decode(parts, case, engine, sessions))
            if "feed" in wanted:
                beside = sessions[: case.beside]
                parts.run("feed", lambda: measure_feed(parts, case, engine, beside))
            del engine, sessions
    if "sleep_smollm2" in wanted:
        sleep = partial(measure_sleep, parts, case, "smollm2")
        parts.run("sleep_smollm2", lambda: sleep(small(), options.store))
    if "prompt" in wanted:
        parts.run("prompt", lambda: measure_prompt(parts, case, small()))
    if "sleep_8b" in wanted:
        sleep = partial(measure_sleep, parts, case, "8b")
        parts.run("sleep_8b", lambda: sleep(large(), options.store))
    return parts.finish()


if __name__ == "__main__":
    sys.exit(main())
