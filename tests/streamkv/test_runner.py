"""The runner by itself: packed rows, what is returned, which slots are written."""

import random
import sys
from pathlib import Path

import pytest
import torch
from dense_oracle import dense_logits
from gpu_cases import DEVICE, ON_GPU
from torch import Tensor

from streamkv.batch import Batch, SequenceStep, StepResult, Wanted
from streamkv.block_table import Entries, TableEntry
from streamkv.model import ModelAdapter
from streamkv.runner import Runner, build_table
from streamkv.sequence import Sequence
from streamkv.tiers.gpu_pool import GpuPool
from streamkv.tiers.spec import BlockKey
from streamkv.triton_runner import TritonRunner
from streamkv.window import NO_CAP, Window

WINDOW = Window(64, ((0, 4),))
KIND = "torch"


@pytest.fixture(
    params=["torch", pytest.param("triton", marks=[pytest.mark.gpu] if ON_GPU else [])],
    autouse=True,
)
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test of this file runs on both runners, Triton's on a GPU or in its interpreter."""
    monkeypatch.setattr(sys.modules[__name__], "KIND", request.param)


@pytest.fixture(scope="module")
def adapter(tiny_model_dir: Path) -> ModelAdapter:
    return ModelAdapter.load(str(tiny_model_dir))


class Bench:
    """A runner over a pool that is all NaN until written; blocks are handed out from the last."""

    def __init__(self, adapter: ModelAdapter, num_blocks: int = 16) -> None:
        make, device = (TritonRunner, DEVICE) if KIND == "triton" else (Runner, "cpu")
        if device != "cpu":
            dtype = adapter.spec.dtype
            adapter = ModelAdapter.load(adapter.name, dtype=dtype, device=device)
        self.pool = GpuPool(adapter.spec, num_blocks, device)
        self.pool.fill_nan(*range(num_blocks + 1))
        self.runner = make(adapter, self.pool.data, adapter.trained_length)
        self._free = list(range(num_blocks))

    def sequence(self, ids: list[int], window: Window = WINDOW) -> Sequence:
        made = Sequence(1, window, 64, BlockKey(b"r" * 16))
        made.append(ids)
        return made

    def run(self, *steps: SequenceStep) -> list[StepResult]:
        """One step of several sequences; counts the tokens as computed."""
        for step in steps:
            start = step.sequence.num_computed
            for index in step.sequence.table.missing(start, start + step.query_len):
                step.sequence.table.add(index, self._free.pop())
        results = self.runner.run(Batch(steps))
        for step in steps:
            step.sequence.advance(step.query_len)
        return results

    def written(self) -> set[tuple[int, int]]:
        """(block_id, offset) of the slots that were written, in all of their numbers."""
        numbers = self.pool.data.isfinite().permute(0, 4, 1, 2, 3, 5).flatten(2)
        assert torch.equal(numbers.all(2), numbers.any(2))
        return {(block, offset) for block, offset in numbers.all(2).nonzero().tolist()}


def some_ids(adapter: ModelAdapter, seed: int, num_tokens: int) -> list[int]:
    return random.Random(seed).choices(range(3, adapter.vocab_size), k=num_tokens)


def expected_scores(adapter: ModelAdapter, ids: list[int]) -> Tensor:
    """Log-probability of each token but the first, by brute force."""
    logprobs = dense_logits(adapter, ids, 4, 64)[:-1].double().log_softmax(-1)
    return logprobs.gather(1, torch.tensor(ids[1:])[:, None])[:, 0].float()


def test_a_table_keeps_kinds_of_entries_apart_and_counts_them() -> None:
    sinks = [TableEntry("gpu", 7, 0, 67, 0, 4)]
    recalled = [TableEntry("gpu", 5, 0, 128, 4, 64)]
    recent = [TableEntry("gpu", 7, 0, NO_CAP, 4, 64), TableEntry("gpu", 2, 64, NO_CAP, 0, 9)]
    table = build_table(Entries(sinks, recalled, recent))
    assert (table.num_sink_entries, table.num_recalled_entries) == (1, 1)
    assert table.block_ids.tolist() == [7, 5, 7, 2]
    assert table.starts.tolist() == [0, 0, 0, 64]
    assert table.caps.tolist() == [67, 128, NO_CAP, NO_CAP]
    assert table.first_valid.tolist() == [0, 4, 4, 0]
    assert table.end_valid.tolist() == [4, 64, 64, 9]
    assert build_table(Entries([], [], [])).block_ids.tolist() == []


