"""An engine's metrics as Prometheus reads them: the table of all of them, and a registry.

Nothing is kept here: whoever scrapes has an engine's counters, histograms and states read at that
moment. Every series is there from the start, with value 0, and no label says anything of a session:
labels have a few fixed values. `docs/metrics.md` has the same table.
"""

from collections.abc import Callable, Iterator, Mapping

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from streamkv.metric_kinds import Counted, Gauged, Snapshot, Timed

_FROM = {"cpu": "cpu_reads", "ssd": "ssd_reads"}

METRICS: tuple[Counted | Gauged | Timed, ...] = (
    Gauged("sessions_open", "Sessions that are open.", lambda now: {"": now.num_open}),
    Gauged(
        "sessions_running",
        "Open sessions that are awake and have something to compute.",
        lambda now: {"": now.num_running},
    ),
    Gauged(
        "sessions",
        "Sessions by where their blocks are: awake in the gpu pool, asleep in the tiers below, "
        "waiting for room, waking or leaving on the way. One that is being opened counts.",
        lambda now: now.states,
        "state",
    ),
    Counted("sessions_slept_total", "Times that a session fell asleep.", "sessions_slept"),
    Counted("sessions_woken_total", "Times that a session woke.", "sessions_woken"),
    Counted(
        "preemptions_total",
        "Times that a session gave way to another one with work left to do.",
        "preemptions",
    ),
    Counted(
        "operations_total",
        "Operations on sessions (feed, say, generate and others) that have ended: at their end, "
        "by an error, or because the caller left them, called something else or closed.",
        {
            "finished": "operations_finished",
            "failed": "operations_failed",
            "cancelled": "operations_cancelled",
        },
        "outcome",
    ),
    Timed(
        "time_to_first_token_seconds",
        "Seconds that callers waited for the first token of an answer, reading the turns said for "
        "it included.",
        "first_token_s",
    ),
    Timed(
        "inter_token_seconds",
        "Seconds that callers waited for each further token of an answer, from asking for it on.",
        "next_token_s",
    ),
    Timed(
        "queue_seconds",
        "Seconds from asking for tokens to be computed until their first step began.",
        "queue_s",
    ),
    Timed(
        "wake_wait_seconds",
        "Seconds that something waited for its session to have room and wake; part of the time in "
        "the queue.",
        "wake_s",
    ),
    Counted("steps_total", "Steps of the model.", "steps"),
    Timed("batch_size", "Sequences in a step.", "batch_size"),
    Counted(
        "computed_tokens_total",
        "Tokens computed: one at a time for the token after it (decode), others (prefill), and "
        "such as were computed before a restart, a rewind or a loss (recomputed).",
        {
            "decode": "decode_tokens",
            "prefill": "prefill_tokens",
            "recomputed": "recomputed_tokens",
        },
        "kind",
    ),
    Counted(
        "accepted_tokens_total",
        "Tokens that came into streams: system prompts and prefixes, turns that were said, what "
        "was fed, scored or kept, and what was generated.",
        {
            "system": "system_tokens",
            "said": "said_tokens",
            "fed": "fed_tokens",
            "generated": "generated_tokens",
        },
        "source",
    ),
    Counted(
        "reused_tokens_total",
        "Tokens not computed because the blocks were stored, by the tier that had them; unread: "
        "out of the window by the end of what was reused.",
        {
            "gpu": "reused_gpu_tokens",
            "cpu": "reused_cpu_tokens",
            "ssd": "reused_ssd_tokens",
            "unread": "reused_unread_tokens",
        },
        "tier",
    ),
    Counted(
        "reuse_choices_total",
        "Stored prefixes found, by what was measured to be sooner: reading or computing them.",
        {"read": "gate_reads", "compute": "gate_computes"},
        "choice",
    ),
    Gauged(
        "tier_blocks",
        "Blocks that a tier holds.",
        lambda now: {tier: usage.num_blocks for tier, usage in now.tiers.items()},
        "tier",
    ),
    Gauged(
        "tier_bytes",
        "Bytes that a tier holds.",
        lambda now: {tier: usage.num_bytes for tier, usage in now.tiers.items()},
        "tier",
    ),
    Gauged(
        "tier_limit_bytes",
        "Bytes that a tier may hold; 0: there is none.",
        lambda now: {tier: usage.limit_bytes for tier, usage in now.tiers.items()},
        "tier",
    ),
    Gauged(
        "digest_bytes",
        "Bytes of the digests by which old blocks are chosen.",
        lambda now: {"gpu": now.digests.gpu_bytes, "cpu": now.digests.cpu_bytes},
        "tier",
    ),
    Gauged(
        "digest_limit_bytes",
        "Bytes of the gpu that digests may take.",
        lambda now: {"": now.digests.gpu_limit_bytes},
    ),
    Counted(
        "promotions_total", "Blocks brought into the gpu pool, by where from.", _FROM, "source"
    ),
    Counted(
        "promoted_bytes_total", "Bytes of these blocks, decoded.", _FROM, "source", unit="blocks"
    ),
    Counted("shared_blocks_total", "Blocks restored from another block of the gpu pool.", "shared"),
    Counted("demotions_total", "Blocks copied from the gpu pool one tier down.", "demotions"),
    Counted("demoted_bytes_total", "Bytes of these blocks.", "demotions", unit="blocks"),
    Counted("misses_total", "Blocks that were to be restored and were in no tier.", "misses"),
    Counted(
        "evictions_total",
        "Blocks evicted for want of room, by tier.",
        {"cpu": "evictions", "ssd": "ssd_evictions"},
        "tier",
    ),
    Counted("dropped_blocks_total", "Blocks given up for want of room or of time.", "dropped"),
    Counted("prefetched_blocks_total", "Blocks read ahead into the cpu pool.", "prefetched"),
    Counted(
        "prefetched_bytes_total", "Bytes of these blocks, decoded.", "prefetched", unit="blocks"
    ),
    Counted("prefetch_skipped_total", "Prefetches that did not begin.", "prefetch_skipped"),
    Counted(
        "tier_waits_total",
        "Times that something waited for the tiers: for the thread that copies blocks down "
        "(demotion), or for a block that was being read ahead (prefetch).",
        {"demotion": "waits", "prefetch": "prefetch_waits"},
        "reason",
    ),
    Counted(
        "tier_wait_seconds_total",
        "Seconds of these waits.",
        {"demotion": "wait_ms", "prefetch": "prefetch_wait_ms"},
        "reason",
        unit="milliseconds",
    ),
    Counted("recall_waits_total", "Times that a step waited for a choice.", "choice_waits"),
    Counted(
        "recall_wait_seconds_total",
        "Seconds of these waits.",
        "choice_wait_ms",
        unit="milliseconds",
    ),
    Counted("recall_absent_total", "Chosen blocks that no tier had any more.", "absent"),
    Counted("recall_digests_lost_total", "Blocks that cannot be chosen.", "digests_lost"),
    Counted(
        "ssd_lookups_total",
        "Reads of the store by what they found.",
        {"hit": "ssd_hits", "miss": "ssd_misses"},
        "result",
    ),
    Counted(
        "ssd_checksum_failures_total",
        "Blocks whose bytes in the store were not what was written; each is a miss.",
        "ssd_corrupt",
    ),
    Counted(
        "ssd_read_errors_total",
        "Reads of the store that failed, of one block or because of the store as a whole; each is "
        "a miss.",
        {"block": "ssd_read_errors", "store": "read_errors"},
        "kind",
    ),
    Counted("ssd_reads_given_up_total", "Reads of the store that took too long.", "reads_given_up"),
    Counted("ssd_read_bytes_total", "Bytes read from the store, as stored.", "ssd_bytes_read"),
    Counted("ssd_written_blocks_total", "Blocks written to the store.", "ssd_writes"),
    Counted(
        "ssd_written_bytes_total", "Bytes written to the store, as stored.", "ssd_bytes_written"
    ),
    Counted(
        "ssd_duplicates_total",
        "Blocks not written to the store because it had them.",
        "ssd_duplicates",
    ),
    Counted("ssd_deleted_blocks_total", "Blocks deleted from the store.", "ssd_deletes"),
    Counted("ssd_full_retries_total", "Writes repeated because it was full.", "ssd_full_retries"),
    Counted("ssd_disabled_total", "Times that writing to the store was given up.", "ssd_disabled"),
)
"""All metrics, in the order in which they are shown."""

