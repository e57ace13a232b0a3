"""The index of digests: what is chosen, and that growing, rewinding and forking change nothing."""

import torch
from torch import Tensor

from streamkv.digest_index import DigestIndex
from streamkv.kernels.digests import block_weights
from streamkv.kernels.rope import RopeTables
from streamkv.tiers.spec import BlockKey, KVSpec

SPEC = KVSpec(num_layers=2, num_kv_heads=1, head_dim=16, block_size=64, dtype="float32")
ROPE = RopeTables(10000.0 ** -(torch.arange(8).double() / 8), 600)
SCALES = [0.25, 0.25]
FAR = 512


def key(index: int) -> BlockKey:
    return BlockKey((2 * index).to_bytes(16, "big"))


def digest(index: int) -> Tensor:
    return torch.randn(2, 1, 16, generator=torch.Generator().manual_seed(index))


def index_of(num_blocks: int, without: frozenset[int] = frozenset()) -> DigestIndex:
    made = DigestIndex(SPEC, "cpu")
    for block in range(num_blocks):
        if block in without:
            made.append(None, None)
        else:
            made.append(key(block), digest(block))
    return made


QUERIES = torch.randn(2, 3, 2, 16, generator=torch.Generator().manual_seed(99))


def choose(index: DigestIndex, end_block: int, num_blocks: int) -> tuple[int, ...]:
    return index.choose(QUERIES, 0, end_block, num_blocks, FAR, ROPE, SCALES)


def heaviest(blocks: list[int], num_blocks: int) -> tuple[int, ...]:
    """One weight at a time, from digests as the index holds them."""
    rows = torch.stack([digest(block) for block in blocks]).half()
    weights = block_weights(QUERIES, rows, FAR, ROPE, SCALES).tolist()
    ranked = sorted(zip(weights, blocks, strict=True), reverse=True)
    return tuple(sorted(block for _, block in ranked[:num_blocks]))


def test_the_heaviest_blocks_are_chosen_in_the_order_of_the_stream() -> None:
    index = index_of(200)
    assert len(index) == 200 and index.key(7) == key(7)
    for end_block in (1, 5, 63, 64, 65, 130, 200):
        for num_blocks in (1, 4, 16):
            expected = heaviest(list(range(end_block)), num_blocks)
            assert choose(index, end_block, num_blocks) == expected


def test_blocks_before_the_first_are_left_out() -> None:
    index = index_of(40)
    found = index.choose(QUERIES, 10, 30, 5, FAR, ROPE, SCALES)
    assert found == heaviest(list(range(10, 30)), 5)
    assert index.choose(QUERIES, 38, 99, 5, FAR, ROPE, SCALES) == (38, 39)
    assert index.choose(QUERIES, 50, 60, 5, FAR, ROPE, SCALES) == ()


def test_more_than_there_are_means_all() -> None:
    assert choose(index_of(5), 3, 16) == (0, 1, 2)
    assert choose(index_of(5), 0, 16) == ()
    assert choose(index_of(0), 0, 16) == ()


def test_a_block_that_cannot_be_found_again_is_never_chosen() -> None:
    gone = frozenset({0, 2, 3, 9})
    left = [block for block in range(20) if block not in gone]
    assert choose(index_of(20, gone), 20, 6) == heaviest(left, 6)
    assert choose(index_of(20, gone), 4, 6) == (1,)


def test_a_tie_goes_to_the_earlier_block() -> None:
    index = DigestIndex(SPEC, "cpu")
    for block in range(6):
        index.append(key(block), digest(0))
    assert choose(index, 6, 2) == (0, 1)


def test_a_rewound_index_is_one_that_never_had_more() -> None:
    index = index_of(100)
    index.truncate(30)
    for block in range(30, 80):
        index.append(key(block), digest(block))
    assert choose(index, 80, 9) == choose(index_of(80), 80, 9)


def test_a_fork_goes_its_own_way() -> None:
    index = index_of(70)
    fork = index.copy()
    index.truncate(10)
    for block in range(10, 70):
        index.append(key(block), digest(1000 + block))
    assert choose(fork, 70, 9) == choose(index_of(70), 70, 9) != choose(index, 70, 9)


def test_digests_take_two_bytes_an_element_of_the_room_there_is() -> None:
    assert index_of(64).num_bytes == 64 * 2 * 2 * 16
    assert index_of(65).num_bytes == 128 * 2 * 2 * 16


def test_a_block_that_is_sealed_once_more_has_its_new_digest() -> None:
    index, other = index_of(20), index_of(20)
    for block in range(20):
        index.put(block, key(block), digest((block + 7) % 20))
    for block in range(20):
        index.put(block, key(block), digest(block))
        assert (index.row(block) == other.row(block)).all()
    index.put(20, None, None)
    assert len(index) == 21 and index.key(20) is None
    assert choose(index, 21, 4) == choose(other, 20, 4)
