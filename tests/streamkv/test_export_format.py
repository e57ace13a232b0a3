"""The one file of an exported session: what is read is what was written, or it is refused."""

import io
import json
import struct

import numpy as np
import pytest

from streamkv.export_format import (
    MAGIC,
    BadExportError,
    ExportHeader,
    ExportKind,
    ExportReader,
    ExportTotals,
    ExportWriter,
)
from streamkv.tiers.checksum import crc32
from streamkv.tiers.codec import Bytes
from streamkv.tiers.spec import BlockKey, KVSpec

SPEC = KVSpec(num_layers=2, num_kv_heads=1, head_dim=4, dtype="float16", block_size=8)
HEADER = ExportHeader("diary", "tiny", "0f" * 16, SPEC, 1_800_000_000.5, has_all=True)


def key(number: int) -> BlockKey:
    return BlockKey(number.to_bytes(16, "big"))


def block(number: int) -> Bytes:
    noise = np.random.default_rng(number)
    # Some that zstd can shrink and some that it cannot.
    top = 256 if number % 2 else 3
    return noise.integers(0, top, SPEC.block_bytes, dtype=np.uint8)


def written(codec: str = "zstd", num_blocks: int = 5) -> bytes:
    file = io.BytesIO()
    writer = ExportWriter(file, HEADER, codec)
    writer.piece(ExportKind.JOURNAL, b"first ")
    writer.piece(ExportKind.JOURNAL, b"second")
    writer.piece(ExportKind.DIGESTS, b"digests")
    for number in range(num_blocks):
        writer.block(key(number), block(number))
    assert writer.end() == ExportTotals(12, 7, num_blocks)
    return file.getvalue()


def read(content: bytes) -> tuple[ExportHeader, list[tuple[ExportKind, bytes]]]:
    reader = ExportReader(io.BytesIO(content))
    found = []
    for frame in reader.frames():
        payload = frame.payload
        if frame.kind is ExportKind.BLOCK:
            payload = bytes(reader.key_of(frame)) + reader.block_of(frame).tobytes()
        found.append((frame.kind, payload))
    return reader.header, found


@pytest.mark.parametrize("codec", ["raw", "zstd"])
def test_what_was_written_is_read(codec: str) -> None:
    header, found = read(written(codec))
    assert header == HEADER
    assert found == [
        (ExportKind.JOURNAL, b"first "),
        (ExportKind.JOURNAL, b"second"),
        (ExportKind.DIGESTS, b"digests"),
        *((ExportKind.BLOCK, bytes(key(n)) + block(n).tobytes()) for n in range(5)),
    ]


def test_every_flipped_bit_and_every_cut_is_found() -> None:
    whole = written()
    for place in range(len(whole)):
        flipped = bytearray(whole)
        flipped[place] ^= 1 << place % 8
        for content in (bytes(flipped), whole[:place]):
            with pytest.raises(BadExportError):
                read(content)


def frames_of(content: bytes) -> list[bytes]:
    frames, start = [], len(MAGIC)
    while start < len(content):
        end = start + 9 + struct.unpack_from("<I", content, start)[0]
        frames.append(content[start:end])
        start = end
    return frames


def test_frames_that_are_missing_doubled_or_elsewhere_are_found() -> None:
    whole = written()
    frames = frames_of(whole)
    assert MAGIC + b"".join(frames) == whole
    for place in range(len(frames)):
        before, after = frames[:place], frames[place + 1 :]
        for changed in (
            [*before, *after],
            [*before, frames[place], frames[place], *after],
            [*before, *after, frames[place]] if after else frames[::-1],
        ):
            with pytest.raises(BadExportError):
                read(MAGIC + b"".join(changed))


def sealed(*frames: tuple[int, bytes]) -> bytes:
    """A file of these frames with right checksums."""
    content, crc = bytearray(MAGIC), crc32(MAGIC)
    for kind, payload in frames:
        body = struct.pack("<IB", len(payload), kind) + payload
        crc = crc32(body, crc)
        content += body + struct.pack("<I", crc)
    return bytes(content)


def header_payload(**others: object) -> bytes:
    _, payload = 0, frames_of(written())[0][5:-4]
    return json.dumps(json.loads(payload) | others).encode()


@pytest.mark.parametrize(
    ("frames", "problem"),
    [
        ([], "cut off"),
        ([(2, b"journal")], "does not begin with its header"),
        ([(1, b"{}")], "its header cannot be read"),
        ([(1, b"[]")], "its header cannot be read"),
        ([(1, header_payload(export_version=2))], "export version 2, this streamkv reads 1"),
        ([(1, header_payload(more=1))], "its header cannot be read"),
        ([(1, header_payload(spec={"num_layers": 1}))], "its header cannot be read"),
        ([(1, header_payload()), (5, b"{}x")], "its end cannot be read"),
        ([(1, header_payload()), (5, b'{"num_blocks": 1}')], "parts of it are missing"),
        ([(1, header_payload()), (3, b"d"), (2, b"j")], "out of order"),
        ([(1, header_payload()), (1, header_payload())], "out of order"),
        ([(1, header_payload()), (9, b"")], "unknown kind"),
        ([(1, header_payload()), (4, b"short")], "a block is cut off"),
        ([(1, header_payload()), (4, bytes(16 + 1 + 8))], "cannot be decoded"),
        ([(1, header_payload()), (4, bytes(16) + b"\x07" + bytes(8))], "cannot be decoded"),
        ([(1, header_payload()), (2, bytes((1 << 20) + 1))], "impossible length"),
        ([(1, header_payload()), (5, b"{}"), (5, b"{}")], "something follows its end"),
    ],
)
def test_what_nobody_has_written_is_refused(frames: list[tuple[int, bytes]], problem: str) -> None:
    with pytest.raises(BadExportError, match=problem):
        read(sealed(*frames))
