"""The benchmarks of recall and of restoring on a GPU, as far as a CPU can run them."""

import itertools
import json
import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from streamkv import Engine, EngineConfig, SamplingParams, Session

BENCHMARKS = Path(__file__).parent.parent.parent / "benchmarks"
STRIDE = 64
Load = Callable[[str], ModuleType]


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Load:
    """A module of the benchmarks."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return __import__


# What changes from choice to choice.


@pytest.mark.parametrize(("share", "num_new"), [(0.0, 0), (0.3, 10), (0.5, 16), (1.0, 32)])
def test_so_many_blocks_differ_from_those_before(load: Load, share: float, num_new: int) -> None:
    changed, rng = load("forced_choices").changed, random.Random(1)
    there = set(range(3, 400)) - set(range(5, 400, 7))
    before = changed((), 3, 400, 32, 1.0, there.__contains__, rng)
    seen: set[int] = set()
    for _ in range(50):
        found = changed(before, 3, 400, 32, share, there.__contains__, rng)
        assert list(found) == sorted(set(found)) and len(found) == 32
        assert set(found) <= there
        assert len(set(found) - set(before)) == num_new
        seen.update(found)
        before = found
    # They come from all over, not from a corner.
    assert len(seen) == 32 if num_new == 0 else len(seen) > 0.7 * len(there)


def test_a_choice_of_which_a_block_is_gone_is_made_anew(load: Load) -> None:
    changed, rng = load("forced_choices").changed, random.Random(1)
    found = changed((1, 2, 3), 0, 50, 3, 0.0, lambda block: block != 2, rng)
    assert len(found) == 3 and not set(found) & {1, 2, 3}
    assert changed((1, 2, 3), 0, 50, 3, 0.0, lambda _: True, rng) == (1, 2, 3)


@pytest.mark.parametrize(("first", "end"), [(0, 7), (5, 5), (9, 2)])
def test_too_few_blocks_are_an_error(load: Load, first: int, end: int) -> None:
    changed = load("forced_choices").changed
    with pytest.raises(RuntimeError, match="there are not 4"):
        changed((0, 1, 2, 3), first, end, 4, 1.0, lambda _: True, random.Random(1))


# Time, by whole strides.


@pytest.mark.parametrize("stride", [64, 256])
def test_every_measured_part_has_a_choice_for_each_stride_and_none_at_its_edge(
    load: Load, stride: int
) -> None:
    times = load("step_times")
    measured = times.whole_strides(1000, stride)
    assert measured % stride == 0 and 1000 <= measured < 1000 + stride
    for num_tokens in range(3 * stride, 5 * stride):
        skipped = times.tokens_before(num_tokens, stride, 2 * stride)
        assert 2 * stride <= skipped < 3 * stride
        first = num_tokens + skipped
        boundaries = [index for index in range(first, first + measured) if index % stride == 0]
        assert len(boundaries) == measured // stride
        assert boundaries[0] - first == stride // 2
        assert first + measured - boundaries[-1] == stride // 2


def test_spans_lie_before_the_measured_tokens(load: Load) -> None:
    times = load("step_times")
    stamps = [0.0, 10.0, 10.5, 11.5, 13.5, 99.0]
    assert times.spans_ms(stamps, 2, 3) == pytest.approx([500, 1000, 2000])
    with pytest.raises(AssertionError):
        times.spans_ms(stamps, 4, 3)


def test_means_and_percentiles(load: Load) -> None:
    found = load("step_times").StepTimes.of([*range(1, 100), 1000.0])
    assert found.mean == pytest.approx((sum(range(1, 100)) + 1000) / 100)
    assert (found.p50, found.p99, found.longest, found.num_steps) == (50, 99, 1000, 100)


def test_the_ratio_is_of_runs_next_to_each_other(load: Load) -> None:
    """A machine that slows down by half slows both runs of a pair."""
    times = load("step_times")
    pairs = [
        (times.StepTimes.of([1.1 * slow, 3.3 * slow]), times.StepTimes.of([1.0 * slow, 3.0 * slow]))
        for slow in (1.0, 1.7, 1.1)
    ]
    assert times.paired_ratio(pairs) == pytest.approx(1.1)


# Choices of an engine.


def recalling(directory: Path) -> Engine:
    config = EngineConfig(
        window_size=4 * STRIDE,
        recall_blocks=4,
        recall_stride=STRIDE,
        prefill_chunk=128,
        cpu_bytes="16MiB",
        max_sessions=2,
        compile="off",
        dtype="float32",
    )
    return Engine(str(directory), config)


def some_ids(count: int) -> list[int]:
    return [5 + (3 * index * index + 7 * index) % 290 for index in range(count)]


def generated(session: Session, count: int) -> None:
    session.generate(SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)).run()


@pytest.mark.parametrize(("share", "num_new"), [(0.0, 0), (0.25, 1), (1.0, 4)])
def test_an_engine_attends_to_forced_choices(
    tiny_model_dir: Path, load: Load, share: float, num_new: int
) -> None:
    """So many blocks are brought back for each stride, and its own choosing runs all the same."""
    forced_choices = load("forced_choices")
    with recalling(tiny_model_dir) as engine:
        session = engine.session("one")
        session.feed([some_ids(40 * STRIDE)]).run()
        engine._tiers.flush()
        session.set_mode("recall")
        sequence = session._live.sequence
        with forced_choices.ForcedChoices(engine) as forced:
            forced.share = share
            generated(session, 3 * STRIDE)
            before, num_installed = engine.counters(), len(forced.installed)
            installed_before = [event.num_new for event in forced.installed]
            assert installed_before[0] == 4
            made = len(forced.made)
            generated(session, 5 * STRIDE)
            later = forced.made[made:]
            assert [(e.num_new, e.num_blocks) for e in later] == [(num_new, 4)] * 5
            assert all(event.seconds > 0 for event in later)
            back = forced.installed[num_installed:]
            assert [(e.num_new, e.num_blocks) for e in back] == [(num_new, 4)] * 5
            after = engine.counters()
            assert after["cpu_reads"] - before["cpu_reads"] == 5 * num_new
            assert after["absent"] == 0
            assert len(sequence.table.recalled) == 4
            live = {block.block_index for block in sequence.table}
            assert not live & set(sequence.table.recalled)
        # Its own choice again.
        real = engine._executor.recaller
        assert real is not None and "choose" not in vars(real.chooser)
        assert "install" not in vars(real.installer)


def test_a_forced_choice_waits_for_the_real_one(load: Load) -> None:
    class Slow:
        asked = 0

        def is_known(self) -> bool:
            return self.asked > 0

        def blocks(self) -> tuple[int, ...]:
            self.asked += 1
            return (9,)

        def weights(self) -> tuple[float, ...]:
            return (1.0,)

    real = Slow()
    forced = load("forced_choices").Forced(real, (1, 2))
    assert not forced.is_known()
    assert forced.blocks() == (1, 2) and real.asked == 1
    assert forced.weights() == (0.5, 0.5)
    assert forced.is_known()


# What was restored.


def test_a_byte_that_differs_or_another_order_of_blocks_is_seen(
    tiny_model_dir: Path, load: Load
) -> None:
    restoring = load("restoring")
    with recalling(tiny_model_dir) as engine:
        session = engine.session("one")
        session.feed([some_ids(3 * STRIDE + 9)]).run()
        first = restoring.block_sums(engine, session)
        assert first.shape == (3,) and len(set(first.tolist())) == 3
        assert (restoring.block_sums(engine, session) == first).all()
        row = engine._gpu_pool.row(session._live.sequence.table[1].block_id)
        row[-1] ^= 1
        changed = restoring.block_sums(engine, session)
        assert (changed == first).tolist() == [True, False, True]
        row[-1] ^= 1
        # The same words at other places.
        words = row.view(dtype=torch.int64)
        words[:2] = words[:2].flip(0).clone()
        assert (restoring.block_sums(engine, session) == first).tolist() == [True, False, True]


def test_other_blocks_end_the_part(load: Load) -> None:
    restoring, tensor = load("restoring"), torch.tensor

    def opened(sums: list[int], logprobs: dict[int, float]) -> Any:
        return restoring.Opened(1.0, 1.0, 0, logprobs, tensor(sums))

    expected = opened([1, 2], {5: -1.0, 6: -2.0})
    close = opened([1, 2], {5: -1.01, 6: -2.0})
    assert restoring.require_same(close, expected, "it") == pytest.approx(0.01)
    wrong = [
        (opened([1, 3], {5: -1.0, 6: -2.0}), "blocks differ"),
        (opened([1], {5: -1.0, 6: -2.0}), "blocks differ"),
        (opened([1, 2], {5: -1.2, 6: -2.0}), "differ by 0.2"),
        (opened([1, 2], {7: -1.0, 8: -2.0}), "differ by inf"),
    ]
    for found, what in wrong:
        with pytest.raises(SystemExit, match=what):
            restoring.require_same(found, expected, "it")


# Parts.


def test_a_part_that_fails_is_reported_and_the_others_run(
    load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module = load("report")
    monkeypatch.setattr(module, "RESULTS", tmp_path)
    report = module.Report("made_up")
    parts = load("parts").Parts(report, quick=False, seconds=60.0)

    def written() -> Any:
        return json.loads((tmp_path / "made_up.json").read_text())

    def good(name: str) -> None:
        report.add(name, 1.0, "s", bound=2.0)

    def bad() -> None:
        load("common").require(False, "an output")

    assert parts.run("one", lambda: good("one"))
    assert list(written()["figures"]) == ["one"] and written()["complete"] is False
    assert not parts.run("two", bad)
    assert not parts.run("three", lambda: [][0])
    assert parts.run("four", lambda: good("four"))
    assert parts.finish() == 1
    assert list(written()["figures"]) == ["one", "four"] and written()["complete"] is False
    assert [note.split(":")[0] for note in written()["notes"]] == [
        "part two failed",
        "part three failed",
    ]


def test_parts_end_with_their_time_and_a_whole_result_says_so(
    load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module = load("report")
    monkeypatch.setattr(module, "RESULTS", tmp_path)
    late = load("parts").Parts(module.Report("late"), quick=False, seconds=0.0)
    ran: list[int] = []
    assert not late.run("one", lambda: ran.append(1))
    assert late.finish() == 1 and ran == []
    whole = load("parts").Parts(module.Report("whole"), quick=False, seconds=60.0)
    assert whole.run("one", lambda: ran.append(1))
    assert whole.finish() == 0 and ran == [1]
    assert json.loads((tmp_path / "whole.json").read_text())["complete"] is True


# All of them, one after another.


def run_all(
    load: Load, folder: Path, monkeypatch: pytest.MonkeyPatch, scripts: dict[str, str]
) -> ModuleType:
    module = load("run_all")
    for name, script in scripts.items():
        (folder / f"{name}.py").write_text(script, encoding="utf-8")
    monkeypatch.setattr(module, "HERE", folder)
    monkeypatch.setattr(module, "LEAST_S", 0.0)
    return module


def test_one_that_takes_too_long_is_ended_with_its_children(
    load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    child = "import time; time.sleep(100)"
    slow = f"""
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", {child!r}])
open({str(tmp_path / "child")!r}, "w").write(str(child.pid))
time.sleep(100)
"""
    module = run_all(
        load, tmp_path, monkeypatch, {"slow": slow, "fast": "", "bad": "raise OSError"}
    )
    assert module.run(module.Benchmark("fast"), None, False, 60.0)
    assert module.run(module.Benchmark("fast"), None, False, None)
    assert not module.run(module.Benchmark("bad"), None, False, 60.0)
    # A slow machine must have begun it by then.
    for limit_s in (2.0, 8.0, 30.0):
        assert not module.run(module.Benchmark("slow"), None, False, limit_s)
        if (tmp_path / "child").exists():
            break
    child_id = int((tmp_path / "child").read_text())
    status = Path(f"/proc/{child_id}/stat")
    assert not status.exists() or status.read_text().rsplit(")", 1)[1].split()[0] in "ZX"


def test_what_is_told_its_time_ends_before_the_limit(load: Load) -> None:
    module = load("run_all")
    told = {each.name for each in module.BENCHMARKS if each.takes_seconds}
    assert told >= {"gpu_recall_steps_8b", "gpu_recall_steps_smollm2", "gpu_restore"}
    for each in module.BENCHMARKS:
        command = module.command_of(each, Path("data"), False, 300.0)
        assert (BENCHMARKS / Path(command[1]).name).is_file()
        assert ("--seconds" in command) == each.takes_seconds
        if each.takes_seconds:
            assert float(command[command.index("--seconds") + 1]) < 300.0
        assert "--seconds" not in module.command_of(each, Path("data"), True, None)


# The scripts themselves.


def run_quick(script: str, *further: str, cache: Path | None = None) -> dict[str, float]:
    """Run one on the CPU; its figures."""
    results = sorted((BENCHMARKS / "results").iterdir())
    environment = dict(os.environ)
    if cache is not None:
        environment["STREAMKV_CACHE"] = str(cache)
    done = subprocess.run(
        [sys.executable, f"benchmarks/{script}.py", "--quick", *further],
        cwd=BENCHMARKS.parent,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "FAILED" not in done.stderr and "not (" not in done.stderr
    assert sorted((BENCHMARKS / "results").iterdir()) == results
    lines = itertools.takewhile(lambda line: ":" not in line, done.stdout.splitlines())
    return {line.split()[0]: float(line.split()[1]) for line in lines if len(line.split()) > 1}


@pytest.mark.model
def test_recall_steps_run_on_random_weights() -> None:
    figures = run_quick("gpu_recall_steps", "--case", "smollm2")
    for batch in (1, 2):
        for share in (0, 30, 100):
            assert figures[f"smollm2_{batch}_changing_{share}_ratio"] > 0
            assert figures[f"smollm2_{batch}_changing_{share}_p99_ms"] > 0
        assert figures[f"smollm2_{batch}_wide_window_ms"] > 0


def test_reading_runs_on_a_tiny_model(tiny_model_dir: Path, tmp_path: Path) -> None:
    figures = run_quick("gpu_recall_feed", "--model", str(tiny_model_dir), cache=tmp_path)
    for chunk in (512, 128):
        rates = [figures[f"{mode}_{chunk}_tokens_per_s"] for mode in ("window", "recall")]
        assert min(rates) > 0


@pytest.mark.model
def test_restoring_runs_on_random_weights() -> None:
    figures = run_quick("gpu_restore")
    for name in ("pinned", "ssd_raw", "ssd_zstd"):
        assert figures[f"{name}_gate_first_reused"] == 2048
        assert figures[f"{name}_s"] > 0
    assert figures["ssd_zstd_file_bytes"] < figures["ssd_raw_file_bytes"]


@pytest.mark.model
def test_random_weights_have_heads_that_choose(load: Load) -> None:
    """Of as many layers and KV heads as there are."""
    models, shapes = load("open_models"), load("random_model")
    adapter = shapes.random_adapter(shapes.TINY, None, "cpu")
    heads = models.some_heads(adapter)
    assert len(heads.heads) == 8
    assert heads.layers == (0, 1, 2, 3) and len(heads.kv_heads) == 8