def test_sequences_side_by_side_get_what_each_wanted(adapter: ModelAdapter) -> None:
    """Three streams at different places, each compared with the brute force by itself."""
    bench = Bench(adapter)
    ids = [some_ids(adapter, seed, 150) for seed in range(3)]
    one, two, three = (bench.sequence(stream) for stream in ids)
    bench.run(SequenceStep(one, 100))
    bench.run(SequenceStep(three, 30))
    scored, chosen, nothing = bench.run(
        SequenceStep(one, 49, Wanted.SCORES),
        SequenceStep(two, 150, Wanted.LOGITS),
        SequenceStep(three, 119),
    )
    assert scored.scores is not None and scored.logits is None
    expected = expected_scores(adapter, ids[0])[100:]
    torch.testing.assert_close(scored.scores, expected, atol=2e-4, rtol=0)
    assert chosen.logits is not None and chosen.scores is None
    expected = dense_logits(adapter, ids[1], 4, 64)[-1]
    torch.testing.assert_close(chosen.logits, expected, atol=2e-4, rtol=0)
    assert nothing == StepResult()
    [last] = bench.run(SequenceStep(three, 1, Wanted.LOGITS))
    assert last.logits is not None
    expected = dense_logits(adapter, ids[2], 4, 64)[-1]
    torch.testing.assert_close(last.logits, expected, atol=2e-4, rtol=0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_exactly_the_slots_of_the_new_tokens_are_written(tiny_model_dir: Path, dtype: str) -> None:
    """Rows that pad a step of 16-bit numbers are written nowhere."""
    if KIND == "triton" and dtype == "bfloat16" and not ON_GPU:
        pytest.skip("Triton's interpreter does not know bfloat16")
    adapter = ModelAdapter.load(str(tiny_model_dir), dtype=dtype)
    bench = Bench(adapter)
    one = bench.sequence(some_ids(adapter, 1, 70))
    two = bench.sequence(some_ids(adapter, 2, 70))
    bench.run(SequenceStep(one, 3))
    assert bench.written() == {(15, offset) for offset in range(3)}
    before = bench.pool.data[15, :, :, :, :3].clone()
    bench.run(SequenceStep(one, 63), SequenceStep(two, 5))
    assert bench.written() == (
        {(15, offset) for offset in range(64)}
        | {(14, offset) for offset in range(2)}
        | {(13, offset) for offset in range(5)}
    )
    assert torch.equal(bench.pool.data[15, :, :, :, :3], before)


@pytest.mark.parametrize(("query_len", "num_scores"), [(1, 1), (3, 3), (4, 3)])
def test_a_last_token_that_nothing_follows_has_no_score(
    adapter: ModelAdapter, query_len: int, num_scores: int
) -> None:
    bench, ids = Bench(adapter), some_ids(adapter, 3, 4)
    [result] = bench.run(SequenceStep(bench.sequence(ids), query_len, Wanted.SCORES))
    assert result.scores is not None
    expected = expected_scores(adapter, ids)[:num_scores]
    torch.testing.assert_close(result.scores, expected, atol=2e-4, rtol=0)


def test_a_single_last_token_has_no_score_at_all(adapter: ModelAdapter) -> None:
    bench = Bench(adapter)
    [result] = bench.run(SequenceStep(bench.sequence([5]), 1, Wanted.SCORES))
    assert result.scores is not None and result.scores.shape == (0,)


def test_scores_do_not_depend_on_how_many_rows_of_logits_are_made_at_once(
    adapter: ModelAdapter, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The interpreter takes its time.
    num_scores = 79 if KIND == "triton" and not ON_GPU else 299
    ids = some_ids(adapter, 4, num_scores + 1)
    expected = expected_scores(adapter, ids)
    module = "streamkv.triton_runner" if KIND == "triton" else "streamkv.runner"
    for num_rows in (1, 50, num_scores, num_scores + 1):
        monkeypatch.setattr(f"{module}.LOGIT_BYTES", num_rows * 4 * adapter.vocab_size)
        bench = Bench(adapter)
        [result] = bench.run(SequenceStep(bench.sequence(ids), num_scores, Wanted.SCORES))
        assert result.scores is not None
        torch.testing.assert_close(result.scores, expected, atol=2e-4, rtol=0)
