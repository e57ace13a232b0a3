"""What many sessions of one engine need of each tier, before there is an engine.

Pure arithmetic over sizes, by the same functions that an engine is made with; nothing is loaded or
measured here. N sessions have histories of T tokens each; M of them are awake, the rest sleep.
Nothing is taken to be shared between them, and blocks to be stored `raw`: both can only be better.

    gpu   windows of the M awake ones and what else `gpu_plan` counts
    cpu   a cache: of sleeping windows what there is room for
    ssd   the windows of all N, those of the M twice, which are never evicted; behind them
          histories, the newest first; journals and digests beside the limit of the store

Waking takes bytes over bandwidth here: the blocks of a window, and those recalled, through page-
locked memory, and from the ssd first what is not in the cpu pool; journal and digests from the ssd
always. What is computed anew, and other sessions' steps, come on top.
"""

from dataclasses import dataclass, replace

from streamkv import plan_shortfalls, stored_bytes
from streamkv.config import EngineConfig, parse_size
from streamkv.cost_gate import ASSUMED_BYTES_PER_S
from streamkv.gpu_plan import DeviceMemory, GpuPlan, ModelSize, plan_gpu
from streamkv.plan_shortfalls import Shortfall, room_on_ssd
from streamkv.session_needs import (
    Workload,
    Writes,
    asleep_blocks,
    daily_writes,
    digest_host_bytes,
    history_blocks,
)
from streamkv.sizing import num_gpu_blocks
from streamkv.tiers.spec import KVSpec

PINNED_BYTES_PER_S = 50e9
"""From page-locked memory to a GPU; `benchmarks/gpu_attention.py` measured 51 GB/s on an H200."""

COPY_BYTES_PER_S = ASSUMED_BYTES_PER_S["cpu"]
"""From the cpu pool to ordinary memory, as the cost gate assumes."""

SSD_BYTES_PER_S = ASSUMED_BYTES_PER_S["ssd"]
"""Of a disk that nothing was read from yet, as the cost gate assumes."""


@dataclass(frozen=True, slots=True)
class Speeds:
    """Bytes per second that are taken for true.

    Attributes:
        pinned: from the cpu pool to where a session runs.
        ssd: read from the store, not from the page cache.
    """

    pinned: float = PINNED_BYTES_PER_S
    ssd: float = SSD_BYTES_PER_S


@dataclass(frozen=True, slots=True)
class Wake:
    """Seconds until the bytes of one sleeping session are there; see the module.

    Attributes:
        num_bytes: of its blocks.
        file_bytes: of its journal and its digests.
        pinned_s: its blocks lie in the cpu pool.
        ssd_s: they lie on the ssd only.
        mean_s: over all sleeping sessions, each as likely, as many in the cpu pool as have room;
            `None`: none sleeps.
    """

    num_bytes: int
    file_bytes: int
    pinned_s: float
    ssd_s: float
    mean_s: float | None


@dataclass(frozen=True, slots=True)
class SessionPlan:
    """What sessions need, and what there is room for. Sizes are in bytes.

    Attributes:
        token_bytes: of KV of a token in the pools.
        ssd_token_bytes: of a token in the store, its share of tables included, at most.
        block_bytes, ssd_block_bytes: of a block of 64 tokens, likewise.
        awake_blocks: gpu blocks kept for one awake session.
        pool_blocks: of the gpu pool.
        gpu: how a GPU is divided up; `None`: none was described.
        asleep_blocks: blocks that one sleeping session needs to wake, the open one included.
        cpu_sessions: sleeping sessions that the cpu pool has room for.
        ssd_sessions: sessions that the store lets wake, so many of them awake; see `locked_blocks`.
        ssd_blocks: blocks that the store has room for.
        ssd_histories: sessions of which the store has room for every token.
        digest_host_bytes: of digests of the awake ones in host memory.
        digest_file_bytes, journal_bytes: of all sessions on disk, beside the store's limit.
        writes: per day; `None`: tokens per day are not known.
        wake: of a sleeping session.
        shortfalls: what does not fit; empty: all does.
    """

    token_bytes: int
    ssd_token_bytes: int
    block_bytes: int
    ssd_block_bytes: int
    awake_blocks: int
    pool_blocks: int
    gpu: GpuPlan | None
    asleep_blocks: int
    cpu_sessions: int
    ssd_sessions: int
    ssd_blocks: int
    ssd_histories: int
    digest_host_bytes: int
    digest_file_bytes: int
    journal_bytes: int
    writes: Writes | None
    wake: Wake
    shortfalls: tuple[Shortfall, ...]

    @property
    def fits(self) -> bool:
        """Whether nothing falls short."""
        return not self.shortfalls


