"""Metrics: complete and zero from the start, the same as stats(), and as counted by hand."""

import asyncio
import re
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from damaged import flip_block
from metrics_by_hand import ByHand, Values, values_of
from prometheus_client.parser import text_string_to_metric_families

from streamkv import Engine, EngineConfig, SamplingParams, Session
from streamkv.batch import Batch, Flight
from streamkv.errors import EngineClosedError, InputError, SessionError
from streamkv.metric_kinds import PREFIX, Counted, Gauged, Timed
from streamkv.metrics import METRICS, SUMS, TOLD_ELSEWHERE

PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"
ROW = re.compile(r"^\| `(streamkv_\w+)` \| (\w+) \| (.*?) \| (.*) \|$", re.MULTILINE)
KINDS = {Counted: "counter", Gauged: "gauge", Timed: "histogram"}
ROOM = 2 * 6
"""Blocks for two sessions that are awake at the same time."""


def options(store: Path, **more: Any) -> EngineConfig:
    given = {
        "window_size": 128,
        "prefill_chunk": 64,
        "max_sessions": 4,
        "cpu_bytes": "64MiB",
        "ssd_bytes": "64MiB",
        "store": str(store),
        "codec": "raw",
        "compile": "off",
    }
    return EngineConfig(**(given | more))


def some_ids(number: int, num_tokens: int) -> list[int]:
    return [5 + (7 * index + 11 * number) % 200 for index in range(num_tokens)]


def greedy(num_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)


@pytest.fixture(scope="module")
def idle(tiny_model_dir: Path) -> Iterator[Engine]:
    with Engine(str(tiny_model_dir), EngineConfig(window_size=128, compile="off")) as engine:
        yield engine


def label_values(name: str, text: str) -> set[str]:
    found = set()
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name.startswith(name):
                found |= {value for label, value in sample.labels.items() if label != "le"}
    return found


def test_the_page_has_every_metric_as_it_is(idle: Engine) -> None:
    rows = ROW.findall(PAGE.read_text(encoding="utf-8"))
    text, wanted = idle.metrics(), []
    for metric in METRICS:
        name, label = PREFIX + metric.name, ""
        if metric.label is not None:
            values = label_values(name, text)
            label = f"`{metric.label}`: {', '.join(sorted(values))}"
        wanted.append((name, KINDS[type(metric)], label, metric.help))
    assert rows == wanted


def test_names_and_helps_follow_prometheus_conventions() -> None:
    assert len({metric.name for metric in METRICS}) == len(METRICS)
    for metric in METRICS:
        assert re.fullmatch(r"[a-z][a-z_]*[a-z]", metric.name), metric.name
        assert metric.name.endswith("_total") == isinstance(metric, Counted), metric.name
        assert metric.help.endswith(".") and len(metric.help) > 10, metric.name
        is_timed = isinstance(metric, Timed) and metric.name != "batch_size"
        assert not is_timed or metric.name.endswith("_seconds")


def test_every_counter_of_an_engine_is_shown_once(idle: Engine) -> None:
    shown: Counter[str] = Counter()
    for metric in METRICS:
        if isinstance(metric, Counted) and not metric.name.endswith("bytes_total"):
            shown.update(metric.counters.values())
    shown.update(["ssd_bytes_read", "ssd_bytes_written"])
    shown.update([*SUMS, *TOLD_ELSEWHERE])
    assert shown == Counter(dict.fromkeys(idle.counters(), 1))


def test_every_series_is_there_with_zero_before_anything_happens(tiny_model_dir: Path) -> None:
    config = EngineConfig(window_size=128, compile="off")
    with Engine(str(tiny_model_dir), config) as engine:
        found, text = values_of(engine), engine.metrics()
    limits = {("tier_limit_bytes", "gpu"), ("tier_limit_bytes", "cpu")}
    assert {key for key, value in found.items() if value} == limits
    assert {name for name, _ in found} >= {metric.name for metric in METRICS if metric.label}
    for name in ("time_to_first_token_seconds", "inter_token_seconds", "queue_seconds"):
        assert f'streamkv_{name}_bucket{{le="+Inf"}} 0.0' in text
        assert f"streamkv_{name}_sum 0.0" in text


def test_engines_of_one_process_have_metrics_of_their_own(
    idle: Engine, tiny_model_dir: Path, tmp_path: Path
) -> None:
    with Engine(str(tiny_model_dir), options(tmp_path / "store")) as other:
        session = other.session("one")
        session.feed([some_ids(1, 100)]).run()
        assert values_of(other)["accepted_tokens_total", "fed"] == 100
        assert values_of(idle)["accepted_tokens_total", "fed"] == 0
        assert set(values_of(other)) == set(values_of(idle))
        assert other.metrics_registry is not idle.metrics_registry
        name = "streamkv_sessions_open"
        [family] = other.metrics_registry.restricted_registry([name]).collect()
        assert (family.name, family.samples[0].value) == (name, 1)
        closed = other
    with pytest.raises(EngineClosedError):
        closed.metrics()


