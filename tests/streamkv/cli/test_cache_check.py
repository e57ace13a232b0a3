"""Reading a whole store: what is damaged is named, what is not is counted."""

from pathlib import Path

import numpy as np
import pytest
from small_tiers import SPEC, new_journal

from streamkv.cli.cache_check import check_store
from streamkv.cli.console import Output
from streamkv.errors import StoreError
from streamkv.store import blocks_path, journal_path
from streamkv.tiers.spec import BlockKey
from streamkv.tiers.ssd import SsdTier, StoreIdentity

KEYS = [BlockKey(bytes([2 * number]) * 16) for number in range(1, 4)]


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """Three blocks of random bytes and one journal."""
    identity = StoreIdentity("tiny", b"w")
    tier = SsdTier(blocks_path(tmp_path), SPEC, identity, limit_bytes=4 << 20, codec="raw")
    tier.write([(key, block(key)) for key in KEYS])
    tier.sync()
    tier.close()
    (tmp_path / "sessions").mkdir()
    new_journal(journal_path(tmp_path, "diary")).close()
    return tmp_path


def block(key: BlockKey) -> np.ndarray:
    return np.random.default_rng(key[0]).integers(0, 256, SPEC.block_bytes, dtype=np.uint8)


def test_a_sound_store_is_counted(store: Path) -> None:
    check = check_store(store, Output(as_json=True))
    assert check.ok
    assert (check.num_blocks, check.num_bytes, check.num_journals) == (3, 3 * 128, 1)
    assert (check.bad_blocks, check.bad_journals, check.tables) == ({}, {}, "")


def test_one_damaged_block_is_named_and_the_others_are_read(store: Path) -> None:
    path = blocks_path(store) / "data.mdb"
    content = bytearray(path.read_bytes())
    place = content.find(block(KEYS[1]).tobytes())
    assert place > 0
    content[place + 100] ^= 1
    path.write_bytes(content)
    check = check_store(store, Output(as_json=True))
    assert not check.ok
    assert list(check.bad_blocks) == [KEYS[1].hex()]
    assert check.num_blocks == 3


def test_a_damaged_journal_is_named_by_its_session(store: Path) -> None:
    journal_path(store, "broken").write_bytes(b"no journal at all")
    check = check_store(store, Output(as_json=True))
    assert not check.ok
    assert (check.num_journals, list(check.bad_journals)) == (2, ["broken"])


def test_no_store_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="there is none"):
        check_store(tmp_path, Output(as_json=True))
