import zlib
from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest

from streamkv.tiers.codec import Bytes, Codecs
from streamkv.tiers.record import (
    BadRecordError,
    EncodedRecord,
    PieceLayout,
    RecordHeader,
    decode_frames,
    encode_record,
    frame_checksum,
)
from streamkv.tiers.spec import BlockKey, KVSpec

SPEC = KVSpec(num_layers=3, num_kv_heads=2, head_dim=32, dtype="bfloat16")
LAYOUT = PieceLayout.of(SPEC, 4096)
KEY = BlockKey(b"k" * 16)
CODECS = Codecs(2)


def block(seed: int = 0) -> Bytes:
    values = np.random.default_rng(seed).standard_normal(SPEC.block_bytes // 2)
    return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)


def encoded(codec: str = "zstd", seed: int = 0) -> EncodedRecord:
    return encode_record(KEY, block(seed), SPEC, LAYOUT, CODECS.named(codec))


def decoded(record: EncodedRecord, payload: bytes, layers: range, key: BlockKey = KEY) -> Bytes:
    header = record.header(1, SPEC)
    start, stop = header.offsets[layers.start], header.offsets[layers.stop]
    out = np.empty((len(layers), SPEC.frame_bytes), dtype=np.uint8)
    coded = np.frombuffer(payload[start:stop], dtype=np.uint8)
    decode_frames(key, header, layers, coded, out, CODECS)
    return out.reshape(-1)


@pytest.mark.parametrize(
    ("spec", "pages"),
    [
        (KVSpec(2, 1, 2, "bfloat16", block_size=4), 1),
        (KVSpec(30, 3, 64, "bfloat16"), 3),  # SmolLM2-135M: frames of 12 pages
        (KVSpec(30, 3, 64, "float32"), 6),
        (KVSpec(32, 8, 128, "bfloat16"), 16),  # Llama-3.1-8B: frames of 64 pages
        (KVSpec(32, 64, 128, "float32"), 16),
    ],
)
def test_a_piece_with_lmdbs_header_is_whole_pages(spec: KVSpec, pages: int) -> None:
    layout = PieceLayout.of(spec, 4096)
    assert layout.piece_pages == pages
    assert layout.piece_bytes == 4096 * pages - 16


def test_pieces_are_counted_at_their_edges() -> None:
    layout = PieceLayout(2, 8176)
    assert [layout.num_pieces(n) for n in (1, 8176, 8177)] == [1, 1, 2]
    assert layout.num_pages(8177) == 4


@pytest.mark.parametrize("codec", ["raw", "zstd"])
def test_a_record_is_whole_pieces_and_comes_back(codec: str) -> None:
    record = encoded(codec)
    assert len(record.payload) % LAYOUT.piece_bytes == 0
    assert len(record.payload) - sum(record.lengths) < LAYOUT.piece_bytes
    assert np.array_equal(decoded(record, record.payload, range(3)), block())


@pytest.mark.parametrize("codec", ["raw", "zstd"])
@pytest.mark.parametrize("layer", [0, 1, 2])
def test_one_layer_is_decoded_alone(codec: str, layer: int) -> None:
    record = encoded(codec)
    frame = block().reshape(3, -1)[layer]
    assert np.array_equal(decoded(record, record.payload, range(layer, layer + 1)), frame)


@pytest.mark.parametrize("codec", ["raw", "zstd"])
@pytest.mark.parametrize("layer", [0, 1, 2])
def test_a_flipped_bit_costs_its_own_layer_only(codec: str, layer: int) -> None:
    record = encoded(codec)
    damaged = bytearray(record.payload)
    damaged[record.header(1, SPEC).offsets[layer] + 100] ^= 1
    for other in range(3):
        layers = range(other, other + 1)
        if other == layer:
            with pytest.raises(BadRecordError, match=f"checksum of layer {layer}"):
                decoded(record, bytes(damaged), layers)
        else:
            assert decoded(record, bytes(damaged), layers).size == SPEC.frame_bytes


