"""Tokens per second of reading in mode `recall`, beside mode `window`: the demo model on a GPU.

    python benchmarks/gpu_recall_feed.py [--model NAME] [--tokens N] [--seconds N] [--quick]

bf16, window 2,048, 16 recalled blocks, 262,144 tokens of text in pinned memory, by chunks of 4,096
and of 512. While it reads a session in mode `recall` chooses once a stride, brings back what was
chosen, and ends its steps at strides. Both modes take turns; medians of the rounds. A session that
has read is checked: every token is computed, and as many blocks are recalled as was asked for.

On a machine without a GPU only `--quick` runs: a tiny random model.
"""

import sys
import time
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from common import MODEL, arguments, require, say
from open_models import Model, opened, random_model, real_model
from parts import Parts, synchronize
from random_model import TINY, engine_config
from report import Report, median

from streamkv import Engine, EngineConfig
from streamkv.tiers.spec import BLOCK_SIZE

CHUNKS = (4096, 512)
MODES = ("window", "recall")
ROUNDS = 3
COUNTED = ("choice_waits", "choice_wait_ms", "promotions", "absent", "waits", "wait_ms", "dropped")


def config(chunk: int, num_tokens: int, model: Model, quick: bool, device: str) -> EngineConfig:
    """An engine whose cpu pool holds all that one session reads."""
    return engine_config(
        256 if quick else 2048,
        2,
        device=device,
        prefill_chunk=chunk,
        retain="all",
        cpu_bytes=(num_tokens // BLOCK_SIZE + 64) * model.block_bytes,
        recall_blocks=4 if quick else 16,
    )


def read_in(engine: Engine, mode: Any, name: str, token_ids: list[int]) -> float:
    """Tokens per second of a new session, until the device has done all of it."""
    session = engine.session(name)
    session.set_mode(mode)
    synchronize()
    began = time.perf_counter()
    session.feed([token_ids]).run()
    engine._loop.settle(session._live.sequence)
    synchronize()
    seconds = time.perf_counter() - began
    sequence = session._live.sequence
    require(sequence.num_computed == len(token_ids) - 1, f"{sequence.num_computed} are computed")
    num_recalled = len(sequence.table.recalled)
    expected = engine.config.recall_blocks if mode == "recall" else 0
    require(num_recalled == expected, f"{num_recalled} blocks are recalled, not {expected}")
    session.delete()
    engine._tiers.flush()
    return len(token_ids) / seconds


def measure(parts: Parts, model: Model, settings: EngineConfig, token_ids: list[int]) -> None:
    """Rounds of both modes by chunks of one size."""
    report, chunk = parts.report, settings.prefill_chunk
    with ExitStack() as stack:
        engine = opened(stack, model, settings)
        # Kernels of both modes are compiled, and buffers made.
        least = 4 * settings.window_size + chunk
        for mode in MODES:
            read_in(engine, mode, f"warm {mode}", token_ids[:least])
        rates: dict[str, list[float]] = {mode: [] for mode in MODES}
        counted: dict[str, dict[str, int]] = {}
        for number in range(ROUNDS):
            began = time.monotonic()
            for mode in MODES if number % 2 else MODES[::-1]:
                before = engine.counters()
                rates[mode].append(read_in(engine, mode, f"{mode} {number}", token_ids))
                after = engine.counters()
                counted[mode] = {name: after[name] - before[name] for name in COUNTED}
                say(
                    f"  {mode}, chunks of {chunk}: {rates[mode][-1]:,.0f} tokens/s, {counted[mode]}"
                )
            for mode in MODES:
                report.add(
                    f"{mode}_{chunk}_tokens_per_s",
                    median(rates[mode]),
                    "tokens/s",
                    better="higher",
                    rounds=[round(rate) for rate in rates[mode]],
                    tokens=len(token_ids),
                    counted=counted[mode],
                )
            pairs = zip(rates["recall"], rates["window"], strict=True)
            ratio = median([window / recall for recall, window in pairs])
            report.add(f"recall_over_window_{chunk}", ratio, "x of the time")
            require(counted["recall"]["absent"] == 0, f"blocks were absent: {counted['recall']}")
            parts.save()
            if parts.left_s < time.monotonic() - began:
                say(f"  no time for more than {number + 1} rounds")
                break


def main() -> int:
    """Measure; 0 if every part came to its end."""
    parser = arguments(__doc__)
    parser.add_argument("--model", help="instead of the demo model; in a quick run of a tiny one")
    parser.add_argument("--tokens", type=int, default=262_144, help="of the text (262,144)")
    parser.add_argument("--seconds", type=float, default=240.0, help="time to end in (240)")
    options = parser.parse_args()
    has_gpu = torch.cuda.is_available()
    if not has_gpu and not options.quick:
        print("this benchmark needs a GPU", file=sys.stderr)
        return 2
    device, chunks, num_tokens = "cuda" if has_gpu else "cpu", CHUNKS, options.tokens
    if options.quick:
        chunks, num_tokens = (512, 128), 3000
    parts = Parts(Report("gpu_recall_feed"), quick=options.quick, seconds=options.seconds)
    is_tiny = options.quick and options.model is None
    model = random_model(TINY, None, device) if is_tiny else real_model(options.model or MODEL)
    token_ids = model.token_ids(num_tokens)
    for chunk in chunks:
        settings = config(chunk, num_tokens, model, options.quick, device)
        part = partial(measure, parts, model, settings, token_ids)
        parts.run(f"chunks of {chunk}", part)
    return parts.finish()


if __name__ == "__main__":
    sys.exit(main())
