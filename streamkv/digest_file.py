"""The digests of a session on disk: one row for each sealed block, at its own place in the file.

    header   MAGIC, version u32, row bytes u32, identity u32, CRC-32 u32
    row      number of rewinds u32, key 16 bytes, digest of 16-bit numbers as they are kept,
             CRC-32 u32                                                       (little-endian)

A session takes 24 + rows * (24 + digest bytes) bytes. The CRC of a row starts from (identity XOR
block index), so that a row of another session or place does not pass; a session's identity knows
the heads whose keys its digests are.

Invariant: a row that is read was written for that block of this session's stream as it stands now.
A row that is damaged, missing or older than a rewind to before its block is none: the block cannot
be chosen, and nothing else is lost. So nothing here raises for what the disk does: a digest that
cannot be written is logged and given up. Guarded by the lock of the session's journal.
"""

import logging
import os
import shutil
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Self

import numpy as np
import numpy.typing as npt

from streamkv.journal_frames import pread_exactly
from streamkv.journal_records import SessionHeader
from streamkv.tiers.keys import KEY_BYTES
from streamkv.tiers.spec import BlockKey

_log = logging.getLogger(__name__)

MAGIC = b"skvdigst"
VERSION = 1
_HEADER = struct.Struct("<8sIIII")
_ROW = struct.Struct(f"<I{KEY_BYTES}s")
_CRC = struct.Struct("<I")
_NO_KEY = bytes(KEY_BYTES)
_READ_BYTES = 1 << 22

HEADER_BYTES = _HEADER.size

ROW_OVERHEAD = _ROW.size + _CRC.size
"""Bytes of a row besides its digest."""

Digest = npt.NDArray[np.uint16]


class DigestRow(NamedTuple):
    """What is known of a sealed block; without a key it cannot be chosen.

    Attributes:
        key: its name.
        digest: its 16-bit numbers, as bits, flat; `None` without a key.
    """

    key: BlockKey | None
    digest: Digest | None


NO_ROW = DigestRow(None, None)


def copy_digests(source: Path, target: Path) -> None:
    """Give a fork, whose journal begins as that of its origin, the digests of that."""
    try:
        shutil.copyfile(source, target)
        os.chmod(target, 0o600)
    except OSError as error:
        _log.warning("%s: cannot be copied to %s (%s)", source, target, error)


def rename_digests(path: Path, names: Mapping[BlockKey, BlockKey]) -> int:
    """Give the rows of a file the new names of their blocks; returns how many are left.

    A row that is damaged, or whose block has no new name, is none from then on.

    Raises:
        OSError: the file cannot be read or written.
    """
    num_left = 0
    with open(path, "r+b") as file:
        head = file.read(_HEADER.size)
        if not _is_header(head):
            file.truncate(0)
            return 0
        _, _, row_bytes, identity, _ = _HEADER.unpack(head)
        index = 0
        while len(row := file.read(row_bytes)) == row_bytes:
            body = row[: -_CRC.size]
            generation, key = _ROW.unpack_from(body)
            is_whole = _row_crc(identity, index, body) == _CRC.unpack(row[-_CRC.size :])[0]
            named = names.get(BlockKey(key)) if is_whole else None
            if named is None:
                row = bytes(row_bytes)
            else:
                body = _ROW.pack(generation, named) + body[_ROW.size :]
                row = body + _CRC.pack(_row_crc(identity, index, body))
                num_left += 1
            file.seek(-row_bytes, os.SEEK_CUR)
            file.write(row)
            index += 1
        file.truncate(_HEADER.size + index * row_bytes)
    return num_left


def _is_header(content: bytes) -> bool:
    if (
        len(content) < _HEADER.size
        or zlib.crc32(content[: -_CRC.size]) != _CRC.unpack(content[-_CRC.size :])[0]
    ):
        return False
    magic, version, row_bytes, _, _ = _HEADER.unpack(content)
    return bool(magic == MAGIC and version == VERSION and row_bytes > ROW_OVERHEAD)


def _row_crc(identity: int, block_index: int, body: bytes) -> int:
    return zlib.crc32(body, (identity ^ block_index) & 0xFFFFFFFF)


