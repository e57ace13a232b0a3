"""Pinned buffers of a step whose copies are late: not written again before they are copied.

The stream is held up by a kernel that spins, while the host goes several steps ahead. Each history
runs twice: as it is, and with every wait for an event taken away, which must show.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from streamkv.batch import SequenceStep, StepResult, Wanted
from streamkv.gpu_flight import Outputs
from streamkv.gpu_sampling import Draw, GpuSampler
from streamkv.sampling_params import SamplingParams
from streamkv.sequence import Sequence
from streamkv.step_table import StepTable
from streamkv.tiers.spec import BlockKey
from streamkv.window import Window

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

NUM_STEPS = 5
SPIN_CYCLES = 800_000_000
GREEDY = SamplingParams(temperature=0.0)
NUM_ROWS = 64

History = Callable[[], list[int]]


def slow(history: Callable[[], None]) -> None:
    """Run a history on the host while the GPU has not begun with it."""
    torch.cuda.synchronize()
    torch.cuda._sleep(SPIN_CYCLES)
    history()
    torch.cuda.synchronize()


def sequence_of(token_id: int) -> Sequence:
    """A stream of one token, in block 0."""
    made = Sequence(1, Window(64), 64, BlockKey(b"r" * 16))
    made.append([token_id])
    made.table.add(0, 0)
    return made


def tables() -> list[int]:
    """Token ids that the GPU finds in the table of step 0, 1, 2, ..., after the host wrote them."""
    pool = torch.zeros(2, 1, 2, 1, 64, 16, device="cuda")
    table = StepTable(NUM_ROWS, 16, pool)
    found = torch.full((NUM_STEPS,), -1, dtype=torch.int64, device="cuda")
    steps = [(SequenceStep(sequence_of(number), 1),) for number in range(NUM_STEPS)]

    def history() -> None:
        for number, step in enumerate(steps):
            table.write(step)
            found[number : number + 1].copy_(table.ids[:1])

    history()
    slow(history)
    return list_of(found)


def options() -> list[int]:
    """Token indices that the GPU finds in the options of step 0, 1, 2, ... of sampling."""
    sampler = GpuSampler(vocab_size=128, max_rows=NUM_ROWS, device="cuda")
    found = torch.full((NUM_STEPS,), -1, dtype=torch.int64, device="cuda")

    def history() -> None:
        for number in range(NUM_STEPS):
            sampler.stage([Draw(GREEDY, number)])
            found[number : number + 1].copy_(sampler._rows.token_indices[:1])

    history()
    slow(history)
    return list_of(found)


def tokens() -> list[int]:
    """Tokens that the host reads of step 0, 1, 2, ...: number i, which the GPU writes late."""
    outputs = Outputs(NUM_ROWS, torch.device("cuda"))
    chosen = torch.arange(NUM_STEPS, device="cuda")
    step = SequenceStep(sequence_of(0), 1, Wanted.LOGITS, GREEDY)
    results: list[StepResult] = []

    def history() -> None:
        for number in range(NUM_STEPS):
            outputs.ids[:1].copy_(chosen[number : number + 1])
            flight = outputs.send([step], [0], None, [None])
            results.extend(flight.results())

    history()
    results.clear()
    slow(history)
    return [-1 if each.token is None else each.token.token_id for each in results]


HISTORIES = pytest.mark.parametrize("history", [tables, options, tokens])


@HISTORIES
def test_every_step_gets_what_was_meant_for_it(history: History) -> None:
    assert history() == list(range(NUM_STEPS))


@HISTORIES
def test_without_the_wait_a_step_would_get_what_is_meant_for_another(
    history: History, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda.Event, "synchronize", lambda event: None)
    assert history() != list(range(NUM_STEPS))


def list_of(found: Tensor) -> list[int]:
    numbers: list[int] = found.tolist()
    return numbers
