"""The benchmark of digests: scores against loops over tokens, candidates, and a run of it all."""

import math
import os
import pydoc_data.topics
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor

BENCHMARKS = Path(__file__).parent.parent.parent / "benchmarks"
HEADS, BLOCKS, TOKENS, DIM, QUERIES = 2, 5, 64, 8, 3


@pytest.fixture
def kinds(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import digest_kinds

    return digest_kinds


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import digest_streams

    return digest_streams


def some(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


KEYS = some(HEADS, BLOCKS, TOKENS, DIM)
TURNED = 2 * some(HEADS, 2 * QUERIES, DIM, seed=1)


def from_loops(vectors: Tensor) -> Tensor:
    """Log of what each block's vectors get, in loops."""
    found = torch.zeros(HEADS, 2 * QUERIES, BLOCKS)
    for head in range(HEADS):
        for place, query in enumerate(TURNED[head].double()):
            for block in range(BLOCKS):
                got = sum(math.exp(float(query @ v.double())) for v in vectors[head, block])
                found[head, place, block] = math.log(got)
    return found


@pytest.mark.parametrize("kind", ["mean", "means_4", "means_16", "far_keys_4", "bits_1", "exact"])
def test_a_block_is_scored_by_all_its_vectors(kinds: ModuleType, kind: str) -> None:
    digests = kinds.KINDS[kind](KEYS)
    torch.testing.assert_close(kinds.block_scores(kind, digests, TURNED), from_loops(digests))


def test_means_are_of_keys_that_follow_each_other(kinds: ModuleType) -> None:
    found = kinds.KINDS["means_16"](KEYS)
    assert found.shape == (HEADS, BLOCKS, 16, DIM)
    for place in range(16):
        expected = KEYS[:, :, 4 * place : 4 * place + 4].mean(2)
        torch.testing.assert_close(found[:, :, place], expected)


def test_bounds_are_the_least_that_no_token_exceeds(kinds: ModuleType) -> None:
    found = kinds.block_scores("bounds", kinds.KINDS["bounds"](KEYS), TURNED)
    for head in range(HEADS):
        for place, query in enumerate(TURNED[head]):
            for block in range(BLOCKS):
                expected = sum(
                    max(float(query[i] * key) for key in KEYS[head, block, :, i])
                    for i in range(DIM)
                )
                assert float(found[head, place, block]) == pytest.approx(expected, rel=1e-4)
                best = float((KEYS[head, block] @ query).max())
                assert best <= float(found[head, place, block]) + 1e-4


def test_far_keys_are_keys_of_the_block_that_are_far_apart(kinds: ModuleType) -> None:
    found = kinds.KINDS["far_keys_4"](KEYS)
    block = KEYS[1, 2]
    taken = [int((block == key).all(1).nonzero()) for key in found[1, 2]]
    assert len(set(taken)) == 4
    expected = [int((block - block.mean(0)).square().sum(1).argmax())]
    while len(expected) < 4:
        nearest = [min(float((key - block[e]).square().sum()) for e in expected) for key in block]
        expected.append(nearest.index(max(nearest)))
    assert taken == expected


@pytest.mark.parametrize(("kind", "values"), [("bits_1", 2), ("bits_2", 4)])
def test_keys_in_few_bits_have_as_many_values(kinds: ModuleType, kind: str, values: int) -> None:
    found = kinds.KINDS[kind](KEYS)
    for block in found.flatten(0, 1):
        for channel in block.T:
            assert len(channel.mul(1e4).round().unique()) <= values
    errors = (found - KEYS).abs()
    if values == 4:
        step = (KEYS.amax(2, keepdim=True) - KEYS.amin(2, keepdim=True)) / 3
        assert bool((errors <= 0.501 * step).all())
    else:
        torch.testing.assert_close(found.mean(2), KEYS.mean(2))
        assert errors.mean() < 0.7 * (KEYS - KEYS.mean(2, keepdim=True)).abs().mean()


def test_a_channel_that_never_changes_keeps_its_value(kinds: ModuleType) -> None:
    same = torch.full((1, 1, TOKENS, DIM), 0.7)
    for kind in ("bits_1", "bits_2"):
        torch.testing.assert_close(kinds.KINDS[kind](same), same)


def test_a_head_s_weights_are_the_mean_over_its_own_queries(kinds: ModuleType) -> None:
    scores = some(HEADS, 2 * QUERIES, BLOCKS, seed=2)
    found = kinds.head_weights(scores, QUERIES)
    assert found.shape == (2 * HEADS, BLOCKS)
    for head in range(2 * HEADS):
        own = scores[head // 2, (head % 2) * QUERIES : (head % 2 + 1) * QUERIES]
        torch.testing.assert_close(found[head], own.softmax(-1).mean(0))


@pytest.mark.parametrize("num_sinks", [0, 3])
def test_what_sink_tokens_draw_is_told_apart_where_a_digest_has_them(
    kinds: ModuleType, num_sinks: int
) -> None:
    found, drawn = kinds.scores_beside_sinks("exact", KEYS, TURNED, num_sinks)
    by_token = (TURNED @ KEYS.flatten(1, 2).mT).unflatten(2, (BLOCKS, TOKENS))
    torch.testing.assert_close(found[..., 1:], by_token[..., 1:, :].logsumexp(-1))
    torch.testing.assert_close(found[..., 0], by_token[..., 0, num_sinks:].logsumexp(-1))
    torch.testing.assert_close(drawn[..., 0], by_token[..., 0, :num_sinks].logsumexp(-1))
    mean = kinds.KINDS["mean"](KEYS)
    found, drawn = kinds.scores_beside_sinks("mean", mean, TURNED, num_sinks)
    assert drawn.shape[-1] == 0
    torch.testing.assert_close(found, kinds.block_scores("mean", mean, TURNED))


def test_a_needle_in_two_blocks_counts_by_the_heavier(kinds: ModuleType) -> None:
    weights = torch.tensor([0.3, 0.1, 0.2, 0.4])
    assert kinds.rank(weights, torch.tensor([False, True, True, False])) == 2
    assert kinds.rank(weights, torch.tensor([False, False, False, True])) == 0


def test_candidates_are_own_blocks_then_others_without_first_and_needle(
    streams: ModuleType,
) -> None:
    def seen(num_blocks: int, needle: int) -> object:
        nothing = torch.zeros(num_blocks, 1)
        return streams.Seen(nothing, nothing, frozenset({needle}))

    all_streams = [seen(4, 2), seen(3, 1), seen(5, 4)]
    found = streams.candidates(all_streams, 1, 100, seed=3).tolist()
    assert found[:3] == [4, 5, 6]
    assert sorted(found[3:]) == [1, 3, 8, 9, 10]
    assert streams.candidates(all_streams, 1, 5, seed=3).tolist() == found[:5]
    assert streams.candidates(all_streams, 1, 0, seed=3).tolist() == [4, 5, 6]
    assert all_streams[1].is_needle.tolist() == [False, True, False]


def test_it_runs_on_a_tiny_model(tiny_model_dir: Path, tmp_path: Path) -> None:
    """It checks weights against loops, and its choice against what a session attends to."""
    (tmp_path / "books").mkdir()
    topics = pydoc_data.topics.topics
    text = "\n".join(topics[name] for name in sorted(topics)[:40])
    (tmp_path / "books" / "reference.md").write_text(text, encoding="utf-8")
    results = sorted((BENCHMARKS / "results").iterdir())
    command = [sys.executable, "benchmarks/digests.py", "--quick", "--device", "cpu"]
    done = subprocess.run(
        [*command, "--model", str(tiny_model_dir), "--data", str(tmp_path)],
        cwd=BENCHMARKS.parent,
        env={**os.environ, "STREAMKV_CACHE": str(tmp_path / "cache")},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    shown = {line.split()[0]: float(line.split()[1]) for line in done.stdout.splitlines()[:10]}
    for label in ("own", "24"):
        assert shown[f"product_below_exact_{label}"] == pytest.approx(0, abs=1e-3)
        assert 0 <= shown[f"per_layer_{label}"] <= 1
        assert f"heads, {label}, bounds" in done.stderr
    assert sorted((BENCHMARKS / "results").iterdir()) == results
