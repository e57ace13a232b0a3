"""The cpu pool of a GPU: only page-locked blocks are given out, and it grows before it evicts."""

import logging
import mmap
import threading

import numpy as np
import pytest
from fake_page_lock import FakePageLock
from hypothesis import given
from hypothesis import strategies as st

from streamkv.errors import ConfigError
from streamkv.tiers.cpu_pool import CpuBlock, CpuPool
from streamkv.tiers.spec import BlockKey, KVSpec
from streamkv.tiers.usage import TierUsage

PAGE = mmap.PAGESIZE
SPEC = KVSpec(num_layers=1, num_kv_heads=1, head_dim=2, dtype="float32", block_size=4)  # 64 bytes


def key_of(number: int) -> BlockKey:
    return BlockKey(number.to_bytes(16, "big"))


def pool_of(
    lock: FakePageLock, num_blocks: int, blocks_per_piece: int = 1, spec: KVSpec = SPEC
) -> CpuPool:
    """Blocks of less than a page, so that a page is what each takes."""
    row_bytes = -(-spec.block_bytes // PAGE) * PAGE
    return CpuPool(spec, num_blocks * row_bytes, lock, blocks_per_piece * row_bytes)


def put(pool: CpuPool, number: int) -> CpuBlock:
    block = pool.reserve(key_of(number))
    assert block is not None
    pool.data(block)[:] = number
    pool.publish(block)
    return block


def test_a_new_pool_has_pinned_nothing_and_counts_what_it_will_have() -> None:
    lock = FakePageLock()
    pool = pool_of(lock, 5, 2)
    assert lock.history == []
    assert (pool.num_blocks, pool.num_pinned_bytes) == (5, 0)
    assert pool.usage() == TierUsage(0, 0, 5 * PAGE)


def test_room_is_pinned_when_it_is_needed() -> None:
    lock = FakePageLock()
    pool = pool_of(lock, 5, 2)
    pinned = []
    for number in range(5):
        assert lock.holds(pool.data(put(pool, number)))
        pinned.append(pool.num_pinned_bytes // PAGE)
    assert pinned == [2, 2, 4, 4, 5]
    pool.check_integrity()


def test_the_whole_pool_is_used_before_anything_is_evicted() -> None:
    pool = pool_of(FakePageLock(), 6, 2)
    for number in range(6):
        pool.unlock(put(pool, number))
    assert pool.num_evictions == 0
    pool.unlock(put(pool, 6))
    assert pool.num_evictions == 1
    assert not pool.contains(key_of(0)) and pool.contains(key_of(1))


def test_between_steps_a_piece_is_pinned_only_ahead_of_need() -> None:
    pool = pool_of(FakePageLock(), 7, 2)
    assert pool.pin_ahead() is True
    assert pool.pin_ahead() is False
    put(pool, 0)
    assert pool.pin_ahead() is True
    assert pool.num_pinned_bytes == 4 * PAGE
    assert [pool.pin_next() for _ in range(3)] == [True, True, False]
    assert pool.pin_ahead() is False
    assert pool.num_pinned_bytes == 7 * PAGE


def test_blocks_that_do_not_fill_pages_begin_on_one_and_keep_their_size() -> None:
    spec = KVSpec(2, 1, head_dim=PAGE // 16 + 1, dtype="float32", block_size=4)
    assert 4 * PAGE < spec.block_bytes < 5 * PAGE
    lock = FakePageLock()
    pool = pool_of(lock, 3, 2, spec)
    rows = [pool.data(put(pool, number)) for number in range(3)]
    assert [len(row) for row in rows] == [spec.block_bytes] * 3
    assert {row.ctypes.data % PAGE for row in rows} == {0}
    assert [bool(np.all(row == number)) for number, row in enumerate(rows)] == [True] * 3
    assert sorted(lock.pieces.values()) == [5 * PAGE, 10 * PAGE]
    assert pool.usage().num_bytes == 3 * spec.block_bytes


def test_a_block_larger_than_a_piece_is_pinned_whole() -> None:
    spec = KVSpec(num_layers=1, num_kv_heads=1, head_dim=64, dtype="float32")
    lock = FakePageLock()
    pool = CpuPool(spec, 2 * spec.block_bytes, lock, piece_bytes=PAGE)
    assert lock.holds(pool.data(put(pool, 0)))
    assert list(lock.pieces.values()) == [spec.block_bytes]


def test_less_than_the_pages_of_a_block_are_refused() -> None:
    with pytest.raises(ConfigError, match=f"smaller than one block of {PAGE} bytes"):
        CpuPool(SPEC, PAGE - 1, FakePageLock())


def test_a_pool_of_no_bytes_pins_nothing() -> None:
    lock = FakePageLock()
    pool = CpuPool(SPEC, 0, lock)
    assert (pool.num_blocks, pool.pin_next(), pool.pin_ahead()) == (0, False, False)
    assert pool.reserve(key_of(1)) is None
    pool.close()
    assert lock.history == []


@pytest.mark.parametrize("refuse_at", [0, 1, 2])
def test_a_refusal_leaves_a_smaller_pool(refuse_at: int, caplog: pytest.LogCaptureFixture) -> None:
    lock = FakePageLock(refuse_at)
    pool = pool_of(lock, 6, 2)
    held = 2 * refuse_at
    with caplog.at_level(logging.WARNING):
        reserved = [pool.reserve(key_of(number)) for number in range(6)]
    assert [block is not None for block in reserved] == [True] * held + [False] * (6 - held)
    assert (pool.num_blocks, pool.usage().limit_bytes) == (held, held * PAGE)
    assert (lock.num_refusals, len(caplog.messages)) == (1, 1)
    for block in reserved[:held]:
        assert block is not None
        pool.publish(block)
        pool.unlock(block)
    if held:
        assert lock.holds(pool.data(put(pool, 9)))
        assert pool.num_evictions == 1
    pool.check_integrity()
    pool.close()
    assert lock.pieces == {}


def test_a_closed_pool_gives_nothing_out_and_what_it_held_can_still_be_read() -> None:
    lock = FakePageLock()
    pool = pool_of(lock, 4)
    block = put(pool, 7)
    pool.close()
    pool.close()
    assert lock.pieces == {} and pool.num_pinned_bytes == 0
    assert pool.reserve(key_of(1)) is None
    assert (pool.pin_next(), pool.pin_ahead()) == (False, False)
    assert np.all(pool.data(block) == 7)
    pool.unlock(block)
    pool.check_integrity()


@given(
    num_blocks=st.integers(1, 6),
    blocks_per_piece=st.integers(1, 4),
    refuse_at=st.none() | st.integers(0, 3),
    events=st.lists(
        st.one_of(
            st.sampled_from(["next", "ahead", "close"]),
            st.tuples(st.sampled_from(["put", "hold", "drop", "unlock"]), st.integers(0, 8)),
        ),
        max_size=30,
    ),
)
def test_every_block_given_out_lies_in_what_is_pinned(
    num_blocks: int,
    blocks_per_piece: int,
    refuse_at: int | None,
    events: list[str | tuple[str, int]],
) -> None:
    lock = FakePageLock(refuse_at)
    pool = pool_of(lock, num_blocks, blocks_per_piece)
    held: list[CpuBlock] = []
    closed = False
    for event in events:
        match event:
            case "next":
                pool.pin_next()
            case "ahead":
                pool.pin_ahead()
            case "close":
                pool.close()
                closed = True
            case ("put" | "hold", number) if not pool.contains(key_of(number)):
                block = pool.reserve(key_of(number))
                if block is not None:
                    assert not closed and lock.holds(pool.data(block))
                    pool.publish(block)
                    held.append(block)
                else:
                    assert closed or len(held) >= pool.num_blocks
                if block is not None and event[0] == "put":
                    pool.unlock(held.pop())
            case ("drop", number):
                pool.delete(key_of(number))
            case ("unlock", number) if held:
                pool.unlock(held.pop(number % len(held)))
        pool.check_integrity()
        assert sum(lock.pieces.values()) == pool.num_pinned_bytes
        assert closed or all(lock.holds(pool.data(block)) for block in held)
    pool.close()
    registered = [address for call, address in lock.history if call == "register"]
    unregistered = [address for call, address in lock.history if call == "unregister"]
    assert sorted(registered) == sorted(unregistered) == sorted(set(registered))


def test_a_writer_and_a_thread_that_pins_agree_on_every_block() -> None:
    lock = FakePageLock()
    pool = pool_of(lock, 200, 3)
    slots: list[int] = []

    def write() -> None:
        for number in range(200):
            block = put(pool, number % 256)
            assert lock.holds(pool.data(block))
            slots.append(block.slot_id)
            pool.delete(block.key)

    writer = threading.Thread(target=write)
    writer.start()
    while pool.pin_next():
        pass
    writer.join()
    assert sorted(slots) == list(range(200))
    assert pool.num_pinned_bytes == 200 * PAGE
    pool.check_integrity()
