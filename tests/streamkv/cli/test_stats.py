import dataclasses
import json

import pytest

from streamkv.cli.console import Output
from streamkv.cli.stats import show_stats, stats_as_json
from streamkv.digest_pages import DigestUsage
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


def test_sink_tokens_of_a_short_stream_are_not_counted_twice(
    capsys: pytest.CaptureFixture[str],
) -> None:
    short = dataclasses.replace(STATS, num_tokens=470, num_window_tokens=470)
    show_stats(short, Output())
    first = capsys.readouterr().out.splitlines()[0]
    assert first == "470 tokens; attended: 4 sink tokens and the newest 466"


@pytest.mark.parametrize(
    ("digests", "shown"),
    [
        (DigestUsage(), None),
        (DigestUsage(cpu_bytes=3 << 20), "digests: 3.0 MiB in host memory"),
        (
            DigestUsage(1 << 20, 1 << 30, 0),
            "digests: 1.0 MiB of 1.0 GiB on the gpu, 0 B in host memory",
        ),
    ],
)
def test_people_read_where_digests_lie_if_there_are_any(
    digests: DigestUsage, shown: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    show_stats(dataclasses.replace(STATS, digests=digests), Output())
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if "digests" in line] == ([] if shown is None else [shown])


def test_scripts_get_every_number() -> None:
    data = json.loads(json.dumps(stats_as_json(STATS)))
    assert data["tiers"]["gpu"] == {
        "num_blocks": 17,
        "num_bytes": 17 << 20,
        "limit_bytes": 64 << 20,
    }
    assert data["counters"]["misses"] == 0
    assert (data["name"], data["num_computed"]) == ("diary", 12_344)
    assert data["digests"] == {
        "gpu_bytes": 0,
        "gpu_limit_bytes": 0,
        "cpu_bytes": 0,
        "num_lost": 0,
    }
