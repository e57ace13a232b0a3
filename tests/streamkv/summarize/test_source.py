from pathlib import Path

import pytest

from streamkv.errors import InputError
from streamkv.summarize import source
from streamkv.summarize.cues import ReadWarnings
from streamkv.summarize.source import inspect_file, read_lines

FRENCH = "Déjà vu à l'été, garçon"


def texts(path: Path) -> list[str]:
    return [line.text for line in read_lines(path, inspect_file(path), ReadWarnings("f"))]


@pytest.mark.parametrize(
    ("encoding", "found"),
    [
        ("utf-8", "utf-8"),
        ("utf-8-sig", "utf-8-sig"),
        ("utf-16", "utf-16"),
        ("utf-16-le", "utf-16-le"),
        ("utf-16-be", "utf-16-be"),
        ("utf-32", "utf-32"),
        ("latin-1", "cp1252"),
    ],
)
def test_the_encoding_is_found(tmp_path: Path, encoding: str, found: str) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(f"{FRENCH}\r\nfin\r\n".encode(encoding))
    assert inspect_file(path).encoding == found
    assert texts(path) == [FRENCH, "fin"]


def test_newlines_of_all_kinds_may_be_mixed(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"one\ntwo\rthree\r\nfour\n\nsix")
    lines = list(read_lines(path, inspect_file(path), ReadWarnings("f")))
    assert [(line.number, line.text) for line in lines] == [
        (1, "one"),
        (2, "two"),
        (3, "three"),
        (4, "four"),
        (5, ""),
        (6, "six"),
    ]


def test_a_legacy_encoding_is_warned_about(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(FRENCH.encode("latin-1"))
    warnings = ReadWarnings("a.txt")
    list(read_lines(path, inspect_file(path), warnings))
    assert [str(warning) for warning in warnings.kept] == [
        "a.txt:1: not UTF-8; read as cp1252, so letters may be wrong"
    ]
    path.write_bytes(FRENCH.encode("latin-1") + b"\x81\x8d")
    assert inspect_file(path).encoding == "latin-1"


def test_a_damaged_utf8_file_stays_utf8(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes((FRENCH * 3).encode() + "é".encode()[:1])
    warnings = ReadWarnings("a.txt")
    lines = list(read_lines(path, inspect_file(path), warnings))
    assert lines[0].text == FRENCH * 3 + "�"
    assert warnings.kept[0].problem == "1 bytes are not UTF-8 and were replaced"


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"", "the file is empty"),
        (b" \r\n\n\t", "the file is empty"),
        (bytes(range(256)) * 40, "a binary file, not text"),
        (b"text" + b"\0" * 50, "a binary file, not text"),
    ],
)
def test_what_is_no_text_is_refused(tmp_path: Path, data: bytes, problem: str) -> None:
    path = tmp_path / "a.srt"
    path.write_bytes(data)
    with pytest.raises(InputError) as caught:
        inspect_file(path)
    assert caught.value.problem == problem
    assert str(path) in str(caught.value)


def test_a_missing_file_and_a_directory_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="No such file"):
        inspect_file(tmp_path / "none.txt")
    with pytest.raises(InputError, match="directory"):
        inspect_file(tmp_path)


def test_stray_nul_characters_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    path.write_bytes(b"x" * 500 + b"\0\0\ny\n")
    warnings = ReadWarnings("a.log")
    lines = list(read_lines(path, inspect_file(path), warnings))
    assert [line.text for line in lines] == ["x" * 500, "y"]
    assert [warning.line_number for warning in warnings.kept] == [1]


def test_a_very_long_line_comes_in_pieces_and_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source, "MAX_LINE_CHARS", 10)
    path = tmp_path / "a.txt"
    path.write_bytes(b"aaaa bbb cccc dddddddddddddd\nend\nexactly10!\nz")
    lines = list(read_lines(path, inspect_file(path), ReadWarnings("f")))
    assert "".join(line.text for line in lines if line.number == 1) == (
        "aaaa bbb cccc dddddddddddddd"
    )
    assert max(len(line.text) for line in lines) <= 10
    assert [(line.number, line.text) for line in lines if line.number > 1] == [
        (2, "end"),
        (3, "exactly10!"),
        (4, "z"),
    ]


def test_a_file_that_changes_while_it_is_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("one\n" * 10)
    lines = read_lines(path, inspect_file(path), ReadWarnings("f"))
    assert next(lines).text == "one"
    with path.open("a") as file:
        file.write("two\n")
    with pytest.raises(InputError, match=r"changed while it was read \(40 bytes, then 44\)"):
        list(lines)


def test_the_digest_is_that_of_the_content(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).write_text("same")
    (tmp_path / "c").write_text("other")
    digests = [inspect_file(tmp_path / name).digest for name in ("a", "b", "c")]
    assert digests[0] == digests[1] != digests[2]