def test_nothing_of_a_session_is_in_the_metrics(tiny_model_dir: Path, tmp_path: Path) -> None:
    with Engine(str(tiny_model_dir), options(tmp_path / "store")) as engine:
        before = set(values_of(engine))
        session = engine.session("zebra", system="Answer quietly.", tenant="walrus")
        session.say("Penguins")
        session.generate(greedy(5)).run()
        text = engine.metrics()
        assert set(values_of(engine)) == before
        for word in ("zebra", "quietly", "walrus", "Penguins", str(tmp_path)):
            assert word not in text


class Play:
    """Several sessions at work on one engine after another, and what was done counted by hand."""

    def __init__(self, model_dir: Path, store: Path) -> None:
        self.model_dir = model_dir
        self.store = store
        self.seen = ByHand()
        self.done: Counter[str] = Counter()

    def state(self, session: Session) -> str:
        return session.stats().state

    def note_sleep(self, engine: Engine, before: dict[str, str]) -> dict[str, str]:
        """Count who has fallen asleep or woken since; returns where everybody is now."""
        now = {name: self.state(session) for name, session in engine._sessions.items()}
        for name, state in now.items():
            self.done["slept"] += (before.get(name), state) == ("awake", "asleep")
            self.done["woken"] += (before.get(name), state) == ("asleep", "awake")
        return now

    def feed(self, session: Session, number: int, num_tokens: int) -> None:
        session.feed([some_ids(number, num_tokens)]).run()
        self.done["fed"] += num_tokens
        self.done["finished"] += 1

    def generate(self, session: Session, num_tokens: int) -> None:
        found = session.generate(greedy(num_tokens)).run()
        assert len(found) == num_tokens
        self.answered(num_tokens)
        self.done["finished"] += 1

    def answered(self, num_tokens: int) -> None:
        self.done["generated"] += num_tokens
        self.done["answers"] += num_tokens > 0

    def leave_in_the_middle(self, session: Session) -> None:
        """Answers that are not heard to their end: two are broken off, one has had all."""
        deltas = session.generate(greedy(50))
        for _ in range(3):
            next(deltas)
        deltas.close()
        self.answered(3)
        self.done["cancelled"] += 1
        deltas = session.generate(greedy(4))
        for _ in range(4):
            next(deltas)
        deltas.close()
        self.answered(4)
        self.done["finished"] += 1

        async def cancel() -> int:
            before = session.num_tokens
            task = asyncio.create_task(session.agenerate(greedy(100_000)).run())
            while session.num_tokens < before + 5:
                await asyncio.sleep(0.001)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            return session.num_tokens - before

        self.answered(asyncio.run(cancel()))
        self.done["cancelled"] += 1

    def check(self, engine: Engine, sessions: list[Session]) -> Values:
        """Compare the metrics with stats() and with what was counted by hand."""
        engine._tiers.flush()
        found, done, seen = values_of(engine), self.done, self.seen
        counted = sessions[0].stats().counters
        assert all(session.stats().counters == counted for session in sessions)
        assert counted == engine.counters()
        for metric in METRICS:
            if isinstance(metric, Counted):
                scale = {"": 1.0, "blocks": engine.model.spec.block_bytes, "milliseconds": 0.001}
                for label, counter in metric.counters.items():
                    wanted = counted[counter] * scale[metric.unit]
                    assert found[metric.name, label] == pytest.approx(wanted), metric.name
        for source in ("fed", "generated", "said", "system"):
            assert found["accepted_tokens_total", source] == done[source], source
        for outcome in ("finished", "failed", "cancelled"):
            assert found["operations_total", outcome] == done[outcome], outcome
        for kind in ("decode", "prefill", "recomputed"):
            assert found["computed_tokens_total", kind] == seen.tokens[kind], kind
        assert found["steps_total", ""] == found["batch_size_count", ""] == len(seen.batch_sizes)
        assert found["batch_size_sum", ""] == sum(seen.batch_sizes)
        assert found["time_to_first_token_seconds_count", ""] == done["answers"]
        assert found["inter_token_seconds_count", ""] == done["generated"] - done["answers"]
        assert found["queue_seconds_count", ""] == seen.num_begun
        assert found["sessions_slept_total", ""] == done["slept"]
        assert found["sessions_woken_total", ""] == done["woken"]
        self.check_places(engine, sessions, found)
        return found

    def check_places(self, engine: Engine, sessions: list[Session], found: Values) -> None:
        """Where sessions and blocks are, by looking at each."""
        states = Counter(map(self.state, sessions))
        for state in ("awake", "asleep", "waiting", "waking", "leaving"):
            assert found["sessions", state] == states[state], state
        assert found["sessions_open", ""] == len(sessions)
        assert found["sessions_running", ""] == 0
        store = engine._store
        assert store is not None
        held = {
            "gpu": sum(session.stats().num_blocks for session in sessions),
            "cpu": len(engine._cpu_pool._index),
            # A record that turned out damaged is shown to nobody, and still takes its room.
            "ssd": len({*store.blocks.keys(), *store.blocks._reader._suspects}),
        }
        for tier, num_blocks in held.items():
            assert found["tier_blocks", tier] == num_blocks, tier
            usage = sessions[0].stats().tiers[tier]
            assert found["tier_bytes", tier] == usage.num_bytes
            assert found["tier_limit_bytes", tier] == usage.limit_bytes
        for tier in ("gpu", "cpu"):
            assert found["tier_bytes", tier] == held[tier] * engine.model.spec.block_bytes


