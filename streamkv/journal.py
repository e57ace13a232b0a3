"""The journal: one append-only file per session, the truth about it.

Invariant: a record whose `append` returned is in the file whatever happens to this process, and is
on disk after the next `sync`. A record whose `append` raised is not in the file; the next append
is as good as the first. What is read back was written; damage is an error or a torn tail, never an
answer. It knows neither models nor blocks, and is used by one thread at a time.
"""

import logging
import os
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
import numpy.typing as npt

from streamkv import journal_file
from streamkv.append_file import AppendFile
from streamkv.errors import InputError, JournalError, StoreFormatError
from streamkv.journal_frames import (
    FRAME_OVERHEAD,
    HEADER_SEED,
    MAGIC,
    MAX_PAYLOAD_BYTES,
    READ_BYTES,
    Frame,
    encode_frame,
    find_frame,
    frame_crc,
    pread_exactly,
    read_frames,
)
from streamkv.journal_records import (
    READ_VERSIONS,
    Fed,
    Flushed,
    Generated,
    Given,
    Record,
    RecordKind,
    SessionHeader,
    decode_header,
    decode_record,
    encode_record,
    ids_offset,
)
from streamkv.journal_state import JournalState, Stretch

_log = logging.getLogger(__name__)

_IDS_READ_BYTES = 1 << 16
_HEADER_READ_BYTES = 1 << 12  # a thousand sessions are looked at when an engine opens
_VERSIONS = f"{READ_VERSIONS[0]} to {READ_VERSIONS[-1]}"


