"""The index of digests: what is chosen, and that growing, rewinding and forking change nothing.

All of it with pages on the device, in host memory, and some here and some there.
"""

import random
from collections.abc import Iterator

import pytest
import torch
from late_copies import Exhausted, LateCopies
from torch import Tensor

from streamkv.digest_index import DigestIndex
from streamkv.digest_memory import DigestMemory
from streamkv.digest_pages import page_bytes, room_bytes
from streamkv.kernels.digests import block_weights
from streamkv.kernels.rope import RopeTables, rotate
from streamkv.retrieval_heads import NUM_HEADS
from streamkv.sizing import digest_bytes
from streamkv.tiers.spec import BlockKey, KVSpec

SPEC = KVSpec(num_layers=2, num_kv_heads=1, head_dim=16, block_size=64, dtype="float32")
ROPE = RopeTables(10000.0 ** -(torch.arange(8).double() / 8), 600)
ROWS, SCALES = [0, 1, 1], [0.25, 0.25, 0.5]
ANGLES = ROPE.rows(torch.tensor(512))


KIB = 1 << 10
DIGEST_BYTES = 4 * KIB
"""Pages take 256 KiB, 512 KiB, 1 MiB and so on."""
MEMORIES = {
    "host": lambda: DigestMemory("cpu"),
    "device": lambda: DigestMemory("cpu", 1 << 25),
    "both": lambda: DigestMemory("cpu", 800 * KIB),
    "late": lambda: DigestMemory("cpu", 0, LateCopies()),
    "late both": lambda: DigestMemory("cpu", 800 * KIB, LateCopies()),
}
made_memories: list[DigestMemory] = []
kind_of_memory = "host"


@pytest.fixture(autouse=True, params=list(MEMORIES))
def in_memory(request: pytest.FixtureRequest) -> Iterator[None]:
    """Each test runs with each kind of memory, which is whole in the end."""
    global kind_of_memory
    kind_of_memory = request.param
    made_memories.clear()
    yield
    for each in made_memories:
        each.check_integrity()


def memory() -> DigestMemory:
    """The one that is tested."""
    made_memories.append(MEMORIES[kind_of_memory]())
    return made_memories[-1]


def key(index: int) -> BlockKey:
    return BlockKey((2 * index).to_bytes(16, "big"))


def digest(index: int) -> Tensor:
    return torch.randn(2, 64, 16, generator=torch.Generator().manual_seed(index))


def index_of(num_blocks: int, without: frozenset[int] = frozenset()) -> DigestIndex:
    made = DigestIndex(2, SPEC, memory())
    for block in range(num_blocks):
        if block in without:
            made.put_missing(block)
        else:
            made.put(block, [key(block)], digest(block)[:, None])
    return made


def extended(made: DigestIndex, blocks: range, seed: int = 0) -> DigestIndex:
    """With these blocks besides, all sealed in one step."""
    digests = torch.stack([digest(seed + i) for i in blocks], 1)
    made.put(blocks.start, [key(i) for i in blocks], digests)
    return made


QUERIES = torch.randn(3, 5, 16, generator=torch.Generator().manual_seed(99))


def choose(index: DigestIndex, end_block: int, num_blocks: int) -> tuple[int, ...]:
    return index.choose(QUERIES, 0, end_block, num_blocks, ROWS, ANGLES, SCALES).blocks()


def heaviest(blocks: list[int], num_blocks: int) -> tuple[int, ...]:
    """One weight at a time, from digests as the index holds them."""
    rows = torch.stack([digest(block) for block in blocks], 1).half()
    weights = block_weights(QUERIES, [rows], ROWS, *ANGLES, SCALES).tolist()
    return first_of(dict(zip(blocks, weights, strict=True)), num_blocks)


