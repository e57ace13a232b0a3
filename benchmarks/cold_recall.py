"""Old blocks from a cold SSD: how near the disk's speed, and how much is read for nothing.

    python benchmarks/cold_recall.py [--quick] [--folder DIR]

A store of many blocks in the shape of a model is written and dropped from the page cache, which is
verified page by page (mincore). Then 32 blocks spread over it are fetched into a gpu pool in host
memory, and, in turns with that, as many bytes are read from a plain file on the same disk: in reads
of the size of a piece of the store, at random places, by four threads, past the page cache
(O_DIRECT), which costs next to no processor time. Every turn takes blocks that no turn took before.
`over_disk` is the median over turns of the one time by the other. Bytes read are those that the
kernel had this process read from the disk (read_bytes of /proc/self/io), over the bytes of the
blocks' frames as they are stored. A fetch also checks, decodes and copies: `cpu_s` is what that
takes of the processors, and `load` how many others wanted them. What a virtual machine's host keeps
in its memory is not seen from inside.
"""

import ctypes
import mmap
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from common import arguments, finish, require, say
from report import Report, median

from streamkv.tiers.gpu_pool import GpuPool
from streamkv.tiers.manager import TierManager
from streamkv.tiers.read_threads import NUM_THREADS
from streamkv.tiers.record import PieceLayout
from streamkv.tiers.spec import BlockKey, KVSpec
from streamkv.tiers.ssd import SsdTier, StoreIdentity
from streamkv.tiers.store_files import DATA_FILE

Block = npt.NDArray[np.uint8]

NUM_CHOSEN = 32
BATCH = 8
"""Blocks of one write."""
SPECS = {
    "8b": KVSpec(num_layers=32, num_kv_heads=8, head_dim=128, dtype="bfloat16"),
    "smollm2": KVSpec(num_layers=30, num_kv_heads=3, head_dim=64, dtype="bfloat16"),
}
NUM_DISTINCT = 8
"""Different contents; a block is one of them with its number written into it."""


class Size(NamedTuple):
    """How much is done.

    Attributes:
        num_turns: how often 32 blocks are fetched; the store has half as many again.
        shapes: which models' blocks.
    """

    num_turns: int
    shapes: tuple[str, ...]


FULL = Size(5, ("8b", "smollm2"))
QUICK = Size(2, ("smollm2",))


def numbered_key(number: int) -> BlockKey:
    """A key of its own for every number."""
    return BlockKey(b"bench" + number.to_bytes(11, "little"))


