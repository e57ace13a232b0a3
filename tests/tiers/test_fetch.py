"""Many blocks at once: each from where it is, all or none after an error, none waited for in vain.

A read that hangs is the dangerous one: the twin test takes away what keeps its block from reuse.
"""

import itertools
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from slow_reads import held_reads

from streamkv.errors import PoolFullError
from streamkv.tiers.faults import inject
from streamkv.tiers.gpu_pool import GpuPool
from streamkv.tiers.host_memory import Bytes
from streamkv.tiers.manager import TierManager
from streamkv.tiers.residents import Residents
from streamkv.tiers.transfer import Completion, Transfer

MakeRig = Callable[..., Any]


def rig_of(make_rig: MakeRig, **options: Any) -> Any:
    """A rig with blocks 0 to 5 on ssd only, and 100 to 103 in the cpu pool."""
    rig = make_rig(**{"gpu": 12, "watermark": 0.0, **options})
    rig.pass_through(*range(6), *range(100, 104))
    rig.settle()
    return rig


def test_each_block_comes_from_where_it_is_in_the_order_asked_for(make_rig: MakeRig) -> None:
    rig = rig_of(make_rig)
    live = rig.seal(50)
    rig.settle()
    numbers = [3, 77, 102, 50, 0, 103, 78, 3]
    assert rig.where(*numbers) == ["ssd", None, "cpu", "gpu", "ssd", "cpu", None, "ssd"]
    found = [True, False, True, True, True, True, False, True]
    assert rig.fetched(*numbers) == found
    counted = [rig.count(n) for n in ("ssd_reads", "cpu_reads", "shared", "promotions", "misses")]
    assert counted == [3, 2, 1, 5, 2]
    assert rig.manager.fetch([]) == []
    rig.manager.drop(live)
    rig.settle()
    assert rig.manager.usage()["gpu"].num_blocks == 0


def test_what_is_fetched_does_not_depend_on_how_it_is_cut(make_rig: MakeRig) -> None:
    rng = np.random.default_rng(3)
    rig = rig_of(make_rig)
    numbers = [0, 77, 3, 101, 5, 103, 2, 78]
    for _ in range(20):
        order = rng.permutation(numbers).tolist()
        cuts = [0, *sorted(rng.choice(range(9), 3).tolist()), 8]
        pieces = [order[a:b] for a, b in itertools.pairwise(cuts)]
        found = [each for piece in pieces for each in rig.fetched(*piece)]
        assert found == [number not in (77, 78) for number in order]


def test_a_block_that_is_still_copied_down_is_fetched(make_rig: MakeRig) -> None:
    rig = rig_of(make_rig)
    go = threading.Event()
    with inject("worker", go.wait):
        rig.pass_through(50)
        assert rig.fetched(50, 0) == [True, True]
        go.set()
    rig.settle()


def test_a_partial_record_is_fetched_unsealed(make_rig: MakeRig) -> None:
    rig = rig_of(make_rig)
    open_block = rig.fill(60)
    assert rig.manager.write_partial(rig.partial_key_of(60), open_block).wait()
    [block_id] = rig.manager.fetch([rig.partial_key_of(60)])
    assert np.array_equal(rig.gpu_pool.block_bytes(block_id), rig.bytes_of(60))
    rig.manager.free(block_id)
    rig.manager.free(open_block)
    rig.settle()


def test_four_blocks_are_read_at_the_same_time(make_rig: MakeRig) -> None:
    rig = rig_of(make_rig)
    with held_reads(rig, 4) as held:
        outcome: list[Any] = []
        fetching = threading.Thread(target=lambda: outcome.append(rig.fetched(*range(6))))
        fetching.start()
        held.arrive(4)  # all four stand still together
        held.go()
        fetching.join()
    assert outcome == [[True] * 6]


def test_the_threads_are_kept_from_one_fetch_to_the_next(make_rig: MakeRig) -> None:
    rig = rig_of(make_rig)
    rig.fetched(*range(6))
    before = set(threading.enumerate())
    rig.fetched(*range(6))
    assert set(threading.enumerate()) == before
    rig.manager.close()
    assert not [thread for thread in threading.enumerate() if "restore" in thread.name]
    assert rig.fetched(*range(6), 103) == [True] * 7  # closed: the caller reads


def test_without_room_for_all_everything_is_given_back(make_rig: MakeRig) -> None:
    rig = rig_of(make_rig, gpu=4)
    live = rig.seal(50)
    with pytest.raises(PoolFullError):
        rig.manager.fetch([rig.key_of(number) for number in range(4)])
    assert rig.manager.usage()["gpu"].num_blocks == 1
    assert rig.fetched(0, 1, 2) == [True] * 3
    rig.manager.drop(live)
    rig.settle()


class BrokenTransfer(Transfer):
    """The second copy into a block fails, while the first has not finished."""

    def __init__(self, gpu_pool: GpuPool) -> None:
        super().__init__(gpu_pool)
        self.num_promoted = 0

    def promote(self, source: Bytes, block_id: int) -> Completion:
        self.num_promoted += 1
        if self.num_promoted == 2:
            raise RuntimeError("the copy engine broke")
        return super().promote(source, block_id)


def test_after_a_failed_copy_everything_is_given_back(make_rig: MakeRig) -> None:
    rig = rig_of(make_rig, transfer_type=BrokenTransfer)
    with pytest.raises(RuntimeError, match="the copy engine broke"):
        rig.manager.fetch([rig.key_of(number) for number in (101, 102, 103, 0, 1)])
    while rig.manager.usage()["gpu"].num_blocks:  # reads that had begun end
        threading.Event().wait(0.001)
    rig.settle()
    assert rig.fetched(101, 102, 103, 0, 1) == [True] * 5


