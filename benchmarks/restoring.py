"""A prefix that is restored into new sessions, timed and compared with what computed it."""

import math
import time
from dataclasses import dataclass, field
from typing import Any

import torch
from common import require, say
from parts import Parts, synchronize
from random_model import engine_config, ids
from report import median
from torch import Tensor

from streamkv import Engine, SamplingParams, Session
from streamkv.tiers.policy import Place
from streamkv.tiers.spec import BLOCK_SIZE

BOUND_S = 0.11
PEERS = {"vllm_0.24.0_other_run": 0.155}
TENANT = "one"
TOLERANCE = 0.05
"""Of a log-probability, of which bfloat16 has a step; that blocks are the same is checked apart."""

ROUNDING = 0.5
"""The same between two ways to compute."""

NEXT = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, logprobs=20)
GATE = ("gate_reads", "gate_computes")


@dataclass
class Case:
    """What is measured.

    Attributes:
        num_tokens: of the prefix, whole blocks.
        window_size: holds all of it.
        prefill_chunk: of all engines.
        rounds: of restoring and computing.
        device: where.
        computed_s: seconds of computing the prefix, as found so far.
    """

    num_tokens: int = 32_768
    window_size: int = 65_536
    prefill_chunk: int = 4096
    rounds: int = 5
    device: str = "cuda"
    computed_s: list[float] = field(default_factory=list)

    @property
    def num_blocks(self) -> int:
        """Of the prefix."""
        return self.num_tokens // BLOCK_SIZE

    @property
    def token_ids(self) -> list[int]:
        """The prefix, and the token that stays pending."""
        return ids(1, self.num_tokens + 1)

    def config(self, **others: Any) -> Any:
        """Options of an engine that has room for two such sessions."""
        options = {"retain": "all", "prefill_chunk": self.prefill_chunk, "device": self.device}
        return engine_config(self.window_size, 2, **(options | others))


@dataclass(frozen=True)
class Opened:
    """A session that was opened and stands at the end of the prefix.

    Attributes:
        seconds: until its KV was there.
        first_token_s: from there until a token was chosen.
        num_reused: tokens whose blocks were read.
        logprobs: of the likeliest next tokens.
        sums: int64 [num_blocks], of the bytes of each block of the prefix.
    """

    seconds: float
    first_token_s: float
    num_reused: int
    logprobs: dict[int, float]
    sums: Tensor


def open_and_feed(engine: Engine, name: str, token_ids: list[int], tenant: str | None) -> Opened:
    """A new session, which sleeps afterwards."""
    synchronize()
    began = time.perf_counter()
    session = engine.session(name, tenant=tenant)
    session.feed([token_ids]).run()
    require(session.num_tokens == len(token_ids), f"{session.num_tokens} tokens were accepted")
    return finished(engine, session, began)


def finished(engine: Engine, session: Session, began: float) -> Opened:
    """What a session that was opened at `began` says next; then it sleeps."""
    synchronize()
    there = time.perf_counter()
    sequence = session._live.sequence
    require(sequence.num_pending == 1, f"{sequence.num_pending} tokens are pending")
    num_reused = session.stats().num_reused
    sums = block_sums(engine, session)
    synchronize()
    begun_next = time.perf_counter()
    [delta] = [delta for delta in session.generate(NEXT).run() if delta.logprob is not None]
    first_token_s = time.perf_counter() - begun_next
    assert delta.logprob is not None
    logprobs = dict(delta.logprob.top)
    session.close()
    return Opened(there - began, first_token_s, num_reused, logprobs, sums)


def block_sums(engine: Engine, session: Session) -> Tensor:
    """A number for each full block of a session: others, in all likelihood, for other bytes."""
    pool, sequence = engine._gpu_pool, session._live.sequence
    words = pool.spec.block_bytes // 8
    odd = torch.arange(1, 2 * words, 2, device=pool.data.device)
    # An odd factor loses nothing of a word, and sums wrap around.
    found = [
        (pool.row(block.block_id).view(torch.int64) * odd).sum()
        for block in sequence.table
        if (block.block_index + 1) * sequence.block_size <= sequence.num_computed
    ]
    return torch.stack(found).cpu()


def largest_difference(found: Opened, expected: Opened) -> float:
    """Of the log-probabilities of tokens that both name; infinite if they name others."""
    both = found.logprobs.keys() & expected.logprobs.keys()
    if 2 * len(both) < len(expected.logprobs):
        return math.inf
    return max(abs(found.logprobs[token] - expected.logprobs[token]) for token in both)


def require_same(found: Opened, expected: Opened, what: str) -> float:
    """The largest difference of a log-probability; ends the part if anything is wrong."""
    same = found.sums.shape == expected.sums.shape and bool((found.sums == expected.sums).all())
    require(same, f"{what}: blocks differ from those of the session that computed them")
    difference = largest_difference(found, expected)
    require(difference <= TOLERANCE, f"{what}: log-probabilities differ by {difference:g}")
    return difference


