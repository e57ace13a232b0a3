"""The cpu pool: eviction order, locks, and slots that are reused only when nobody reads them."""

import re
import threading
from pathlib import Path

import numpy as np
import pytest

from streamkv.errors import ConfigError
from streamkv.tiers.cpu_pool import CpuBlock, CpuPool
from streamkv.tiers.spec import BlockKey, KVSpec
from streamkv.tiers.usage import TierUsage

SPEC = KVSpec(num_layers=1, num_kv_heads=1, head_dim=2, dtype="float32", block_size=4)
A, B, C, D = (BlockKey(bytes([letter]) * 16) for letter in b"abcd")


def pool_of(num_blocks: int) -> CpuPool:
    return CpuPool(SPEC, num_blocks * SPEC.block_bytes)


def put(pool: CpuPool, key: BlockKey, *, locked: bool = False) -> CpuBlock:
    block = pool.reserve(key)
    assert block is not None
    pool.data(block)[:] = key[0]
    pool.publish(block)
    if not locked:
        pool.unlock(block)
    return block


def held(pool: CpuPool, *keys: BlockKey) -> list[bool]:
    pool.check_integrity()
    return [pool.contains(key) for key in keys]


def test_a_reserved_block_is_not_found_before_it_is_published() -> None:
    pool = pool_of(2)
    block = pool.reserve(A)
    assert block is not None
    assert pool.lock(A) is None
    pool.publish(block)
    found = pool.lock(A)
    assert found is block


def test_several_are_locked_and_let_go_of_at_once_like_one_by_one() -> None:
    pool = pool_of(3)
    blocks = [put(pool, A), put(pool, B)]
    found = pool.lock_many([B, C, A, A])
    assert found == [blocks[1], None, blocks[0], blocks[0]]
    assert [block.num_locks for block in blocks] == [2, 1]
    assert pool.lock_many([]) == []
    pool.unlock_many([blocks[0], blocks[1], blocks[0]])
    assert [block.num_locks for block in blocks] == [0, 0]
    # The last that was let go of is the last to go.
    put(pool, C)
    put(pool, D)
    assert held(pool, A, B, C, D) == [True, False, True, True]


def test_of_two_blocks_of_one_key_the_first_is_listed_and_the_other_gives_its_room_back() -> None:
    pool = pool_of(2)
    blocks = [pool.reserve(A), pool.reserve(A)]
    assert blocks[0] is not None and blocks[1] is not None
    assert pool.publish(blocks[1]) is True
    assert pool.publish(blocks[0]) is False
    assert pool.lock(A) is blocks[1]
    pool.unlock(blocks[0])
    pool.check_integrity()
    assert pool.usage().num_blocks == 1
    put(pool, B)
    assert held(pool, A, B) == [True, True]


def test_evicts_the_least_recently_used() -> None:
    pool = pool_of(2)
    put(pool, A)
    put(pool, B)
    used = pool.lock(A)
    assert used is not None
    pool.unlock(used)
    put(pool, C)
    assert held(pool, A, B, C) == [True, False, True]
    assert pool.num_evictions == 1


def test_a_locked_block_is_never_evicted() -> None:
    pool = pool_of(2)
    locked = put(pool, A, locked=True)
    for key in (B, C, D):
        put(pool, key)
    assert held(pool, A, B, C, D) == [True, False, False, True]
    assert np.all(pool.data(locked) == ord("a"))


def test_refuses_room_when_all_are_locked_and_gives_it_after_unlock() -> None:
    pool = pool_of(1)
    block = put(pool, A, locked=True)
    assert pool.reserve(B) is None
    pool.unlock(block)
    assert pool.reserve(B) is not None
    assert held(pool, A, B) == [False, False]


def test_a_block_deleted_while_it_is_read_keeps_its_bytes_until_unlocked() -> None:
    pool = pool_of(1)
    put(pool, A)
    reading = pool.lock(A)
    assert reading is not None
    pool.delete(A)
    assert held(pool, A) == [False]
    assert pool.reserve(B) is None
    assert np.all(pool.data(reading) == ord("a"))
    pool.unlock(reading)
    assert pool.reserve(B) is not None


def test_an_abandoned_reservation_gives_its_slot_back() -> None:
    pool = pool_of(1)
    block = pool.reserve(A)
    assert block is not None
    pool.unlock(block)
    pool.check_integrity()
    assert pool.usage().num_blocks == 0


def test_deleting_what_is_not_there_does_nothing() -> None:
    pool = pool_of(1)
    pool.delete(A)
    assert held(pool, A) == [False]


def test_usage_counts_blocks_and_the_limit_as_given() -> None:
    pool = CpuPool(SPEC, 3 * SPEC.block_bytes + 5)
    put(pool, A)
    assert pool.num_blocks == 3
    assert pool.usage() == TierUsage(1, 64, 197)


def test_a_pool_of_no_bytes_holds_nothing() -> None:
    pool = CpuPool(SPEC, 0)
    assert pool.num_blocks == 0
    assert pool.reserve(A) is None
    pool.check_integrity()


def test_fewer_bytes_than_a_block_are_refused() -> None:
    with pytest.raises(ConfigError, match="cpu_bytes=63: smaller than one block of 64 bytes"):
        CpuPool(SPEC, 63)


def test_takes_exactly_the_memory_given_and_only_as_it_is_used() -> None:
    spec = KVSpec(num_layers=4, num_kv_heads=8, head_dim=64, dtype="float32")

    def resident() -> int:
        """Bytes of the pool's own mapping in memory: the rest of the process may shrink."""
        address = pool._rows.ctypes.data
        inside = False
        for line in Path("/proc/self/smaps").read_text().splitlines():
            if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
                first, last = (int(end, 16) for end in line.split()[0].split("-"))
                inside = first <= address < last
            elif inside and line.startswith("Rss:"):
                return 1024 * int(line.split()[1])
        raise AssertionError("the pool's memory is not mapped")

    pool = CpuPool(spec, 33 * 2**20)
    assert resident() < 2**20
    for round_number in range(3):
        for index in range(33):
            key = BlockKey(bytes([round_number, index]) * 8)
            put(pool, key)
    # A power-of-two allocator would need 64 MiB.
    assert 33 * 2**20 <= resident() < 34 * 2**20


def test_readers_and_an_evicting_writer_never_see_each_others_bytes() -> None:
    pool = pool_of(3)
    keys = [BlockKey(bytes([value]) * 16) for value in range(8)]
    wrong: list[int] = []

    def read() -> None:
        for turn in range(2000):
            block = pool.lock(keys[turn % 8])
            if block is not None:
                if not np.all(pool.data(block) == turn % 8):
                    wrong.append(turn)
                pool.unlock(block)

    readers = [threading.Thread(target=read) for _ in range(3)]
    for reader in readers:
        reader.start()
    for turn in range(2000):
        key = keys[turn * 5 % 8]
        if not pool.contains(key):
            block = pool.reserve(key)
            if block is not None:
                pool.data(block)[:] = key[0]
                pool.publish(block)
                pool.unlock(block)
    for reader in readers:
        reader.join()
    assert wrong == []
    pool.check_integrity()
