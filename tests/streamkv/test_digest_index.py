"""The index of digests: what is chosen, and that growing, rewinding and forking change nothing."""

import pytest
import torch
from torch import Tensor

from streamkv.digest_index import DigestIndex, page_rows
from streamkv.kernels.digests import block_weights
from streamkv.kernels.rope import RopeTables, rotate
from streamkv.retrieval_heads import NUM_HEADS
from streamkv.sizing import digest_bytes
from streamkv.tiers.spec import BlockKey, KVSpec

SPEC = KVSpec(num_layers=2, num_kv_heads=1, head_dim=16, block_size=64, dtype="float32")
ROPE = RopeTables(10000.0 ** -(torch.arange(8).double() / 8), 600)
ROWS, SCALES = [0, 1, 1], [0.25, 0.25, 0.5]
ANGLES = ROPE.rows(torch.tensor(512))


def key(index: int) -> BlockKey:
    return BlockKey((2 * index).to_bytes(16, "big"))


def digest(index: int) -> Tensor:
    return torch.randn(2, 64, 16, generator=torch.Generator().manual_seed(index))


def index_of(num_blocks: int, without: frozenset[int] = frozenset()) -> DigestIndex:
    made = DigestIndex(2, SPEC, "cpu")
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
    ranked = sorted(zip(weights, blocks, strict=True), reverse=True)
    return tuple(sorted(block for _, block in ranked[:num_blocks]))


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
    ranked = sorted(zip(weights, range(first, 20), strict=True), reverse=True)
    assert found == tuple(sorted(block for _, block in ranked[:4]))
    everything = index.choose(QUERIES, 0, 20, 99, ROWS, ANGLES, SCALES, num_sinks).blocks()
    assert everything == tuple(range(first, 20))


def test_sink_tokens_that_draw_all_attention_do_not_have_their_block_chosen() -> None:
    made = DigestIndex(2, SPEC, "cpu")
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
    index = DigestIndex(2, SPEC, "cpu")
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
    index, first = DigestIndex(2, SPEC, "cpu"), 0
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
    assert index_of(64).num_bytes == 64 * one
    assert index_of(65).num_bytes == (64 + 128) * one
    assert [page_rows(number) for number in range(6)] == [64, 128, 256, 512, 1024, 1024]


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