def keys_of(session: Session, num_blocks: int) -> list[Any]:
    """Keys of the prefix's blocks, while the session has them live."""
    keys = [block.key for block in session._live.sequence.table][:num_blocks]
    require(len(keys) == num_blocks and None not in keys, "not all blocks of the prefix are sealed")
    return keys


def require_places(engine: Engine, keys: list[Any], place: str) -> None:
    """All of these blocks are there and nowhere above."""
    engine._tiers.flush()
    places = [engine._tiers.where(key) for key in keys]
    counts = {each: places.count(each) for each in set(places)}
    require(counts == {place: len(keys)}, f"the prefix lies in {counts}, not in {place}")


class Restoring:
    """Restores one prefix again and again, and notes it as figures of one name.

    Args:
        parts: where figures go.
        case: what is measured.
        name: of the figures.
        engine: that restores.
        expected: what the session that computed the prefix says next.
        place: tier that has the prefix.
    """

    def __init__(
        self,
        parts: Parts,
        case: Case,
        name: str,
        engine: Engine,
        expected: Opened,
        place: Place,
    ) -> None:
        self._parts = parts
        self._case = case
        self._name = name
        self._engine = engine
        self._expected = expected
        self._place: Place = place
        self._number = 0
        self._worst = 0.0
        self.found: list[Opened] = []

    def once(self) -> Opened:
        """Restore it into a new session."""
        self._number += 1
        name = f"{self._name} {self._number}"
        opened = open_and_feed(self._engine, name, self._case.token_ids, TENANT)
        if opened.num_reused == self._case.num_tokens:
            self._worst = max(self._worst, require_same(opened, self._expected, name))
        else:
            # What was computed, perhaps in chunks cut elsewhere, is rounded otherwise.
            difference = largest_difference(opened, self._expected)
            require(difference <= ROUNDING, f"{name}: log-probabilities differ by {difference:g}")
        return opened

    def by_gate(self, when: str) -> Opened:
        """The same as the cost gate decides, which is noted."""
        gate, before = self._engine.cost_gate, self._engine.counters()
        gate.always_reads = False
        num_bytes = self._case.num_blocks * self._engine._gpu_pool.spec.block_bytes
        expected = {
            "read_s": gate.read_s({self._place: num_bytes}),
            "compute_s": gate.compute_s(self._case.num_tokens),
        }
        opened = self.once()
        after = self._engine.counters()
        decided = {name: after[name] - before[name] for name in GATE}
        self._parts.report.add(
            f"{self._name}_gate_{when}_reused",
            opened.num_reused,
            "tokens",
            better="higher",
            seconds=opened.seconds,
            expected=expected,
            **decided,
        )
        self._parts.save()
        say(
            f"  {self._name}, gate {when}: {opened.num_reused} tokens reused in "
            f"{opened.seconds:.3f} s, {decided}, having expected {expected}"
        )
        return opened

    def always(self) -> None:
        """The same whatever the gate thinks; counts as a measurement."""
        self._engine.cost_gate.always_reads = True
        opened = self.once()
        self._engine.cost_gate.always_reads = False
        require(opened.num_reused == self._case.num_tokens, f"{opened.num_reused} tokens reused")
        self.found.append(opened)
        say(f"  {self._name}: {opened.seconds:.4f} s, next token {opened.first_token_s:.4f} s")

    def add(self, num_bytes: int, *, may_replay: bool) -> None:
        """The figures so far.

        Args:
            num_bytes: of the prefix.
            may_replay: the cost gate computes instead, so that being slower is no fault.

        From pinned memory it has a bound in seconds, too.
        """
        report, name = self._parts.report, self._name
        seconds = [opened.seconds for opened in self.found]
        report.add(
            f"{name}_s",
            median(seconds),
            "s",
            bound=BOUND_S if self._place == "cpu" else None,
            peers=PEERS if self._place == "cpu" else None,
            rounds=[round(each, 4) for each in seconds],
            bytes_per_s=num_bytes / median(seconds),
            next_token_s=median([opened.first_token_s for opened in self.found]),
            logprob_difference=self._worst,
        )
        if self._case.computed_s:
            ratio = median(seconds) / median(self._case.computed_s)
            bound = None if may_replay else 1.0
            report.add(f"{name}_over_computing", ratio, "x of computing", bound=bound)
        self._parts.save()


def compute(parts: Parts, case: Case, engine: Engine, name: str, expected: Opened) -> None:
    """A session without a tenant: nothing is shared, all is computed."""
    opened = open_and_feed(engine, name, case.token_ids, None)
    require(opened.num_reused == 0, f"{opened.num_reused} tokens were reused")
    case.computed_s.append(opened.seconds)
    parts.report.add(
        "computing_s",
        median(case.computed_s),
        "s",
        rounds=[round(each, 4) for each in case.computed_s],
        tokens=case.num_tokens,
        logprob_difference=largest_difference(opened, expected),
    )
    say(f"  computing: {opened.seconds:.4f} s")
