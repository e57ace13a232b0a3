"""Frames that zstd coded, decoded together, against the bytes that were coded."""

import gc
from concurrent.futures import ThreadPoolExecutor
from itertools import combinations

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from streamkv.tiers.codec import Bytes, CodecError, Codecs
from streamkv.tiers.planes import PlaneTable, join, slabs_of

FRAME_BYTES = 16384
KINDS = ("kv", "half", "packed", "zeros", "noise")


def frame_of(kind: str, seed: int, element_bytes: int) -> Bytes:
    """A frame whose planes are: of values like KV, one kept in two, all packed, tiny, all kept."""
    rng = np.random.default_rng(seed)
    if kind == "kv":
        values = rng.standard_normal(FRAME_BYTES // element_bytes).astype(np.float32)
        bits = values.view(np.uint32) >> 8 * (4 - element_bytes)
        return bits.astype(f"<u{element_bytes}").view(np.uint8)
    if kind == "zeros":
        return np.zeros(FRAME_BYTES, dtype=np.uint8)
    frame = rng.integers(0, 256, FRAME_BYTES, dtype=np.uint8)
    if kind == "half":
        frame[seed % 2 :: 2] >>= 3 + seed % 4
    elif kind == "packed":
        frame >>= 1 + seed % 6
    return frame


def coded_of(frames: list[Bytes], element_bytes: int) -> tuple[Bytes, list[int]]:
    """Their coded forms one behind the other, and the bytes of each."""
    codec = Codecs(element_bytes).named("zstd")
    coded = [codec.encode(frame) for frame in frames]
    return np.frombuffer(b"".join(coded), dtype=np.uint8), [len(each) for each in coded]


def decoded(coded: Bytes, lengths: list[int], element_bytes: int) -> Bytes:
    out = np.full((len(lengths), FRAME_BYTES), 0xEE, dtype=np.uint8)
    Codecs(element_bytes).named("zstd").decode(coded, lengths, out)
    return out


def table_of(coded: Bytes, lengths: list[int], element_bytes: int) -> PlaneTable:
    """Where the planes of frames that were not kept whole lie, plane by plane."""
    begins, sizes, at = [], [], 0
    for length in lengths:
        head = coded[at : at + 4 * element_bytes].view("<u4").astype(int)
        sizes.append(head)
        begins.append([at + 4 * element_bytes + sum(head[:place]) for place in range(len(head))])
        at += length
    return PlaneTable(np.array(begins).T, np.array(sizes).T, FRAME_BYTES // element_bytes)


def test_the_kinds_have_planes_that_were_kept_and_planes_that_were_not() -> None:
    lengths = {}
    for kind in KINDS:
        coded, (lengths[kind],) = coded_of([frame_of(kind, 1, 2)], 2)
        if kind != "noise":
            table = table_of(coded, [coded.size], 2)
            num_kept = int((table.sizes == table.plane_bytes).sum())
            assert num_kept == {"kv": 1, "half": 1}.get(kind, 0)
    assert lengths["noise"] == FRAME_BYTES
    assert len(set(lengths.values())) == len(KINDS)


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(KINDS), st.integers(0, 9)), min_size=1, max_size=10),
    st.sampled_from([1, 2, 4]),
)
def test_frames_of_any_kinds_come_back_together(
    kinds: list[tuple[str, int]], element_bytes: int
) -> None:
    frames = [frame_of(kind, seed, max(element_bytes, 2)) for kind, seed in kinds]
    assert np.array_equal(decoded(*coded_of(frames, element_bytes), element_bytes), frames)


@pytest.mark.parametrize("element_bytes", [2, 4])
def test_every_slice_of_frames_has_the_bytes_that_it_has_in_all(element_bytes: int) -> None:
    frames = [frame_of(kind, seed, element_bytes) for seed in (1, 2) for kind in KINDS]
    coded, lengths = coded_of(frames, element_bytes)
    for first, stop in combinations(range(len(frames) + 1), 2):
        begin, end = sum(lengths[:first]), sum(lengths[:stop])
        out = decoded(coded[begin:end], lengths[first:stop], element_bytes)
        assert np.array_equal(out, frames[first:stop])


