"""Sessions that recall beside sessions with a wide window, and runs of them over whole strides."""

import asyncio
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

from common import require, say
from forced_choices import Event, ForcedChoices
from gpu_decode import all_timed, check
from open_models import Model, opened, read
from random_model import engine_config
from step_times import StepTimes, spans_ms, tokens_before, whole_strides

from streamkv import Engine, EngineConfig

BLOCK = 64
WARM = 24
"""First tokens, in which sessions find together and clocks rise."""

SPARE_BLOCKS = 600
"""Room of the cpu pool for what is generated; when that is used up, the oldest history goes."""

COUNTED = (
    "choice_waits",
    "choice_wait_ms",
    "promotions",
    "cpu_reads",
    "shared",
    "absent",
    "misses",
    "digests_lost",
    "demotions",
    "evictions",
    "waits",
    "wait_ms",
)


@dataclass(frozen=True)
class Case:
    """What is measured.

    Attributes:
        name: of the model.
        history: tokens read before.
        window_size, recall_blocks: of the session that recalls.
        prefill_chunk: of both engines.
        num_tokens: measured at least.
        batches: sessions at the same time.
        rounds: at most, of one session and of several.
        device: where.
        digest_bytes: of the GPU for digests; `None`: as an engine takes by itself.
    """

    name: str
    history: int
    window_size: int = 4096
    recall_blocks: int = 32
    prefill_chunk: int = 4096
    num_tokens: int = 1000
    batches: tuple[int, ...] = (1, 16)
    rounds: tuple[int, ...] = (3, 2)
    device: str = "cuda"
    digest_bytes: str | None = None

    @property
    def quick(self) -> "Case":
        """The same, tiny."""
        return replace(
            self, history=2000, window_size=256, recall_blocks=4, prefill_chunk=128,
            num_tokens=64, batches=(1, 2), rounds=(2, 1),
        )  # fmt: skip

    def config(self, spec_bytes: int, *, recalls: bool) -> EngineConfig:
        """Options of an engine: the same but for what is compared.

        Args:
            spec_bytes: bytes of a block.
            recalls: window and recalled blocks; else a window of as many tokens as both.
        """
        wide = self.window_size + BLOCK * self.recall_blocks
        kept = self.history // BLOCK if recalls else 0
        return engine_config(
            self.window_size if recalls else wide,
            max(2, *self.batches),
            device=self.device,
            prefill_chunk=self.prefill_chunk,
            retain="all",
            cpu_bytes=(kept + SPARE_BLOCKS) * spec_bytes,
            recall_blocks=self.recall_blocks if recalls else 0,
            digest_bytes=self.digest_bytes,
        )


@dataclass(frozen=True)
class Run:
    """One run of some sessions.

    Attributes:
        steps: times between tokens, of all sessions.
        made, installed: choices made and brought back in that time.
        counted: what the engine's counters went up by, in the whole run.
        problems: what was not as it was asked for.
    """

    steps: StepTimes
    made: tuple[Event, ...] = ()
    installed: tuple[Event, ...] = ()
    counted: dict[str, int] | None = None
    problems: tuple[str, ...] = ()


class Pair:
    """Sessions that recall, and as many that have a wide window, in two engines.

    Args:
        case: what is measured.
        recalling, plain: the engines.
        token_ids: as many as the history has.
    """

    def __init__(self, case: Case, recalling: Engine, plain: Engine, token_ids: list[int]) -> None:
        self.case = case
        self.engine = recalling
        self.stride = recalling.config.stride
        self.num_measured = whole_strides(case.num_tokens, self.stride)
        self._plain = plain
        self._wide = plain.config.window_size + BLOCK
        self._ids = token_ids
        self.recalling = [read(recalling, "history", token_ids)]
        self.plain = [read(plain, "0", token_ids[: self._wide])]
        self.recalling[0].set_mode("recall")

    @property
    def num_kept(self) -> int:
        """Blocks of the history that are in the cpu pool."""
        recaller = self.engine._executor.recaller
        assert recaller is not None
        index = recaller._streams[self.recalling[0]._live.sequence].index
        keys = (index.key(block) for block in range(len(index)))
        return sum(key is not None and self.engine._cpu_pool.contains(key) for key in keys)

    def grow(self, batch: int) -> None:
        """Have so many sessions of both kinds, each at another place of its stride."""
        first, apart = self.recalling[0], max(1, self.stride // batch)
        while len(self.recalling) < batch:
            number = len(self.recalling)
            forked = first.fork(f"fork {number}")
            forked.feed([self._ids[: number * apart]]).run()
            self.recalling.append(forked)
            wide = self._ids[: self._wide + number * apart]
            self.plain.append(read(self._plain, str(number), wide))

    def run_recalling(self, batch: int, forced: ForcedChoices) -> Run:
        """Whole strides of all sessions, whose choices change as `forced` says by then."""
        sessions, before = self.recalling[:batch], self.engine.counters()
        # What the share was changed to is chosen within a stride, and attended after another.
        skipped = [tokens_before(s.num_tokens, self.stride, 2 * self.stride) for s in sessions]
        stamps = asyncio.run(all_timed(sessions, max(skipped) + self.num_measured + WARM))
        counters = self.engine.counters()
        spans, made, installed = list[float](), list[Event](), list[Event]()
        problems = list[str]()
        for session, skip, times in zip(sessions, skipped, stamps, strict=True):
            spans += spans_ms(times, skip, self.num_measured)
            sequence = session._live.sequence
            part = sequence, times[skip - 1], times[skip + self.num_measured - 1]
            problems += self._problems(forced, part)
            made += forced.between(forced.made, *part)
            installed += forced.between(forced.installed, *part)
        counted = {name: counters[name] - before[name] for name in COUNTED if name in counters}
        if counted["absent"]:
            problems.append(f"{counted['absent']} chosen blocks were absent")
        steps = StepTimes.of(spans)
        return Run(steps, tuple(made), tuple(installed), counted, tuple(problems))

    def _problems(self, forced: ForcedChoices, part: tuple[Any, float, float]) -> list[str]:
        """Unless each stride has made a choice and brought one back, with the share asked for."""
        num_blocks, problems = self.case.recall_blocks, list[str]()
        expected = (round(forced.share * num_blocks), num_blocks)
        for what, events in (("made", forced.made), ("brought back", forced.installed)):
            found = [(e.num_new, e.num_blocks) for e in forced.between(events, *part)]
            if found != [expected] * (self.num_measured // self.stride):
                problems.append(f"choices {what}, as (new, all) blocks: {found}, not {expected}")
        return problems

    def run_plain(self, batch: int) -> Run:
        """As many tokens of the sessions that have a wide window."""
        stamps = asyncio.run(all_timed(self.plain[:batch], WARM + self.num_measured))
        spans = [span for times in stamps for span in spans_ms(times, WARM, self.num_measured)]
        return Run(StepTimes.of(spans))


def opened_pair(stack: ExitStack, case: Case, model: Model) -> Pair:
    """Both engines, and a session in each that has read."""
    engines = []
    for recalls in (True, False):
        engine = opened(stack, model, case.config(model.block_bytes, recalls=recalls))
        check(engine)
        engines.append(engine)
    pair = Pair(case, *engines, model.token_ids(case.history))
    kept = pair.num_kept
    say(f"  {kept} blocks of the history in the cpu pool")
    require(kept >= 4 * case.recall_blocks, f"only {kept} blocks are in the cpu pool")
    return pair
