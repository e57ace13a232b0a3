import struct
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from streamkv.errors import ConfigError
from streamkv.tiers.codec import Bytes, Codec, CodecError, Codecs

FRAME_BYTES = 16384


def kv_like(seed: int, element_bytes: int) -> Bytes:
    """Normally distributed values of a float type, as bytes."""
    values = np.random.default_rng(seed).standard_normal(FRAME_BYTES // element_bytes)
    bits = values.astype(np.float32).view(np.uint32)
    return bits.view(np.uint8) if element_bytes == 4 else (bits >> 16).astype(np.uint16).view("u1")


def noise(seed: int) -> Bytes:
    return np.random.default_rng(seed).integers(0, 256, FRAME_BYTES, dtype=np.uint8)


def round_trip(codec: Codec, frame: Bytes) -> Bytes:
    out = np.full(frame.size, 0xEE, dtype=np.uint8)
    decode_one(codec, np.frombuffer(codec.encode(frame), dtype=np.uint8), out)
    return out


def decode_one(codec: Codec, coded: Bytes, out: Bytes) -> None:
    codec.decode(coded, [coded.size], out.reshape(1, -1))


@pytest.mark.parametrize("name", ["raw", "zstd"])
@pytest.mark.parametrize("element_bytes", [2, 4])
@pytest.mark.parametrize("kind", ["kv", "noise", "zeros"])
def test_a_round_trip_gives_the_same_bytes(name: str, element_bytes: int, kind: str) -> None:
    frames = {
        "kv": kv_like(1, element_bytes),
        "noise": noise(2),  # every bit pattern: NaNs with payloads, infinities, subnormals
        "zeros": np.zeros(FRAME_BYTES, dtype=np.uint8),
    }
    codec = Codecs(element_bytes).named(name)
    assert np.array_equal(round_trip(codec, frames[kind]), frames[kind])


@pytest.mark.parametrize(
    ("element_bytes", "bits"),
    [(2, [0x7FC1, 0xFF81, 0x7F80, 0x8000, 0x0001]), (4, [0x7FC00001, 0xFF800001, 0x80000000, 1])],
)
def test_nan_payloads_and_signed_zeros_survive(element_bytes: int, bits: list[int]) -> None:
    frame = np.resize(np.array(bits, dtype=f"<u{element_bytes}"), 2048).view(np.uint8)
    assert np.array_equal(round_trip(Codecs(element_bytes).named("zstd"), frame), frame)


@given(data=st.binary(min_size=1, max_size=300), element_bytes=st.sampled_from([2, 4]))
def test_any_bytes_come_back(data: bytes, element_bytes: int) -> None:
    frame = np.frombuffer(data * element_bytes, dtype=np.uint8)
    for name in ("raw", "zstd"):
        assert np.array_equal(round_trip(Codecs(element_bytes).named(name), frame), frame)


def test_planes_beat_plain_zstd_on_values_like_kv() -> None:
    frame = kv_like(3, 2)
    coded = Codecs(2).named("zstd").encode(frame)
    plain = zstandard.ZstdCompressor(level=1).compress(frame.tobytes())
    assert len(coded) < 0.8 * frame.size
    assert len(coded) < 0.9 * len(plain)


def planes_of(frame: Bytes, element_bytes: int) -> list[bytes]:
    """The first bytes of all elements, then the second ones, and so on."""
    return [frame[place::element_bytes].tobytes() for place in range(element_bytes)]


@pytest.mark.parametrize("element_bytes", [2, 4])
@pytest.mark.parametrize("level", [1, 3])
def test_planes_that_zstd_coded_otherwise_are_read(element_bytes: int, level: int) -> None:
    """As stores of earlier versions have them."""
    frame, compressor = kv_like(6, element_bytes), zstandard.ZstdCompressor(level=level)
    coded = [compressor.compress(plane) for plane in planes_of(frame, element_bytes)]
    packed = struct.pack(f"<{element_bytes}I", *map(len, coded)) + b"".join(coded)
    out = np.full(frame.size, 0xEE, dtype=np.uint8)
    decode_one(Codecs(element_bytes).named("zstd"), np.frombuffer(packed, dtype=np.uint8), out)
    assert np.array_equal(out, frame)


def test_looking_for_few_matches_makes_values_like_kv_smaller() -> None:
    frame, compressor = kv_like(8, 2), zstandard.ZstdCompressor(level=1)
    by_level = sum(len(compressor.compress(plane)) for plane in planes_of(frame, 2))
    assert len(Codecs(2).named("zstd").encode(frame)) < by_level


@pytest.mark.parametrize("name", ["raw", "zstd"])
def test_what_cannot_shrink_does_not_grow(name: str) -> None:
    assert len(Codecs(2).named(name).encode(noise(4))) == FRAME_BYTES


@pytest.mark.parametrize("name", ["raw", "zstd"])
@pytest.mark.parametrize("size", [0, 1, 7, 8, 100, FRAME_BYTES - 1, FRAME_BYTES + 1])
def test_bytes_of_a_wrong_size_are_refused(name: str, size: int) -> None:
    coded = np.zeros(size, dtype=np.uint8)
    with pytest.raises(CodecError):
        decode_one(Codecs(2).named(name), coded, np.empty(FRAME_BYTES, dtype=np.uint8))


def test_a_plane_that_claims_another_size_is_refused_before_it_is_made() -> None:
    bomb = zstandard.ZstdCompressor().compress(bytes(1 << 24))
    coded = struct.pack("<2I", len(bomb), len(bomb)) + bomb + bomb
    with pytest.raises(CodecError, match="16777216 bytes, expected 8192"):
        decode_one(
            Codecs(2).named("zstd"),
            np.frombuffer(coded, dtype=np.uint8),
            np.empty(FRAME_BYTES, dtype=np.uint8),
        )


def test_damaged_zstd_is_refused_or_differs_but_never_crashes() -> None:
    codec, frame = Codecs(2).named("zstd"), kv_like(5, 2)
    coded = np.frombuffer(codec.encode(frame), dtype=np.uint8)
    out = np.empty(FRAME_BYTES, dtype=np.uint8)
    refused = 0
    for position in range(0, 64):
        damaged = coded.copy()
        damaged[position] ^= 0xFF
        try:
            decode_one(codec, damaged, out)
        except CodecError:
            refused += 1
    assert refused > 0


def test_one_codec_serves_many_threads() -> None:
    codec = Codecs(2).named("zstd")

    def work(seed: int) -> bool:
        frame = kv_like(seed, 2)
        return all(np.array_equal(round_trip(codec, frame), frame) for _ in range(20))

    with ThreadPoolExecutor(8) as threads:
        assert all(threads.map(work, range(32)))


def test_an_unknown_codec_is_refused_by_name_and_by_code() -> None:
    with pytest.raises(ConfigError, match=r"codec='gzip': not a codec\. Use one of 'raw', 'zstd'"):
        Codecs(2).named("gzip")
    with pytest.raises(CodecError, match="codec 77"):
        Codecs(2).coded(77)
