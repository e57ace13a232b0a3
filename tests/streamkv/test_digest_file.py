"""Digests on disk: rows come back as they were, or not at all."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from streamkv.digest_file import (
    NO_ROW,
    ROW_OVERHEAD,
    DigestFile,
    DigestRow,
    copy_digests,
    rename_digests,
)
from streamkv.journal_records import SessionHeader
from streamkv.tiers.spec import BlockKey

NUM_BYTES = 64
HEADER = SessionHeader("tiny", "00", 300, 128, 4, "window", "cache", "ab", 17.25)


def key(number: int) -> BlockKey:
    return BlockKey(bytes([2 * number + 2] * 16))


def digest(number: int) -> np.ndarray:
    return np.arange(32, dtype=np.uint16) + np.uint16(40_000 + number)


def fill(path: Path, count: int, num_rewinds: int = 0) -> DigestFile:
    file = DigestFile.open(path, NUM_BYTES, "keys", HEADER)
    for number in range(count):
        file.write(number, num_rewinds, key(number), digest(number).reshape(2, 2, 8))
    return file


def read(
    path: Path,
    rewinds: tuple[int, ...] = (),
    header: SessionHeader = HEADER,
    kind: str = "keys",
) -> list[int]:
    """Numbers of the rows that are there; -1 for those that are not."""
    file = DigestFile.open(path, NUM_BYTES, kind, header)
    found = []
    for number, row in enumerate(file.rows(rewinds, 64)):
        if row.key is not None:
            assert row.key == key(number)
            assert row.digest is not None and (row.digest == digest(number)).all()
        found.append(number if row.key is not None else -1)
    file.close()
    return found


def test_rows_come_back_and_take_the_bytes_that_are_documented(tmp_path: Path) -> None:
    path = tmp_path / "one.digests"
    fill(path, 3).close()
    assert read(path) == [0, 1, 2]
    assert path.stat().st_size == 24 + 3 * (24 + NUM_BYTES)
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_block_without_a_key_is_no_damage(tmp_path: Path) -> None:
    path = tmp_path / "one.digests"
    file = fill(path, 1)
    file.write(1, 0, None, None)
    assert list(file.rows((), 64))[1] == DigestRow(None, None)
    assert file.num_lost == 0


@pytest.mark.parametrize("place", [0, 5, 20, 60, 87])
def test_a_flipped_bit_costs_its_row_alone(tmp_path: Path, place: int) -> None:
    path = tmp_path / "one.digests"
    fill(path, 4).close()
    data = bytearray(path.read_bytes())
    data[24 + 2 * (ROW_OVERHEAD + NUM_BYTES) + place] ^= 4
    path.write_bytes(data)
    assert read(path) == [0, 1, -1, 3]


def test_a_row_at_another_place_is_none(tmp_path: Path) -> None:
    path = tmp_path / "one.digests"
    fill(path, 4).close()
    data, size = path.read_bytes(), (ROW_OVERHEAD + NUM_BYTES)
    path.write_bytes(data[:24] + data[24 + size : 24 + 2 * size] + data[24 + size :])
    assert read(path) == [-1, 1, 2, 3]


@pytest.mark.parametrize("num_bytes", [1, 23, 24, 30, 24 + 88 + 87])
def test_a_torn_file_keeps_its_whole_rows(tmp_path: Path, num_bytes: int) -> None:
    path = tmp_path / "one.digests"
    fill(path, 4).close()
    path.write_bytes(path.read_bytes()[:num_bytes])
    assert read(path) == list(range(max(0, (num_bytes - 24) // 88)))
    fill(path, 4).close()
    assert read(path) == [0, 1, 2, 3]


def test_a_row_that_was_left_out_is_none(tmp_path: Path) -> None:
    path = tmp_path / "one.digests"
    file = fill(path, 1)
    file.write(3, 0, key(3), digest(3))
    assert read(path) == [0, -1, -1, 3]


def test_rows_from_before_a_rewind_to_within_their_block_are_none(tmp_path: Path) -> None:
    path = tmp_path / "one.digests"
    file = fill(path, 5)
    file.write(4, 2, key(4), digest(4))
    assert read(path, (256,)) == [0, 1, 2, 3, 4], "a row of a rewind that the journal has lost"
    assert read(path, (255, 300)) == [0, 1, 2, -1, 4]
    assert read(path, (300, 128)) == [0, 1, -1, -1, 4]
    assert read(path, (300, 300, 319)) == [0, 1, 2, 3, -1]


def test_truncated_it_forgets_the_rest(tmp_path: Path) -> None:
    path = tmp_path / "one.digests"
    file = fill(path, 5)
    file.truncate(2)
    file.truncate(4)
    file.sync()
    assert read(path) == [0, 1]


def test_the_file_of_another_session_is_begun_anew(tmp_path: Path) -> None:
    path = tmp_path / "one.digests"
    fill(path, 2).close()
    other = SessionHeader("tiny", "00", 300, 128, 4, "window", "cache", "ab", 18.0)
    assert read(path, header=other) == []
    assert read(path) == []


def test_a_fork_has_rows_of_its_own(tmp_path: Path) -> None:
    one, two = tmp_path / "one.digests", tmp_path / "two.digests"
    fill(one, 3)
    copy_digests(one, two)
    DigestFile.open(two, NUM_BYTES, "keys", HEADER).truncate(1)
    assert read(one) == [0, 1, 2] and read(two) == [0]


def test_a_disk_that_takes_nothing_costs_digests_only(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    missing = tmp_path / "no such directory" / "one.digests"
    file = fill(missing, 2)
    assert list(file.rows((), 64)) == []
    file.truncate(1)
    file.sync()
    file.delete()
    copy_digests(missing, tmp_path / "two.digests")
    assert "cannot be opened" in caplog.text and "cannot be copied" in caplog.text
    assert NO_ROW.key is None


def test_digests_of_other_heads_are_of_no_use(tmp_path: Path) -> None:
    path = tmp_path / "one.digests"
    fill(path, 3).close()
    assert read(path, kind="other keys") == []


def test_rows_are_renamed_and_found_by_an_imported_session(tmp_path: Path) -> None:
    """Its header has another salt, and says whose digests they were."""
    path = tmp_path / "one.digests"
    file = fill(path, 4)
    file.write(4, 1, key(4), digest(4))
    file.close()
    content = bytearray(path.read_bytes())
    content[24 + (24 + NUM_BYTES) + 30] ^= 1
    path.write_bytes(content)
    names = {key(number): key(number + 50) for number in (0, 1, 2, 4)}
    assert rename_digests(path, names) == 3
    imported = replace(HEADER, salt="cd", origin=HEADER.salt)
    opened = DigestFile.open(path, NUM_BYTES, "keys", imported)
    rows = list(opened.rows((1000,), 64))
    opened.close()
    # The second was damaged, the fourth has no new name.
    assert [row.key for row in rows] == [key(50), None, key(52), None, key(54)]
    assert all((rows[n].digest == digest(n)).all() for n in (0, 2, 4))
    assert read(path, header=replace(imported, origin="ef")) == [], "of another session"


@pytest.mark.parametrize("content", [b"", b"skvdigst", b"x" * 100])
def test_what_are_no_digests_becomes_none(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "one.digests"
    path.write_bytes(content)
    assert rename_digests(path, {}) == 0
    assert read(path) == []