def contents(spec: KVSpec) -> list[Block]:
    """Normal bfloat16 numbers, which the codec makes smaller about as it does real KV."""
    torch.manual_seed(0)
    shape = (NUM_DISTINCT, spec.block_bytes // 2)
    drawn = torch.randn(shape, dtype=torch.float32).to(torch.bfloat16)
    return list(drawn.view(torch.uint8).numpy())


def block_of(number: int, blocks: list[Block]) -> Block:
    """Block `number`: no two are equal."""
    block = blocks[number % NUM_DISTINCT].copy()
    block[:8] = np.frombuffer(number.to_bytes(8, "little"), np.uint8)
    return block


def open_store(path: Path, spec: KVSpec, codec: str, num_blocks: int) -> SsdTier:
    """The store, large enough for all blocks."""
    limit = num_blocks * spec.block_bytes * 5 // 4 + (64 << 20)
    return SsdTier(path, spec, StoreIdentity("bench", b"bench"), limit_bytes=limit, codec=codec)


def pages_in_memory(path: Path) -> int:
    """Pages of a file that are in the page cache."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(path, "rb") as file:
        num_bytes = os.fstat(file.fileno()).st_size
        with mmap.mmap(file.fileno(), num_bytes, prot=mmap.PROT_READ) as memory:
            view = np.frombuffer(memory, np.uint8)
            seen = np.zeros(-(-num_bytes // mmap.PAGESIZE), np.uint8)
            arguments = (ctypes.c_void_p(view.ctypes.data), ctypes.c_size_t(num_bytes))
            failed = libc.mincore(*arguments, ctypes.c_void_p(seen.ctypes.data))
            del view
    require(failed == 0, f"mincore of {path} failed")
    return int((seen & 1).sum())


def make_cold(path: Path) -> None:
    """Drop a file, which nobody has mapped, from the page cache; ends the run if it stays there."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    num_left = pages_in_memory(path)
    require(num_left == 0, f"{num_left} pages of {path} stay in the page cache: not a cold run")


def bytes_from_disk() -> int:
    """Bytes that the kernel has read from disks for this process."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("read_bytes")))


class Timed(NamedTuple):
    """One turn of either side.

    Attributes:
        seconds: that it took.
        num_read: bytes read from disk.
        cpu_s: seconds of processors, all threads together.
    """

    seconds: float
    num_read: int
    cpu_s: float


class Clock:
    """Seconds and bytes since it was made."""

    def __init__(self) -> None:
        self._bytes, self._cpu_s = bytes_from_disk(), time.process_time()
        self._begun_s = time.perf_counter()

    def read(self) -> Timed:
        """Up to now."""
        seconds = time.perf_counter() - self._begun_s
        return Timed(seconds, bytes_from_disk() - self._bytes, time.process_time() - self._cpu_s)


class Fetched(NamedTuple):
    """What a turn asked for.

    Attributes:
        coded_bytes: of the frames as they are stored.
        num_pieces: that hold them.
    """

    coded_bytes: int
    num_pieces: int


def fetch(store: SsdTier, pool: GpuPool, numbers: Sequence[int], blocks: list[Block]) -> Timed:
    """Fetch cold blocks, and compare them."""
    keys = [numbered_key(number) for number in numbers]
    with TierManager(store.spec, pool, None, store, retain="all", on_pressure="wait") as manager:
        clock = Clock()
        block_ids = manager.fetch(keys)
        timed = clock.read()
        for number, block_id in zip(numbers, block_ids, strict=True):
            require(block_id is not None, f"block {number} is not there")
            right = np.array_equal(pool.block_bytes(block_id), block_of(number, blocks))
            require(right, f"block {number} came back changed")
            manager.drop(block_id)
    return timed


def size_of(store: SsdTier, numbers: Sequence[int]) -> Fetched:
    """How much is stored of some blocks."""
    wanted = {numbered_key(number) for number in numbers}
    entries = [entry for entry in store.entries() if entry.key in wanted]
    layout = PieceLayout.of(store.spec, mmap.PAGESIZE)
    num_pieces = sum(layout.num_pieces(entry.coded_bytes) for entry in entries)
    return Fetched(sum(entry.coded_bytes for entry in entries), num_pieces)


def read_plainly(path: Path, size: int, num_reads: int, rng: np.random.Generator) -> Timed:
    """Read pieces of a file at random places by four threads, past the page cache."""
    num_pieces = path.stat().st_size // size
    places = rng.choice(num_pieces, num_reads, replace=False).tolist()
    shares = [places[start::NUM_THREADS] for start in range(NUM_THREADS)]
    file = os.open(path, os.O_RDONLY | os.O_DIRECT)

    def read(share: list[int]) -> None:
        with mmap.mmap(-1, size) as room:
            for place in share:
                num_bytes = os.preadv(file, [room], place * size)
                require(num_bytes == size, "a plain read was short")

    try:
        with ThreadPoolExecutor(NUM_THREADS) as threads:
            clock = Clock()
            list(threads.map(read, shares))
            return clock.read()
    finally:
        os.close(file)


def write_store(path: Path, spec: KVSpec, codec: str, num_blocks: int, blocks: list[Block]) -> None:
    """A store of blocks numbered from 0."""
    with open_store(path, spec, codec, num_blocks) as store:
        for first in range(0, num_blocks, BATCH):
            numbers = range(first, min(first + BATCH, num_blocks))
            items = [(numbered_key(number), block_of(number, blocks)) for number in numbers]
            require(store.write(items) == len(items), "a block was not written")
        store.sync()


def write_plain(path: Path, num_bytes: int) -> None:
    """A file of random bytes."""
    rng = np.random.default_rng(0)
    with open(path, "wb") as file:
        for _ in range(num_bytes >> 24):
            file.write(rng.bytes(1 << 24))
        os.fsync(file.fileno())


def measure(report: Report, folder: Path, shape: str, codec: str, num_turns: int) -> None:
    """All turns of one shape and codec."""
    spec, rng = SPECS[shape], np.random.default_rng(1)
    blocks, num_blocks = contents(spec), num_turns * NUM_CHOSEN * 3 // 2
    path, plain = folder / f"{shape}-{codec}", folder / "plain"
    say(f"{shape}, {codec}: writing {num_blocks} blocks of {spec.block_bytes:,} bytes")
    write_store(path, spec, codec, num_blocks, blocks)
    data = path / DATA_FILE
    size = PieceLayout.of(spec, mmap.PAGESIZE).piece_pages * mmap.PAGESIZE
    pool = GpuPool(spec, NUM_CHOSEN)
    pool.data.fill_(1)  # so that no page of it is touched first in a turn
    order = rng.permutation(num_blocks)
    ratios, wasted, ours, disks, busy = [], [], [], [], []
    for turn in range(num_turns):
        numbers = sorted(order[turn * NUM_CHOSEN : (turn + 1) * NUM_CHOSEN].tolist())
        with open_store(path, spec, codec, num_blocks) as store:
            stored = size_of(store, numbers)
        make_cold(data)
        num_bytes = stored.num_pieces * size
        disk = read_plainly(plain, size, stored.num_pieces, rng)
        with open_store(path, spec, codec, num_blocks) as store:
            found = fetch(store, pool, numbers, blocks)
        ratios.append(found.seconds / disk.seconds)
        wasted.append(found.num_read / stored.coded_bytes)
        ours.append(num_bytes / found.seconds / 1e6)
        disks.append(num_bytes / disk.seconds / 1e6)
        busy.append(found.cpu_s)
        say(
            f"  {num_bytes / 1e6:.0f} MB: {ours[-1]:.0f} MB/s, plain file {disks[-1]:.0f} MB/s "
            f"({disk.num_read / num_bytes:.2f} of them from disk), {wasted[-1]:.2f} bytes read "
            "for one stored"
        )
    name = f"{shape}_{codec}"
    report.add(f"{name}_over_disk", median(ratios), "x", bound=1.5, all=ratios, piece_bytes=size)
    report.add(f"{name}_read_over_stored", median(wasted), "x", bound=2.0, all=wasted)
    report.add(f"{name}_cpu_s", median(busy), "s", all=busy, load=os.getloadavg()[0])
    report.add(f"{name}_mb_per_s", median(ours), "MB/s", better="higher", all=ours)
    report.add(f"{name}_disk_mb_per_s", median(disks), "MB/s", better="higher", all=disks)
    for each in path.iterdir():
        each.unlink()


def main() -> int:
    """All shapes and codecs; 0 if every bound is kept."""
    parser = arguments(__doc__)
    parser.add_argument("--folder", type=Path, help="on the disk to be measured; else the default")
    parser.add_argument("--only", nargs="+", help="such as 8b-zstd")
    options = parser.parse_args()
    size = QUICK if options.quick else FULL
    report = Report("cold_recall")
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        largest = max(SPECS[shape].block_bytes for shape in size.shapes)
        write_plain(folder / "plain", size.num_turns * NUM_CHOSEN * largest)
        for shape in size.shapes:
            for codec in ("zstd", "raw"):
                if not options.only or f"{shape}-{codec}" in options.only:
                    measure(report, folder, shape, codec, size.num_turns)
    report.notes.append("Cold: no page of the store was in the page cache, by mincore.")
    return finish(report, quick=options.quick)


if __name__ == "__main__":
    sys.exit(main())
