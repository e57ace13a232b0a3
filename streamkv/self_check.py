"""The same stream with everything in the gpu pool, and with its blocks brought back from each tier.

A stream of several windows is scored and generated once by an engine that has nothing but a gpu
pool. Then it is played again in ways that bring blocks back between its parts, from one tier each
(`streamkv/self_check_play.py`): put to sleep and resumed, followed by a second session that takes
the first one's blocks, or, where everything is attended, left to a fork for a moment. Every token
and log-probability is compared. Invariant: a way that brought no block back counts as failed.

This module knows engines and sessions, and nothing of how a tier works.
"""

import dataclasses
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from streamkv.config import EngineConfig
from streamkv.engine import Engine
from streamkv.errors import AbsentBlockError, ConfigError
from streamkv.self_check_play import Follower, Holder, Plain, Said, Sleeper, play

CONFIG = EngineConfig(
    window_size=192, prefill_chunk=128, max_sessions=2, cpu_bytes=0, ssd_bytes="4GiB"
)
"""Small windows, so that a short stream leaves several behind it."""

TOLERANCES = {"float32": 1e-4}
OTHER_TOLERANCE = 0.02
"""Largest difference of log-probabilities that is rounding: other steps may add in another order;
float16 and bfloat16 have three decimal digits or less."""

OTHER_CUTS_TOLERANCE = 0.25
"""The same where a text is cut into other steps than the reference's, in 16 bits: on an H200 up to
0.19 lay between a chunk and single steps. A block of another content makes whole nats."""


@dataclass(frozen=True, slots=True)
class Case:
    """A way to bring blocks back.

    Attributes:
        tier: where they come from.
        counter: what the engine counts them as.
        options: fields of `EngineConfig` that differ from those of the reference.
        player: how they leave and come back.
    """

    tier: str
    counter: str
    options: dict[str, Any]
    player: type[Plain] = Sleeper

    def tolerance(self, dtype: str) -> float:
        """Largest difference of a log-probability that is rounding."""
        other = OTHER_CUTS_TOLERANCE if self.player is Follower else OTHER_TOLERANCE
        return TOLERANCES.get(dtype, other)


TIERS = (
    Case("gpu", "shared", {}, Follower),
    Case("cpu", "cpu_reads", {"cpu_bytes": "1GiB"}),
    Case("ssd", "ssd_reads", {}),
)
FULL_TIERS = (Case("gpu", "shared", {}, Holder), *TIERS[1:])


@dataclass(frozen=True, slots=True)
class Group:
    """Cases that are compared with one reference.

    Attributes:
        mode: how tokens attend.
        options: fields of `EngineConfig`, for the reference and all cases.
        cases: what is compared with it.
    """

    mode: str
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    cases: Sequence[Case] = TIERS


GROUPS = (
    Group("window"),
    # The pool holds the whole stream, twice where a fork holds on to it.
    Group("full", {"attention": "full", "max_sessions": 8}, FULL_TIERS),
)
"""What is checked; further attention modes are further groups."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a case.

    Attributes:
        mode, tier: which case.
        num_blocks: blocks that came back from the tier.
        num_tokens: tokens compared.
        num_different: of these, tokens that are farther off than rounding explains.
        largest_difference: of a log-probability, in nats; of two tokens, if another one was chosen.
        absent: which block did not come back, where that is an error; else empty.
    """

    mode: str
    tier: str
    num_blocks: int
    num_tokens: int
    num_different: int
    largest_difference: float
    absent: str = ""

    @property
    def problem(self) -> str:
        """What is wrong; empty if nothing is."""
        if self.absent:
            return f"a block did not come back ({self.absent})"
        if self.num_different:
            return f"{self.num_different} of {self.num_tokens} tokens differ"
        if self.num_tokens == 0:
            return "nothing was compared"
        return "" if self.num_blocks else "not exercised: no block came back from this tier"


OnProgress = Callable[[str], None]


def self_check(
    model: str,
    config: EngineConfig = CONFIG,
    groups: Sequence[Group] = GROUPS,
    on_progress: OnProgress | None = None,
) -> Iterator[Outcome]:
    """Play every case and compare it with its reference, one after the other.

    Stores are made in a temporary directory, which is removed. A mode that the model or the device
    does not have is said to `on_progress` and left out.

    Args:
        model: as for `Engine`.
        config: options of all engines; its `cpu_bytes` and `store` are set by the cases.
        on_progress: called with a line for people before anything that takes seconds.

    Raises:
        ConfigError, ModelError, StoreError: as `Engine`.
    """
    say = on_progress if on_progress is not None else _silent
    for group in groups:
        say(f"{group.mode}: everything in the gpu pool ...")
        try:
            base = dataclasses.replace(config, cpu_bytes=0, store=None, **group.options)
            with Engine(model, base) as engine:
                reference = play(Plain(engine))
                dtype = engine.model.spec.dtype
        except ConfigError as error:
            if error.field != "attention":
                raise
            say(f"{group.mode}: not checked: {error.problem}.")
            continue
        for case in group.cases:
            say(f"{group.mode}: blocks from {case.tier} ...")
            try:
                said, num_blocks = _play_case(model, base, case, reference)
            except AbsentBlockError as error:
                yield Outcome(group.mode, case.tier, 0, 0, 0, 0.0, absent=str(error))
                continue
            yield _compare(
                group.mode, case.tier, num_blocks, said, reference, case.tolerance(dtype)
            )


def _play_case(model: str, base: EngineConfig, case: Case, reference: Said) -> tuple[Said, int]:
    """Returns what was said and how many blocks came back."""
    with (
        tempfile.TemporaryDirectory(prefix="streamkv-self-check-") as directory,
        _open(model, base, case, Path(directory)) as engine,
    ):
        # Slow or not: what is stored is to come back.
        engine.cost_gate.always_reads = True
        return play(case.player(engine, reference)), engine.counters()[case.counter]


def _open(model: str, base: EngineConfig, case: Case, directory: Path) -> Engine:
    """An engine whose blocks leave memory, or not, as the case wants."""
    store = str(directory / "store") if case.player is Sleeper else None
    return Engine(model, dataclasses.replace(base, store=store, **case.options))


def _compare(
    mode: str, tier: str, num_blocks: int, said: Said, reference: Said, tolerance: float
) -> Outcome:
    # Two tokens of one probability are a tie; what goes another way from there differs further on.
    differences = [
        abs(logprob - reference[index][1]) if index in reference else float("inf")
        for index, (_, logprob) in said.items()
    ]
    # Whatever is no number differs.
    num_different = sum(not difference <= tolerance for difference in differences)
    largest = max(differences, default=0.0)
    return Outcome(mode, tier, num_blocks, len(said), num_different, largest)


def _silent(_: str) -> None:
    pass