class DigestFile:
    """Rows of one session. Made by `open`.

    Attributes:
        path: the file.
        num_lost: rows that were damaged or could not be written.
    """

    def __init__(self, path: Path, num_row_bytes: int, identity: int) -> None:
        self.path = path
        self.num_lost = 0
        self._row_bytes = num_row_bytes
        self._identity = identity
        self._fd: int | None = None

    @classmethod
    def open(cls, path: Path, num_bytes: int, kind: str, header: SessionHeader) -> Self:
        """The digests of the session that was created with `header`, made if there are none.

        A file that is another session's or has another format is begun anew.

        Args:
            path: of the file.
            num_bytes: of a digest.
            kind: what digests are; those of another kind are of no use.
            header: of the session's journal.
        """
        name = f"{header.origin or header.salt} {header.created_s!r} {header.weights} {kind}"
        file = cls(path, ROW_OVERHEAD + num_bytes, zlib.crc32(name.encode()))
        try:
            file._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            content = file._header()
            if os.pread(file._fd, len(content), 0) != content:
                os.ftruncate(file._fd, 0)
                os.pwrite(file._fd, content, 0)
        except OSError as error:
            file._give_up("opened", error)
        return file

    def rows(self, rewinds: Sequence[int], block_size: int) -> Iterator[DigestRow]:
        """All rows, by block index.

        Args:
            rewinds: tokens that each rewind of the session left, in their order.
            block_size: tokens per block.
        """
        fewest_left = _suffix_minima(rewinds)
        for index, content in enumerate(self._contents()):
            generation, row = self._decode(index, content)
            if row is None:
                self.num_lost += 1
                yield NO_ROW
            elif generation < len(rewinds) and fewest_left[generation] < (index + 1) * block_size:
                # Written before the stream was taken back to within this block or before it.
                yield NO_ROW
            else:
                yield row
        if self.num_lost:
            _log.warning(
                "%s: %d rows are damaged or missing; these blocks cannot be recalled",
                self.path,
                self.num_lost,
            )

    def write(
        self, block_index: int, num_rewinds: int, key: BlockKey | None, digest: Digest | None
    ) -> None:
        """Write the row of a block.

        Args:
            block_index: which block.
            num_rewinds: of the session so far.
            key: `None` for a block that cannot be found again.
            digest: its 16-bit numbers, as bits, given if the key is.
        """
        if self._fd is None:
            return
        size = self._row_bytes - ROW_OVERHEAD
        content = digest.astype("<u2").tobytes() if digest is not None else bytes(size)
        assert len(content) == size
        body = _ROW.pack(num_rewinds, key if key is not None else _NO_KEY) + content
        row = body + _CRC.pack(self._crc(block_index, body))
        try:
            if os.pwrite(self._fd, row, self._place(block_index)) != len(row):
                raise OSError("the disk is full")
        except OSError as error:
            # Its place stays empty or torn, which reads as no row; later rows may have room again.
            self.num_lost += 1
            if self.num_lost == 1:
                _log.warning("%s: a row cannot be written (%s)", self.path, error)

    def truncate(self, num_blocks: int) -> None:
        """Forget the blocks from `num_blocks` on."""
        if self._fd is None:
            return
        try:
            if os.fstat(self._fd).st_size > self._place(num_blocks):
                os.ftruncate(self._fd, self._place(num_blocks))
        except OSError as error:
            # Nothing is lost: rows tell by the number of rewinds that they are old.
            _log.warning("%s: cannot be cut (%s)", self.path, error)

    def sync(self) -> None:
        """Wait until what was written is on disk, as far as the disk allows."""
        if self._fd is not None:
            try:
                os.fsync(self._fd)
            except OSError as error:
                _log.warning("%s: cannot be made durable (%s)", self.path, error)

    def close(self) -> None:
        """Close the file; what is written from then on is given up."""
        fd, self._fd = self._fd, None
        if fd is not None:
            os.close(fd)

    def delete(self) -> None:
        """Close it and remove it from the disk, if it is there."""
        self.close()
        try:
            self.path.unlink(missing_ok=True)
        except OSError as error:
            _log.warning("%s: cannot be deleted (%s)", self.path, error)

    def _header(self) -> bytes:
        body = _HEADER.pack(MAGIC, VERSION, self._row_bytes, self._identity, 0)[: -_CRC.size]
        return body + _CRC.pack(zlib.crc32(body))

    def _place(self, block_index: int) -> int:
        return _HEADER.size + block_index * self._row_bytes

    def _crc(self, block_index: int, body: bytes) -> int:
        return _row_crc(self._identity, block_index, body)

    def _contents(self) -> Iterator[bytes]:
        """The bytes of each row; a torn one at the end is given up."""
        if self._fd is None:
            return
        size = self._row_bytes
        try:
            num_rows = (os.fstat(self._fd).st_size - _HEADER.size) // size
            at_once = max(1, _READ_BYTES // size)
            for first in range(0, num_rows, at_once):
                count = min(at_once, num_rows - first)
                content = pread_exactly(self._fd, count * size, self._place(first))
                for start in range(0, len(content), size):
                    yield content[start : start + size]
        except OSError as error:
            self._give_up("read", error)

    def _decode(self, index: int, content: bytes) -> tuple[int, DigestRow | None]:
        body = content[: -_CRC.size]
        if self._crc(index, body) != _CRC.unpack(content[-_CRC.size :])[0]:
            return 0, None
        generation, key = _ROW.unpack_from(body)
        if key == _NO_KEY:
            return generation, NO_ROW
        digest = np.frombuffer(body, dtype="<u2", offset=_ROW.size).astype(np.uint16)
        return generation, DigestRow(BlockKey(key), digest)

    def _give_up(self, what: str, error: OSError) -> None:
        _log.warning(
            "%s: cannot be %s (%s); old blocks of this session cannot be recalled after a restart",
            self.path,
            what,
            error,
        )
        self.close()


def _suffix_minima(values: Sequence[int]) -> list[int]:
    """For each place the smallest value from there on."""
    minima = list(values)
    for place in range(len(minima) - 2, -1, -1):
        minima[place] = min(minima[place], minima[place + 1])
    return minima