class Journal:
    """An open journal, locked against every other opener until `close`.

    Attributes:
        path: the file.
        header: what the session was created with.
        state: where the session stands; changes with each append.
        torn_bytes: bytes after the last whole record that were given up at open.
    """

    def __init__(self, path: Path, fd: int, header: SessionHeader, seed: int, end: int) -> None:
        """Use `create` or `open`."""
        self.path = path
        self.header = header
        self.state = JournalState()
        self.torn_bytes = 0
        self._file: AppendFile | None = AppendFile(path, fd, end)
        self._seed = seed
        self._first = end

    @classmethod
    def create(cls, path: Path, header: SessionHeader) -> Self:
        """Start a journal at `path`, durable when this returns; its directory must exist.

        Raises:
            JournalError: it exists, or the directory cannot be written.
        """
        kind, payload = encode_record(header)
        frame = encode_frame(kind, payload, len(MAGIC), HEADER_SEED)
        fd = journal_file.create_locked(path, MAGIC + frame)
        return cls(path, fd, header, frame_crc(frame), len(MAGIC) + len(frame))

    @classmethod
    def open(cls, path: Path) -> Self:
        """Open a journal and read it through; a torn tail is given up, counted and logged.

        Raises:
            JournalError: no such file, not a journal, or a damaged record that is not the tail.
            StoreFormatError: written by another version.
            SessionError: open already; names the process.
        """
        journal = cls._read(path, journal_file.open_locked(path))
        if journal.torn_bytes:
            _log.warning(
                "%s: gave up %d bytes of a torn record at byte %d; unless something else cut the "
                "file off, nothing that was acknowledged is missing",
                path,
                journal.torn_bytes,
                journal.num_bytes,
            )
        return journal

    @classmethod
    def read_beside(cls, path: Path) -> Self:
        """Read a journal that another process may be writing, as far as it has come.

        Nothing can be appended. A torn tail may be a record that is being written.

        Raises:
            JournalError, StoreFormatError: as `open`.
        """
        return cls._read(path, journal_file.open_unlocked(path))

    def fork(self, path: Path) -> Self:
        """A journal of its own at `path` that holds all of this one; durable when this returns.

        Raises:
            JournalError: it exists, the directory cannot be written, or this file cannot be read.
        """
        file = self._require_open()
        fd = journal_file.create_locked(path, _parts(self.path, file))
        try:
            forked = type(self)(path, fd, self.header, self._seed, self._first)
        except BaseException:
            os.close(fd)
            raise
        try:
            forked._replay()
        except BaseException:
            forked.delete()
            raise
        return forked

    @classmethod
    def _read(cls, path: Path, fd: int) -> Self:
        try:
            header, seed, end = _read_header(path, fd)
            journal = cls(path, fd, header, seed, end)
            journal._replay()
        except BaseException as error:
            os.close(fd)
            if isinstance(error, OSError):
                raise _cannot_read(path, error) from error
            raise
        return journal

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def num_bytes(self) -> int:
        """Bytes of the file that hold whole records."""
        return self._require_open().end

    def append(self, *records: Record) -> None:
        """Write records, all or none: one system call, no fsync.

        Raises:
            InputError: text or ids that cannot be written, or more than 1 MiB in one record.
            JournalError: the file cannot be written. Nothing of the records is in it; once the
                cause is gone, append again.
        """
        file = self._require_open()
        frames, offsets, end = [], [], file.end
        for record in records:
            self._check(record)
            frames.append(encode_frame(*_encoded(record), end, self._seed))
            offsets.append(end)
            end += len(frames[-1])
        file.append(b"".join(frames))
        for record, offset in zip(records, offsets, strict=True):
            self.state.apply(*encode_record(record), offset)

    def sync(self) -> None:
        """Wait until every appended record is on disk.

        Raises:
            JournalError: it cannot be said that they are; a later `sync` tries anew.
        """
        self._require_open().sync()

    def ids(self, start: int, end: int) -> npt.NDArray[np.uint32]:
        """Ids of the tokens start <= token_index < end, read back from the file.

        Raises:
            InputError: not a range of tokens of this journal.
            JournalError: the file was damaged since it was opened.
        """
        file = self._require_open()
        if not 0 <= start <= end <= self.state.num_tokens:
            remedy = f"Use 0 <= start <= end <= {self.state.num_tokens}."
            raise InputError("range", (start, end), "not tokens of this session", remedy)
        if start == end:
            return np.empty(0, dtype=np.uint32)
        parts = [self._ids_of(file, part) for part in self.state.index.stretches(start, end)]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _ids_of(self, file: AppendFile, part: Stretch) -> npt.NDArray[np.uint32]:
        found = bytearray()
        for frame in self._frames(file, part.offset, _IDS_READ_BYTES):
            found += frame.payload[ids_offset(frame.kind, frame.payload) :]
            if len(found) >= 4 * (part.end - part.first):
                break
        ids = np.frombuffer(found, dtype="<u4")
        return ids[part.start - part.first : part.end - part.first].astype(np.uint32)

    def scan(self) -> Iterator[Record]:
        """Every record from the header on, as it stands now; memory is bounded.

        Raises:
            JournalError: the file was damaged since it was opened.
        """
        file = self._require_open()
        yield self.header
        for frame in self._frames(file, self._first):
            yield decode_record(frame.kind, frame.payload)

    def close(self) -> None:
        """Release file and lock. Does not sync. May be called again."""
        file, self._file = self._file, None
        if file is not None:
            file.close()

    def delete(self) -> None:
        """Delete the file from the disk and close. Raises JournalError; then it is still open."""
        self._require_open()
        journal_file.remove(self.path)
        self.close()

    def _require_open(self) -> AppendFile:
        if self._file is None:
            raise JournalError(f"{self.path}: was closed. Open the session again.")
        return self._file

    def _check(self, record: Record) -> None:
        assert not isinstance(record, SessionHeader), "the header is written by create"
        if isinstance(record, Fed):
            held = len(self.state.tail) + len(record.text)
            assert 0 <= record.tail_len <= held, (record.tail_len, held)
        if isinstance(record, Given | Generated):
            assert not self.state.tail, "held-back text is flushed before other ids"
        if isinstance(record, Fed | Given | Generated | Flushed) and record.ids:
            worst = max(record.ids)
            if worst >= self.header.vocab_size or min(record.ids) < 0:
                bad = worst if worst >= self.header.vocab_size else min(record.ids)
                remedy = f"Use token ids from 0 to {self.header.vocab_size - 1}."
                raise InputError("ids", bad, "outside the vocabulary", remedy)

    def _replay(self) -> None:
        file = self._require_open()
        file_end = os.fstat(file.fd).st_size
        for frame in read_frames(file.fd, file.end, file_end, self._seed):
            try:
                self.state.apply(frame.kind, frame.payload, frame.offset)
            except ValueError as error:
                raise _damaged(self.path, frame.offset, str(error)) from error
            file.end = frame.end
        if file.end < file_end:
            self._give_up_tail(file, file_end)

    def _give_up_tail(self, file: AppendFile, file_end: int) -> None:
        later = find_frame(file.fd, file.end + 1, file_end, self._seed)
        if later is not None:
            raise _damaged(self.path, file.end, f"a whole record follows at byte {later}")
        # The first append cuts it off; until then the file stays as it was found.
        self.torn_bytes = file_end - file.end

    def _frames(
        self, file: AppendFile, start: int, read_bytes: int = READ_BYTES
    ) -> Iterator[Frame]:
        end, last = file.end, start
        try:
            for frame in read_frames(file.fd, start, end, self._seed, read_bytes=read_bytes):
                last = frame.end
                yield frame
        except OSError as error:
            raise _cannot_read(self.path, error) from error
        if last != end:
            raise _damaged(self.path, last, "it was whole when the journal was opened")


