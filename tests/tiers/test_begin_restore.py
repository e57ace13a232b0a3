"""Restores that are under way while others begin: what is there, what is held, what is given up.

Copies here are made when something waits for them, as late as a copy engine may be.
"""

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from slow_reads import held_reads

from streamkv.errors import PoolFullError
from streamkv.tiers.faults import inject
from streamkv.tiers.gpu_pool import GpuPool
from streamkv.tiers.host_memory import Bytes
from streamkv.tiers.restoring import Restore
from streamkv.tiers.transfer import Completion, Transfer

MakeRig = Callable[..., Any]


class Late:
    """A copy that is made when it is waited for, and once."""

    def __init__(self, transfer: "LateTransfer", make: Callable[[], object]) -> None:
        self._transfer = transfer
        self._make: Callable[[], object] | None = make
        transfer.num_pending += 1

    def done(self) -> bool:
        return self._make is None

    def wait(self) -> None:
        if self._make is not None:
            self._make()
            self._make = None
            self._transfer.num_pending -= 1


class LateTransfer(Transfer):
    """Promotions and copies of gpu blocks end when they are waited for."""

    def __init__(self, gpu_pool: GpuPool) -> None:
        super().__init__(gpu_pool)
        self.num_pending = 0

    def promote(self, source: Bytes, block_id: int) -> Completion:
        return Late(self, lambda: super(LateTransfer, self).promote(source, block_id))

    def copy(self, source_block_id: int, block_id: int) -> Completion:
        return Late(self, lambda: super(LateTransfer, self).copy(source_block_id, block_id))


def rig_of(make_rig: MakeRig, **options: Any) -> Any:
    """A rig with blocks 0 to 5 on ssd only, and 100 to 103 in the cpu pool."""
    rig = make_rig(**{"gpu": 16, "watermark": 0.0, "transfer_type": LateTransfer, **options})
    rig.pass_through(*range(6), *range(100, 104))
    rig.settle()
    return rig


def begin(rig: Any, *numbers: int) -> tuple[Restore, list[int]]:
    block_ids = [rig.manager.allocate() for _ in numbers]
    for block_id in block_ids:
        rig.gpu_pool.block_bytes(block_id)[:] = 0xEE
    pairs = [(rig.key_of(number), at) for number, at in zip(numbers, block_ids, strict=True)]
    return rig.manager.begin_restore(pairs), block_ids


def finish(rig: Any, restore: Restore, numbers: list[int], block_ids: list[int]) -> list[bool]:
    """Wait for it, check the bytes of what was found, and give all blocks back."""
    found: list[bool] = rig.manager.end_restore(restore)
    for number, block_id, is_there in zip(numbers, block_ids, found, strict=True):
        if is_there:
            assert np.array_equal(rig.gpu_pool.block_bytes(block_id), rig.bytes_of(number))
            rig.manager.drop(block_id)
        else:
            rig.manager.free(block_id)
    return found


def test_what_is_found_does_not_depend_on_how_many_are_under_way(make_rig: MakeRig) -> None:
    rng = np.random.default_rng(5)
    rig = rig_of(make_rig)
    numbers = [0, 77, 3, 101, 5, 103, 2, 78, 100, 1]
    for _ in range(20):
        order = rng.permutation(numbers).tolist()
        cuts = [0, *sorted(rng.choice(range(11), 4).tolist()), 10]
        batches = [order[a:b] for a, b in itertools.pairwise(cuts)]
        begun = [(batch, *begin(rig, *batch)) for batch in batches]
        for at in rng.permutation(len(begun)).tolist():
            batch, restore, block_ids = begun[at]
            found = finish(rig, restore, batch, block_ids)
            assert found == [number not in (77, 78) for number in batch]
        rig.settle()
    assert rig.manager.usage()["gpu"].num_blocks == 0
    assert rig.count("misses") == 40 and rig.count("promotions") == 160