def first_of(weights: dict[int, float], num_blocks: int) -> tuple[int, ...]:
    """Each block by its weight, or by half of that of the block right before it."""
    ranks = {block: max(each, weights.get(block - 1, 0.0) / 2) for block, each in weights.items()}
    ranked = sorted(ranks, key=lambda block: (-ranks[block], block))
    return tuple(sorted(ranked[:num_blocks]))


def test_the_heaviest_blocks_are_chosen_in_the_order_of_the_stream() -> None:
    index = index_of(200)
    assert len(index) == 200 and index.key(7) == key(7)
    for end_block in (1, 5, 63, 64, 65, 130, 200):
        for num_blocks in (1, 4, 16):
            expected = heaviest(list(range(end_block)), num_blocks)
            assert choose(index, end_block, num_blocks) == expected


def test_what_is_chosen_comes_with_its_weights() -> None:
    """They are shares of all candidates, and no less for a choice of all."""
    rows = torch.stack([digest(block) for block in range(70)], 1).half()
    expected = block_weights(QUERIES, [rows], ROWS, *ANGLES, SCALES)
    for num_blocks in (1, 5, 70, 100):
        choosing = index_of(70).choose(QUERIES, 0, 70, num_blocks, ROWS, ANGLES, SCALES)
        found = torch.tensor(choosing.weights())
        torch.testing.assert_close(found, expected[list(choosing.blocks())])
    assert found.sum().item() == pytest.approx(1)


def test_blocks_before_the_first_are_left_out() -> None:
    index = index_of(40)

    def found(first_block: int, end_block: int) -> tuple[int, ...]:
        return index.choose(QUERIES, first_block, end_block, 5, ROWS, ANGLES, SCALES).blocks()

    assert found(10, 30) == heaviest(list(range(10, 30)), 5)
    assert found(38, 99) == (38, 39)
    assert found(50, 60) == ()


@pytest.mark.parametrize("num_sinks", [1, 4, 64, 100, 128])
def test_sink_tokens_are_no_reason_to_recall(num_sinks: int) -> None:
    """Nothing of a block of sink tokens could be recalled; of others, what is no sink token."""
    index, first = index_of(20), num_sinks // 64
    found = index.choose(QUERIES, 0, 20, 4, ROWS, ANGLES, SCALES, num_sinks).blocks()
    rows = torch.stack([digest(block) for block in range(first, 20)], 1).half()
    weights = block_weights(QUERIES, [rows], ROWS, *ANGLES, SCALES, num_sinks % 64).tolist()
    assert found == first_of(dict(enumerate(weights, first)), 4)
    everything = index.choose(QUERIES, 0, 20, 99, ROWS, ANGLES, SCALES, num_sinks).blocks()
    assert everything == tuple(range(first, 20))


def test_sink_tokens_that_draw_all_attention_do_not_have_their_block_chosen() -> None:
    made = DigestIndex(2, SPEC, memory())
    query = QUERIES.mean(1, keepdim=True)
    for block in range(8):
        made.put(block, [key(block)], 0.1 * digest(block)[:, None])
    alone = made.choose(query[:1], 1, 8, 2, [0], ANGLES, [1.0]).blocks()
    # Keys along the first head's turned query.
    drawing = 0.1 * digest(0)
    drawing[:, :4] = 20 * torch.nn.functional.normalize(rotate(query, *ANGLES)[0], dim=-1)
    made.put(0, [key(0)], drawing[:, None])
    chosen = {
        num_sinks: made.choose(query[:1], 0, 8, 2, [0], ANGLES, [1.0], num_sinks).blocks()
        for num_sinks in (0, 4)
    }
    assert 0 in chosen[0] and chosen[4] == alone


