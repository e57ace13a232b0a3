"""What a store holds, counted over a real one."""

from pathlib import Path

import numpy as np
import pytest

from streamkv.cli.cache_view import (
    StoreSummary,
    describe_entry,
    open_reader,
    open_writer,
    summarize_store,
)
from streamkv.errors import StoreError
from streamkv.store import blocks_path
from streamkv.tiers.spec import BlockKey, KVSpec
from streamkv.tiers.ssd import SsdTier, StoreIdentity

SPEC = KVSpec(num_layers=2, num_kv_heads=1, head_dim=2, dtype="float32")
WHOLE, PARTIAL = BlockKey(b"\x02" * 16), BlockKey(b"\x03" * 16)


def fill(store: Path, codec: str, *keys: BlockKey) -> None:
    """Write blocks of zeros; the session `diary` needs all but the first."""
    identity = StoreIdentity("tiny", b"w")
    tier = SsdTier(blocks_path(store), SPEC, identity, limit_bytes=4 << 20, codec=codec)
    block = np.zeros(SPEC.block_bytes, dtype=np.uint8)
    tier.write([(key, block) for key in keys])
    tier.set_manifest("diary", keys[1:])
    tier.sync()
    tier.close()


def test_records_are_counted_by_codec_and_session(tmp_path: Path) -> None:
    fill(tmp_path, "zstd", WHOLE)
    fill(tmp_path, "raw", BlockKey(b"\x04" * 16), BlockKey(b"\x06" * 16), PARTIAL)
    with open_reader(tmp_path) as reader:
        summary = summarize_store(reader, tmp_path)
    assert (summary.num_blocks, summary.num_locked) == (4, 2)
    assert summary.codecs == {"raw": 3, "zstd": 1}
    assert summary.sessions == {"diary": 2}
    assert (summary.model, summary.owner, summary.limit_bytes) == ("tiny", None, 4 << 20)
    assert summary.block_bytes == 2048
    assert 3 * 2048 < summary.coded_bytes < 4 * 2048
    assert summary.ratio == 4 * 2048 / summary.coded_bytes > 1


def test_an_empty_store_is_neither_larger_nor_smaller(tmp_path: Path) -> None:
    fill(tmp_path, "raw")
    with open_reader(tmp_path) as reader:
        summary = summarize_store(reader, tmp_path)
    assert isinstance(summary, StoreSummary)
    assert (summary.num_blocks, summary.ratio, summary.codecs) == (0, 1.0, {})


def test_a_record_is_described_by_what_scripts_need(tmp_path: Path) -> None:
    fill(tmp_path, "raw", WHOLE, PARTIAL)
    with open_reader(tmp_path) as reader:
        described = {entry.key: describe_entry(entry) for entry in reader.entries()}
    assert described[WHOLE]["key"] == "02" * 16
    assert (described[WHOLE]["kind"], described[WHOLE]["sessions"]) == ("block", [])
    assert (described[PARTIAL]["kind"], described[PARTIAL]["sessions"]) == ("partial", ["diary"])
    assert described[PARTIAL]["coded_bytes"] == 2048


@pytest.mark.parametrize("opens", [open_reader, open_writer])
def test_looking_for_a_store_does_not_make_one(opens: object, tmp_path: Path) -> None:
    assert callable(opens)
    with pytest.raises(StoreError, match=r"there is none\. Give the --store"):
        opens(tmp_path / "nothing")
    assert list(tmp_path.iterdir()) == []
