import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from streamkv.journal_frames import (
    FRAME_OVERHEAD,
    MAX_PAYLOAD_BYTES,
    encode_frame,
    find_frame,
    frame_crc,
    pread_exactly,
    read_frames,
)

SEED = 0x1234ABCD
PAYLOADS = [b"", b"a", bytes(range(250)), b"\0" * 50, b"end"]


def frames_of(payloads: list[bytes], start: int = 0, seed: int = SEED) -> bytes:
    data = b""
    for number, payload in enumerate(payloads):
        data += encode_frame(1 + number % 9, payload, start + len(data), seed)
    return data


class Scratch:
    """A file with given bytes, and its fd."""

    def __init__(self, path: Path) -> None:
        self.fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)

    def set(self, data: bytes) -> int:
        os.ftruncate(self.fd, 0)
        os.pwrite(self.fd, data, 0)
        return self.fd


@pytest.fixture
def scratch(tmp_path: Path) -> Iterator[Scratch]:
    scratch = Scratch(tmp_path / "frames")
    yield scratch
    os.close(scratch.fd)


def test_a_frame_of_one_token_takes_thirteen_bytes() -> None:
    frame = encode_frame(4, b"\x07\0\0\0", 100, SEED)
    assert len(frame) == 13 == FRAME_OVERHEAD + 4
    assert frame[:9] == b"\x04\0\0\0\x04\x07\0\0\0"
    assert frame_crc(frame) == int.from_bytes(frame[9:], "little") == 0x7EA03667


@pytest.mark.parametrize("read_bytes", [0, 1, 13, 64, 1 << 20])
def test_frames_come_back_whatever_the_read_size(scratch: Scratch, read_bytes: int) -> None:
    data = frames_of(PAYLOADS)
    fd = scratch.set(data)
    found = list(read_frames(fd, 0, len(data), SEED, read_bytes=read_bytes))
    assert [frame.payload for frame in found] == PAYLOADS
    assert [frame.kind for frame in found] == [1, 2, 3, 4, 5]
    assert [frame.offset for frame in found] == [0, *(frame.end for frame in found[:-1])]
    assert found[-1].end == len(data)


def test_the_largest_payload_comes_back(scratch: Scratch) -> None:
    payload = bytes(MAX_PAYLOAD_BYTES)
    data = frames_of([b"x", payload, b"y"])
    found = list(read_frames(scratch.set(data), 0, len(data), SEED))
    assert [len(frame.payload) for frame in found] == [1, MAX_PAYLOAD_BYTES, 1]


@pytest.mark.parametrize("seed", [SEED ^ 1, 0])
def test_frames_of_another_journal_do_not_pass(scratch: Scratch, seed: int) -> None:
    data = frames_of(PAYLOADS)
    assert list(read_frames(scratch.set(data), 0, len(data), seed)) == []


@pytest.mark.parametrize("shift", [1, 4, 4096])
def test_frames_at_another_place_do_not_pass(scratch: Scratch, shift: int) -> None:
    data = bytes(shift) + frames_of(PAYLOADS)
    assert list(read_frames(scratch.set(data), shift, len(data), SEED)) == []


def test_frames_of_equal_length_that_change_places_do_not_pass(scratch: Scratch) -> None:
    data = frames_of([b"one", b"two", b"six"])
    size = len(data) // 3
    swapped = data[size : 2 * size] + data[:size] + data[2 * size :]
    assert list(read_frames(scratch.set(swapped), 0, len(data), SEED)) == []


def test_a_missing_frame_is_noticed(scratch: Scratch) -> None:
    data = frames_of([b"one", b"two", b"six"])
    size = len(data) // 3
    fd = scratch.set(data[:size] + data[2 * size :])
    assert [frame.payload for frame in read_frames(fd, 0, 2 * size, SEED)] == [b"one"]


def test_zeros_are_not_frames(scratch: Scratch) -> None:
    fd = scratch.set(bytes(4096))
    assert list(read_frames(fd, 0, 4096, 0)) == []
    assert find_frame(fd, 0, 4096, 0) is None


@pytest.mark.parametrize("debris", [b"?", b"\x04\0\0\0\x04\x07", bytes(300), bytes(1 << 20)])
def test_a_frame_after_damage_is_found_at_its_offset(scratch: Scratch, debris: bytes) -> None:
    data = debris + frames_of([b"later", b"last"], start=len(debris))
    fd = scratch.set(data)
    assert find_frame(fd, 0, len(data), SEED) == len(debris)
    assert find_frame(fd, len(debris) + 1, len(data), SEED) == len(data) - FRAME_OVERHEAD - 4


def test_a_cut_frame_is_not_found(scratch: Scratch) -> None:
    data = frames_of([bytes(100)])[:-1]
    assert find_frame(scratch.set(data), 0, len(data), SEED) is None


def test_reading_past_the_end_is_an_error(scratch: Scratch) -> None:
    fd = scratch.set(b"12345")
    assert pread_exactly(fd, 3, 2) == b"345"
    with pytest.raises(OSError, match="ends at byte 5"):
        pread_exactly(fd, 4, 2)