def plan_sessions(
    model: ModelSize,
    spec: KVSpec,
    config: EngineConfig,
    work: Workload,
    memory: DeviceMemory | None = None,
    speeds: Speeds | None = None,
) -> SessionPlan:
    """What `work` needs of each tier, whether it fits or not.

    Args:
        config: sizes of tiers and window; `max_sessions` and `gpu_bytes` do not count: the gpu
            pool is that of `work.num_awake` sessions.
        memory: of the GPU; `None`: it runs on a CPU, whose gpu pool is ordinary memory.
        speeds: `None`: those assumed.

    Raises:
        ConfigError: `digest_bytes` has no room for a page.
    """
    config = replace(config, gpu_bytes=None, max_sessions=work.num_awake)
    gpu = plan_gpu(memory, model, spec, config) if memory is not None else None
    shortfalls = [
        *(plan_shortfalls.on_gpu(memory, model, spec, config) if memory is not None else ()),
        *plan_shortfalls.in_cpu_pool(spec, config),
        *plan_shortfalls.on_ssd(spec, config, work),
    ]
    asleep = asleep_blocks(config, work.num_tokens, spec.block_size)
    ssd_blocks = room_on_ssd(config, spec)
    cpu_sessions = parse_size("cpu_bytes", config.cpu_bytes) // spec.block_bytes // asleep
    of_block = stored_bytes.block_bytes(spec)
    of_digests = stored_bytes.digest_file_bytes(config, spec, work.num_tokens)
    of_journal = stored_bytes.journal_bytes(config, spec, work.num_tokens, asleep)
    return SessionPlan(
        token_bytes=spec.token_bytes,
        ssd_token_bytes=-(-of_block // spec.block_size),
        block_bytes=spec.block_bytes,
        ssd_block_bytes=of_block,
        awake_blocks=num_gpu_blocks(replace(config, max_sessions=1), spec),
        pool_blocks=num_gpu_blocks(config, spec),
        gpu=gpu,
        asleep_blocks=asleep,
        cpu_sessions=cpu_sessions,
        ssd_sessions=max(0, ssd_blocks // asleep - work.num_awake),
        ssd_blocks=ssd_blocks,
        ssd_histories=ssd_blocks // history_blocks(work.num_tokens, spec),
        digest_host_bytes=digest_host_bytes(config, spec, work, on_gpu=memory is not None),
        digest_file_bytes=work.num_sessions * of_digests,
        journal_bytes=work.num_sessions * of_journal,
        writes=daily_writes(config, spec, work) if work.tokens_per_day > 0 else None,
        wake=_wake(
            config, spec, work, speeds or Speeds(), asleep, cpu_sessions, of_journal + of_digests
        ),
        shortfalls=tuple(shortfalls),
    )


def _wake(
    config: EngineConfig,
    spec: KVSpec,
    work: Workload,
    speeds: Speeds,
    asleep: int,
    cpu_sessions: int,
    file_bytes: int,
) -> Wake:
    old = min(config.recall_blocks, history_blocks(work.num_tokens, spec) - asleep)
    num_bytes = (asleep + old) * spec.block_bytes
    files_s = file_bytes / speeds.ssd
    pinned_s = files_s + num_bytes / speeds.pinned
    # A block is copied on while the next one is read: the slower of the two counts.
    ssd_s = files_s + num_bytes / min(speeds.ssd, speeds.pinned)
    num_asleep = work.num_sessions - work.num_awake
    mean_s = None
    if num_asleep > 0:
        share = min(1.0, cpu_sessions / num_asleep)
        mean_s = share * pinned_s + (1 - share) * ssd_s
    return Wake(num_bytes, file_bytes, pinned_s, ssd_s, mean_s)
