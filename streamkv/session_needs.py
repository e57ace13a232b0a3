"""What sessions with long histories need, asleep and on disk, before there is an engine.

Pure arithmetic. Histories are of T tokens each, nothing of them is shared, and blocks are stored
`raw`: what there is can only need less.
"""

from dataclasses import dataclass

from streamkv import stored_bytes
from streamkv.config import EngineConfig, require_int
from streamkv.digest_pages import room_bytes
from streamkv.recall_schedule import question_start
from streamkv.sizing import digest_budget, digest_bytes
from streamkv.tiers.spec import BLOCK_SIZE, KVSpec
from streamkv.window import Window

MOST = 10**10
"""Of anything that is counted here."""


@dataclass(frozen=True, slots=True)
class Workload:
    """What the sessions are and do.

    Attributes:
        num_sessions: all of them, awake and sleeping.
        num_awake: of them, open at once.
        num_tokens: of each history.
        tokens_per_day: that each session reads and writes.
        sleeps_per_day: how often each goes to sleep; each time its open block is written.

    Raises:
        ConfigError: a number below what makes sense, or above `MOST`.
    """

    num_sessions: int
    num_awake: int
    num_tokens: int
    tokens_per_day: int = 0
    sleeps_per_day: int = 1

    def __post_init__(self) -> None:
        require_int("num_sessions", self.num_sessions, 1, MOST)
        require_int("num_awake", self.num_awake, 1, self.num_sessions)
        require_int("num_tokens", self.num_tokens, 1, MOST)
        require_int("tokens_per_day", self.tokens_per_day, 0, MOST)
        require_int("sleeps_per_day", self.sleeps_per_day, 0, MOST)


@dataclass(frozen=True, slots=True)
class Writes:
    """Bytes written to the ssd in a day by all sessions, at most.

    What a file system and a disk write besides is not known here.
    """

    blocks: int
    open_blocks: int
    journals: int
    digests: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.blocks + self.open_blocks + self.journals + self.digests

    def years(self, endurance_bytes: float) -> float | None:
        """How long a disk lasts that takes so many bytes; `None`: nothing is written."""
        return endurance_bytes / (self.total * 365.25) if self.total > 0 else None


def asleep_blocks(config: EngineConfig, num_tokens: int, block_size: int = BLOCK_SIZE) -> int:
    """Blocks that a stream needs to wake: sink tokens, window, and an open block.

    The most that any length has which ends in the same block.
    """
    sealed = num_tokens // block_size
    resume_at = sealed * block_size
    if config.recall_blocks > 0:
        resume_at = question_start(resume_at, block_size)
    first = Window(config.window_size).first_visible(resume_at) // block_size
    sinks = -(-config.num_sink_tokens // block_size)
    return sealed + 1 - first + min(first, sinks)


def locked_blocks(config: EngineConfig, spec: KVSpec, work: Workload) -> int:
    """Blocks that a store must hold at once, at most, so that every session can wake.

    Those of all sessions, and of the awake ones twice: the checkpoint before stays until the next
    one is written, by when nothing of it need be in the window any more.
    """
    of_one = asleep_blocks(config, work.num_tokens, spec.block_size)
    return (work.num_sessions + work.num_awake) * of_one


def history_blocks(num_tokens: int, spec: KVSpec) -> int:
    """Blocks of a whole history, an open one included."""
    return num_tokens // spec.block_size + 1


def digest_host_bytes(config: EngineConfig, spec: KVSpec, work: Workload, on_gpu: bool) -> int:
    """Host memory for digests of the awake sessions; what a GPU has room for is not in it."""
    if config.recall_blocks == 0:
        return 0
    of_one = room_bytes(work.num_tokens // spec.block_size, digest_bytes(spec))
    return max(0, work.num_awake * of_one - (digest_budget(config, spec) if on_gpu else 0))


def daily_writes(config: EngineConfig, spec: KVSpec, work: Workload) -> Writes:
    """What all sessions write to the ssd in a day, at most."""
    sealed = -(-work.tokens_per_day // spec.block_size)
    of_block = stored_bytes.block_bytes(spec)
    count = work.num_sessions
    asleep = asleep_blocks(config, work.num_tokens, spec.block_size)
    return Writes(
        blocks=count * sealed * of_block,
        open_blocks=count * work.sleeps_per_day * of_block,
        journals=count * stored_bytes.journal_bytes(config, spec, work.tokens_per_day, asleep),
        digests=count * sealed * stored_bytes.digest_row_bytes(config, spec),
    )
