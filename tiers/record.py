"""The stored form of a block: a header, and one frame per layer, cut into pieces of one size.

    header   magic, version, codec, number of frames, sequence, spec hash, (length, checksum)
             of each frame, checksum of the header
    payload  the coded frames one after another, padded to whole pieces

Invariant: each frame is coded and checksummed by itself, so one layer can be read alone, and
every checksum covers the key and the layer, so that bytes of another record never pass for this
one. All pieces have one size, whole pages of the store, so that pages freed by one record fit
every other. This module knows neither files nor LMDB.
"""

import struct
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from streamkv.errors import StoreError
from streamkv.tiers.checksum import crc32, joined_checksum
from streamkv.tiers.codec import Bytes, Codec, CodecError, Codecs, RawCodec
from streamkv.tiers.spec import FORMAT_VERSION, BlockKey, KVSpec

MAGIC = b"SKVR"


_PAGE_HEADER_BYTES = 16  # LMDB puts this before a value that has pages of its own
_FIXED = struct.Struct("<4sHBxHxxQ8s")
_FRAME = struct.Struct("<II")
_CHECKSUM = struct.Struct("<I")
_MAX_PIECE_PAGES = 16


class BadRecordError(StoreError):
    """A stored record that is torn, damaged, or of another layout. Readers count it as a miss."""


