"""The store: lossless ratio on real KV, speed, file size under its limit, cost of retaining.

    python benchmarks/store.py [--quick]

Ratio and speed: the bf16 KV of SmolLM2 over a text, coded and decoded on one core, bit for bit.
File: blocks that compress well, as usual and not at all are written until the coded bytes are 20
times the limit, with the codec changing at every reopening; the file is measured after every write.
Retaining: float32 feeds with a cpu pool of 64 MiB, closed at the end, so that every byte that
`retain` asks for is written within the time; bytes are those handed to write calls (/proc/self/io).
"""

import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from common import MODEL, arguments, finish, pieces, require, say, topics_ids
from report import Report, median

from streamkv import Engine, EngineConfig
from streamkv.config import Retain
from streamkv.errors import StoreError
from streamkv.store import blocks_path
from streamkv.tiers.codec import Codecs
from streamkv.tiers.keys import is_partial
from streamkv.tiers.spec import DTYPE_BYTES, BlockKey, KVSpec
from streamkv.tiers.ssd import SsdTier, StoreIdentity, open_existing

Block = npt.NDArray[np.uint8]

RETAINS: tuple[Retain, ...] = ("all", "window", "none")
TURNOVER = 20
BATCH = 8
"""Blocks of one write."""


class Size(NamedTuple):
    """How much is done.

    Attributes:
        kv_tokens: tokens whose KV is coded.
        limit_bytes: of the store that is written over and over.
        feed_tokens: tokens of one feed.
        rounds: feeds of each `retain`.
    """

    kv_tokens: int
    limit_bytes: int
    feed_tokens: int
    rounds: int


FULL = Size(8192, 256 << 20, 8192, 3)
QUICK = Size(640, 32 << 20, 512, 1)


def real_blocks(directory: Path, num_tokens: int) -> tuple[KVSpec, list[Block]]:
    """The sealed bf16 blocks of a text, read from the engine's own store."""
    config = EngineConfig(
        window_size=1020, dtype="bfloat16", store=str(directory), codec="raw", max_sessions=1
    )
    with Engine(MODEL, config, on_progress=say) as engine:
        engine.session("text").feed(pieces(topics_ids(engine.tokenizer, num_tokens), 512)).run()
    with open_existing(blocks_path(directory)) as store:
        keys = [entry.key for entry in store.entries() if not is_partial(entry.key)]
        blocks = [np.empty(store.spec.block_bytes, dtype=np.uint8) for _ in keys]
        for key, block in zip(keys, blocks, strict=True):
            require(store.read(key, block), f"block {key.hex()} is not there")
        spec = store.spec
    expected = (num_tokens - 1) // spec.block_size
    require(len(blocks) == expected, f"{len(blocks)} sealed blocks instead of {expected}")
    return spec, blocks


def measure_codec(report: Report, spec: KVSpec, blocks: list[Block]) -> None:
    """Ratio and speed of the lossless codec, frame by frame as records are made."""
    codec = Codecs(DTYPE_BYTES[spec.dtype]).named("zstd")
    frames = [frame for block in blocks for frame in block.reshape(spec.num_layers, -1)]
    num_bytes = spec.block_bytes * len(blocks)
    started = time.perf_counter()
    coded = [np.frombuffer(codec.encode(frame), dtype=np.uint8) for frame in frames]
    encoded = time.perf_counter()
    out = np.empty((1, spec.frame_bytes), dtype=np.uint8)
    for each in coded:
        codec.decode(each, [each.size], out)
    decoded = time.perf_counter()
    for frame, each in zip(frames, coded, strict=True):
        codec.decode(each, [each.size], out)
        require(np.array_equal(frame, out[0]), "a decoded frame is not the frame")
    ratio = num_bytes / sum(each.size for each in coded)
    report.add("zstd_ratio_bf16", ratio, "x", bound=1.4, better="higher", blocks=len(blocks))
    for name, seconds in (("encode", encoded - started), ("decode", decoded - encoded)):
        report.add(f"zstd_{name}_mb_per_s", num_bytes / seconds / 1e6, "MB/s", better="higher")


