"""The same stream with everything in the gpu pool, and with its blocks brought back from each tier.

A stream of several windows is scored and generated once by an engine that has nothing but a gpu
pool. Then it is played again, put to sleep and resumed between its parts so that its window comes
back from one tier, or followed by a second session that takes the first one's blocks. Every token
and log-probability is compared. Invariant: a way that brought no block back counts as failed.

This module knows engines and sessions, and nothing of how a tier works.
"""

import dataclasses
import random
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from streamkv.config import EngineConfig
from streamkv.engine import Engine
from streamkv.sampling_params import SamplingParams
from streamkv.session import Session

NUM_PARTS = 6
WORDS_A_PART = 120
GENERATED_A_PART = 12
SEED = 7
NAME = "self-check"

CONFIG = EngineConfig(
    window_size=192, prefill_chunk=128, max_sessions=2, cpu_bytes=0, ssd_bytes="4GiB"
)
"""Small windows, so that a short stream leaves several behind it."""

TOLERANCES = {"float32": 1e-4}
OTHER_TOLERANCE = 0.02
"""Largest difference of log-probabilities that is rounding: other steps may add in another order;
float16 and bfloat16 have three decimal digits or less."""


@dataclass(frozen=True, slots=True)
class Case:
    """A way to bring blocks back.

    Attributes:
        tier: where they come from.
        counter: what the engine counts them as.
        options: fields of `EngineConfig` that differ from those of the reference.
        follows: a second session takes them, of the same tenant; otherwise sleep and resume.
    """

    tier: str
    counter: str
    options: dict[str, Any]
    follows: bool = False


TIERS = (
    Case("gpu", "shared", {}, follows=True),
    Case("cpu", "cpu_reads", {"cpu_bytes": "1GiB"}),
    Case("ssd", "ssd_reads", {}),
)


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


GROUPS = (Group("window"),)
"""What is checked; further attention modes are further groups."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a case.

    Attributes:
        mode, tier: which case.
        num_blocks: blocks that came back from the tier.
        num_tokens: tokens compared.
        num_different: of these, tokens that are others, or farther off than rounding explains.
        largest_difference: of a log-probability, in nats; infinite if a token is another one.
    """

    mode: str
    tier: str
    num_blocks: int
    num_tokens: int
    num_different: int
    largest_difference: float

    @property
    def problem(self) -> str:
        """What is wrong; empty if nothing is."""
        if self.num_different:
            return f"{self.num_different} of {self.num_tokens} tokens differ"
        if self.num_tokens == 0:
            return "nothing was compared"
        return "" if self.num_blocks else "not exercised: no block came back from this tier"


Said = dict[int, tuple[int, float]]
"""By token index: the token and its log-probability."""

OnProgress = Callable[[str], None]


def self_check(
    model: str,
    config: EngineConfig = CONFIG,
    groups: Sequence[Group] = GROUPS,
    on_progress: OnProgress | None = None,
) -> Iterator[Outcome]:
    """Play every case and compare it with its reference, one after the other.

    Stores are made in a temporary directory, which is removed.

    Args:
        model: as for `Engine`.
        config: options of all engines; its `cpu_bytes` and `store` are set by the cases.
        on_progress: called with a line for people before anything that takes seconds.

    Raises:
        ConfigError, ModelError, StoreError: as `Engine`.
    """
    say = on_progress if on_progress is not None else _silent
    for group in groups:
        base = dataclasses.replace(config, cpu_bytes=0, store=None, **group.options)
        say(f"{group.mode}: everything in the gpu pool ...")
        with Engine(model, base) as engine:
            reference = _play(_Plain(engine))
            tolerance = TOLERANCES.get(engine.model.spec.dtype, OTHER_TOLERANCE)
        for case in group.cases:
            say(f"{group.mode}: blocks from {case.tier} ...")
            said, num_blocks = _play_case(model, base, case)
            yield _compare(group.mode, case.tier, num_blocks, said, reference, tolerance)


def _play_case(model: str, base: EngineConfig, case: Case) -> tuple[Said, int]:
    """Returns what was said and how many blocks came back."""
    with tempfile.TemporaryDirectory(prefix="streamkv-self-check-") as directory:
        store = None if case.follows else str(Path(directory) / "store")
        config = dataclasses.replace(base, store=store, **case.options)
        with Engine(model, config) as engine:
            # Slow or not: what is stored is to come back.
            engine.cost_gate.always_reads = True
            player = _Follower(engine) if case.follows else _Sleeper(engine)
            return _play(player), engine.counters()[case.counter]


class _Plain:
    """Plays a stream in one go."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._session = engine.session(NAME, tenant=NAME)

    def read(self, text: str) -> Said:
        """Take in a text; what is said of its tokens."""
        return _scored(self._session, text)

    def go_on(self) -> Said:
        """Generate."""
        return _generated(self._session)

    def rest(self) -> None:
        """Between two parts."""


class _Sleeper(_Plain):
    """Sleeps and resumes between the parts."""

    def rest(self) -> None:
        """Give every block back, and take the window again from where it lies."""
        self._session.close()
        self._session = self._engine.session(NAME)


class _Follower(_Plain):
    """A second session reads what the first has just computed, and goes on by itself."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self._second = engine.session(f"{NAME} 2", tenant=NAME)

    def read(self, text: str) -> Said:
        """Feed both; reading says nothing of tokens."""
        self._session.feed(text).run()
        self._second.feed(text).run()
        return {}

    def go_on(self) -> Said:
        """Both generate; the second one's answer counts."""
        _generated(self._session)
        return _generated(self._second)


def _play(player: _Plain) -> Said:
    said: Said = {}
    for text in texts():
        said |= player.read(text)
        player.rest()
        said |= player.go_on()
        player.rest()
    return said


def texts() -> list[str]:
    """The parts of the stream: words of random letters, the same in every process."""
    source = random.Random(SEED)
    letters = "etaoinshrdlu"

    def word() -> str:
        return "".join(source.choices(letters, k=source.randint(2, 7)))

    return [" ".join(word() for _ in range(WORDS_A_PART)) + ". " for _ in range(NUM_PARTS)]


def _scored(session: Session, text: str) -> Said:
    scores = session.score(text)
    return {s.token_index: (s.token_id, s.logprob) for s in scores if s.logprob is not None}


def _generated(session: Session) -> Said:
    params = SamplingParams(
        temperature=0, max_tokens=GENERATED_A_PART, ignore_eos=True, logprobs=0, seed=SEED
    )
    return {
        delta.token_index: (delta.logprob.token_id, delta.logprob.logprob)
        for delta in session.generate(params)
        if delta.logprob is not None
    }


def _compare(
    mode: str, tier: str, num_blocks: int, said: Said, reference: Said, tolerance: float
) -> Outcome:
    differences = [
        abs(logprob - reference[index][1])
        if index in reference and reference[index][0] == token_id
        else float("inf")
        for index, (token_id, logprob) in said.items()
    ]
    # Whatever is no number differs.
    num_different = sum(not difference <= tolerance for difference in differences)
    largest = max(differences, default=0.0)
    return Outcome(mode, tier, num_blocks, len(said), num_different, largest)


def _silent(_: str) -> None:
    pass
