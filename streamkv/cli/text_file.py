"""Text from files and from standard input, in pieces, from any character on.

Invariant: characters are those of the file, line ends included; a byte that is no UTF-8 is refused
before anything of the file is used. Memory does not grow with the file.
"""

import codecs
import hashlib
import io
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from streamkv.errors import InputError

PIECE_CHARS = 16_384


@dataclass(frozen=True, slots=True)
class TextFile:
    """A file that is text from its first byte to its last.

    Attributes:
        path: the file.
        num_chars: its characters.
    """

    path: Path
    num_chars: int

    @classmethod
    def check(cls, path: Path) -> "TextFile":
        """Read the file through.

        Raises:
            InputError: no such file, not readable, not UTF-8, or empty.
        """
        num_chars = sum(map(len, _decoded(path)))
        if num_chars == 0:
            raise InputError("file", str(path), "it is empty", "Give a file with text.")
        return cls(path, num_chars)

    def pieces(self, start: int = 0) -> Iterator[str]:
        """The text from character `start` on.

        Raises:
            InputError: the file cannot be read any more.
        """
        for piece in _decoded(self.path):
            if start >= len(piece):
                start -= len(piece)
                continue
            yield piece[start:]
            start = 0

    def digest(self, num_chars: int) -> str:
        """Names the first `num_chars` characters."""
        hashed = hashlib.blake2b(digest_size=16)
        for piece in _decoded(self.path):
            hashed.update(piece[:num_chars].encode())
            num_chars -= min(num_chars, len(piece))
            if num_chars == 0:
                break
        return hashed.hexdigest()


def stdin_lines(newline: str | None = None) -> Iterator[str]:
    """Lines of standard input.

    Args:
        newline: "" keeps line ends as they are, `None` makes each a newline.

    Raises:
        InputError: a line is not UTF-8; names the line.
    """
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(encoding="utf-8", errors="surrogateescape", newline=newline)
    for number, line in enumerate(sys.stdin, start=1):
        if any("\ud800" <= char <= "\udfff" for char in line):
            remedy = "Convert it first, for example with iconv -t UTF-8."
            raise InputError("stdin", line, f"line {number} is not UTF-8", remedy)
        yield line


def _decoded(path: Path) -> Iterator[str]:
    decoder = codecs.getincrementaldecoder("utf-8-sig")()
    num_read = 0
    try:
        with open(path, "rb") as file:
            while data := file.read(PIECE_CHARS):
                yield decoder.decode(data)
                num_read += len(data)
        yield decoder.decode(b"", final=True)
    except UnicodeDecodeError as error:
        remedy = "Convert it first, for example with iconv -t UTF-8."
        place = max(num_read - len(decoder.getstate()[0]), 0) + error.start
        raise InputError("file", str(path), f"not UTF-8 (near byte {place})", remedy) from error
    except OSError as error:
        reason = error.strerror or str(error)
        raise InputError("file", str(path), reason, "Give a file that can be read.") from error