@pytest.mark.parametrize("codec", ["raw", "zstd"])
def test_sound_frames_are_checked_together(codec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = [block(0), block(1)]
    blocks[1].reshape(3, -1)[1] = 0  # frames of zstd differ in length
    records = [encode_record(KEY, each, SPEC, LAYOUT, CODECS.named(codec)) for each in blocks]

    def one_by_one(*_: object) -> int:
        raise AssertionError("a frame was checked by itself")

    monkeypatch.setattr("streamkv.tiers.record.frame_checksum", one_by_one)
    for first, stop in combinations(range(4), 2):
        for each, record in zip(blocks, records, strict=True):
            wanted = each.reshape(3, -1)[first:stop].reshape(-1)
            assert np.array_equal(decoded(record, record.payload, range(first, stop)), wanted)


@pytest.mark.parametrize("codec", ["raw", "zstd"])
@pytest.mark.parametrize("layer", [0, 1, 2])
def test_a_damaged_frame_is_named_among_sound_ones(codec: str, layer: int) -> None:
    record = encoded(codec)
    begin, end = record.header(1, SPEC).offsets[layer : layer + 2]
    for position in {begin, begin + 9, (begin + end) // 2, end - 1}:
        damaged = bytearray(record.payload)
        damaged[position] ^= 0x80
        with pytest.raises(BadRecordError, match=f"checksum of layer {layer}"):
            decoded(record, bytes(damaged), range(3))


@pytest.mark.parametrize("layer", [0, 1, 2])
def test_a_frame_with_a_right_checksum_that_zstd_did_not_write_is_named(layer: int) -> None:
    sound = encoded()
    begin = sound.header(1, SPEC).offsets[layer]
    payload = bytearray(sound.payload)
    payload[begin] ^= 1  # the size of its first plane
    checksums = list(sound.checksums)
    checksums[layer] = frame_checksum(KEY, layer, payload[begin : begin + sound.lengths[layer]])
    record = replace(sound, checksums=tuple(checksums))
    with pytest.raises(BadRecordError, match=f"layer {layer}: zstd frame of"):
        decoded(record, bytes(payload), range(3))
    for other in {0, 1, 2} - {layer}:
        frame = block().reshape(3, -1)[other]
        assert np.array_equal(decoded(record, bytes(payload), range(other, other + 1)), frame)


def test_frames_of_another_key_or_layer_are_refused() -> None:
    record = encoded("raw")
    with pytest.raises(BadRecordError):
        decoded(record, record.payload, range(3), BlockKey(b"x" * 16))
    frame = SPEC.frame_bytes
    swapped = record.payload[frame : 2 * frame] + record.payload[:frame]
    with pytest.raises(BadRecordError):
        decoded(record, swapped, range(2))


def test_a_codec_of_a_later_version_is_a_bad_record() -> None:
    record = EncodedRecord(KEY, 77, *(getattr(encoded(), n) for n in ("lengths", "checksums")), b"")
    with pytest.raises(BadRecordError, match="codec 77"):
        decoded(record, encoded().payload, range(1))


def test_a_header_comes_back() -> None:
    header = encoded().header(12345, SPEC)
    assert RecordHeader.unpack(KEY, header.pack(KEY), SPEC) == header
    assert header.num_bytes == sum(header.lengths)
    assert header.offsets[0] == 0
    assert len(header.pack(KEY)) < 1000


def test_a_header_with_any_flipped_bit_is_refused() -> None:
    packed = encoded().header(1, SPEC).pack(KEY)
    for position in range(len(packed)):
        damaged = bytearray(packed)
        damaged[position] ^= 4
        with pytest.raises(BadRecordError):
            RecordHeader.unpack(KEY, bytes(damaged), SPEC)


@pytest.mark.parametrize("size", [0, 3, 20, 40, 51])
def test_a_torn_header_is_refused(size: int) -> None:
    packed = encoded().header(1, SPEC).pack(KEY)
    with pytest.raises(BadRecordError):
        RecordHeader.unpack(KEY, packed[:size], SPEC)


def test_a_header_of_another_key_or_layout_is_refused() -> None:
    packed = encoded().header(1, SPEC).pack(KEY)
    with pytest.raises(BadRecordError, match="checksum of the header"):
        RecordHeader.unpack(BlockKey(b"x" * 16), packed, SPEC)
    other = KVSpec(num_layers=3, num_kv_heads=2, head_dim=32, dtype="float16")
    with pytest.raises(BadRecordError, match="another layout"):
        RecordHeader.unpack(KEY, packed, other)


def test_a_frame_s_checksum_is_crc_32() -> None:
    """Stores that were written with another implementation of it stay readable."""
    key = BlockKey(bytes(range(16)))
    for coded in (b"", b"x", bytes(range(256)) * 33):
        seed = zlib.crc32((7).to_bytes(4, "little"), zlib.crc32(key))
        assert frame_checksum(key, 7, coded) == zlib.crc32(coded, seed)
