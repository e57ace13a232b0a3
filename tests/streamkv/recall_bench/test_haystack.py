"""Text to hide something in: files, and passages drawn from them."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from streamkv.errors import InputError
from streamkv.recall_bench.draws import draw
from streamkv.recall_bench.haystack import OWN_TEXT, own_haystack, read_directory


def letters(text: str) -> Sequence[int]:
    """One token for each character."""
    return [ord(letter) for letter in text]


def text_of(ids: Sequence[int]) -> str:
    return "".join(map(chr, ids))


def test_files_are_found_below_the_directory_by_their_kind(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    for name in ("b.md", "deep/a.TXT", "c.py", "empty.md"):
        (tmp_path / name).write_text("" if "empty" in name else "text")
    found = read_directory(tmp_path, letters)
    assert [source.name for source in found.sources] == ["b.md", "deep/a.TXT"]


def test_only_texts_that_are_long_enough_are_drawn(tmp_path: Path) -> None:
    (tmp_path / "long.md").write_text("abcdefghij" * 10)
    # More bytes than the passage wants, but fewer tokens.
    (tmp_path / "short.md").write_text("é" * 40)
    hay = read_directory(tmp_path, letters)
    for place in range(20):
        passage = hay.passage(60, place)
        assert passage.source == "long.md"
        assert text_of(passage.token_ids) in "abcdefghij" * 10
    with pytest.raises(
        InputError, match=r"no text in it has 101 tokens; the longest, long.md, has"
    ):
        hay.passage(101, 0)


def test_every_place_of_every_text_can_be_drawn(tmp_path: Path) -> None:
    (tmp_path / "a.md").write_text("abcd")
    (tmp_path / "b.md").write_text("efg")
    hay = read_directory(tmp_path, letters)
    drawn = {text_of(hay.passage(3, place).token_ids) for place in range(200)}
    assert drawn == {"abc", "bcd", "efg"}


def test_joined_files_follow_one_another_round_and_round(tmp_path: Path) -> None:
    (tmp_path / "a.md").write_text("abc")
    (tmp_path / "b.md").write_text("de")
    hay = read_directory(tmp_path, letters, join=True)
    for place in range(20):
        passage = hay.passage(13, place)
        first = text_of(passage.token_ids)
        assert {source.name for source in passage.texts} == {"a.md", "b.md"}
        assert passage.may_contain("bc") and passage.may_contain("de")
        assert not passage.may_contain("cd")
        assert len(first) == 13
        assert first in "abcde" * 4
        assert first[0] == {"a.md": "abc", "b.md": "de"}[passage.source][passage.first_token]


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda directory: directory / "nowhere", "not a directory"),
        (lambda directory: directory, "no text in it"),
    ],
)
def test_a_directory_without_text_is_refused(tmp_path: Path, make: object, problem: str) -> None:
    assert callable(make)
    with pytest.raises(InputError, match=rf"^data=.*{problem}. Give a directory with .md or .txt"):
        read_directory(make(tmp_path), letters)


def test_a_file_that_is_no_text_is_named(tmp_path: Path) -> None:
    (tmp_path / "bad.md").write_bytes(b"abc\xff\xfe")
    with pytest.raises(InputError, match=r"bad.md.: not UTF-8 \(near byte 3\)"):
        read_directory(tmp_path, letters).passage(3, 0)


def test_another_size_of_a_file_is_another_haystack(tmp_path: Path) -> None:
    (tmp_path / "a.md").write_text("abc")
    first = read_directory(tmp_path, letters).fingerprint()
    assert read_directory(tmp_path, letters).fingerprint() == first
    (tmp_path / "a.md").write_text("abcd")
    assert read_directory(tmp_path, letters).fingerprint() != first


def test_there_is_a_text_without_any_file() -> None:
    passage = own_haystack(letters).passage(1000, 0)
    assert passage.source == OWN_TEXT
    assert len(passage.token_ids) == 1000


def test_draws_are_those_of_every_machine() -> None:
    assert [draw(10, "seed", place) for place in range(12)] == [9, 7, 6, 5, 9, 2, 8, 4, 1, 4, 5, 7]
    counts = [0] * 5
    for place in range(5000):
        counts[draw(5, place)] += 1
    assert min(counts) > 900
    assert draw(1, "only") == 0