def test_what_follows_a_heavy_block_is_chosen_with_it() -> None:
    """A fact may go on behind a border, where heads that find its beginning do not look."""
    made = DigestIndex(2, SPEC, memory())
    query = QUERIES.mean(1, keepdim=True)
    looked_at = torch.nn.functional.normalize(rotate(query, *ANGLES)[0], dim=-1)
    for block in range(60):
        keys = 0.1 * digest(block)
        if block in (17, 41, 59):
            keys[:, 60:] = 8 * looked_at
        made.put(block, [key(block)], keys[:, None])
    choosing = made.choose(query[:1], 0, 60, 5, [0], ANGLES, [1.0])
    assert choosing.blocks() == (17, 18, 41, 42, 59)
    # What is told of them is how much they are looked at.
    heavy, beside = choosing.weights()[::2], choosing.weights()[1::2]
    assert min(heavy) > 100 * max(beside)
    # What is not there is followed by nothing.
    made.put_missing(41)
    chosen = made.choose(query[:1], 0, 60, 4, [0], ANGLES, [1.0]).blocks()
    assert {17, 18, 59} <= set(chosen) and 41 not in chosen
    others = made.choose(query[:1], 0, 60, 58, [0], ANGLES, [1.0])
    assert 42 in others.blocks()


def test_more_than_there_are_means_all() -> None:
    assert choose(index_of(5), 3, 16) == (0, 1, 2)
    assert choose(index_of(5), 0, 16) == ()
    assert choose(index_of(0), 0, 16) == ()


def test_a_block_that_cannot_be_found_again_is_never_chosen() -> None:
    gone = frozenset({0, 2, 3, 9})
    left = [block for block in range(20) if block not in gone]
    assert choose(index_of(20, gone), 20, 6) == heaviest(left, 6)
    assert choose(index_of(20, gone), 4, 6) == (1,)


def test_a_block_that_was_missing_is_chosen_once_it_has_a_key() -> None:
    index = index_of(8, frozenset({2, 5}))
    assert choose(index, 8, 8) == (0, 1, 3, 4, 6, 7)
    extended(index, range(2, 3))
    assert choose(index, 8, 8) == (0, 1, 2, 3, 4, 6, 7)
    index.truncate(5)
    extended(index, range(5, 8))
    assert choose(index, 8, 8) == tuple(range(8))


def test_a_tie_goes_to_the_earlier_block() -> None:
    index = DigestIndex(2, SPEC, memory())
    for block in range(6):
        index.put(block, [key(block)], digest(0)[:, None])
    assert choose(index, 6, 2) == (0, 1)


def test_a_rewound_index_is_one_that_never_had_more() -> None:
    index = index_of(100)
    index.truncate(30)
    extended(index, range(30, 80))
    assert choose(index, 80, 9) == choose(index_of(80), 80, 9)


def test_a_fork_goes_its_own_way() -> None:
    index = index_of(70)
    fork = index.copy()
    index.truncate(10)
    extended(index, range(10, 70), seed=1000)
    assert choose(fork, 70, 9) == choose(index_of(70), 70, 9) != choose(index, 70, 9)


def test_a_fork_writes_to_no_page_of_its_origin() -> None:
    index = index_of(70)
    fork = index.copy()
    extended(fork, range(70, 100), seed=1000)
    extended(index, range(70, 100))
    assert choose(index, 100, 9) == choose(index_of(100), 100, 9) != choose(fork, 100, 9)


@pytest.mark.parametrize("cuts", [[200], [64, 136], [1, 62, 2, 135], [3000], [191, 2809]])
def test_blocks_sealed_together_are_those_sealed_one_by_one(cuts: list[int]) -> None:
    index, first = DigestIndex(2, SPEC, memory()), 0
    for count in cuts:
        extended(index, range(first, first + count))
        first += count
    assert len(index) == first
    for end_block in (9, 64, 65, 191, 192, 193, first):
        if end_block <= first:
            assert choose(index, end_block, 7) == heaviest(list(range(end_block)), 7)


def test_digests_take_two_bytes_an_element_of_the_room_there_is() -> None:
    assert digest_bytes(SPEC) == 2 * NUM_HEADS * 64 * 16
    one = digest_bytes(SPEC) * 2 // NUM_HEADS
    assert one == DIGEST_BYTES
    assert index_of(64).num_bytes == 64 * one == room_bytes(64, one)
    assert index_of(65).num_bytes == (64 + 128) * one == room_bytes(65, one)


