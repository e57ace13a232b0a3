"""A session's stats for people and for scripts."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from streamkv.cli.console import Output
from streamkv.config import format_size
from streamkv.digest_pages import DigestUsage
from streamkv.outputs import SessionStats
from streamkv.tiers.usage import TierUsage


def show_stats(stats: SessionStats, output: Output) -> None:
    """Print where a session stands."""
    # Of a short stream the window shows the sink tokens, too.
    newest = min(stats.num_window_tokens, stats.num_tokens - stats.num_sink_tokens)
    output.line(
        f"{stats.num_tokens:,} tokens; attended: {stats.num_sink_tokens:,} sink tokens and "
        f"the newest {newest:,}"
    )
    show_tiers(stats.tiers, output)
    show_digests(stats.digests, output)
    happened = {name: count for name, count in sorted(stats.counters.items()) if count}
    if happened:
        output.line(", ".join(f"{name} {count:,}" for name, count in happened.items()))


def show_tiers(tiers: Mapping[str, TierUsage], output: Output) -> None:
    """Print blocks and bytes of each tier."""
    rows = [
        (name, f"{usage.num_blocks:,} blocks", format_size(usage.num_bytes), _limit(usage))
        for name, usage in tiers.items()
    ]
    output.columns(rows, ("tier", "holds", "bytes", "limit"))


def show_digests(digests: DigestUsage, output: Output) -> None:
    """Print where the digests of an engine that can recall lie; else nothing."""
    if digests.gpu_bytes or digests.cpu_bytes:
        parts = [f"{format_size(digests.cpu_bytes)} in host memory"]
        if digests.gpu_limit_bytes:
            limit = format_size(digests.gpu_limit_bytes)
            parts.insert(0, f"{format_size(digests.gpu_bytes)} of {limit} on the gpu")
        output.line(f"digests: {', '.join(parts)}")


def stats_as_json(stats: SessionStats) -> dict[str, Any]:
    """All of a session's stats as a JSON object."""
    return dataclasses.asdict(stats)


def _limit(usage: TierUsage) -> str:
    return format_size(usage.limit_bytes) if usage.limit_bytes else "off"
