"""The file below a transcript: its encoding, its identity, its physical lines.

Invariant: memory does not grow with the file, nor with its longest line. A file that is not text is
refused before any work; bytes that do not fit the encoding become U+FFFD and are counted, never an
exception in mid-file. This module knows nothing about subtitles.
"""

import codecs
import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, NamedTuple

from streamkv.errors import InputError
from streamkv.summarize.cues import ReadWarnings

MAX_LINE_CHARS = 65536
MAX_CONTROL_SHARE = 0.01
_CHUNK_BYTES = 1 << 20
_HEAD_BYTES = 4096
# Tab, the newlines, form feed, backspace and escape occur in logs of terminals.
_CONTROL_BYTES = bytes(set(range(32)) - {8, 9, 10, 11, 12, 13, 27})
_BOMS = (
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)


class PhysicalLine(NamedTuple):
    """A line of the file without its newline, or a piece of a very long one (same number)."""

    number: int
    text: str


@dataclass(frozen=True, slots=True)
class SourceInfo:
    """What one pass over the file's bytes says about it.

    Attributes:
        digest: SHA-256 of the bytes, in hex: the identity of this content.
        num_bytes: size of the file.
        modified_ns: when it was last changed.
        encoding: name of a Python codec.
        damage: what is wrong with the encoding, for a warning; empty if nothing.
    """

    digest: str
    num_bytes: int
    modified_ns: int
    encoding: str
    damage: str


def inspect_file(path: Path) -> SourceInfo:
    """Digest and encoding of a file, in one pass and constant memory.

    Raises:
        InputError: no such file, unreadable, empty, or not text.
    """
    try:
        with path.open("rb") as file:
            return _inspect(path, file)
    except OSError as error:
        reason = error.strerror or str(error)
        raise InputError("path", str(path), reason, "Give a readable text file.") from error


def read_lines(path: Path, info: SourceInfo, warnings: ReadWarnings) -> Iterator[PhysicalLine]:
    """The lines of the file in order; LF, CR and CRLF may be mixed.

    Raises:
        InputError: the file cannot be read, or was changed since `info` was made.
    """
    if info.damage:
        warnings.add(1, info.damage)
    try:
        with path.open("r", encoding=info.encoding, errors="replace", newline=None) as file:
            for line in _pieces(file):
                if "\0" in line.text:
                    warnings.add(line.number, "NUL characters were left out")
                    line = PhysicalLine(line.number, line.text.replace("\0", ""))
                yield line
            _refuse_changed(path, info, os.fstat(file.fileno()))
    except OSError as error:
        reason = error.strerror or str(error)
        raise InputError("path", str(path), reason, "Give a readable text file.") from error


def _refuse_changed(path: Path, info: SourceInfo, now: os.stat_result) -> None:
    if (now.st_size, now.st_mtime_ns) != (info.num_bytes, info.modified_ns):
        raise InputError(
            "path",
            str(path),
            f"the file was changed while it was read ({info.num_bytes} bytes, then {now.st_size})",
            "Run again when it is complete.",
        )


def _pieces(file: IO[str]) -> Iterator[PhysicalLine]:
    number, carry, in_line = 1, "", False
    while piece := file.readline(MAX_LINE_CHARS - len(carry)):
        ended = piece.endswith("\n")
        text, carry = carry + piece.removesuffix("\n"), ""
        if not ended and len(text) >= MAX_LINE_CHARS:
            cut = text.rfind(" ", MAX_LINE_CHARS // 2) + 1 or MAX_LINE_CHARS
            text, carry = text[:cut], text[cut:]
        if text or not in_line:
            yield PhysicalLine(number, text)
        number += ended
        in_line = not ended
    if carry:
        yield PhysicalLine(number, carry)


def _inspect(path: Path, file: IO[bytes]) -> SourceInfo:
    head = file.read(_HEAD_BYTES)
    file.seek(0)
    modified_ns = os.fstat(file.fileno()).st_mtime_ns
    wide = _wide_encoding(head)
    scan = _Scan()
    while chunk := file.read(_CHUNK_BYTES):
        scan.update(chunk)
    if scan.num_bytes == 0 or (not head.strip() and scan.num_bytes == len(head)):
        raise InputError("path", str(path), "the file is empty", "Give a file with text in it.")
    if wide is None and scan.num_control > MAX_CONTROL_SHARE * scan.num_bytes:
        raise InputError(
            "path", str(path), "a binary file, not text", "Give a text, SRT or VTT file."
        )
    encoding, damage = (wide, "") if wide else scan.encoding()
    return SourceInfo(scan.digest.hexdigest(), scan.num_bytes, modified_ns, encoding, damage)


def _wide_encoding(head: bytes) -> str | None:
    """The encoding that a byte order mark, or every second byte being zero, gives away."""
    for bom, encoding in _BOMS:
        if head.startswith(bom):
            return encoding
    pairs = len(head) // 2
    zeros_even, zeros_odd = head[0::2].count(0), head[1::2].count(0)
    if pairs >= 4 and zeros_odd > 0.4 * pairs and zeros_even < 0.1 * pairs:
        return "utf-16-le"
    if pairs >= 4 and zeros_even > 0.4 * pairs and zeros_odd < 0.1 * pairs:
        return "utf-16-be"
    return None


class _Scan:
    """Running facts about the bytes of a file."""

    def __init__(self) -> None:
        self.digest = hashlib.sha256()
        self.num_bytes = 0
        self.num_control = 0
        self._num_good = 0
        self._num_bad = 0
        self._undefined_in_cp1252 = False
        self._decoder = codecs.getincrementaldecoder("utf-8")("surrogateescape")

    def update(self, chunk: bytes) -> None:
        self.digest.update(chunk)
        self.num_bytes += len(chunk)
        self.num_control += len(chunk) - len(chunk.translate(None, _CONTROL_BYTES))
        self._undefined_in_cp1252 |= any(byte in chunk for byte in b"\x81\x8d\x8f\x90\x9d")
        self._count(self._decoder.decode(chunk))

    def encoding(self) -> tuple[str, str]:
        """The codec to read with, and what to warn about."""
        self._count(self._decoder.decode(b"", final=True))
        if self._num_bad == 0:
            return "utf-8", ""
        # A legacy text has hardly a valid sequence; a damaged UTF-8 text has hardly an invalid one.
        if self._num_good >= 4 * self._num_bad:
            return "utf-8", f"{self._num_bad} bytes are not UTF-8 and were replaced"
        legacy = "latin-1" if self._undefined_in_cp1252 else "cp1252"
        return legacy, f"not UTF-8; read as {legacy}, so letters may be wrong"

    def _count(self, text: str) -> None:
        if text.isascii():
            return
        num_bad = sum("\udc80" <= char <= "\udcff" for char in text)
        self._num_bad += num_bad
        self._num_good += sum(char > "\x7f" for char in text) - num_bad
