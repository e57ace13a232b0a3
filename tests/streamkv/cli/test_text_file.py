import io
from pathlib import Path

import pytest

from streamkv.cli.text_file import PIECE_CHARS, TextFile, stdin_lines
from streamkv.errors import InputError


def test_pieces_begin_at_any_character(tmp_path: Path) -> None:
    text = "é🙂\r\n" * (PIECE_CHARS // 3)
    path = tmp_path / "text"
    path.write_bytes(text.encode())
    file = TextFile.check(path)
    assert file.num_chars == len(text)
    for start in (0, 1, PIECE_CHARS - 1, len(text) - 1, len(text)):
        assert "".join(file.pieces(start)) == text[start:]


def test_a_digest_names_the_beginning(tmp_path: Path) -> None:
    (tmp_path / "short").write_text("abc")
    (tmp_path / "long").write_text("abc" + "d" * 50_000)
    short, long = TextFile.check(tmp_path / "short"), TextFile.check(tmp_path / "long")
    assert long.digest(3) == short.digest(3) != long.digest(4)


def test_a_byte_order_mark_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes(b"\xef\xbb\xbfabc")
    assert "".join(TextFile.check(tmp_path / "text").pieces()) == "abc"


def test_the_place_of_a_bad_byte_is_named(tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes(b"a" * 20_000 + b"\xff" + b"a" * 100)
    with pytest.raises(InputError, match="near byte 20000"):
        TextFile.check(tmp_path / "text")


def test_standard_input_is_utf8_with_its_line_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    given = io.TextIOWrapper(io.BytesIO("é\r\n🙂".encode()), encoding="ascii")
    monkeypatch.setattr("sys.stdin", given)
    assert list(stdin_lines(newline="")) == ["é\r\n", "🙂"]


def test_a_bad_line_of_standard_input_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    given = io.TextIOWrapper(io.BytesIO(b"fine\ncaf\xe9\n"), encoding="utf-8")
    monkeypatch.setattr("sys.stdin", given)
    lines = stdin_lines()
    assert next(lines) == "fine\n"
    with pytest.raises(InputError, match="line 2 is not UTF-8"):
        next(lines)


def test_a_character_that_is_cut_off_is_refused(tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes("abc🙂".encode()[:-1])
    with pytest.raises(InputError, match="not UTF-8"):
        TextFile.check(tmp_path / "text")