def test_after_a_failed_read_everything_is_given_back(make_rig: MakeRig) -> None:
    rig = rig_of(make_rig)

    def fail() -> None:
        raise RuntimeError("broken")

    with inject("ssd.get", fail), pytest.raises(RuntimeError, match="broken"):
        rig.manager.fetch([rig.key_of(number) for number in (101, 0, 1, 2, 3, 4, 5)])
    while rig.manager.usage()["gpu"].num_blocks:
        threading.Event().wait(0.001)
    rig.settle()
    assert rig.fetched(101, 0, 1) == [True] * 3


class LateCopies(Transfer):
    """Copies from the cpu pool take place only when they are waited for.

    Before the first of them the cpu pool is asked for as much room as it gives, and it is written
    over: what was not locked until then is lost.
    """

    def __init__(self, gpu_pool: GpuPool) -> None:
        super().__init__(gpu_pool)
        self.events: list[str] = []
        self.take_room: Callable[[], None] | None = None

    def promote(self, source: Bytes, block_id: int) -> Completion:
        self.events.append("issued")
        return LateCopy(self, source, block_id)


class LateCopy:
    def __init__(self, transfer: LateCopies, source: Bytes, block_id: int) -> None:
        self._transfer, self._source, self._block_id = transfer, source, block_id

    def done(self) -> bool:
        return False

    def wait(self) -> None:
        self._transfer.events.append("waited")
        if self._transfer.take_room is not None:
            self._transfer.take_room()
        Transfer.promote(self._transfer, self._source, self._block_id)


def test_all_copies_are_issued_before_the_first_is_waited_for_and_keep_their_source(
    make_rig: MakeRig,
) -> None:
    rig = rig_of(make_rig, transfer_type=LateCopies)
    transfer = rig.manager._transfer
    taken: list[Any] = []

    def take_room() -> None:
        while (block := rig.cpu_pool.reserve(rig.key_of(999))) is not None:
            rig.cpu_pool.data(block)[:] = 0xEE
            taken.append(block)

    transfer.take_room = take_room
    assert rig.fetched(101, 0, 103, 102) == [True] * 4
    assert transfer.events[:4] == ["issued"] * 3 + ["waited"]
    assert len(taken) == 1  # the fourth block of the pool
    rig.cpu_pool.unlock(taken[0])
    rig.settle()


def fetch_what_hangs(rig: Any) -> list[bool]:
    """Fetch a block whose read ends only after its room was wanted; whether others stay whole."""
    with held_reads(rig, before=True) as held:
        fetched = rig.manager.fetch([rig.key_of(number) for number in (101, 0, 102)])
        held.arrive()
        assert [block_id is not None for block_id in fetched] == [True, False, True]
        assert rig.count("reads_given_up") == 1
        owned = []
        with pytest.raises(PoolFullError):  # and does not wait for a block that may never come
            while True:
                owned.append(rig.manager.allocate())
        for block_id in owned:
            rig.gpu_pool.block_bytes(block_id)[:] = 0xEE
        held.go()
        while rig.manager._restoring._read_into:
            threading.Event().wait(0.001)
    whole = [bool((rig.gpu_pool.block_bytes(block_id) == 0xEE).all()) for block_id in owned]
    for block_id in owned:
        rig.manager.free(block_id)
    for block_id in fetched:
        if block_id is not None:
            rig.manager.drop(block_id)
    return whole


def test_nothing_is_written_into_a_block_after_its_read_was_given_up(
    make_rig: MakeRig, caplog: pytest.LogCaptureFixture
) -> None:
    rig = rig_of(make_rig, read_limit_s=0.05)
    assert fetch_what_hangs(rig) == [True] * 9
    assert "was given up" in caplog.text
    rig.settle()
    assert rig.manager.usage()["gpu"].num_blocks == 0
    assert rig.fetched(0, 1, 2) == [True] * 3


class CarelessResidents(Residents):
    """Does not keep a block while it is read into: what the hold is there for."""

    def hold(self, block_id: int) -> None:
        pass

    def unhold(self, block_id: int) -> None:
        pass


class CarelessManager(TierManager):
    def _make_residents(self) -> Residents:
        return CarelessResidents(self._free_list)


def test_without_the_hold_the_late_read_would_write_over_somebody_elses_block(
    make_rig: MakeRig,
) -> None:
    rig = rig_of(make_rig, read_limit_s=0.05, manager_type=CarelessManager)
    assert fetch_what_hangs(rig).count(False) == 1


def test_with_every_thread_hanging_what_is_in_memory_is_still_fetched(make_rig: MakeRig) -> None:
    rig = rig_of(make_rig, read_limit_s=0.05)
    with held_reads(rig, 4) as held:
        assert rig.fetched(0, 1, 2, 3, 101) == [False] * 4 + [True]
        held.arrive(4)
        hits = rig.ssd.counters["hits"]
        assert rig.fetched(4, 102) == [False, True]  # and 4 is not read for nothing later
        assert rig.count("reads_given_up") == 5
        held.go()
        while rig.manager._restoring._read_into:
            threading.Event().wait(0.001)
    assert rig.ssd.counters["hits"] == hits
    rig.settle()
    assert rig.fetched(0, 1, 2, 3, 4) == [True] * 5


def test_a_single_restore_that_hangs_is_given_up_too(make_rig: MakeRig) -> None:
    rig = rig_of(make_rig, read_limit_s=0.05)
    with held_reads(rig) as held:
        assert rig.held(0, 101) == [False, True]
        held.go()
    while rig.manager._restoring._read_into:
        threading.Event().wait(0.001)
    assert rig.held(0) == [True]
    rig.settle()
