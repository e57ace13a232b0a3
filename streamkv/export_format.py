"""How an exported session lies in one file: framing and checksums, written and read in one pass.

    file    = MAGIC, frame ...
    frame   = payload length u32, kind u8, payload, CRC-32 u32                (little-endian)

    HEADER  JSON of ExportHeader and the format version
    JOURNAL a piece of the session's journal; all pieces one after another are the file
    DIGESTS a piece of its digests, likewise; none if it has none
    BLOCK   key 16 bytes, codec u8, coded bytes of each layer's frame u32 ..., the coded frames
    END     JSON: how many bytes and blocks there were

The kinds come in this order. The CRC of a frame goes on from that of the frame before it, so that a
frame that is missing, doubled or elsewhere is found like a flipped bit.

Invariant: what the reader hands out was written so, in this order; a file without its END is
damaged. Memory is bounded by one frame. What journals and keys mean is not known here.
"""

import json
import struct
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from enum import IntEnum
from typing import BinaryIO, NamedTuple

import numpy as np

from streamkv.tiers.checksum import crc32
from streamkv.tiers.codec import Bytes, CodecError, Codecs
from streamkv.tiers.keys import KEY_BYTES
from streamkv.tiers.spec import DTYPE_BYTES, BlockKey, KVSpec

MAGIC = b"skvexprt"
EXPORT_VERSION = 1
PIECE_BYTES = 1 << 20
"""Bytes of journal or digests in one frame, at most."""

_HEAD = struct.Struct("<IB")
_CRC = struct.Struct("<I")
_BLOCK_HEAD = struct.Struct(f"<{KEY_BYTES}sB")


class ExportKind(IntEnum):
    """What a frame is. 0 stays unused, so that zeros are never a frame."""

    HEADER = 1
    JOURNAL = 2
    DIGESTS = 3
    BLOCK = 4
    END = 5


class BadExportError(Exception):
    """Not an export, or a damaged one. The text says what is wrong with it."""


@dataclass(frozen=True, slots=True)
class ExportHeader:
    """What an export says of itself.

    Attributes:
        name: of the session.
        model: name of its model.
        weights: its weights' fingerprint, in hex.
        spec: layout of its blocks.
        exported_s: when, in seconds since 1970 (UTC).
        has_all: whether old blocks are in it, as far as they were stored.
    """

    name: str
    model: str
    weights: str
    spec: KVSpec
    exported_s: float
    has_all: bool


@dataclass(frozen=True, slots=True)
class ExportTotals:
    """What an export holds, by its END.

    Attributes:
        journal_bytes, digest_bytes: of the two files.
        num_blocks: blocks.
    """

    journal_bytes: int = 0
    digest_bytes: int = 0
    num_blocks: int = 0


class ExportFrame(NamedTuple):
    """A frame that was read."""

    kind: ExportKind
    payload: bytes


class ExportWriter:
    """Writes an export to a file that is open for writing.

    Args:
        file: empty.
        header: the first frame.
        codec: name of the codec of blocks: `zstd` or `raw`.

    Raises:
        OSError: from every method: it cannot be written.
    """

    def __init__(self, file: BinaryIO, header: ExportHeader, codec: str) -> None:
        self._file = file
        self._spec = header.spec
        self._codec = Codecs(DTYPE_BYTES[header.spec.dtype]).named(codec)
        self._crc = crc32(MAGIC)
        self._sizes = dict.fromkeys(ExportKind, 0)
        file.write(MAGIC)
        self._write(ExportKind.HEADER, json.dumps(_fields_of(header)).encode())

    def piece(self, kind: ExportKind, content: bytes) -> None:
        """Write a piece of the journal or the digests, at most `PIECE_BYTES`."""
        assert kind in (ExportKind.JOURNAL, ExportKind.DIGESTS) and len(content) <= PIECE_BYTES
        self._sizes[kind] += len(content)
        self._write(kind, content)

    def block(self, key: BlockKey, block: Bytes) -> None:
        """Write a block, uint8 `[block_bytes]`, contiguous."""
        frames = block.reshape(self._spec.num_layers, self._spec.frame_bytes)
        coded = [self._codec.encode(frame) for frame in frames]
        lengths = struct.pack(f"<{len(coded)}I", *map(len, coded))
        head = _BLOCK_HEAD.pack(key, self._codec.code)
        self._sizes[ExportKind.BLOCK] += 1
        self._write(ExportKind.BLOCK, b"".join([head, lengths, *coded]))

    def end(self) -> ExportTotals:
        """Write the end; returns what was written before it."""
        sizes = self._sizes
        totals = ExportTotals(
            sizes[ExportKind.JOURNAL], sizes[ExportKind.DIGESTS], sizes[ExportKind.BLOCK]
        )
        self._write(ExportKind.END, json.dumps(asdict(totals)).encode())
        return totals

    def _write(self, kind: ExportKind, payload: bytes) -> None:
        body = _HEAD.pack(len(payload), kind) + payload
        self._crc = crc32(body, self._crc)
        self._file.write(body + _CRC.pack(self._crc))