def test_a_block_that_is_sealed_once_more_has_its_new_digest() -> None:
    index, other = index_of(200), index_of(200)
    extended(index, range(60, 70), seed=1000)
    assert choose(index, 200, 9) != choose(other, 200, 9)
    assert not torch.equal(index.digest(64), other.digest(64))
    extended(index, range(60, 70))
    assert len(index) == 200 and choose(index, 200, 9) == choose(other, 200, 9)
    for block in range(200):
        assert torch.equal(index.digest(block), digest(block).half())
    index.put_missing(30)
    assert len(index) == 200 and index.key(30) is None and index.key(31) == key(31)


def weights(index: DigestIndex, num_blocks: int) -> Tensor:
    """Of all blocks, missing ones too."""
    pages, fetch = list(index._cut(0, num_blocks)), index._memory.fetch
    return block_weights(QUERIES, pages, ROWS, *ANGLES, SCALES, fetch=fetch)


def as_lists(blocks: list[int | None]) -> Tensor:
    """Digests of blocks by their seeds in one piece, with zeros for what is missing."""
    rows = [torch.zeros(2, 64, 16) if seed is None else digest(seed) for seed in blocks]
    return torch.stack(rows, 1).half()


@pytest.mark.parametrize("seed", range(3))
def test_whatever_is_done_weights_are_to_the_bit_those_of_pages_on_the_device(seed: int) -> None:
    """Two streams that share memory, grown, rewound, forked and ended by chance, beside lists."""
    draw = random.Random(seed)
    memories = [memory(), DigestMemory("cpu", 1 << 25)]
    streams = [[DigestIndex(2, SPEC, each)] * 1 for each in memories]
    told: list[list[int | None]] = [[]]
    for step in range(60):
        at = draw.randrange(len(told))
        match draw.choice(["grow", "grow", "grow", "again", "miss", "rewind", "fork", "end"]):
            case "grow":
                count, first = draw.choice([1, 3, 70, 150]), len(told[at])
                for each in streams:
                    extended(each[at], range(first, first + count), seed=1000 * step)
                told[at] += [1000 * step + block for block in range(first, first + count)]
            case "again" if len(told[at]) > 5:
                first = draw.randrange(len(told[at]) - 4)
                for each in streams:
                    extended(each[at], range(first, first + 3), seed=1000 * step)
                told[at][first : first + 3] = [1000 * step + first + i for i in range(3)]
            case "miss":
                for each in streams:
                    each[at].put_missing(len(told[at]))
                told[at].append(None)
            case "rewind":
                left = draw.randrange(len(told[at]) + 1)
                for each in streams:
                    each[at].truncate(left)
                del told[at][left:]
            case "fork" if len(told) < 4:
                for each in streams:
                    each.append(each[at].copy())
                told.append(list(told[at]))
            case "end" if len(told) > 1:
                for each in streams:
                    each.pop(at).close()
                told.pop(at)
    for at, blocks in enumerate(told):
        for each in streams:
            assert [each[at].key(i) is None for i in range(len(blocks))] == [
                block is None for block in blocks
            ]
        if blocks:
            there = tuple(i for i, block in enumerate(blocks) if block is not None)
            assert {choose(each[at], len(blocks), len(blocks)) for each in streams} == {there}
            found, other = (weights(each[at], len(blocks)) for each in streams)
            assert torch.equal(found, other)
            plain = block_weights(QUERIES, [as_lists(blocks)], ROWS, *ANGLES, SCALES)
            torch.testing.assert_close(found, plain, atol=1e-6, rtol=1e-4)
    for each, one in zip(streams, memories, strict=True):
        for index in each:
            index.close()
        usage = one.usage()
        assert (usage.gpu_bytes, usage.cpu_bytes, usage.num_lost) == (0, 0, 0)