SUMS: Mapping[str, tuple[str, ...]] = {
    "promotions": ("cpu_reads", "ssd_reads"),
    "reused_tokens": (
        "reused_gpu_tokens",
        "reused_cpu_tokens",
        "reused_ssd_tokens",
        "reused_unread_tokens",
    ),
}
"""Counters that are the sums of others, and shown as those only."""

TOLD_ELSEWHERE = ("writes",)
"""A counter that the store has, too, and knows better: `ssd_writes`, `ssd_duplicates`."""


class EngineCollector(Collector):
    """Makes metrics of an engine's snapshot.

    Args:
        read: the snapshot of now.
    """

    def __init__(self, read: Callable[[], Snapshot]) -> None:
        self._read = read

    def collect(self) -> Iterator[Metric]:
        """All metrics with their values."""
        now = self._read()
        for metric in METRICS:
            yield metric.family(now)

    def describe(self) -> Iterator[Metric]:
        """All metrics without values: nobody need be asked for a name."""
        for metric in METRICS:
            yield metric.empty()


def make_registry(read: Callable[[], Snapshot]) -> CollectorRegistry:
    """A registry of one engine's metrics, of which a process may have many."""
    registry = CollectorRegistry()
    registry.register(EngineCollector(read))
    return registry


def exposition(registry: CollectorRegistry) -> str:
    """All metrics in Prometheus' text format."""
    return generate_latest(registry).decode()