class ExportReader:
    """Reads an export from a file that is open for reading, from its start.

    Raises:
        BadExportError: from every method: what is read is not what was written.
        OSError: it cannot be read.

    Attributes:
        header: the first frame.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._crc = crc32(MAGIC)
        if file.read(len(MAGIC)) != MAGIC:
            raise BadExportError("not an exported session")
        first = self._read(PIECE_BYTES)
        if first.kind is not ExportKind.HEADER:
            raise BadExportError("it does not begin with its header")
        self.header = _header_of(first.payload)
        spec = self.header.spec
        self._codecs = Codecs(DTYPE_BYTES[spec.dtype])
        self._lengths = struct.Struct(f"<{spec.num_layers}I")
        self._block_bytes = _BLOCK_HEAD.size + self._lengths.size + spec.block_bytes

    def frames(self) -> Iterator[ExportFrame]:
        """The frames between HEADER and END, to the last byte of the file."""
        sizes = dict.fromkeys(ExportKind, 0)
        newest = ExportKind.HEADER
        most = max(PIECE_BYTES, self._block_bytes)
        while True:
            frame = self._read(most)
            if frame.kind < newest or frame.kind is ExportKind.HEADER:
                raise BadExportError("its parts are out of order")
            newest = frame.kind
            if frame.kind is ExportKind.END:
                break
            sizes[frame.kind] += 1 if frame.kind is ExportKind.BLOCK else len(frame.payload)
            yield frame
        found = (sizes[ExportKind.JOURNAL], sizes[ExportKind.DIGESTS], sizes[ExportKind.BLOCK])
        if ExportTotals(*found) != _totals_of(frame.payload):
            raise BadExportError("parts of it are missing")
        if self._file.read(1):
            raise BadExportError("something follows its end")

    def key_of(self, frame: ExportFrame) -> BlockKey:
        """The key of a BLOCK frame."""
        if len(frame.payload) < _BLOCK_HEAD.size + self._lengths.size:
            raise BadExportError("a block is cut off")
        return BlockKey(frame.payload[:KEY_BYTES])

    def block_of(self, frame: ExportFrame) -> Bytes:
        """The block of a BLOCK frame, uint8 `[block_bytes]`."""
        self.key_of(frame)
        spec, start = self.header.spec, _BLOCK_HEAD.size + self._lengths.size
        lengths = self._lengths.unpack_from(frame.payload, _BLOCK_HEAD.size)
        coded = np.frombuffer(frame.payload, dtype=np.uint8, offset=start)
        out = np.empty((spec.num_layers, spec.frame_bytes), dtype=np.uint8)
        try:
            if sum(lengths) != coded.size or max(lengths) > spec.frame_bytes:
                raise CodecError(f"{coded.size} coded bytes")
            self._codecs.coded(frame.payload[KEY_BYTES]).decode(coded, lengths, out)
        except CodecError as error:
            raise BadExportError(f"a block cannot be decoded ({error})") from error
        return out.reshape(-1)

    def _read(self, most: int) -> ExportFrame:
        head = self._exactly(_HEAD.size)
        length, kind = _HEAD.unpack(head)
        if length > most:
            raise BadExportError("a part of it has an impossible length")
        payload = self._exactly(length)
        self._crc = crc32(payload, crc32(head, self._crc))
        if _CRC.unpack(self._exactly(_CRC.size))[0] != self._crc:
            raise BadExportError(f"a checksum is wrong before byte {self._file.tell()}")
        try:
            return ExportFrame(ExportKind(kind), payload)
        except ValueError as error:
            raise BadExportError("a part of an unknown kind") from error

    def _exactly(self, num_bytes: int) -> bytes:
        content = self._file.read(num_bytes)
        if len(content) < num_bytes:
            raise BadExportError(f"it is cut off at byte {self._file.tell()}")
        return content


def _fields_of(header: ExportHeader) -> dict[str, object]:
    return asdict(header) | {"export_version": EXPORT_VERSION}


def _header_of(payload: bytes) -> ExportHeader:
    try:
        fields = json.loads(payload)
        version = fields.pop("export_version")
        if version != EXPORT_VERSION:
            raise BadExportError(f"export version {version}, this streamkv reads {EXPORT_VERSION}")
        spec = KVSpec(**fields.pop("spec"))
        if spec.dtype not in DTYPE_BYTES or min(spec.block_shape) < 1:
            raise ValueError(spec)
        return ExportHeader(**fields, spec=spec)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise BadExportError("its header cannot be read") from error


def _totals_of(payload: bytes) -> ExportTotals:
    try:
        return ExportTotals(**json.loads(payload))
    except (ValueError, TypeError) as error:
        raise BadExportError("its end cannot be read") from error