def _parts(path: Path, file: AppendFile) -> Iterator[bytes]:
    """The bytes of a file up to the end of its records, a piece at a time."""
    for offset in range(0, file.end, MAX_PAYLOAD_BYTES):
        try:
            yield pread_exactly(file.fd, min(MAX_PAYLOAD_BYTES, file.end - offset), offset)
        except OSError as error:
            raise _cannot_read(path, error) from error


def _encoded(record: Record) -> tuple[RecordKind, bytes]:
    kind, payload = encode_record(record)
    if len(payload) > MAX_PAYLOAD_BYTES:
        raise InputError(
            "record",
            kind.name,
            f"{len(payload)} bytes at once",
            f"Write at most {MAX_PAYLOAD_BYTES} bytes at a time.",
        )
    return kind, payload


def read_header(path: Path) -> SessionHeader:
    """What a session was created with; another process may be writing its journal.

    Raises:
        JournalError, StoreFormatError: as `Journal.open`.
    """
    fd = journal_file.open_unlocked(path)
    try:
        return _read_header(path, fd)[0]
    except OSError as error:
        raise _cannot_read(path, error) from error
    finally:
        os.close(fd)


def delete_journal(path: Path) -> None:
    """Delete a journal that may be damaged, but not one that is open.

    Raises:
        JournalError: no such file, or the directory cannot be written.
        SessionError: open already; names the process.
    """
    fd = journal_file.open_locked(path)
    try:
        journal_file.remove(path)
    finally:
        os.close(fd)


def _read_header(path: Path, fd: int) -> tuple[SessionHeader, int, int]:
    """The header, the seed of all later frames and the offset of the first."""
    size = os.fstat(fd).st_size
    if size < len(MAGIC) or os.pread(fd, len(MAGIC), 0) != MAGIC:
        raise JournalError(f"{path}: not a journal of streamkv. Use another store or session name.")
    reach = min(size, len(MAGIC) + FRAME_OVERHEAD + MAX_PAYLOAD_BYTES)
    frames = read_frames(fd, len(MAGIC), reach, HEADER_SEED, read_bytes=_HEADER_READ_BYTES)
    frame = next(frames, None)
    if frame is None or frame.kind != RecordKind.HEADER:
        raise _damaged(path, len(MAGIC), "it is the header")
    try:
        version, header = decode_header(frame.payload)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _damaged(path, len(MAGIC), "it is the header") from error
    if header is None:
        raise StoreFormatError(
            f"{path}: journal version {version}, this streamkv reads {_VERSIONS}. Use the "
            "streamkv that wrote it, or another store."
        )
    stored = pread_exactly(fd, 4, frame.end - 4)
    return header, frame_crc(stored), frame.end


def _damaged(path: Path, offset: int, problem: str) -> JournalError:
    return JournalError(
        f"{path}: damaged record at byte {offset} ({problem}). Restore the file from a copy, or "
        f"give up what follows with: truncate -s {offset} '{path}'"
    )


def _cannot_read(path: Path, error: OSError) -> JournalError:
    return JournalError(f"{path}: cannot be read ({error}). Check the disk.")
