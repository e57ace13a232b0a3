"""What recall costs a decode step on a GPU: window 4,096 + 32 recalled blocks of a long history.

    python benchmarks/gpu_recall_steps.py --case 8b [--tokenizer DIR] [--seconds N] [--quick]
    python benchmarks/gpu_recall_steps.py --case smollm2 [--model NAME] [--seconds N] [--quick]

`8b`: the shape of Llama-3.1-8B with random weights, 400,000 tokens of history in pinned memory;
`smollm2`: the demo model, 1,000,000. The engine, its sessions and its choosing are the real ones;
then the blocks it chose are replaced by others, of which 0, 30 or 100 % differ from the choice
before, all in the cpu pool, so that so many are brought back each time. Wall time between tokens
as the caller of `agenerate` sees it, over whole strides (at least 1,000 tokens), in turns with a
session of the same configuration whose window is 4,096 + 32 * 64. Ratios are of runs next to each
other.

On a machine without a GPU only `--quick` runs: a tiny random model.
"""

import argparse
import sys
import time
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from common import MODEL, arguments, say
from forced_choices import Event, ForcedChoices
from open_models import Model, random_model, real_model
from parts import Parts
from random_model import LLAMA_8B, TINY
from recall_sessions import BLOCK, Case, Pair, Run, opened_pair
from report import Report
from step_times import paired_ratio

BOUNDS = {0.0: 1.10, 0.3: 1.25, 1.0: None}
"""Share of the chosen that changes at each choice, and the ratio asked for."""

CASES = {"8b": Case("8b", 400_000), "smollm2": Case("smollm2", 1_000_000)}