def measure_tier(report: Report, directory: Path, spec: KVSpec, blocks: list[Block]) -> None:
    """Durable writes and reads through the tier, both codecs."""
    num_bytes = spec.block_bytes * len(blocks)
    for codec in ("raw", "zstd"):
        path = directory / f"tier-{codec}"
        with SsdTier(
            path, spec, StoreIdentity(MODEL, b"bench"), limit_bytes=3 * num_bytes, codec=codec
        ) as tier:
            items = [(numbered_key(place), block) for place, block in enumerate(blocks)]
            started = time.perf_counter()
            num_present = tier.write(items)
            tier.sync()
            written = time.perf_counter() - started
            require(num_present == len(items), "a block was not written")
            read = read_seconds(tier, items)
        for name, seconds in (("write", written), ("read_cached", read)):
            rate = num_bytes / seconds / 1e6
            report.add(f"tier_{codec}_{name}_mb_per_s", rate, "MB/s", better="higher")


def read_seconds(tier: SsdTier, items: list[tuple[BlockKey, Block]]) -> float:
    """Seconds to read all items, which must come back as they were."""
    outs = [np.empty_like(block) for _, block in items]
    started = time.perf_counter()
    hits = [tier.read(key, out) for (key, _), out in zip(items, outs, strict=True)]
    elapsed = time.perf_counter() - started
    require(all(hits), "a block was not read")
    for (_, block), out in zip(items, outs, strict=True):
        require(np.array_equal(block, out), "a block came back changed")
    return elapsed


def numbered_key(number: int) -> BlockKey:
    """A key of its own for every number."""
    return BlockKey(b"bench" + number.to_bytes(11, "little"))