@dataclass(frozen=True, slots=True)
class PieceLayout:
    """How payloads are cut.

    Attributes:
        piece_pages: pages of one piece.
        piece_bytes: bytes of one piece: its pages less the header LMDB puts before them.
    """

    piece_pages: int
    piece_bytes: int

    @classmethod
    def of(cls, spec: KVSpec, page_bytes: int) -> "PieceLayout":
        """The layout for `spec`: about four pieces a frame, so that padding is near 1 %."""
        pages = spec.frame_bytes // page_bytes // 4
        pages = min(max(pages, 1), _MAX_PIECE_PAGES)
        return cls(pages, pages * page_bytes - _PAGE_HEADER_BYTES)

    @property
    def piece_stride(self) -> int:
        """Bytes from a piece to the next where they lie one behind the other."""
        return self.piece_bytes + _PAGE_HEADER_BYTES

    def num_pieces(self, num_bytes: int) -> int:
        """Pieces that hold `num_bytes`."""
        return -(-num_bytes // self.piece_bytes)

    def num_pages(self, num_bytes: int) -> int:
        """Pages that hold `num_bytes` of payload."""
        return self.num_pieces(num_bytes) * self.piece_pages


@dataclass(frozen=True, slots=True)
class RecordHeader:
    """What a record says of itself.

    Attributes:
        sequence: order of writing in its store; names the pieces.
        codec: code of the codec of all frames.
        spec_hash: layout of the block.
        lengths: coded bytes of each frame, `[num_layers]`.
        checksums: checksum of each coded frame, `[num_layers]`.
    """

    sequence: int
    codec: int
    spec_hash: bytes
    lengths: tuple[int, ...]
    checksums: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Coded bytes of all frames."""
        return sum(self.lengths)

    @property
    def offsets(self) -> list[int]:
        """Where each frame begins in the payload, and where the last ends, `[num_layers + 1]`."""
        return list(accumulate(self.lengths, initial=0))

    def pack(self, key: BlockKey) -> bytes:
        """The header as stored under `key`."""
        fixed = _FIXED.pack(
            MAGIC, FORMAT_VERSION, self.codec, len(self.lengths), self.sequence, self.spec_hash
        )
        frames = map(_FRAME.pack, self.lengths, self.checksums)
        packed = b"".join([fixed, *frames])
        return packed + _CHECKSUM.pack(crc32(packed, crc32(key)))

    @classmethod
    def unpack(cls, key: BlockKey, packed: bytes, spec: KVSpec) -> "RecordHeader":
        """The header stored under `key`.

        Raises:
            BadRecordError: damaged, of another key, of another format version or another layout.
        """
        expected = _FIXED.size + spec.num_layers * _FRAME.size + _CHECKSUM.size
        if len(packed) < _FIXED.size or packed[:4] != MAGIC:
            raise BadRecordError("no record header")
        _, version, codec, num_frames, sequence, spec_hash = _FIXED.unpack_from(packed)
        if version != FORMAT_VERSION:
            raise BadRecordError(f"format version {version}, not {FORMAT_VERSION}")
        if spec_hash != spec.spec_hash or num_frames != spec.num_layers:
            raise BadRecordError("written for another layout")
        if len(packed) != expected:
            raise BadRecordError(f"header of {len(packed)} bytes, expected {expected}")
        body, end = packed[: -_CHECKSUM.size], packed[-_CHECKSUM.size :]
        if _CHECKSUM.pack(crc32(body, crc32(key))) != end:
            raise BadRecordError("checksum of the header")
        lengths, checksums = zip(*_FRAME.iter_unpack(body[_FIXED.size :]), strict=True)
        return cls(sequence, codec, spec_hash, lengths, checksums)


@dataclass(frozen=True, slots=True)
class EncodedRecord:
    """A block ready to be stored.

    Attributes:
        key: its name.
        codec: code of its codec.
        lengths: coded bytes of each frame.
        checksums: checksum of each coded frame.
        payload: whole pieces.
    """

    key: BlockKey
    codec: int
    lengths: tuple[int, ...]
    checksums: tuple[int, ...]
    payload: bytes

    @property
    def num_bytes(self) -> int:
        """Coded bytes of all frames."""
        return sum(self.lengths)

    def header(self, sequence: int, spec: KVSpec) -> RecordHeader:
        """The header under which it is stored as number `sequence`."""
        return RecordHeader(sequence, self.codec, spec.spec_hash, self.lengths, self.checksums)


def frame_checksum(key: BlockKey, layer: int, coded: bytes | memoryview) -> int:
    """Checksum of a coded frame in its place.

    CRC-32 by ISA-L: 19 GB/s on a core where zlib's reaches 1.2. A warm read of 8 MiB was mostly
    zlib's checksum before.
    """
    return crc32(coded, _begin(layer, crc32(key)))


def encode_record(
    key: BlockKey, block: Bytes, spec: KVSpec, layout: PieceLayout, codec: Codec
) -> EncodedRecord:
    """Code `block` (uint8 `[block_bytes]`, contiguous) for storing."""
    frames = [codec.encode(frame) for frame in block.reshape(spec.num_layers, spec.frame_bytes)]
    lengths = tuple(map(len, frames))
    padding = layout.num_pieces(sum(lengths)) * layout.piece_bytes - sum(lengths)
    checksums = tuple(frame_checksum(key, layer, frame) for layer, frame in enumerate(frames))
    return EncodedRecord(key, codec.code, lengths, checksums, b"".join([*frames, bytes(padding)]))


def decode_frames(
    key: BlockKey, header: RecordHeader, layers: range, coded: Bytes, out: Bytes, codecs: Codecs
) -> None:
    """Check and decode the frames of `layers` into `out`.

    Args:
        layers: consecutive layers.
        coded: their coded frames one after another, uint8; raw frames may lie in `out`.
        out: uint8 `[len(layers), frame_bytes]`, contiguous; undefined after an error.

    Raises:
        BadRecordError: a checksum or a coded frame is wrong.
    """
    lengths = header.lengths[layers.start : layers.stop]
    if _are_right(key, header, layers, coded):
        # A frame that does not decode all the same is found again below, and named.
        with suppress(CodecError):
            _decode(header, coded, lengths, out, codecs)
            return
    start = 0
    for at, (layer, length) in enumerate(zip(layers, lengths, strict=True)):
        frame = coded[start : start + length]
        start += length
        if frame_checksum(key, layer, frame.data) != header.checksums[layer]:
            raise BadRecordError(f"checksum of layer {layer}")
        try:
            _decode(header, frame, [length], out[at : at + 1], codecs)
        except CodecError as error:
            raise BadRecordError(f"layer {layer}: {error}") from error


def _decode(
    header: RecordHeader, coded: Bytes, lengths: Sequence[int], out: Bytes, codecs: Codecs
) -> None:
    if header.codec == RawCodec.code and np.may_share_memory(coded, out):
        return  # read in place
    codecs.coded(header.codec).decode(coded, lengths, out)


def _are_right(key: BlockKey, header: RecordHeader, layers: range, coded: Bytes) -> bool:
    """Whether the coded frames of some layers are right, by one checksum over all of them."""
    begin = crc32(key)
    frames = [
        (_begin(layer, begin), header.checksums[layer], header.lengths[layer]) for layer in layers
    ]
    return bool(crc32(coded.data) == joined_checksum(frames))


def _begin(layer: int, key_checksum: int) -> int:
    """What the checksum of a frame begins with."""
    seed: int = crc32(layer.to_bytes(4, "little"), key_checksum)
    return seed