@pytest.mark.parametrize("element_bytes", [2, 4])
def test_planes_of_one_place_are_put_in_by_one_step(element_bytes: int) -> None:
    """Or by a few: zstd takes another buffer when one is full."""
    num_frames = 32
    frames = [frame_of("kv", seed, element_bytes) for seed in range(num_frames)]
    coded, lengths = coded_of(frames, element_bytes)
    table = table_of(coded, lengths, element_bytes)
    slabs = slabs_of(coded, table, zstandard.ZstdDecompressor())
    assert sum(len(slab.planes) for slab in slabs) == num_frames * element_bytes
    kept = [slab for slab in slabs if (table.sizes[slab.place] == table.plane_bytes).all()]
    assert [len(slab.planes) for slab in kept] == (element_bytes - 1) * [num_frames]
    assert len(slabs) <= 4 * element_bytes


def test_what_zstd_unpacked_lives_as_long_as_the_slabs() -> None:
    frames = [frame_of(kind, seed, 2) for seed in range(6) for kind in ("packed", "zeros", "kv")]
    coded, lengths = coded_of(frames, 2)
    slabs = slabs_of(coded, table_of(coded, lengths, 2), zstandard.ZstdDecompressor())
    gc.collect()
    _other = [np.full(FRAME_BYTES // 2, 0xEE, dtype=np.uint8) for _ in range(200)]
    out = np.empty((len(frames), FRAME_BYTES // 2), dtype="<u2")
    join(slabs, out)
    assert np.array_equal(out.view(np.uint8), frames)


@pytest.mark.parametrize("bad", range(4))
def test_one_broken_plane_among_many_is_refused(bad: int) -> None:
    frames = [frame_of("packed", 3, 2) for _ in range(4)]
    coded, lengths = coded_of(frames, 2)
    broken = coded.copy()
    broken[sum(lengths[:bad]) + 8] ^= 0xFF  # zstd's magic number
    with pytest.raises(CodecError, match="zstd"):
        decoded(broken, lengths, 2)
    broken = coded.copy()
    broken[sum(lengths[:bad])] ^= 1  # the size of its first plane
    with pytest.raises(CodecError, match="with planes of"):
        decoded(broken, lengths, 2)


def test_any_flipped_byte_is_refused_or_leaves_the_other_frames_as_they_are() -> None:
    frames = [frame_of("packed", seed, 2) for seed in range(3)]
    coded, lengths = coded_of(frames, 2)
    for position in range(lengths[0], lengths[0] + 64):
        broken = coded.copy()
        broken[position] ^= 0xFF
        try:
            out = decoded(broken, lengths, 2)
        except CodecError:
            continue
        assert np.array_equal(out[[0, 2]], [frames[0], frames[2]])


@pytest.mark.parametrize("change", [-1, 1])
def test_lengths_that_are_not_those_of_the_frames_are_refused(change: int) -> None:
    coded, lengths = coded_of([frame_of("kv", seed, 2) for seed in range(3)], 2)
    with pytest.raises(CodecError):
        decoded(coded, [lengths[0] + change, *lengths[1:]], 2)
    with pytest.raises(CodecError):
        decoded(coded, [lengths[0] + change, lengths[1] - change, lengths[2]], 2)
    for few in (lengths[:2], []):
        with pytest.raises(CodecError):
            decoded(coded, few, 2)


def test_many_threads_decode_at_once() -> None:
    codec = Codecs(2).named("zstd")
    cases = []
    for seed in range(8):
        frames = [frame_of(kind, seed, 2) for kind in KINDS]
        cases.append((frames, *coded_of(frames, 2)))

    def work(number: int) -> bool:
        frames, coded, lengths = cases[number % len(cases)]
        out = np.full((len(frames), FRAME_BYTES), 0xEE, dtype=np.uint8)
        codec.decode(coded, lengths, out)
        return np.array_equal(out, frames)

    with ThreadPoolExecutor(8) as threads:
        assert all(threads.map(work, range(200)))