def mixed_blocks(blocks: list[Block]) -> list[Block]:
    """Blocks of very different coded sizes: real, half random, all random, nearly empty."""
    rng = np.random.default_rng(7)
    mixed = []
    for real in blocks[:BATCH]:
        noise = rng.integers(0, 256, real.size, dtype=np.uint8)
        half, sparse = real.copy(), np.zeros_like(real)
        half[: real.size // 2] = noise[: real.size // 2]
        sparse[::97] = real[::97]
        mixed += [real, half, noise, sparse]
    order = rng.permutation(len(mixed))
    return [mixed[place] for place in order]


def coded_bytes(spec: KVSpec, block: Block, codec: str) -> int:
    """Bytes of a block's coded frames."""
    coder = Codecs(DTYPE_BYTES[spec.dtype]).named(codec)
    return sum(len(coder.encode(frame)) for frame in block.reshape(spec.num_layers, -1))


def endless(blocks: list[Block]) -> Iterator[tuple[int, BlockKey, Block]]:
    """Place in `blocks`, a key never used before, and the block; without end."""
    number = 0
    while True:
        for place, block in enumerate(blocks):
            yield place, numbered_key(number), block
            number += 1


class Filled(NamedTuple):
    """Largest size of the file while the limit was written once, and writes that failed."""

    largest_bytes: int
    num_failed: int


def fill(tier: SsdTier, stream: Iterable[tuple[int, BlockKey, Block]], sizes: list[int]) -> Filled:
    """Write once the limit in coded bytes, and read every block back."""
    written = largest = num_failed = 0
    batch: list[tuple[BlockKey, Block]] = []
    for place, key, block in stream:
        batch.append((key, block))
        written += sizes[place]
        if len(batch) == BATCH:
            if write(tier, batch):
                read_seconds(tier, batch)
            else:
                num_failed += 1
            largest = max(largest, tier.file_bytes())
            batch = []
            if written >= tier.limit_bytes:
                break
    return Filled(largest, num_failed)


def write(tier: SsdTier, batch: list[tuple[BlockKey, Block]]) -> bool:
    """Write durably; returns whether all of it is there."""
    try:
        num_present = tier.write(batch)
        tier.sync()
    except StoreError as error:
        say(f"  a write failed: {error}")
        return False
    return num_present == len(batch)


def measure_limit(
    report: Report, path: Path, spec: KVSpec, blocks: list[Block], limit: int
) -> None:
    """The file after writing and evicting many times its limit, with both codecs mixed."""
    mixed = mixed_blocks(blocks)
    sizes = {codec: [coded_bytes(spec, b, codec) for b in mixed] for codec in ("raw", "zstd")}
    stream = endless(mixed)
    largest = num_failed = 0
    for turn in range(TURNOVER):
        codec = ("zstd", "raw")[turn % 2]
        identity = StoreIdentity(MODEL, b"bench")
        with SsdTier(path, spec, identity, limit_bytes=limit, codec=codec) as tier:
            filled = fill(tier, stream, sizes[codec])
            largest = max(largest, filled.largest_bytes)
            num_failed += filled.num_failed
            tier.check_integrity()
            live = tier.usage().num_bytes
        say(f"  written {turn + 1} x limit, file at most {largest / limit:.3f} of it")
    report.add("largest_file_over_limit", largest / limit, "x", bound=1.1)
    report.add("live_over_limit", live / limit, "x", better="higher")
    report.add("failed_writes", num_failed, "writes", bound=0)


def io_bytes() -> int:
    """Bytes that this process handed to write calls."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("wchar")))


def sustained(directory: Path, retain: Retain, num_tokens: int) -> tuple[float, float]:
    """Tokens/s and bytes written per token of one feed, everything written at its end."""
    config = EngineConfig(
        window_size=1020,
        dtype="float32",
        cpu_bytes="64MiB",
        store=str(directory),
        ssd_bytes="4GiB",
        retain=retain,
        max_sessions=1,
    )
    with Engine(MODEL, config) as engine:
        ids = topics_ids(engine.tokenizer, num_tokens + 64)
        session = engine.session("feed")
        session.feed([ids[:64]]).run()
        before, started = io_bytes(), time.perf_counter()
        session.feed(pieces(ids[64:], 512)).run()
        require(session.num_tokens == num_tokens + 64, "the feed is not complete")
        session.close()
        engine.close()
        elapsed = time.perf_counter() - started
    return num_tokens / elapsed, (io_bytes() - before) / num_tokens


def check_retained(directory: Path, retain: Retain, num_tokens: int) -> None:
    """What was written can be read, and it is as much as `retain` asks for."""
    with open_existing(blocks_path(directory)) as store:
        report = store.verify()
        num_sealed = num_tokens // store.spec.block_size
    require(not report.bad, f"{len(report.bad)} damaged records")
    num_least = {"all": num_sealed, "window": 1, "none": 0}[retain]
    require(report.num_ok >= num_least, f"{retain}: only {report.num_ok} records")
    require(retain != "none" or report.num_ok == 0, f"{retain}: {report.num_ok} records")


def measure_retain(report: Report, directory: Path, size: Size) -> None:
    """Feeds of each `retain`, in turns."""
    found: dict[Retain, list[tuple[float, float]]] = {retain: [] for retain in RETAINS}
    for turn in range(size.rounds):
        for retain in RETAINS:
            store = directory / f"retain-{retain}-{turn}"
            rate, per_token = sustained(store, retain, size.feed_tokens)
            say(f"  retain={retain}: {rate:.0f} tokens/s, {per_token:,.0f} bytes a token")
            check_retained(store, retain, size.feed_tokens)
            found[retain].append((rate, per_token))
    for retain, pairs in found.items():
        rate, per_token = (median([pair[place] for pair in pairs]) for place in (0, 1))
        report.add(f"retain_{retain}_tokens_per_s", rate, "tokens/s", better="higher")
        report.add(f"retain_{retain}_bytes_per_token", per_token, "bytes")


def main() -> int:
    """All parts; 0 if every bound is kept."""
    options = arguments(__doc__).parse_args()
    size = QUICK if options.quick else FULL
    report = Report("store")
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        spec, blocks = real_blocks(directory / "real", size.kv_tokens)
        parts: dict[str, Callable[[], None]] = {
            "codec": lambda: measure_codec(report, spec, blocks),
            "tier": lambda: measure_tier(report, directory, spec, blocks),
            "limit": lambda: measure_limit(
                report, directory / "limit", spec, blocks, size.limit_bytes
            ),
            "retain": lambda: measure_retain(report, directory, size),
        }
        for part, run in parts.items():
            say(part)
            run()
    return finish(report, quick=options.quick)


if __name__ == "__main__":
    sys.exit(main())
