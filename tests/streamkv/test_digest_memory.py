"""Where pages of digests lie: room that is taken, shared, given back and used again."""

import threading

import pytest
import torch
from late_copies import Exhausted, LateCopies

from streamkv.digest_memory import DigestMemory, Page
from streamkv.digest_pages import DigestUsage

KIB = 1 << 10
SHAPE = (2, 64, 8, 4)
"""8 KiB in 16 bits."""


def page(memory: DigestMemory) -> Page:
    made = memory.take(8 * KIB, SHAPE, torch.float16)
    assert made is not None and made.data.shape == SHAPE and made.data.dtype == torch.float16
    return made


def some_digests(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(2, count, 8, 4, generator=torch.Generator().manual_seed(seed))


def test_pages_lie_on_the_device_while_there_is_room_and_then_on_the_host() -> None:
    memory = DigestMemory("cpu", 20 * KIB)
    pages = [page(memory) for _ in range(4)]
    assert [each.start for each in pages] == [0, 8 * KIB, None, None]
    assert memory.usage() == DigestUsage(16 * KIB, 20 * KIB, 16 * KIB)
    memory.give_back(pages[1])
    memory.give_back(pages[2])
    assert memory.usage() == DigestUsage(8 * KIB, 20 * KIB, 8 * KIB)
    assert page(memory).start == 8 * KIB
    memory.check_integrity()


def test_pages_on_the_device_are_parts_of_one_allocation() -> None:
    memory = DigestMemory("cpu", 16 * KIB)
    first, second = page(memory), page(memory)
    assert second.data.data_ptr() - first.data.data_ptr() == 8 * KIB
    memory.write(first, 0, some_digests(64, seed=1))
    memory.write(second, 0, some_digests(64, seed=2))
    assert torch.equal(memory.read(first, 9), some_digests(64, seed=1)[:, 9].half())
    assert torch.equal(memory.read(second, 0), some_digests(64, seed=2)[:, 0].half())


def test_a_shared_page_is_free_when_its_last_user_has_given_it_back() -> None:
    memory = DigestMemory("cpu", 8 * KIB)
    shared = page(memory)
    memory.share(shared)
    memory.give_back(shared)
    assert memory.usage().gpu_bytes == 8 * KIB
    memory.share(shared)
    with pytest.raises(AssertionError):
        memory.write(shared, 0, some_digests(1))
    memory.give_back(shared)
    memory.give_back(shared)
    assert memory.usage().gpu_bytes == 0
    with pytest.raises(AssertionError):
        memory.give_back(shared)


@pytest.mark.parametrize("budget", [0, 8 * KIB, 16 * KIB])
def test_a_copy_has_what_was_on_its_way_to_the_page(budget: int) -> None:
    """From host to host, from host to device, and on the device."""
    memory = DigestMemory("cpu", budget, LateCopies())
    blocker = page(memory) if budget == 8 * KIB else None
    source = page(memory)
    memory.write(source, 3, some_digests(5, seed=3))
    if blocker is not None:
        memory.give_back(blocker)
    copied = memory.copy(source)
    assert copied is not None
    places = {0: (None, None), 8 * KIB: (None, 0), 16 * KIB: (0, 8 * KIB)}
    assert (source.start, copied.start) == places[budget]
    # What is written to the first one now is not in the copy.
    memory.write(source, 3, some_digests(5, seed=4))
    for place in range(5):
        assert torch.equal(memory.read(copied, 3 + place), some_digests(5, seed=3)[:, place].half())
        assert torch.equal(memory.read(source, 3 + place), some_digests(5, seed=4)[:, place].half())


def test_a_page_of_the_device_is_copied_to_the_host() -> None:
    memory = DigestMemory("cpu", 8 * KIB, LateCopies())
    source = page(memory)
    memory.write(source, 0, some_digests(64))
    copied = memory.copy(source)
    assert copied is not None and (source.start, copied.start) == (0, None)
    assert torch.equal(memory.read(copied, 63), some_digests(64)[:, 63].half())


class FromDisk(LateCopies):
    """Nothing is on the device."""

    def is_there(self, tensor: torch.Tensor) -> bool:
        return False


def test_what_comes_from_the_host_waits_for_what_is_under_way() -> None:
    copies = FromDisk()
    memory = DigestMemory("cpu", 0, copies)
    target = page(memory)
    memory.write(target, 0, some_digests(4, seed=1))
    assert copies.num_asked == 0
    # A copy to the same place is still under way.
    copies.send(target.data[0, :2], some_digests(2, seed=2)[0].half())
    target.is_used = True
    memory.write(target, 0, some_digests(1, seed=3))
    assert copies.num_made == 1
    assert torch.equal(memory.read(target, 0), some_digests(1, seed=3)[:, 0].half())


def test_without_leave_to_lock_pages_plain_memory_is_taken_and_that_is_said_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    if torch.cuda.is_available():
        pytest.skip("torch page-locks here")
    memory = DigestMemory("cpu")
    memory._pins = True
    pages = [page(memory) for _ in range(3)]
    assert not any(each.data.is_pinned() for each in pages)
    [message] = [r.message for r in caplog.records if "page-locked" in r.message]
    assert "ulimit -l" in message and "digest_bytes" in message
    assert memory.usage().cpu_bytes == 24 * KIB


def test_without_any_memory_there_is_no_page_and_nothing_is_counted_as_taken() -> None:
    memory = Exhausted("cpu", 8 * KIB)
    first = page(memory)
    assert memory.take(8 * KIB, SHAPE, torch.float16) is None and memory.copy(first) is None
    assert memory.usage() == DigestUsage(8 * KIB, 8 * KIB, 0)


def test_streams_on_several_threads_share_it() -> None:
    """Each takes, shares and gives back; in the end all of it is free."""
    memory = DigestMemory("cpu", 100 * KIB)
    problems: list[object] = []

    def work(seed: int) -> None:
        for turn in range(200):
            pages = [page(memory) for _ in range(4)]
            for each in pages:
                each.data.fill_(seed)
                memory.share(each)
                memory.give_back(each)
            if not all(bool((each.data == seed).all()) for each in pages):
                problems.append((seed, turn))
            for each in pages:
                memory.give_back(each)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    memory.check_integrity()
    assert not problems and memory.usage() == DigestUsage(0, 100 * KIB, 0)
