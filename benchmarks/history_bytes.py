"""Bytes that grow with a session's history, by tier, against the formula of docs/recall.md.

    python benchmarks/history_bytes.py [--tokens 100000 1000000] [--store DIR] [--quick]

One session in mode `recall` reads token ids up to each of the two lengths. There it is measured
awake: memory of the GPU (where there is none: the pool and the device's part of digests), the cpu
pool, digests in host memory, and what the process has grown by; then it is put to sleep, and its
journal, its digests' file and the store's blocks are measured on disk. It is woken and goes on.

On a GPU it is the demo model in bfloat16; on a CPU a small model with random weights, whose bytes
follow the same formulas. Ids are random: bytes do not depend on them, with blocks stored `raw`.
"""

import gc
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
from common import MODEL, arguments, every, finish, pieces, require, say
from memory import resident_bytes
from random_model import ids, random_adapter, random_engine
from report import Report

from streamkv import Engine, EngineConfig
from streamkv.digest_file import ROW_OVERHEAD
from streamkv.digest_pages import room_bytes
from streamkv.journal_frames import FRAME_OVERHEAD
from streamkv.sizing import digest_bytes
from streamkv.store import digests_path, journal_path
from streamkv.tiers.keys import KEY_BYTES
from streamkv.tiers.record import PieceLayout

SMALL = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
}
NAME = "history"
ITEM = 4096
"""Tokens of one item of a feed: one record of the journal."""

CHECKPOINT_TOKENS = 4096
PAGE_BYTES = 4096


class Bytes(NamedTuple):
    """What a session of some length takes.

    Attributes:
        num_blocks: sealed blocks.
        gpu: memory of the device.
        digests_gpu, digests_cpu: pages of digests, by place.
        cpu_pool: blocks in the cpu pool; it has a limit.
        resident: of the process, page-locked memory not counted on all systems.
        journal, digest_file, blocks, block_file: on disk; the last is what the store's file takes.
    """

    num_blocks: int
    gpu: int
    digests_gpu: int
    digests_cpu: int
    cpu_pool: int
    resident: int
    journal: int
    digest_file: int
    blocks: int
    block_file: int


def config(store: Path, on_gpu: bool, digests: int | str) -> EngineConfig:
    """A window that a small model has, and a cpu pool that is full early."""
    return EngineConfig(
        window_size=2048 if on_gpu else 512,
        dtype="bfloat16",
        device="cuda" if on_gpu else "cpu",
        prefill_chunk=4096 if on_gpu else 512,
        attention="recall",
        recall_blocks=16,
        digest_bytes=digests,
        cpu_bytes="2GiB" if on_gpu else "4MiB",
        store=str(store),
        ssd_bytes="60GiB" if on_gpu else "4GiB",
        codec="raw",
        checkpoint_tokens=CHECKPOINT_TOKENS,
        max_sessions=1,
    )


@contextmanager
def engine_of(wanted: EngineConfig, on_gpu: bool) -> Iterator[Engine]:
    """The demo model on a GPU, the small one on a CPU."""
    if on_gpu:
        with Engine(MODEL, wanted, on_progress=say) as engine:
            yield engine
        return
    torch.manual_seed(0)
    adapter = random_adapter(SMALL, device="cpu")
    # Heads that look facts up are noted by it, and belong to this shape.
    adapter.fingerprint = b"history bytes 01"
    with random_engine(adapter, wanted) as engine:
        yield engine


def gpu_bytes(engine: Engine, on_gpu: bool) -> int:
    """Memory of the device that is in use."""
    if not on_gpu:
        return engine.usage()["gpu"].limit_bytes + engine.digest_usage().gpu_limit_bytes
    torch.cuda.synchronize()
    gc.collect()
    return torch.cuda.memory_allocated()


def measure(engine: Engine, store: Path, num_tokens: int, on_gpu: bool, begin: int) -> Bytes:
    """Feed the session from `begin` up to a length, and measure it awake and asleep."""
    session, show = engine.session(NAME), every(100_000)
    require(session.num_tokens == begin, f"{session.num_tokens} tokens instead of {begin}")
    for progress in session.feed(pieces(ids(begin, num_tokens - begin), ITEM)):
        show(progress.token_index, progress.tokens_per_s)
    require(session.mode == "recall" and session.num_tokens == num_tokens, "not all was read")
    counters = engine.counters()
    for name in ("dropped", "ssd_disabled", "digests_lost"):
        require(counters[name] == 0, f"{name} is {counters[name]}")
    usage, digests = engine.usage(), engine.digest_usage()
    gpu, resident = gpu_bytes(engine, on_gpu), resident_bytes()
    session.close()
    block_files = [path for path in (store / "blocks").rglob("*") if path.is_file()]
    return Bytes(
        (num_tokens - 1) // 64,
        gpu,
        digests.gpu_bytes,
        digests.cpu_bytes,
        usage["cpu"].num_bytes,
        resident,
        journal_path(store, NAME).stat().st_size,
        digests_path(store, NAME).stat().st_size,
        engine.usage()["ssd"].num_bytes,
        sum(path.stat().st_blocks * 512 for path in block_files),
    )