def test_stats_metrics_and_a_count_by_hand_agree(
    idle: Engine, tiny_model_dir: Path, tmp_path: Path
) -> None:
    play, block_bytes = Play(tiny_model_dir, tmp_path / "store"), idle.model.spec.block_bytes
    config = options(play.store, gpu_bytes=ROOM * block_bytes)
    with Engine(str(tiny_model_dir), config) as engine, play.seen.watching(engine):
        ann, bob = engine.session("ann"), engine.session("bob")
        play.feed(ann, 1, 300)
        play.feed(bob, 2, 70)
        play.generate(ann, 20)
        play.leave_in_the_middle(bob)
        states = play.note_sleep(engine, {})
        found = play.check(engine, [ann, bob])
        assert found["promotions_total", "cpu"] == found["wake_wait_seconds_count", ""] == 0

        # Three are more than there is room for: who rests gives way, and comes back.
        cyd = engine.session("cyd")
        states = play.note_sleep(engine, states)
        assert states["cyd"] == "asleep"
        with pytest.raises(SessionError):
            cyd.generate().run()
        play.done["failed"] += 1
        before = cyd.num_tokens
        cyd.say("What is a block?")
        play.done["said"] += cyd.num_tokens - before
        play.done["finished"] += 1
        states = play.note_sleep(engine, states)
        sleeper = next(session for session in (ann, bob) if play.state(session) == "asleep")
        play.generate(cyd, 5)
        num_blocks = -(-min(sleeper.num_tokens, 128) // 64) + (sleeper.num_tokens > 128)
        play.generate(sleeper, 5)
        states = play.note_sleep(engine, states)
        assert (play.done["slept"], play.done["woken"]) == (2, 2)
        found = play.check(engine, [ann, bob, cyd])
        assert found["wake_wait_seconds_count", ""] >= 2
        # What the sleeper had was its window, and came back from the cpu pool.
        assert num_blocks <= found["promotions_total", "cpu"] <= num_blocks + 1
        assert found["promotions_total", "ssd"] == found["ssd_checksum_failures_total", ""] == 0
        promoted = found["promotions_total", "cpu"]
        assert found["promoted_bytes_total", "cpu"] == promoted * block_bytes
        demoted = found["demotions_total", ""]
        assert demoted > 0 and found["demoted_bytes_total", ""] == demoted * block_bytes

        lengths = {name: session.num_tokens for name, session in engine._sessions.items()}
        assert sum(lengths.values()) == sum(play.done[of] for of in ("fed", "generated", "said"))
        live = next(each for each in (ann, bob) if play.state(each) == "awake")
        sealed = [block for block in live._live.sequence.table if block.key is not None]
        victim = sealed[-1]
        data = engine._gpu_pool.data[victim.block_id]
        content = data[1, 0, 0, :4].contiguous().numpy().tobytes()
    assert flip_block(play.store, content) >= 1
    check_after_restart(play, live.name, lengths)


def check_after_restart(play: Play, damaged: str, lengths: dict[str, int]) -> None:
    """A new engine counts from zero: what it restores, what is damaged, what it computes again."""
    play.done.clear()
    config = options(play.store)
    with Engine(str(play.model_dir), config) as engine, play.seen.watching(engine):
        assert not any(engine.counters().values())
        sessions: list[Session] = []
        num_restored = 0
        for name, num_tokens in lengths.items():
            play.seen.lose(name, num_tokens)
            session = engine.session(name)
            assert session.num_tokens == num_tokens
            sessions.append(session)
            if name != damaged:
                num_restored += session.stats().num_blocks
        found = values_of(engine)
        assert found["ssd_checksum_failures_total", ""] == 1
        assert found["misses_total", ""] == found["ssd_lookups_total", "miss"] == 1
        assert found["promotions_total", "ssd"] == found["ssd_lookups_total", "hit"]
        # All of the others, and what was read of the damaged one for nothing.
        assert found["promotions_total", "ssd"] >= num_restored > 0
        assert found["ssd_read_bytes_total", ""] > num_restored * engine.model.spec.block_bytes
        for session in sessions:
            play.generate(session, 3)
        found = play.check(engine, sessions)
        assert found["computed_tokens_total", "recomputed"] > 0
        reused = sum(found["reused_tokens_total", at] for at in ("gpu", "cpu", "ssd", "unread"))
        assert reused == engine.counters()["reused_tokens"]
        assert reused == sum(session.stats().num_reused for session in sessions)

        assert min(found["tier_blocks", tier] for tier in ("gpu", "cpu", "ssd")) > 0

        # A rewind computes again what is behind the last whole block that is left.
        [session] = [each for each in sessions if each.name == damaged]
        length = session.num_tokens - 40
        session.rewind(length)
        play.done["finished"] += 1
        play.seen.lose(damaged, length)
        play.generate(session, 3)
        play.check(engine, sessions)


def test_reused_tokens_are_counted_by_the_tier_that_had_them(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    store, ids = tmp_path / "store", some_ids(3, 1000)
    with Engine(str(tiny_model_dir), options(store)) as engine:
        engine.cost_gate.always_reads = True
        first = engine.session("first", tenant="them")
        first.feed([ids]).run()
        engine._tiers.flush()
        second = engine.session("second", tenant="them")
        second.feed([ids]).run()
        found = values_of(engine)
        reused = second.stats().num_reused
        # All of its window is that of the first one, and what is older is not read by anybody.
        assert found["reused_tokens_total", "gpu"] == 3 * 64 - (reused < 960) * 64
        assert found["reused_tokens_total", "unread"] == reused - 192 + (reused < 960) * 64
        assert found["reused_tokens_total", "ssd"] == 0
        assert found["reuse_choices_total", "read"] >= 1
        first.delete()
    with Engine(str(tiny_model_dir), options(store)) as engine:
        engine.cost_gate.always_reads = True
        third = engine.session("third", tenant="them")
        third.feed([ids]).run()
        found = values_of(engine)
        assert found["reused_tokens_total", "ssd"] > 0
        assert found["reused_tokens_total", "gpu"] == found["reused_tokens_total", "cpu"] == 0


def test_who_computes_and_who_waits_for_room_is_seen_while_it_does(
    idle: Engine, tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = options(tmp_path / "store", gpu_bytes=ROOM * idle.model.spec.block_bytes)
    with Engine(str(tiny_model_dir), config) as engine:
        sessions = [engine.session(f"session {number}") for number in range(3)]
        running, launch = [], engine._runner.launch

        def watched(batch: Batch) -> Flight:
            running.append((values_of(engine)["sessions_running", ""], len(batch.steps)))
            return launch(batch)

        monkeypatch.setattr(engine._runner, "launch", watched)
        sessions[0].feed([some_ids(1, 200)]).run()
        assert running == [(1, 1)] * len(running) and len(running) > 2
        with ExitStack() as held, ThreadPoolExecutor(1) as pool:
            for session in sessions[:2]:
                held.enter_context(engine._loop.held(session._live.sequence, awake=True))
            feed = pool.submit(sessions[2].feed([some_ids(2, 50)]).run)
            while sessions[2].stats().state != "waiting":
                time.sleep(0.005)
            found = values_of(engine)
            assert (found["sessions", "waiting"], found["sessions", "awake"]) == (1, 2)
            assert found["sessions_running", ""] == 0
            held.close()
            feed.result(30)
        assert values_of(engine)["sessions", "waiting"] == 0


def test_how_operations_end_is_counted_once_each(idle: Engine) -> None:
    def ended() -> tuple[float, ...]:
        found = values_of(idle)
        names = ("finished", "failed", "cancelled")
        return tuple(found["operations_total", outcome] for outcome in names)

    def broken() -> Iterator[str]:
        yield "A text. "
        raise OSError("the line is dead")

    before = ended()
    session = idle.session("ends")
    never_begun = session.generate(greedy(3))
    never_begun.close()
    with pytest.raises(OSError, match="line is dead"):
        session.feed(broken()).run()
    with pytest.raises(InputError):
        session.feed("").run()
    deltas = session.generate(greedy(9))
    next(deltas)
    deltas.close()
    deltas.close()
    stale = session.generate(greedy(9))
    next(stale)
    session.say("That will do.")
    with pytest.raises(SessionError, match="stale"):
        next(stale)
    session.feed(["One more. "]).run()
    left = session.generate(greedy(9))
    next(left)
    session.delete()
    assert tuple(now - then for now, then in zip(ended(), before, strict=True)) == (2, 2, 3)
