import pytest

from streamkv.errors import ConfigError
from streamkv.tiers.spec import KVSpec
from streamkv.tiers.store_room import StoreRoom

SMOL = KVSpec(30, 3, 64, "bfloat16")  # blocks of 1,474,560 bytes


def test_a_twentieth_of_a_large_store_stays_free() -> None:
    room = StoreRoom.of(20 << 30, SMOL, 4096)
    assert room.map_pages == 5242880
    assert room.budget() == 5242880 - 262144
    assert room.chunk_pages == 8192


def test_a_small_store_keeps_room_for_three_writes() -> None:
    room = StoreRoom.of(16 << 20, SMOL, 4096)
    assert room.chunk_pages == 363  # one block
    assert room.budget() == 4096 - 3 * 363 - 64


def test_a_full_disk_lowers_the_budget() -> None:
    room = StoreRoom.of(1 << 30, SMOL, 4096)
    assert room.budget(100000) == 100000 - 5000
    assert room.budget(10000) == 10000 - 3 * 363 - 64
    assert room.budget(10) == 0


def test_a_limit_without_room_for_some_blocks_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"ssd_bytes=1000000: no room for 8 blocks .* at least"):
        StoreRoom.of(1000000, SMOL, 4096)
    smallest = (8 * 363 + 128) * 4096
    assert StoreRoom.of(smallest, SMOL, 4096).budget() > 4 * 363
    with pytest.raises(ConfigError):
        StoreRoom.of(smallest - 1, SMOL, 4096)