def journal_bytes(num_tokens: int, stride: int, k: int, window_blocks: int) -> float:
    """What the journal grows by in so many tokens, by the documented formula."""
    records = FRAME_OVERHEAD + 1 + 4 * ITEM
    choices = FRAME_OVERHEAD + 16 + 4 * k
    # A name and a place for each block of the window, and of the two before it.
    checkpoints = FRAME_OVERHEAD + 8 + KEY_BYTES + (KEY_BYTES + 8) * (window_blocks + 2)
    return num_tokens * (records / ITEM + choices / stride + checkpoints / CHECKPOINT_TOKENS)


def compare(report: Report, engine: Engine, short: Bytes, long: Bytes) -> None:
    """Each tier at both lengths beside the formula; the GPU's may not differ."""
    spec, options = engine.model.spec, engine.config
    recaller = engine._executor.recaller
    assert recaller is not None
    one, blocks = recaller.digester.digest_bytes, long.num_blocks - short.num_blocks
    say(f"{one} bytes a digest, at most {digest_bytes(spec)}; {spec.block_bytes} a block")
    report.add("gpu_growth", long.gpu - short.gpu, "bytes", bound=0, at=[short.gpu, long.gpu])
    for name, found in (("short", short), ("long", long)):
        pages = found.digests_gpu + found.digests_cpu
        expected = room_bytes(found.num_blocks, one)
        report.add(f"digest_pages_{name}", pages, "bytes", bound=expected, tolerance=0)
        expected = 24 + found.num_blocks * (ROW_OVERHEAD + one)
        report.add(f"digest_file_{name}", found.digest_file, "bytes", bound=expected, tolerance=0)
        report.add(f"cpu_pool_{name}", found.cpu_pool, "bytes")
    report.add("digests_cpu_growth", long.digests_cpu - short.digests_cpu, "bytes")
    grown, expected_f = (
        long.journal - short.journal,
        journal_bytes(
            64 * blocks, options.stride, options.recall_blocks, options.window_size // 64
        ),
    )
    report.add("journal_growth", grown, "bytes", bound=expected_f, tolerance=0.02 * expected_f)
    pages = PieceLayout.of(spec, PAGE_BYTES).num_pages(spec.block_bytes) * PAGE_BYTES
    for name in ("blocks", "block_file"):
        one_block = (getattr(long, name) - getattr(short, name)) / blocks
        report.add(f"{name}_per_block", one_block, "bytes", bound=pages, tolerance=0.02 * pages)
    # On a CPU pages are resident as far as they were written.
    written = min(long.digests_cpu - short.digests_cpu, blocks * one)
    others = long.resident - short.resident - written - (long.cpu_pool - short.cpu_pool)
    report.add("other_resident_growth", others, "bytes", blocks=blocks)


def main() -> int:
    """Feed, measure, compare; 0 if every bound is kept."""
    parser = arguments(__doc__)
    parser.add_argument("--tokens", type=int, nargs=2, default=[100_000, 1_000_000])
    parser.add_argument("--store", type=Path, help="where there is room for all blocks")
    parser.add_argument("--digest-bytes", default="64MiB", help="the device's part, full early")
    options = parser.parse_args()
    on_gpu = torch.cuda.is_available()
    # Whole blocks, and the token that is computed with what comes next.
    wanted = [8_192, 32_768] if options.quick else options.tokens
    lengths = [num_tokens // 64 * 64 + 1 for num_tokens in wanted]
    with tempfile.TemporaryDirectory(dir=options.store) as directory:
        store = Path(directory) / "store"
        with engine_of(config(store, on_gpu, options.digest_bytes), on_gpu) as engine:
            short = measure(engine, store, lengths[0], on_gpu, 0)
            long = measure(engine, store, lengths[1], on_gpu, lengths[0])
            for name in Bytes._fields:
                say(f"{name:<12} {getattr(short, name):>16,} {getattr(long, name):>16,}")
            report = Report("history_bytes")
            model = MODEL if on_gpu else "a model of 2 layers, 2 KV heads of 16, random weights"
            report.notes.append(f"{model}, bfloat16, {lengths[0]:,} and {lengths[1]:,} tokens")
            compare(report, engine, short, long)
    return finish(report, quick=options.quick)


if __name__ == "__main__":
    sys.exit(main())