def test_nothing_is_waited_for_before_the_end_is_asked_for(make_rig: MakeRig) -> None:
    rig = rig_of(make_rig)
    transfer = rig.manager._transfer
    with held_reads(rig, 2) as held:
        first, first_ids = begin(rig, 101, 0)
        second, second_ids = begin(rig, 102, 103, 1)
        held.arrive(2)
        assert transfer.num_pending == 3
        assert not rig.manager._residents.is_sealed(first_ids[0]), "it is not there yet"
        held.go()
        assert finish(rig, second, [102, 103, 1], second_ids) == [True] * 3
    assert finish(rig, first, [101, 0], first_ids) == [True] * 2
    assert transfer.num_pending == 0
    rig.settle()


def test_a_source_in_the_cpu_pool_outlives_everything_that_wants_its_place(
    make_rig: MakeRig,
) -> None:
    """Until the copy has ended neither eviction nor deletion gives its memory to another block."""
    rig = rig_of(make_rig, cpu=4)
    restore, block_ids = begin(rig, 101, 103)
    rig.pass_through(*range(60, 70))
    rig.manager.forget("nobody", [rig.key_of(103)]).wait()
    rig.manager.flush()
    assert finish(rig, restore, [101, 103], block_ids) == [True] * 2
    rig.settle()


def test_nobody_waits_for_a_block_that_a_restore_under_way_holds(make_rig: MakeRig) -> None:
    """Its source is dropped meanwhile: who then allocates gets that block, and does not hang."""
    rig = rig_of(make_rig, gpu=3)
    source = rig.seal(50)
    rig.manager.flush()
    restore, block_ids = begin(rig, 50, 101)
    rig.manager.drop(source)
    again = rig.manager.allocate()
    assert again == source
    with pytest.raises(PoolFullError):
        rig.manager.allocate()
    rig.gpu_pool.block_bytes(again)[:] = 0xAA
    assert finish(rig, restore, [50, 101], block_ids) == [True] * 2
    rig.manager.free(again)
    rig.settle()


def test_what_is_abandoned_is_copied_no_more_and_held_by_nobody(make_rig: MakeRig) -> None:
    rig = rig_of(make_rig, cpu=4)
    with held_reads(rig, 4) as held:
        restore, block_ids = begin(rig, 101, 0, 1, 2, 3, 4, 5, 102)
        held.arrive(4)
        restore.abandon()
        restore.abandon()
        assert rig.manager._transfer.num_pending == 0
        for block_id in block_ids:
            rig.manager.free(block_id)
        # Four blocks are still read into, so nobody gets them.
        others = [rig.manager.allocate() for _ in range(12)]
        assert len(set(others) & set(block_ids)) == 4
        with pytest.raises(PoolFullError):
            rig.manager.allocate()
        held.go()
    for block_id in others:
        rig.manager.free(block_id)
    while rig.manager.usage()["gpu"].num_blocks:
        pass
    rig.settle()
    assert rig.fetched(101, 0, 5) == [True] * 3


def test_a_read_that_fails_fails_its_own_restore_only(make_rig: MakeRig) -> None:
    rig = rig_of(make_rig)

    def fail() -> None:
        raise RuntimeError("broken")

    good, good_ids = begin(rig, 101, 103)
    with inject("ssd.get", fail):
        bad, bad_ids = begin(rig, 102, 1, 2)
        with pytest.raises(RuntimeError, match="broken"):
            rig.manager.end_restore(bad)
    for block_id in bad_ids:
        rig.manager.free(block_id)
    assert finish(rig, good, [101, 103], good_ids) == [True] * 2
    while rig.manager.usage()["gpu"].num_blocks:
        pass
    rig.settle()
    assert rig.fetched(102, 1, 2) == [True] * 3


def test_a_restore_under_way_outlives_the_threads_that_read(make_rig: MakeRig) -> None:
    rig = rig_of(make_rig)
    restore, block_ids = begin(rig, 101, 0, 1, 2, 3, 4, 5)
    other, other_ids = begin(rig, 102, 0)
    rig.manager.close()
    assert finish(rig, restore, [101, 0, 1, 2, 3, 4, 5], block_ids) == [True] * 7
    other.abandon()
    for block_id in other_ids:
        rig.manager.free(block_id)
    rig.manager.check_integrity()
    assert rig.manager.usage()["gpu"].num_blocks == 0