def test_a_choice_right_behind_a_write_sees_it_and_so_does_the_host() -> None:
    index = index_of(300)
    extended(index, range(298, 310), seed=5000)
    assert torch.equal(index.digest(309), digest(5309).half())
    extended(index, range(310, 311), seed=5000)
    found = weights(index, 311)
    told = [*range(298), *(5000 + block for block in range(298, 311))]
    plain = block_weights(QUERIES, [as_lists(list(told))], ROWS, *ANGLES, SCALES)
    torch.testing.assert_close(found, plain, atol=1e-6, rtol=1e-4)


def test_pages_of_a_fork_count_once_and_are_given_back_by_the_last() -> None:
    index = index_of(100)
    one = index._memory
    before = one.usage()
    fork = index.copy()
    assert one.usage() == before
    extended(fork, range(100, 101))
    grown = sum((one.usage().gpu_bytes, one.usage().cpu_bytes))
    # The second page, which has the new block, has a copy; the first one is shared.
    assert grown == room_bytes(100, DIGEST_BYTES) + page_bytes(1, DIGEST_BYTES)
    index.close()
    assert sum((one.usage().gpu_bytes, one.usage().cpu_bytes)) == fork.num_bytes
    # Alone again: what is written now is written in place.
    extended(fork, range(3, 5), seed=77)
    assert sum((one.usage().gpu_bytes, one.usage().cpu_bytes)) == fork.num_bytes
    fork.close()
    assert one.usage().gpu_bytes == one.usage().cpu_bytes == 0


def test_a_rewind_gives_pages_back_and_what_comes_then_uses_them() -> None:
    index = index_of(500)
    whole = index._memory.usage()
    index.truncate(64)
    assert index.num_bytes == page_bytes(0, DIGEST_BYTES)
    usage = index._memory.usage()
    assert usage.gpu_bytes + usage.cpu_bytes == index.num_bytes
    extended(index, range(64, 500))
    assert index._memory.usage() == whole
    assert choose(index, 500, 9) == heaviest(list(range(500)), 9)


def test_blocks_without_memory_for_their_digests_cannot_be_chosen_and_are_counted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Room for the first page only; then the host has memory again."""
    one = Exhausted("cpu", page_bytes(0, DIGEST_BYTES))
    index = DigestIndex(2, SPEC, one)
    extended(index, range(100))
    index.put_missing(100)
    fork = index.copy()
    extended(index, range(10, 12), seed=1000)
    extended(index, range(101, 110))
    assert one.usage().num_lost == (100 - 64) + 2 + 9 and len(index) == 110
    assert index.key(63) == key(63) and {index.key(i) for i in (10, 11, 64, 109)} == {None}
    assert fork.key(10) == key(10) and torch.equal(fork.digest(10), digest(10).half())
    left = [block for block in range(64) if block not in (10, 11)]
    assert len(left) == 62 and choose(index, 110, 62) == tuple(left)
    told: list[int | None] = [*range(64), *[None] * 46]
    plain = block_weights(QUERIES, [as_lists(told)], ROWS, *ANGLES, SCALES)
    torch.testing.assert_close(weights(index, 110), plain, atol=1e-6, rtol=1e-4)
    assert len([r for r in caplog.records if "no memory for the digests" in r.message]) == 1
    one.is_exhausted = False
    # On a page that was not there before, what else is on it is still missing.
    extended(index, range(70, 72))
    told[70:72] = [70, 71]
    plain = block_weights(QUERIES, [as_lists(told)], ROWS, *ANGLES, SCALES)
    torch.testing.assert_close(weights(index, 110), plain, atol=1e-6, rtol=1e-4)
    assert index.key(70) == key(70) and index.key(72) is None
    index.close()
    fork.close()
    one.check_integrity()
    assert one.usage().gpu_bytes == one.usage().cpu_bytes == 0
