"""Real text as token ids, and passages drawn from it.

Files are read and encoded when a draw first needs them. Invariant: the same seed draws the same
passage from the same files. What is hidden in a passage is not known here.
"""

import hashlib
import pydoc_data.topics
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from streamkv.errors import InputError
from streamkv.recall_bench.draws import draw

SUFFIXES = (".md", ".txt")
OWN_TEXT = "Python's language reference (pydoc_data.topics)"
"""The haystack without --data: every CPython carries it. Published figures are not made with it."""

Encode = Callable[[str], Sequence[int]]


@dataclass(slots=True)
class Source:
    """One text.

    Attributes:
        name: for people; in a directory its path there.
        num_bytes: its size; no text has more tokens than bytes.
        read: gives its text.
    """

    name: str
    num_bytes: int
    read: Callable[[], str]
    _text: str | None = field(default=None, repr=False)
    _ids: "array[int] | None" = field(default=None, repr=False)

    def text(self) -> str:
        """The text, kept once it has been read."""
        if self._text is None:
            self._text = self.read()
        return self._text

    def ids(self, encode: Encode) -> "array[int]":
        """Its token ids, kept once they are made."""
        if self._ids is None:
            self._ids = array("i", encode(self.text()))
        return self._ids


@dataclass(frozen=True, slots=True)
class Passage:
    """Consecutive tokens of a text.

    Attributes:
        source: name of the text that it begins in.
        first_token: index of its first token there.
        token_ids: its tokens.
        texts: every text that it has tokens of.
    """

    source: str
    first_token: int
    token_ids: list[int]
    texts: tuple[Source, ...]

    def may_contain(self, text: str) -> bool:
        """Whether one of its texts contains this one, in the passage or elsewhere."""
        return any(text in source.text() for source in self.texts)


class Haystack:
    """Texts to draw passages from.

    Args:
        name: for people.
        sources: the texts, in an order that does not change.
        encode: text to token ids.
        join: where no text is long enough go on with the next one, round and round.
    """

    def __init__(
        self, name: str, sources: Sequence[Source], encode: Encode, *, join: bool = False
    ) -> None:
        self.name = name
        self.sources = list(sources)
        self._encode = encode
        self._join = join

    def fingerprint(self) -> str:
        """Names the texts: another directory, or another size of a file, gives another one."""
        listed = [(source.name, source.num_bytes) for source in self.sources]
        return hashlib.blake2b(repr((listed, self._join)).encode(), digest_size=8).hexdigest()

    def passage(self, num_tokens: int, *purpose: object) -> Passage:
        """Tokens at a drawn place of a drawn text that is long enough.

        Raises:
            InputError: no text is; names the longest.
        """
        left = [source for source in self.sources if source.num_bytes >= num_tokens]
        for turn in range(len(left)):
            source = left.pop(draw(len(left), *purpose, "source", turn))
            ids = source.ids(self._encode)
            if len(ids) >= num_tokens:
                first = draw(len(ids) - num_tokens + 1, *purpose, "place")
                return Passage(source.name, first, list(ids[first : first + num_tokens]), (source,))
        if self._join:
            return self._joined(num_tokens, *purpose)
        raise self._too_short(num_tokens)

    def _joined(self, num_tokens: int, *purpose: object) -> Passage:
        place = draw(len(self.sources), *purpose, "source")
        source = self.sources[place]
        ids = source.ids(self._encode)
        first = draw(max(len(ids), 1), *purpose, "place")
        token_ids = list(ids[first : first + num_tokens])
        texts, idle = [source], 0
        while len(token_ids) < num_tokens and idle < len(self.sources):
            place = (place + 1) % len(self.sources)
            more = self.sources[place].ids(self._encode)
            texts.append(self.sources[place])
            idle = 0 if more else idle + 1
            token_ids += more[: num_tokens - len(token_ids)]
        if len(token_ids) < num_tokens:
            raise self._too_short(num_tokens)
        return Passage(source.name, first, token_ids, tuple(texts[: len(self.sources)]))

    def _too_short(self, num_tokens: int) -> InputError:
        sizes = [(len(source.ids(self._encode)), source.name) for source in self.sources]
        longest, name = max(sizes)
        return InputError(
            "data",
            self.name,
            f"no text in it has {num_tokens:,} tokens; the longest, {name}, has {longest:,}",
            "Give longer files or smaller --lengths, or join the files with --join.",
        )


def read_directory(directory: Path, encode: Encode, *, join: bool = False) -> Haystack:
    """The .md and .txt files below a directory, by their paths.

    Raises:
        InputError: no such directory, or no such file in it.
    """
    remedy = f"Give a directory with {' or '.join(SUFFIXES)} files, UTF-8."
    if not directory.is_dir():
        raise InputError("data", str(directory), "not a directory", remedy)
    found = [
        path
        for path in directory.rglob("*")
        if path.suffix.lower() in SUFFIXES and path.is_file() and path.stat().st_size
    ]
    sources = [
        Source(path.relative_to(directory).as_posix(), path.stat().st_size, _reader(path))
        for path in found
    ]
    if not sources:
        raise InputError("data", str(directory), "no text in it", remedy)
    sources.sort(key=lambda source: source.name)
    return Haystack(str(directory), sources, encode, join=join)


def own_haystack(encode: Encode, *, join: bool = False) -> Haystack:
    """A text that is on every machine."""
    topics = pydoc_data.topics.topics
    text = "\n".join(topics[name] for name in sorted(topics))
    return Haystack(
        OWN_TEXT, [Source(OWN_TEXT, len(text.encode()), lambda: text)], encode, join=join
    )


def _reader(path: Path) -> Callable[[], str]:
    def read() -> str:
        try:
            return path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            remedy = "Convert it, for example with iconv -t UTF-8, or take it away."
            problem = f"not UTF-8 (near byte {error.start})"
            raise InputError("data", str(path), problem, remedy) from error
        except OSError as error:
            reason = error.strerror or str(error)
            raise InputError("data", str(path), reason, "Give files that can be read.") from error

    return read
