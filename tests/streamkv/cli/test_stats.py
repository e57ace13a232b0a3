import json

import pytest

from streamkv.cli.console import Output
from streamkv.cli.stats import show_stats, stats_as_json
from streamkv.outputs import SessionStats
from streamkv.tiers.usage import TierUsage

STATS = SessionStats(
    name="diary",
    num_tokens=12_345,
    num_computed=12_344,
    num_sink_tokens=4,
    num_window_tokens=1_020,
    text_chars=54_321,
    num_blocks=17,
    tiers={"gpu": TierUsage(17, 17 << 20, 64 << 20), "cpu": TierUsage(0, 0, 0)},
    counters={"writes": 1_500, "misses": 0, "demotions": 2},
)


def test_people_read_where_it_stands_and_what_happened(capsys: pytest.CaptureFixture[str]) -> None:
    show_stats(STATS, Output())
    assert capsys.readouterr().out.splitlines() == [
        "12,345 tokens; attended: 4 sink tokens and the newest 1,020",
        "tier  holds      bytes     limit",
        "gpu   17 blocks  17.0 MiB  64.0 MiB",
        "cpu   0 blocks   0 B       off",
        "demotions 2, writes 1,500",
    ]


def test_scripts_get_every_number() -> None:
    data = json.loads(json.dumps(stats_as_json(STATS)))
    assert data["tiers"]["gpu"] == {
        "num_blocks": 17,
        "num_bytes": 17 << 20,
        "limit_bytes": 64 << 20,
    }
    assert data["counters"]["misses"] == 0
    assert (data["name"], data["num_computed"]) == ("diary", 12_344)