def measure(parts: Parts, pair: Pair, batch: int, rounds: int) -> None:
    """Rounds of all shares, each beside the wide window, as long as there is time."""
    pairs: dict[float, list[tuple[Run, Run]]] = {share: [] for share in BOUNDS}
    pair.grow(batch)
    turns = [(number, share) for number in range(rounds) for share in BOUNDS]
    with ForcedChoices(pair.engine) as forced:
        for turn, (number, share) in enumerate(turns):
            began, forced.share = time.monotonic(), share
            if turn % 2:
                plain, recalling = pair.run_plain(batch), pair.run_recalling(batch, forced)
            else:
                recalling, plain = pair.run_recalling(batch, forced), pair.run_plain(batch)
            pairs[share].append((recalling, plain))
            add_share(parts.report, pair, batch, share, pairs[share])
            parts.save()
            if turn + 1 < len(turns) and parts.left_s < 1.2 * (time.monotonic() - began):
                say(f"  no time for more than {turn + 1} of {len(turns)} turns")
                if number == 0:
                    parts.report.is_whole = False
                    parts.report.notes.append(f"{batch} sessions: no time for every share")
                break
    plain_runs = [plain for each in pairs.values() for _, plain in each]
    middle = sorted(plain_runs, key=lambda run: run.steps.mean)[len(plain_runs) // 2]
    name = f"{pair.case.name}_{batch}_wide_window"
    steps = middle.steps
    parts.report.add(f"{name}_ms", steps.mean, "ms per step", **steps._asdict())
    parts.report.add(f"{name}_p99_ms", steps.p99, "ms per step")


def add_share(
    report: Report, pair: Pair, batch: int, share: float, pairs: list[tuple[Run, Run]]
) -> None:
    """What was found for a share so far."""
    case = pair.case
    name = f"{case.name}_{batch}_changing_{round(100 * share)}"
    steps = [(recalling.steps, plain.steps) for recalling, plain in pairs]
    ratio = paired_ratio(steps)
    newest = pairs[-1][0]
    moved = sum(e.num_new for e in newest.installed) * pair.engine.model.spec.block_bytes
    num_steps = newest.steps.num_steps
    problems = [problem for recalling, _ in pairs for problem in recalling.problems]
    report.add(
        f"{name}_ratio",
        ratio,
        "x of a wide window's mean step",
        bound=BOUNDS[share] if batch == 1 else None,
        pairs_ms=[[round(a.mean, 4), round(b.mean, 4)] for a, b in steps],
        choices=len(newest.made),
        choosing_ms=mean_ms(newest.made),
        installing_ms=mean_ms(newest.installed),
        promoted_bytes_per_token=round(moved / num_steps),
        counted=newest.counted,
        problems=problems,
    )
    if problems:
        # It was measured, and is no evidence.
        report.figures[f"{name}_ratio"]["ok"] = False
        say(f"  {name}: {problems[-1]}")
    middle = sorted(steps)[len(steps) // 2][0]
    report.add(f"{name}_ms", middle.mean, "ms per step", **middle._asdict())
    report.add(f"{name}_p99_ms", middle.p99, "ms per step")
    recalling, plain = steps[-1]
    say(
        f"  {name}: {recalling.mean:.3f} ms (p50 {recalling.p50:.3f}, p99 {recalling.p99:.3f}, "
        f"longest {recalling.longest:.2f}), wide window {plain.mean:.3f} ms (p99 {plain.p99:.3f}): "
        f"{recalling.mean / plain.mean:.3f} x; choosing {mean_ms(newest.made):.2f} ms, bringing "
        f"back {mean_ms(newest.installed):.2f} ms; {newest.counted}"
    )


def mean_ms(events: tuple[Event, ...]) -> float:
    """Mean time that the engine's thread was at it."""
    return round(1000 * sum(event.seconds for event in events) / max(1, len(events)), 4)


def model_of(case: Case, options: argparse.Namespace) -> Model:
    """The model that is measured; in a quick run a tiny one unless one is named."""
    if options.model is not None:
        return real_model(options.model)
    if options.quick or case.name == "8b":
        shape = TINY if options.quick else LLAMA_8B
        return random_model(shape, options.tokenizer, case.device)
    return real_model(MODEL)


def main() -> int:
    """Measure; 0 if every bound is kept."""
    parser = arguments(__doc__)
    parser.add_argument("--case", choices=tuple(CASES), default="8b")
    parser.add_argument("--model", help="another one than that of the case")
    parser.add_argument("--tokenizer", type=Path, help="its directory, of random weights")
    parser.add_argument("--digest-bytes", help="of the GPU for digests; by default the engine's")
    parser.add_argument("--seconds", type=float, default=480.0, help="time to end in (480)")
    options = parser.parse_args()
    case = replace(CASES[options.case], digest_bytes=options.digest_bytes)
    if options.quick:
        case = case.quick
    if not torch.cuda.is_available():
        if not options.quick:
            print("this benchmark needs a GPU", file=sys.stderr)
            return 2
        case = replace(case, device="cpu")
    report = Report(f"gpu_recall_steps_{case.name}")
    parts = Parts(report, quick=options.quick, seconds=options.seconds)
    pairs: list[Pair] = []
    with ExitStack() as stack:

        def prepare() -> None:
            model = model_of(case, options)
            pair = opened_pair(stack, case, model)
            pairs.append(pair)
            report.notes.append(
                f"{case.name} on {case.device}: {case.history} tokens of history, {pair.num_kept} "
                f"blocks of {model.block_bytes} bytes in the cpu pool; window {case.window_size} "
                f"and {case.recall_blocks} blocks, chosen every {pair.stride} tokens; "
                f"{pair.num_measured} tokens measured, whole strides; {pair.engine.digest_usage()}"
            )
            missing = (case.history - case.window_size) // BLOCK - pair.num_kept
            if missing > 0:
                report.notes.append(f"{missing} blocks of the history had no room there")
                report.is_whole = False

        if parts.run("reading", prepare):
            for batch, rounds in zip(case.batches, case.rounds, strict=True):
                what = f"{batch} session" + ("s" if batch > 1 else "")
                parts.run(what, partial(measure, parts, pairs[0], batch, rounds))
        return parts.finish()


if __name__ == "__main__":
    sys.exit(main())
