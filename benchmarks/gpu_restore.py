"""Restoring a prefix of 32,768 tokens instead of computing it: a dense session of an 8B model.

    python benchmarks/gpu_restore.py [--tokenizer DIR] [--store DIR] [--seconds N] [--quick]

The shape of Llama-3.1-8B with random weights, bf16, window 65,536, so that all 512 blocks of 8 MiB
are attended. One session of a tenant reads the tokens; another of the same tenant is opened and
fed the same: from its opening until all is in the gpu pool and the device is done. From pinned
memory, in the same engine, once the first session sleeps and its blocks have left the gpu pool, in
turns with computing as many tokens; then from a store in the page cache, in a new engine without a
cpu pool, for both codecs, where the first session is resumed, too. The cost gate decides for itself
at first and at last, and is told to read whatever is stored in between. From pinned memory there is
a bound in seconds; from a store it is enough that reading is faster than computing, or that the
gate, asked at last, has it computed. Checked each time: all blocks have the bytes that the first
session computed, and the next token the log-probabilities.

On a machine without a GPU only `--quick` runs: a tiny random model.
"""

import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from common import arguments, require, say
from open_models import Model, opened, random_model
from parts import Parts, release_memory, synchronize
from random_model import LLAMA_8B, TINY, ids
from report import Report, median
from restoring import (
    TENANT,
    Case,
    Opened,
    Restoring,
    compute,
    finished,
    keys_of,
    open_and_feed,
    require_places,
)

from streamkv import Engine

CODECS = ("raw", "zstd")


def first_session(engine: Engine, case: Case) -> tuple[Opened, list[Any]]:
    """The session that computes the prefix: what it says next, and the keys of its blocks."""
    session = engine.session("first", tenant=TENANT)
    began = time.perf_counter()
    session.feed([case.token_ids]).run()
    keys = keys_of(session, case.num_blocks)
    return finished(engine, session, began), keys


def measure_pinned(parts: Parts, case: Case, model: Model) -> None:
    """From pinned memory, in the engine that computed the prefix."""
    # The prefix, and the newest of those that are computed beside it.
    cpu_bytes = (5 * case.num_blocks // 2 + 64) * model.block_bytes
    with ExitStack() as stack:
        engine = opened(stack, model, case.config(cpu_bytes=cpu_bytes))
        # Kernels are compiled, and buffers made.
        open_and_feed(engine, "warm", ids(2, case.num_tokens // 4 + 1), None)
        expected, keys = first_session(engine, case)
        require_places(engine, keys, "cpu")
        restoring = Restoring(parts, case, "pinned", engine, expected, "cpu")
        by_gate = restoring.by_gate("first")
        for number in range(case.rounds):
            if number and parts.left_s <= 0:
                break
            engine._tiers.flush()
            compute(parts, case, engine, f"computed {number}", expected)
            require_places(engine, keys, "cpu")
            restoring.always()
            restoring.add(len(keys) * model.block_bytes, may_replay=by_gate.num_reused == 0)
        restoring.by_gate("later")


def warm_page_cache(directory: Path) -> None:
    """Read all files once."""
    for path in directory.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                while file.read(1 << 24):
                    pass


@contextmanager
def stored(case: Case, model: Model, place: Path | None, codec: str) -> Iterator[Any]:
    """Options of an engine with a store that has the prefix, and what comes next after it."""
    with tempfile.TemporaryDirectory(dir=place) as directory:
        options = {"store": directory, "codec": codec, "ssd_bytes": 3 * bytes_of(case, model)}
        with ExitStack() as stack:
            cpu_bytes = (case.num_blocks + 64) * model.block_bytes
            engine = opened(stack, model, case.config(cpu_bytes=cpu_bytes, **options))
            expected, keys = first_session(engine, case)
            del engine
            began = time.perf_counter()
        say(f"  {codec}: stored {time.perf_counter() - began:.1f} s after it was computed")
        files = [path for path in Path(directory).rglob("*") if path.is_file()]
        num_bytes = sum(path.stat().st_size for path in files)
        warm_page_cache(Path(directory))
        release_memory()
        yield case.config(cpu_bytes=0, **options), expected, keys, num_bytes


def bytes_of(case: Case, model: Model) -> int:
    """Of the prefix's blocks, and some."""
    return (case.num_blocks + 64) * model.block_bytes


def measure_ssd(parts: Parts, case: Case, model: Model, place: Path | None, codec: str) -> None:
    """From a store in the page cache, in a new engine."""
    name = f"ssd_{codec}"
    with stored(case, model, place, codec) as (settings, expected, keys, num_bytes):
        parts.report.add(f"{name}_file_bytes", num_bytes, "bytes")
        with ExitStack() as stack:
            engine = opened(stack, model, settings)
            require_places(engine, keys, "ssd")
            restoring = Restoring(parts, case, name, engine, expected, "ssd")
            # Before anything was computed there is nothing to compare reading with.
            restoring.by_gate("first")
            for number in range(case.rounds):
                if number and parts.left_s <= 0:
                    break
                restoring.always()
                restoring.add(len(keys) * model.block_bytes, may_replay=False)
            # Now the gate learns how fast this engine computes, by some steps after the first, and
            # nothing is written any more when it is asked.
            open_and_feed(engine, "warm", ids(2, case.num_tokens // 2 + 1), None)
            engine._tiers.flush()
            by_gate = restoring.by_gate("later")
            restoring.add(len(keys) * model.block_bytes, may_replay=by_gate.num_reused == 0)
            measure_resume(parts, case, name, engine)


def measure_resume(parts: Parts, case: Case, name: str, engine: Engine) -> None:
    """The session that computed the prefix is opened again by its name."""
    seconds = []
    for _ in range(case.rounds):
        synchronize()
        began = time.perf_counter()
        session = engine.session("first")
        synchronize()
        seconds.append(time.perf_counter() - began)
        computed = session._live.sequence.num_computed
        require(session.resumed and computed >= case.num_tokens, f"{computed} tokens are resumed")
        session.close()
        if parts.left_s <= 0:
            break
    rounds = [round(each, 4) for each in seconds]
    parts.report.add(f"{name}_resume_s", median(seconds), "s", rounds=rounds)
    say(f"  {name}: resumed in {rounds} s")


def main() -> int:
    """Measure; 0 if every bound is kept."""
    parser = arguments(__doc__)
    parser.add_argument("--tokenizer", type=Path, help="directory of a tokenizer")
    parser.add_argument("--store", type=Path, help="directory for stores of 5 GB, one at a time")
    parser.add_argument("--codecs", nargs="+", choices=CODECS, default=CODECS)
    parser.add_argument("--seconds", type=float, default=300.0, help="time to end in (300)")
    options = parser.parse_args()
    has_gpu = torch.cuda.is_available()
    if not has_gpu and not options.quick:
        print("this benchmark needs a GPU", file=sys.stderr)
        return 2
    case = Case(device="cuda" if has_gpu else "cpu")
    if options.quick:
        case = replace(case, num_tokens=2048, window_size=4096, prefill_chunk=512, rounds=2)
    parts = Parts(Report("gpu_restore"), quick=options.quick, seconds=options.seconds)
    shape = TINY if options.quick else LLAMA_8B
    models: list[Model] = []
    if parts.run(
        "model", lambda: models.append(random_model(shape, options.tokenizer, case.device))
    ):
        parts.run("pinned", partial(measure_pinned, parts, case, models[0]))
        for codec in options.codecs:
            part = partial(measure_ssd, parts, case, models[0], options.store, codec)
            parts.run(f"ssd, {codec}", part)
    return parts.finish()


if __name__ == "__main__":
    sys.exit(main())
