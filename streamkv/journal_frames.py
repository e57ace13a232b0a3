"""How records lie in a journal file: framing, checksums, reading, and finding a frame after damage.

    file   = MAGIC, header frame, frame ...
    frame  = payload length u32, kind u8, payload, CRC-32 u32         (little-endian)

The CRC covers length, kind and payload, and starts from (seed XOR file offset). The seed is the CRC
of the header frame, so bytes of another journal, or of another place in this one, do not pass.
Invariant: a frame that is read is one that was written there. What payloads mean is not known here.
"""

import os
import re
import struct
import zlib
from collections.abc import Iterator
from typing import NamedTuple

MAGIC = b"streamkv"
"""First bytes of every journal."""

MAX_PAYLOAD_BYTES = 1 << 20
"""Longer payloads are refused by the writer and taken for damage by the reader."""

HEADER_SEED = zlib.crc32(MAGIC)
"""Seed of the header frame, which has no earlier one to take its seed from."""

_HEAD = struct.Struct("<IB")
_CRC_BYTES = 4
FRAME_OVERHEAD = _HEAD.size + _CRC_BYTES

READ_BYTES = 1 << 20
"""Bytes read at a time when a whole journal is read."""

# Length of at most MAX_PAYLOAD_BYTES, then a kind; a lookahead, because matches may overlap.
_MAYBE_HEAD = re.compile(rb"(?=..[\x00-\x10]\x00[\x01-\x0c])", re.DOTALL)


class Frame(NamedTuple):
    """One frame read from a file."""

    offset: int
    end: int
    kind: int
    payload: bytes


def encode_frame(kind: int, payload: bytes, offset: int, seed: int) -> bytes:
    """The bytes of a frame that will lie at `offset`."""
    body = _HEAD.pack(len(payload), kind) + payload
    return body + _checksum(body, offset, seed).to_bytes(_CRC_BYTES, "little")


def frame_crc(frame: bytes) -> int:
    """The CRC stored at the end of an encoded frame."""
    return int.from_bytes(frame[-_CRC_BYTES:], "little")


def read_frames(
    fd: int, start: int, end: int, seed: int, *, read_bytes: int = READ_BYTES
) -> Iterator[Frame]:
    """The frames of a file from offset `start` on, up to `end` or the first bad one.

    Memory is bounded by `read_bytes` plus one frame. The last frame's `end` tells a bad frame.

    Raises:
        OSError: the file cannot be read.
    """
    buffer, base, at = b"", start, 0
    while base + at < end:
        need = FRAME_OVERHEAD
        if len(buffer) - at >= need:
            length, kind = _HEAD.unpack_from(buffer, at)
            if length > MAX_PAYLOAD_BYTES:
                return
            need += length
        if len(buffer) - at < need:
            base, at = base + at, 0
            if base + need > end:
                return
            buffer = pread_exactly(fd, min(max(read_bytes, need), end - base), base)
            continue
        stop = at + need
        body = buffer[at : stop - _CRC_BYTES]
        stored = int.from_bytes(buffer[stop - _CRC_BYTES : stop], "little")
        if _checksum(body, base + at, seed) != stored:
            return
        yield Frame(base + at, base + stop, kind, body[_HEAD.size :])
        at = stop


def find_frame(fd: int, start: int, end: int, seed: int) -> int | None:
    """Offset of the first whole frame that begins in [start, end), wherever it begins."""
    overlap = _HEAD.size - 1
    for base in range(start, end, READ_BYTES):
        buffer = pread_exactly(fd, min(READ_BYTES + overlap, end - base), base)
        for match in _MAYBE_HEAD.finditer(buffer):
            offset = base + match.start()
            if next(read_frames(fd, offset, end, seed, read_bytes=0), None) is not None:
                return offset
    return None


def pread_exactly(fd: int, num_bytes: int, offset: int) -> bytes:
    """`num_bytes` bytes at `offset`. Raises OSError if the file ends before."""
    parts = []
    while num_bytes > 0:
        part = os.pread(fd, num_bytes, offset)
        if not part:
            raise OSError(f"the file ends at byte {offset}, before it should")
        parts.append(part)
        num_bytes -= len(part)
        offset += len(part)
    return b"".join(parts)


def _checksum(body: bytes, offset: int, seed: int) -> int:
    return zlib.crc32(body, (seed ^ offset) & 0xFFFFFFFF)
